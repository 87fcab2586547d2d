"""Saving and loading a checkpoint: ours beside stock FSDP2's through DCP's own reader and writer.

Both systems hold the same model and the same optimizer state: owner shards here, row shards there.
Rounds are interleaved. Times are the slowest rank's, from a barrier to the return of the call, with
the data forced to the disk by both (``fsync``); a load follows its save, so that it reads from the
page cache in both. Peaks are measured in a round of their own, as in [Note: what is counted].
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from torchtitan_matrixfsdp.bench.blocks import model_blocks, plan_blocks, scaled_model
from torchtitan_matrixfsdp.bench.memory import make_meter, settled
from torchtitan_matrixfsdp.bench.ranks import rank_mesh, seconds, slowest
from torchtitan_matrixfsdp.bench.results import (
    CheckpointOperation,
    CheckpointSystem,
    Ratio,
    Spread,
    spread,
)
from torchtitan_matrixfsdp.bench.step import make_optimizers, shard_model
from torchtitan_matrixfsdp.checkpoint import Manifest, OwnerStorageReader, OwnerStorageWriter
from torchtitan_matrixfsdp.layout import OwnerPlan

_STOCK, _OURS = "fsdp2, dcp", "owner"


@dataclass(frozen=True)
class CheckpointOptions:
    """What ``checkpoint`` measures.

    Attributes:
        dim: width of the blocks.
        blocks: how many.
        repeats: rounds over both systems.
        folder: where to write; a temporary folder is made in it, and removed.
    """

    dim: int
    blocks: int
    repeats: int
    folder: str | None


@dataclass(frozen=True)
class _System:
    state: Mapping[str, Any]
    save: Callable[[dict[str, Any], Path], object]
    load: Callable[[dict[str, Any], Path], object]


def measure_checkpoints(options: CheckpointOptions) -> tuple[CheckpointSystem, ...]:
    """FSDP2 and owner shards, in this order. Called on all ranks, which return the same.

    Raises:
        RuntimeError: a loaded value is not the one that was saved.
    """
    plan = plan_blocks(
        model_blocks(scaled_model(options.dim, options.blocks)), dist.get_world_size()
    )
    systems = {
        _STOCK: _System(
            _state(options, None),
            lambda state, path: dcp.save(state, checkpoint_id=path),
            lambda state, path: dcp.load(state, checkpoint_id=path),
        ),
        _OURS: _System(
            _state(options, plan),
            lambda state, path: dcp.save(
                state, storage_writer=OwnerStorageWriter(path, Manifest())
            ),
            lambda state, path: dcp.load(state, storage_reader=OwnerStorageReader(path)),
        ),
    }
    shared: list[str | None] = [None]
    if dist.get_rank() == 0:
        shared[0] = tempfile.mkdtemp(prefix="matrixfsdp-bench-", dir=options.folder)
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    try:
        return _measure(systems, options.repeats, folder)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


def _save_ours(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=OwnerStorageWriter(path, Manifest()))


def _state(options: CheckpointOptions, plan: OwnerPlan | None) -> dict[str, Any]:
    """The parameters of a sharded model, and the state of its optimizers after a step."""
    model = shard_model(scaled_model(options.dim, options.blocks), plan, rank_mesh()).model
    state: dict[str, Any] = dict(model.named_parameters())
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    for optimizer in make_optimizers(model, is_stock=plan is None):
        for param, entries in optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim:
                    value.fill_(0.5)
                state[f"optimizer.{names[param]}.{key}"] = value
    return {name: value.detach() for name, value in state.items()}


def _measure(
    systems: Mapping[str, _System], repeats: int, folder: Path
) -> tuple[CheckpointSystem, ...]:
    peaks = {name: _peaks(system, folder / f"{name}, peak") for name, system in systems.items()}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in systems}
    for number in range(repeats):
        for name, system in systems.items():
            path, state = folder / f"{name} {number}", dict(system.state)
            times[name][0].append(seconds(partial(system.save, state, path)))
            times[name][1].append(seconds(partial(system.load, state, path)))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
    saves, loads = (
        dict(zip(systems, slowest([times[name][phase] for name in systems]), strict=True))
        for phase in (0, 1)
    )
    return tuple(
        CheckpointSystem(
            name,
            disk_bytes=peaks[name].disk,
            save=_operation(saves, name, peaks[name].save),
            load=_operation(loads, name, peaks[name].load),
        )
        for name in systems
    )


def _operation(times: Mapping[str, list[float]], name: str, peak: Spread) -> CheckpointOperation:
    pairs = list(zip(times[_STOCK], times[name], strict=True))
    return CheckpointOperation(statistics.median(times[name]), Ratio.of(pairs), peak)


@dataclass(frozen=True)
class _Peaks:
    disk: int
    save: Spread
    load: Spread


def _peaks(system: _System, path: Path) -> _Peaks:
    """Bytes on the disk, and alive on top of the shards; checks what is loaded."""
    meter = make_meter()
    state = dict(system.state)
    locals_ = [
        value.to_local() if isinstance(value, DTensor) else value for value in state.values()
    ]
    before = [local.clone() for local in locals_]

    def phase(run: Callable[[dict[str, Any], Path], object]) -> Spread:
        with meter:
            for local in locals_:
                local.sum()  # the meter sees what passes through an operator
            meter.reset()
            steady = meter.live()
            run(state, path)
            peak = meter.peak()
        settled(meter)
        return spread(peak - steady)

    saved = phase(system.save)
    for local in locals_:
        local.zero_()
    loaded = phase(system.load)
    if not all(torch.equal(a, b) for a, b in zip(locals_, before, strict=True)):
        raise RuntimeError("what was loaded is not what was saved")
    disk = sum(file.stat().st_size for file in path.iterdir())
    return _Peaks(disk, saved, loaded)
