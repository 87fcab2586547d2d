"""The ``step`` report as a picture."""

from __future__ import annotations

from pathlib import Path

from torchtitan_matrixfsdp.bench.results import StepReport


class NoPlotError(RuntimeError):
    """matplotlib is not installed; the message has the remedy."""


def require_matplotlib() -> None:
    """Ask for matplotlib before anything is measured.

    Raises:
        NoPlotError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlotError(
            "matplotlib is not installed: pip install matplotlib, or leave --plot out"
        ) from None


def plot_step(report: StepReport, path: Path) -> None:
    """Write a bar chart of the modes' times relative to ``ideal``, on a logarithmic axis; whiskers
    span the repetitions."""
    require_matplotlib()
    from matplotlib.figure import Figure

    modes = report.results.modes
    medians = [mode.to_ideal.median for mode in modes]
    below = [mode.to_ideal.median - mode.to_ideal.min for mode in modes]
    above = [mode.to_ideal.max - mode.to_ideal.median for mode in modes]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar([mode.mode for mode in modes], medians, yerr=[below, above], capsize=4)
    axes.bar_label(bars, labels=[f"{value:.2f}" for value in medians], padding=3)
    axes.set_yscale("log")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.margins(y=0.15)
    axes.set_ylabel("time of a step / ideal")
    axes.tick_params(axis="x", labelrotation=30)
    setting = report.results.setting
    axes.set_title(
        f"{report.optimizer}, {report.results.matrices} matrices, {setting.world_size} ranks "
        f"({setting.backend} on {setting.device})"
    )
    figure.savefig(path, dpi=150)
