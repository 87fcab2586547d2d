"""The reports as text."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_matrixfsdp.bench.refresh import RefreshReport
from torchtitan_matrixfsdp.bench.results import (
    CheckpointReport,
    CommReport,
    LayoutResult,
    MeasuredStep,
    MemoryReport,
    ModelAccount,
    NewtonSchulzReport,
    Ratio,
    Setting,
    Spread,
    StepReport,
)
from torchtitan_matrixfsdp.layout import BASELINE_STEPS

_MEGABYTE = 10**6
_GIGABYTE = 10**9
_TERAFLOP = 10**12


def comm_text(report: CommReport) -> str:
    """The ``comm`` report."""
    parts = []
    if report.setting is not None:
        parts += [_setting(report.setting), *map(_layout, report.layouts)]
        parts.append(_measured(report.measured_steps))
    parts += map(_account, report.accounts)
    return "\n\n".join(parts)


def memory_text(report: MemoryReport) -> str:
    """The ``memory`` report."""
    stock = report.systems[0]
    rows = [
        [
            system.system,
            _megabytes(system.steady),
            *(
                f"{_megabytes(phase.peak)} ({phase.peak / base.peak:.2f})"
                for phase, base in (
                    (system.gather, stock.gather),
                    (system.forward, stock.forward),
                    (system.backward, stock.backward),
                )
            ),
            _megabytes(system.steady_with_gradients),
        ]
        for system in report.systems
    ]
    head = ["system", "parameters", "gather", "forward", "backward", "gradients"]
    title = (
        f"{report.blocks} blocks of P_B = {_megabytes(report.block_bytes)} MB, {report.tokens} "
        "tokens: peak MB on top of the sharded parameters, the fullest rank's (ratio to fsdp2)"
    )
    return f"{_setting(report.setting)}\n\n{title}\n{_table(head, rows)}"


def checkpoint_text(report: CheckpointReport) -> str:
    """The ``checkpoint`` report."""
    rows = [
        [
            system.system,
            _megabytes(system.disk_bytes),
            *(
                cell
                for operation in (system.save, system.load)
                for cell in (_ratio(operation.to_fsdp2), _megabytes(operation.peak_bytes.max))
            ),
        ]
        for system in report.systems
    ]
    head = ["system", "MB on disk", "save, time to fsdp2's", "peak MB"]
    head += ["load, time to fsdp2's", "peak MB"]
    title = (
        f"{report.blocks} blocks with the state of Muon and AdamW; peaks on top of the shards, the "
        "fullest rank's"
    )
    return f"{_setting(report.setting)}\n\n{title}\n{_table(head, rows)}"


def refresh_text(report: RefreshReport) -> str:
    """The ``refresh`` report."""
    rows = [
        [
            account.optimizer,
            str(account.world_size),
            str(account.frequency),
            *(
                f"{flops / _TERAFLOP:,.3f}"
                for flops in (
                    account.largest_matrix,
                    account.busiest_owner / account.frequency,
                    account.busiest_owner,
                    account.staggered,
                )
            ),
            f"{account.busiest_owner / account.staggered:.1f}",
            f"{account.state_bytes / _GIGABYTE:,.2f}",
        ]
        for account in report.accounts
    ]
    head = [
        "optimizer",
        "ranks",
        "frequency",
        "largest matrix",
        "mean step",
        "worst step, together",
        "worst step, staggered",
        "flatter",
        "state GB",
    ]
    title = (
        f"Llama {report.model}, planner {report.planner}, by formula: TFLOP of refreshes on the "
        "busiest owner, state on the fullest"
    )
    return f"{title}\n{_table(head, rows)}"


def newton_schulz_text(report: NewtonSchulzReport) -> str:
    """The ``newton-schulz`` report."""
    setting = report.setting
    rows = [
        [
            result.dtype,
            f"{result.matrices} of {result.rows} x {result.cols}",
            f"{result.milliseconds:.1f}",
            _ratio(result.time_to_products),
            _ratio(result.time_to_float32_products),
            _ratio(result.stacked_to_each),
            f"{result.relative_error:.1e}",
            f"{result.smallest_singular_value:.3f} to {result.largest_singular_value:.3f}",
        ]
        for result in report.results
    ]
    head = [
        "dtype",
        "matrices",
        "ms",
        "time / products",
        "time / float32 products",
        "one bmm / each",
        "error",
        "singular values",
    ]
    title = (
        f"torch {setting.torch_version} on {setting.device}, {setting.threads} thread(s): "
        f"{setting.steps} steps of {setting.coefficients}, {setting.repeats} repetitions. Times: "
        "median of paired ratios (min to max). Error: relative to float64, the worst matrix's"
    )
    return f"{title}\n{_table(head, rows)}"


def step_text(report: StepReport) -> str:
    """The ``step`` report."""
    results = report.results
    rows = [
        [
            mode.mode,
            *(
                "" if ratio is None else _ratio(ratio)
                for ratio in (
                    mode.to_ideal,
                    mode.to_zero3,
                    mode.to_adamw_foreach,
                    mode.to_adamw_fused,
                )
            ),
            _counts(mode.counted.bytes),
            _counts(mode.counted.messages),
            f"{_megabytes(mode.steady_bytes)} / {_megabytes(mode.peak_bytes)}",
        ]
        for mode in results.modes
    ]
    head = [
        "mode",
        "time / ideal",
        "time / zero3",
        "time / AdamW foreach",
        "time / AdamW fused",
        "bytes sent",
        "messages",
        "MB between steps / at the peak",
    ]
    title = (
        f"The step of {report.optimizer} ({report.compute_dtype}) on {results.matrices} matrices, "
        f"{_megabytes(results.matrix_bytes)} MB, of {report.layers} blocks ({report.hidden} wide "
        "inside). Counted = predicted. Times: median of paired ratios (min to max). The busiest "
        f"rank's work over the mean: ideal {results.ideal_imbalance:.3f}, owners "
        f"{results.owner_imbalance:.3f}. Weights within {results.largest_difference:.0e} of one "
        f"device's (at most {report.tolerance:.0e})"
    )
    return f"{_setting(results.setting)}\n\n{title}\n{_table(head, rows)}"


def _setting(setting: Setting) -> str:
    return (
        f"torch {setting.torch_version}, {setting.backend} on {setting.device}, "
        f"{setting.world_size} ranks, {setting.dtype}, width {setting.layer_dim}, "
        f"{setting.repeats} repetitions"
    )


def _layout(layout: LayoutResult) -> str:
    rows = [
        [
            f"{result.transport}{' (auto)' if result.is_auto else ''}",
            name,
            _spread(operation.counted.bytes),
            _counts(operation.counted.messages),
            _ratio(operation.time_to_collective),
            _ratio(operation.time_to_fsdp2),
        ]
        for result in layout.transports
        for name, operation in (("gather", result.gather), ("reduce", result.reduce))
    ]
    head = [
        "transport",
        "operation",
        "sent MB, ranks' min/median/max",
        "messages",
        "time / collective",
        "time / FSDP2's path",
    ]
    title = (
        f"Block '{layout.layout}': gamma {layout.gamma:.2f}, P_B = "
        f"{_megabytes(layout.block_bytes)} MB; FSDP2 sends {_megabytes(layout.fsdp2_bytes)} MB "
        "each way. Counted = predicted. Times: median of paired ratios (min to max)"
    )
    return f"{title}\n{_table(head, rows)}"


def _measured(steps: Sequence[MeasuredStep]) -> str:
    rows = [
        [step.system, *(_counts(p.counted) for p in (step.forward, step.backward, step.step))]
        for step in steps
    ]
    head = ["system", "forward", "backward", "optimizer step"]
    title = "One real step of a scaled-down Llama: bytes sent, ranks' min/median/max, as predicted"
    return f"{title}\n{_table(head, rows)}"


def _account(account: ModelAccount) -> str:
    rows = [
        [
            _label(system.system),
            *(
                _megabytes(spread.max)
                for spread in (
                    system.forward,
                    system.backward,
                    system.prefetched_over_fsdp2,
                    system.exposed,
                )
            ),
        ]
        for system in account.systems
    ]
    head = ["system", "forward", "backward", "prefetched over FSDP2's", "exposed (step)"]
    title = (
        f"Llama {account.model}, {account.world_size} ranks, by formula: MB that the busiest rank "
        f"sends per step (gather {account.gather_itemsize}, reduce {account.reduce_itemsize}, step "
        f"{account.step_itemsize} and {account.result_itemsize} bytes per element; "
        f"{account.microbatches} microbatch(es); gamma up to {account.gamma_max:.2f}; "
        f"matrices / W = {_megabytes(account.matrix_bytes / account.world_size)} MB)"
    )
    return f"{title}\n{_table(head, rows)}"


def _label(system: str) -> str:
    kind, _, name = system.partition(", ")
    return f"{kind}, {BASELINE_STEPS[name].label}" if name in BASELINE_STEPS else system


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / _MEGABYTE:,.2f}"


def _spread(spread: Spread) -> str:
    return " / ".join(_megabytes(n) for n in (spread.min, spread.median, spread.max))


def _counts(spread: Spread) -> str:
    values = (spread.min, spread.median, spread.max)
    return f"{values[0]:,}" if len(set(values)) == 1 else " / ".join(f"{n:,}" for n in values)


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.min:.2f} to {ratio.max:.2f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that reads in a terminal and is Markdown."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )
