"""The results of the benchmarks, as plain data: the JSON document is their ``asdict``.

``docs/bench.md`` says what each field means.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

SCHEMA = 2


@dataclass(frozen=True)
class Spread:
    """A number that differs by rank."""

    min: int
    median: int
    max: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        """The spread of one value per rank; the median is a value that occurs."""
        return cls(min(values), statistics.median_low(values), max(values))


@dataclass(frozen=True)
class Ratio:
    """Paired ratios of times, ours to a baseline's: below 1 ours is faster."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Ratio:
        """From pairs (baseline, ours) in seconds, one per repetition."""
        ratios = [ours / baseline for baseline, ours in pairs]
        return cls(statistics.median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True)
class Sent:
    """What a rank sends in one operation."""

    bytes: Spread
    messages: Spread


@dataclass(frozen=True)
class Operation:
    """One gather or one reduction of a block under one transport."""

    predicted: Sent
    counted: Sent
    time_to_collective: Ratio
    time_to_fsdp2: Ratio


@dataclass(frozen=True)
class TransportResult:
    """A block under one transport."""

    transport: str
    is_auto: bool
    gather: Operation
    reduce: Operation


@dataclass(frozen=True)
class LayoutResult:
    """A block in one layout, FSDP2's and ours."""

    layout: str
    gamma: float
    block_bytes: int
    fsdp2_bytes: int
    transports: tuple[TransportResult, ...]


@dataclass(frozen=True)
class Phase:
    """What a rank sends in one phase of a step, in bytes."""

    predicted: Spread
    counted: Spread


@dataclass(frozen=True)
class MeasuredStep:
    """One real training step of the scaled-down model."""

    system: str
    forward: Phase
    backward: Phase
    step: Phase


@dataclass(frozen=True)
class SystemAccount:
    """A whole model's step under one system, by formula, in bytes that a rank sends."""

    system: str
    forward: Spread
    backward: Spread
    step: Spread
    prefetched: Spread
    exposed: Spread
    prefetched_over_fsdp2: Spread


@dataclass(frozen=True)
class ModelAccount:
    """A whole model's step at one world size, by formula."""

    model: str
    world_size: int
    matrix_bytes: int
    gamma_max: float
    gather_itemsize: int
    reduce_itemsize: int
    step_itemsize: int
    result_itemsize: int
    microbatches: int
    systems: tuple[SystemAccount, ...]


@dataclass(frozen=True)
class Setting:
    """Where and how the measurements ran."""

    torch_version: str
    backend: str
    device: str
    world_size: int
    dtype: str
    layer_dim: int
    repeats: int

    @classmethod
    def here(
        cls, dtype: torch.dtype, device: torch.device, layer_dim: int, repeats: int
    ) -> Setting:
        """The setting of the running process group."""
        return cls(
            torch.__version__,
            dist.get_backend(),
            device.type,
            dist.get_world_size(),
            str(dtype).removeprefix("torch."),
            layer_dim,
            repeats,
        )


@dataclass(frozen=True)
class CommReport:
    """What ``comm`` reports; ``setting`` is None and the measured lists empty where nothing ran."""

    schema: int
    command: str
    setting: Setting | None
    layouts: tuple[LayoutResult, ...]
    measured_steps: tuple[MeasuredStep, ...]
    accounts: tuple[ModelAccount, ...]


@dataclass(frozen=True)
class MemoryPhase:
    """The most bytes alive in one phase, on top of the steady state; the fullest rank's."""

    predicted: int | None
    peak: int


@dataclass(frozen=True)
class SystemMemory:
    """One system's memory: parameters alone (``steady``), and what each phase adds at its peak."""

    system: str
    steady: int
    gather: MemoryPhase
    forward: MemoryPhase
    backward: MemoryPhase
    steady_with_gradients: int


@dataclass(frozen=True)
class MemoryReport:
    """What ``memory`` reports."""

    schema: int
    command: str
    setting: Setting
    block_bytes: int
    blocks: int
    tokens: int
    systems: tuple[SystemMemory, ...]


@dataclass(frozen=True)
class NewtonSchulzSetting:
    """Where and how Newton-Schulz was measured."""

    torch_version: str
    device: str
    threads: int
    steps: int
    coefficients: str
    repeats: int


@dataclass(frozen=True)
class NewtonSchulzResult:
    """Matrices of one shape in one dtype: times, and how exact the result is."""

    dtype: str
    matrices: int
    rows: int
    cols: int
    flops: int
    milliseconds: float
    time_to_products: Ratio
    time_to_float32_products: Ratio
    stacked_to_each: Ratio
    relative_error: float
    smallest_singular_value: float
    largest_singular_value: float


@dataclass(frozen=True)
class NewtonSchulzReport:
    """What ``newton-schulz`` reports."""

    schema: int
    command: str
    setting: NewtonSchulzSetting
    results: tuple[NewtonSchulzResult, ...]


@dataclass(frozen=True)
class ModeResult:
    """The optimizer step in one mode; ratios to modes that were not measured are None."""

    mode: str
    steps_per_sample: int
    seconds_here: float
    to_ideal: Ratio
    to_zero3: Ratio | None
    to_adamw_foreach: Ratio | None
    to_adamw_fused: Ratio | None
    predicted: Sent
    counted: Sent
    steady_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class StepResults:
    """What the ranks of ``step`` measure."""

    setting: Setting
    matrices: int
    matrix_bytes: int
    largest_difference: float
    ideal_imbalance: float
    owner_imbalance: float
    modes: tuple[ModeResult, ...]


@dataclass(frozen=True)
class StepReport:
    """What ``step`` reports."""

    schema: int
    command: str
    optimizer: str
    layers: int
    hidden: int
    compute_dtype: str
    tolerance: float
    results: StepResults


@dataclass(frozen=True)
class CheckpointOperation:
    """A save or a load: the slowest rank's time, and the bytes alive on top of the shards."""

    seconds_here: float
    to_fsdp2: Ratio
    peak_bytes: Spread


@dataclass(frozen=True)
class CheckpointSystem:
    """One system's checkpoint."""

    system: str
    disk_bytes: int
    save: CheckpointOperation
    load: CheckpointOperation


@dataclass(frozen=True)
class CheckpointReport:
    """What ``checkpoint`` reports."""

    schema: int
    command: str
    setting: Setting
    blocks: int
    systems: tuple[CheckpointSystem, ...]


def spread(value: int) -> Spread:
    """The spread of every rank's ``value``; a collective, the same on all ranks."""
    values: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return Spread.of(values)
