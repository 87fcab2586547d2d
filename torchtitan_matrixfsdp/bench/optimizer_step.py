"""The optimizer step under every mode, interleaved in one run over the same gradients.

[Note: what a sample is]
A repetition takes a sample of each mode, in an order that moves on by one from repetition to
repetition. A sample is several steps, so many that they last as long as clocks and schedulers
demand; each step starts behind a barrier, which is not timed, and counts until the slowest rank is
done. Ratios are of samples of the same repetition.

Bytes, memory and equality of the weights are checked in steps of their own, which are not timed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from torchtitan_matrixfsdp.bench.blocks import LlamaShape
from torchtitan_matrixfsdp.bench.memory import make_meter, settled
from torchtitan_matrixfsdp.bench.ranks import rank_device, seconds, slowest, synchronise
from torchtitan_matrixfsdp.bench.results import (
    ModeResult,
    Ratio,
    Sent,
    Setting,
    StepResults,
    spread,
)
from torchtitan_matrixfsdp.bench.sent import SentBytes
from torchtitan_matrixfsdp.bench.step_modes import (
    DTYPE,
    MODES,
    OPTIMIZERS,
    OTHER_MATHS,
    Problem,
    StepMode,
    single_device,
)
from torchtitan_matrixfsdp.comm import Traffic

_MIN_SAMPLE_S = 0.1
_MAX_STEPS = 32
_CHECKED_STEPS = 2
# Float32 weights of size 1, moved by about 1e-2 per step. The order of summation differs between
# modes (1e-7), and Newton-Schulz, here in float32, amplifies that in directions whose singular
# values are small, by up to 3.4 per iteration. Rows of another rank or a step too few differ by
# 1e-3 and more.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class StepOptions:
    """What ``step`` measures.

    Attributes:
        optimizer: a key of ``OPTIMIZERS``.
        modes: keys of ``MODES``, ``ideal`` among them.
        shape: of the blocks.
        repeats: samples of each mode.
        compute: dtype of Newton-Schulz.
    """

    optimizer: str
    modes: tuple[str, ...]
    shape: LlamaShape
    repeats: int
    compute: torch.dtype


def measure_optimizer_step(options: StepOptions) -> StepResults:
    """All modes. Called on all ranks, which return the same.

    Raises:
        RuntimeError: a rank's weights differ from one device's by more than ``TOLERANCE``, or it
            sends other bytes than predicted.
    """
    choice = OPTIMIZERS[options.optimizer]
    difference = _check_weights(options)
    problem = Problem(options.shape, choice, options.compute)
    modes = {name: MODES[name](problem) for name in options.modes}
    # What is not timed comes first, and warms up what is.
    memory = {name: _memory(mode) for name, mode in modes.items()}
    sent = {name: _check_traffic(name, mode) for name, mode in modes.items()}
    steps = {name: _steps_per_sample(mode) for name, mode in modes.items()}
    samples = _sample(modes, steps, options.repeats)

    def ratio(name: str, baseline: str) -> Ratio | None:
        if baseline not in samples:
            return None
        return Ratio.of(list(zip(samples[baseline], samples[name], strict=True)))

    results = []
    for name in modes:
        to_ideal = ratio(name, "ideal")
        assert to_ideal is not None
        result = ModeResult(
            mode=name,
            steps_per_sample=steps[name],
            seconds_here=median(samples[name]),
            to_ideal=to_ideal,
            to_zero3=ratio(name, "zero3"),
            to_adamw_foreach=ratio(name, "adamw_foreach"),
            to_adamw_fused=ratio(name, "adamw_fused"),
            predicted=sent[name][0],
            counted=sent[name][1],
            steady_bytes=memory[name][0],
            peak_bytes=memory[name][1],
        )
        results.append(result)
    owners = [shard.owner for shard in problem.shards]
    return StepResults(
        setting=Setting.here(DTYPE, rank_device(), options.shape.dim, options.repeats),
        matrices=len(problem.shards),
        matrix_bytes=sum(shard.nbytes for shard in problem.shards),
        largest_difference=difference,
        ideal_imbalance=problem.imbalance(problem.ideal_workers()),
        owner_imbalance=problem.imbalance(owners),
        modes=tuple(results),
    )


def _check_weights(options: StepOptions) -> float:
    """The largest difference of any weight, in any mode on any rank, from one device's."""
    problem = Problem(options.shape, OPTIMIZERS[options.optimizer], torch.float32)
    reference = single_device(problem)
    for _ in range(_CHECKED_STEPS):
        reference.step()
    expected = {fqn: weight for fqn, weight, _ in reference.parts()}
    largest = 0.0
    for name in options.modes:
        if name in OTHER_MATHS:
            continue
        mode = MODES[name](problem)
        for _ in range(_CHECKED_STEPS):
            mode.step()
        apart = [
            (weight - expected[fqn][rows]).abs().max().item()
            for fqn, weight, rows in mode.parts()
            if weight.numel() > 0
        ]
        ((difference,),) = slowest([[max(apart, default=0.0)]])
        if not difference <= TOLERANCE:  # NaN too
            raise RuntimeError(
                f"{name}: weights differ from one device's by {difference:.1e} after "
                f"{_CHECKED_STEPS} steps; at most {TOLERANCE:.0e} is rounding"
            )
        largest = max(largest, difference)
    return largest


def _steps_per_sample(mode: StepMode) -> int:
    ((duration,),) = slowest([[seconds(mode.step)]])
    return max(1, min(_MAX_STEPS, math.ceil(_MIN_SAMPLE_S / duration)))


def _check_traffic(name: str, mode: StepMode) -> tuple[Sent, Sent]:
    mode.take()
    with SentBytes() as dispatched:
        mode.step()
    predicted, counted = mode.predict(), mode.take()
    if counted != predicted or dispatched.total != predicted.sent_bytes:
        raise RuntimeError(
            f"{name} on rank {dist.get_rank()}: predicted {predicted}, counted {counted}, seen in "
            f"the dispatcher {dispatched.total} bytes"
        )
    return _sent(predicted), _sent(counted)


def _sent(traffic: Traffic) -> Sent:
    return Sent(spread(traffic.sent_bytes), spread(traffic.messages))


def _memory(mode: StepMode) -> tuple[int, int]:
    """Bytes that live on the fullest rank between steps, and at the highest point of a step."""
    meter = make_meter()
    with meter:
        mode.step()  # everything that the mode holds passes through an operator
    steady = settled(meter)
    with meter:
        meter.reset()
        mode.step()
        synchronise(rank_device())
        peak = meter.peak()
    return spread(steady).max, spread(peak).max


def _sample(
    modes: Mapping[str, StepMode], steps: Mapping[str, int], repeats: int
) -> dict[str, list[float]]:
    """Seconds per step of each mode, one sample for each repetition."""
    names = list(modes)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            durations = [[seconds(modes[name].step)] for _ in range(steps[name])]
            samples[name].append(_mean(slowest(durations)))
    return samples


def _mean(durations: Sequence[Sequence[float]]) -> float:
    return sum(duration for (duration,) in durations) / len(durations)
