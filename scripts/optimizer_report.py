"""Read what scripts/compare_optimizers.sh has trained: choose rates, print tables, draw the curves.

A run's folder is called <optimizer>-<learning rate>.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from summarize_run import LOSS, NoRunError, newest_events, scalars

# The loss of one step is that of one small batch.
_LAST = 20


@dataclass(frozen=True)
class Run:
    optimizer: str
    rate: str
    losses: list[tuple[int, float]]

    @property
    def final(self) -> float:
        """The mean loss of the last steps; infinite where one is not a number."""
        last = [loss for _, loss in self.losses[-_LAST:]]
        mean = statistics.fmean(last)
        return mean if mean == mean else float("inf")

    def steps_to(self, loss: float) -> int | None:
        """The first step from which on the mean of as many steps is at most `loss`."""
        for end in range(_LAST, len(self.losses) + 1):
            window = [value for _, value in self.losses[end - _LAST : end]]
            if statistics.fmean(window) <= loss:
                return self.losses[end - 1][0]
        return None


def runs_in(folder: Path) -> list[Run]:
    """The complete runs in `folder`, by name.

    Raises:
        NoRunError: there is none.
    """
    runs = []
    for path in sorted(folder.glob("*-*/complete")):
        optimizer, _, rate = path.parent.name.partition("-")
        losses = scalars(newest_events(path.parent), [LOSS])[LOSS]
        runs.append(Run(optimizer, rate, losses))
    if not runs:
        raise NoRunError(f"no complete run in {folder}")
    return runs


def best(runs: Sequence[Run], optimizer: str) -> Run:
    """The run of `optimizer` whose final loss is lowest.

    Raises:
        NoRunError: it has none.
    """
    own = [run for run in runs if run.optimizer == optimizer]
    if not own:
        raise NoRunError(f"no run of {optimizer}; there are {sorted({r.optimizer for r in runs})}")
    return min(own, key=lambda run: run.final)


def sweep_table(runs: Sequence[Run]) -> str:
    """Every run's final loss as a Markdown table; the best rate of each optimizer is bold."""
    rows = [f"| optimizer | rate | loss (mean of the last {_LAST} steps) |", "|---|---|---|"]
    for run in runs:
        mark = "**" if run is best(runs, run.optimizer) else ""
        rows.append(f"| {run.optimizer} | {mark}{run.rate}{mark} | {run.final:.4f} |")
    return "\n".join(rows)


def comparison_table(runs: Sequence[Run]) -> str:
    """The runs side by side, AdamW first and as the reference."""
    reference = best(runs, "AdamW")
    ordered = sorted(runs, key=lambda run: (run is not reference, run.optimizer))
    last = reference.losses[-1][0]
    rows = [
        f"| optimizer | rate | loss at step {last} (mean of {_LAST}) "
        "| steps to AdamW's last loss |",
        "|---|---|---|---|",
    ]
    for run in ordered:
        steps = run.steps_to(reference.final)
        rows.append(
            f"| {run.optimizer} | {run.rate} | {run.final:.4f} | "
            f"{'not reached' if steps is None else steps} |"
        )
    return "\n".join(rows)


def draw(runs: Sequence[Run], path: Path) -> None:
    """All loss curves in one PNG, each the running mean of the steps so far within a window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for run in runs:
        steps = [step for step, _ in run.losses]
        values = [loss for _, loss in run.losses]
        smooth = [
            statistics.fmean(values[max(0, i + 1 - _LAST) : i + 1]) for i in range(len(values))
        ]
        axes.plot(steps, smooth, label=f"{run.optimizer}, lr {run.rate}")
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, mean of {_LAST} steps")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("sweep", "print the table of a sweep"),
        ("best", "print the best rate of one optimizer"),
        ("compare", "print the comparison and draw losses.png beside the runs"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("folder", type=Path)
        if name == "best":
            command.add_argument("optimizer")
    arguments = parser.parse_args(argv)
    try:
        runs = runs_in(arguments.folder)
        if arguments.command == "sweep":
            print(sweep_table(runs))
        elif arguments.command == "best":
            print(best(runs, arguments.optimizer).rate)
        else:
            print(comparison_table(runs))
            draw(runs, arguments.folder / "losses.png")
            print(f"Curves: {arguments.folder / 'losses.png'}")
    except NoRunError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
