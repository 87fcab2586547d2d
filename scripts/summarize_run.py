"""Print one line about a training run: first and last loss, throughput, where its outputs are.

Reads the newest TensorBoard run and the newest checkpoint under the run's dump folder.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOSS = "loss_metrics/global_avg_loss"
TOKENS_PER_SECOND = "throughput(tps)"  # per device


class NoRunError(Exception):
    """The folder lacks what a finished run leaves."""


@dataclass(frozen=True)
class Run:
    first_step: int
    first_loss: float
    last_step: int
    last_loss: float
    tokens_per_second: float
    """Per device. The median over the logged steps, without the first, which includes start-up."""
    events: Path
    """Folder of the TensorBoard files."""


def newest_events(output_dir: Path) -> Path:
    """The folder of the newest TensorBoard run below `output_dir`.

    Raises:
        NoRunError: there is no event file.
    """
    files = sorted(output_dir.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise NoRunError(
            f"no TensorBoard run under {output_dir}: train with metrics.enable_tensorboard = true"
        )
    return files[-1].parent


def scalars(folder: Path, tags: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each tag of the TensorBoard run in `folder`.

    Raises:
        NoRunError: a tag is missing.
    """
    # Late, since it takes a second.
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})  # 0: keep every point
    events.Reload()
    missing = set(tags) - set(events.Tags()[SCALARS])
    if missing:
        raise NoRunError(f"the TensorBoard run in {folder} has no {', '.join(sorted(missing))}")
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def newest_run(output_dir: Path) -> Run:
    """Read the scalars of the newest TensorBoard run below `output_dir`.

    Raises:
        NoRunError: no event file, or one without a loss.
    """
    folder = newest_events(output_dir)
    found = scalars(folder, [LOSS, TOKENS_PER_SECOND])
    (first_step, first_loss), (last_step, last_loss) = found[LOSS][0], found[LOSS][-1]
    rates = [value for _, value in found[TOKENS_PER_SECOND]]
    return Run(
        first_step, first_loss, last_step, last_loss, statistics.median(rates[1:] or rates), folder
    )


def newest_checkpoint(output_dir: Path) -> Path:
    """The folder `checkpoint/step-N` with the largest N that holds any file.

    Raises:
        NoRunError: there is none.
    """
    found = {}
    for path in (output_dir / "checkpoint").glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal() and path.is_dir() and any(path.iterdir()):
            found[int(number)] = path
    if not found:
        raise NoRunError(
            f"no checkpoint/step-N under {output_dir}: train with checkpoint.enable = true"
        )
    return found[max(found)]


def summary(output_dir: Path, ranks: int | None, resume_command: str) -> str:
    """The line to print.

    Args:
        output_dir: the run's `job.dump_folder`.
        ranks: how many took part, to give the throughput of all together; None gives it per rank.
        resume_command: trains on from the checkpoint, but for the number of steps.
    """
    run = newest_run(output_dir)
    checkpoint = newest_checkpoint(output_dir)
    if ranks is None:
        rate = f"{run.tokens_per_second:,.0f} tokens/s per rank"
    else:
        rate = f"{run.tokens_per_second * ranks:,.0f} tokens/s on {ranks} ranks"
    return (
        f"Done: loss {run.first_loss:.4f} at step {run.first_step}, {run.last_loss:.4f} at step "
        f"{run.last_step}; {rate}; outputs in {output_dir} "
        f"(checkpoint: {checkpoint.relative_to(output_dir)}, "
        f"TensorBoard: {run.events.relative_to(output_dir)}); "
        f"go on: {resume_command} --training.steps {2 * run.last_step}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir", type=Path, help="the run's job.dump_folder")
    parser.add_argument("--ranks", type=int, help="how many ranks trained")
    parser.add_argument(
        "--resume-command", help="what trains on from the checkpoint (default: run_train.sh)"
    )
    options = parser.parse_args(argv)
    resume = options.resume_command or (
        f"bash scripts/run_train.sh --job.dump_folder {options.output_dir}"
    )
    try:
        line = summary(options.output_dir, options.ranks, resume)
    except NoRunError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
