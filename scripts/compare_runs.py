"""Print the losses and gradient norms of several TensorBoard runs side by side.

The first run is the reference: the others' largest relative differences from it are given.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from summarize_run import LOSS, NoRunError, newest_events, scalars

NORM = "grad_norm"


def table(folders: Sequence[Path]) -> str:
    """A Markdown table, one row per run; differences are over all steps.

    Raises:
        NoRunError: a folder has no run, or the runs have different steps.
    """
    runs = {folder.name: scalars(newest_events(folder), [LOSS, NORM]) for folder in folders}
    names = list(runs)
    reference = runs[names[0]]
    steps = [step for step, _ in reference[LOSS]]
    rows = [
        f"| run | loss at {steps[0]} | loss at {steps[-1]} | norm at {steps[-1]} "
        f"| losses differ from {names[0]} by | norms by |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        if [step for step, _ in run[LOSS]] != steps:
            raise NoRunError(f"{name} and {names[0]} have logged different steps")
        differences = [_largest_difference(run[tag], reference[tag]) for tag in (LOSS, NORM)]
        rows.append(
            f"| {name} | {run[LOSS][0][1]:.5f} | {run[LOSS][-1][1]:.5f} | {run[NORM][-1][1]:.5f} "
            f"| {differences[0]:.1e} | {differences[1]:.1e} |"
        )
    return "\n".join(rows)


def _largest_difference(
    values: Sequence[tuple[int, float]], reference: Sequence[tuple[int, float]]
) -> float:
    pairs = zip(values, reference, strict=True)
    return max(abs(value - other) / abs(other) for (_, value), (_, other) in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="job.dump_folder of each run")
    try:
        print(table(parser.parse_args(argv).folders))
    except NoRunError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
