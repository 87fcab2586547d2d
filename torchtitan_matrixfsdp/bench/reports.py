"""The reports, from what the ranks measure and what the formulas say.

What runs on a rank stands in modules such as this one and not beside the command line: a spawned
process finds a function by its module's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan_matrixfsdp.bench.account import account_model
from torchtitan_matrixfsdp.bench.blocks import (
    WIDTH_MULTIPLE,
    model_blocks,
    plan_blocks,
    scaled_model,
)
from torchtitan_matrixfsdp.bench.checkpoint import CheckpointOptions, measure_checkpoints
from torchtitan_matrixfsdp.bench.comm import CommOptions, measure_layouts
from torchtitan_matrixfsdp.bench.memory import MemoryOptions, measure_memory
from torchtitan_matrixfsdp.bench.optimizer_step import (
    TOLERANCE,
    StepOptions,
    measure_optimizer_step,
)
from torchtitan_matrixfsdp.bench.ranks import is_reporter, on_ranks, rank_device
from torchtitan_matrixfsdp.bench.results import (
    SCHEMA,
    CheckpointReport,
    CheckpointSystem,
    CommReport,
    LayoutResult,
    MeasuredStep,
    MemoryReport,
    Setting,
    StepReport,
    StepResults,
    SystemMemory,
)
from torchtitan_matrixfsdp.bench.step import measure_steps
from torchtitan_matrixfsdp.comm import TRANSPORTS
from torchtitan_matrixfsdp.layout import StepShape

_STEP_WIDTH = 2 * WIDTH_MULTIPLE

_CommMeasured = tuple[Setting | None, tuple[LayoutResult, ...], tuple[MeasuredStep, ...]]


def comm_report(
    world_size: int,
    options: CommOptions | None,
    model: str,
    account_world_sizes: Sequence[int],
    shape: StepShape,
) -> CommReport | None:
    """What ``comm`` reports; without ``options`` the account alone, and no rank is started.

    Returns None where another process of the launcher reports.
    """
    measured: _CommMeasured | None = None
    if options is not None:
        measured = on_ranks(_comm_on_rank, world_size, options)
    if not is_reporter():
        return None
    setting, layouts, steps = measured or (None, (), ())
    accounts = tuple(account_model(model, size, shape) for size in account_world_sizes)
    return CommReport(SCHEMA, "comm", setting, layouts, steps, accounts)


def memory_report(world_size: int, options: MemoryOptions) -> MemoryReport | None:
    """What ``memory`` reports; None where another process of the launcher reports."""
    measured: tuple[Setting, tuple[SystemMemory, ...]] | None
    measured = on_ranks(_memory_on_rank, world_size, options)
    if measured is None:
        return None
    setting, systems = measured
    blocks = model_blocks(scaled_model(options.dim, options.blocks))
    block_bytes = plan_blocks(blocks, world_size).blocks[0].nbytes
    return MemoryReport(
        SCHEMA, "memory", setting, block_bytes, options.blocks, options.tokens, systems
    )


def checkpoint_report(world_size: int, options: CheckpointOptions) -> CheckpointReport | None:
    """What ``checkpoint`` reports; None where another process of the launcher reports."""
    measured: tuple[Setting, tuple[CheckpointSystem, ...]] | None
    measured = on_ranks(_checkpoint_on_rank, world_size, options)
    if measured is None:
        return None
    setting, systems = measured
    return CheckpointReport(SCHEMA, "checkpoint", setting, options.blocks, systems)


def step_report(world_size: int, options: StepOptions) -> StepReport | None:
    """What ``step`` reports; None where another process of the launcher reports."""
    results: StepResults | None = on_ranks(measure_optimizer_step, world_size, options)
    if results is None:
        return None
    return StepReport(
        schema=SCHEMA,
        command="step",
        optimizer=options.optimizer,
        layers=options.shape.layers,
        hidden=options.shape.hidden,
        compute_dtype=str(options.compute).removeprefix("torch."),
        tolerance=TOLERANCE,
        results=results,
    )


def _comm_on_rank(options: CommOptions) -> _CommMeasured:
    setting = Setting.here(options.dtype, rank_device(), options.dim, options.repeats)
    layouts = measure_layouts(options)
    return setting, layouts, measure_steps((*TRANSPORTS, "auto"), _STEP_WIDTH)


def _memory_on_rank(options: MemoryOptions) -> tuple[Setting, tuple[SystemMemory, ...]]:
    setting = Setting.here(torch.float32, rank_device(), options.dim, options.repeats)
    return setting, measure_memory(options)


def _checkpoint_on_rank(
    options: CheckpointOptions,
) -> tuple[Setting, tuple[CheckpointSystem, ...]]:
    setting = Setting.here(torch.float32, rank_device(), options.dim, options.repeats)
    return setting, measure_checkpoints(options)
