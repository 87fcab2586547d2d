"""Memory of a block's materialisation, ours and FSDP2's of the same block.

[Note: what is counted]
On a CPU: the bytes of all tensor storages that are alive after any operator, each once. FSDP2 and
owner shards both free memory by resizing storages, which is no operator, so sizes are read anew
each time; what is allocated must be written by an operator, and is seen then. Not seen is what a
kernel or the backend takes and gives back within one call (gloo stages copies), in both systems.
On a GPU: what the caching allocator has given out.

A phase's number is its highest point on top of the steady state (the sharded parameters and the
input). Phases are repeated, the systems in turn, and the lowest number counts: a backend's thread
that still holds a finished transfer's tensors for a moment can only add.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from torchtitan_matrixfsdp.bench.blocks import model_blocks, plan_blocks, scaled_model
from torchtitan_matrixfsdp.bench.ranks import rank_device, rank_mesh, synchronise
from torchtitan_matrixfsdp.bench.results import MemoryPhase, SystemMemory, spread
from torchtitan_matrixfsdp.bench.step import ShardedModel, sample, shard_model
from torchtitan_matrixfsdp.layout import (
    BlockPlan,
    choose_transport,
    fsdp_gather_bytes,
    owner_gather_bytes,
)
from torchtitan_matrixfsdp.runtime import OwnerContext
from torchtitan_matrixfsdp.runtime.fsdp_compat import local_of

_ITEMSIZE = 4  # float32
_STOCK = "fsdp2"


@dataclass(frozen=True)
class MemoryOptions:
    """What ``memory`` measures.

    Attributes:
        transport: of the owner shards.
        dim: width of the blocks.
        blocks: how many; prefetch needs two.
        tokens: of each rank's input.
        repeats: rounds over all systems.
    """

    transport: str
    dim: int
    blocks: int
    tokens: int
    repeats: int


@dataclass(frozen=True)
class _Peaks:
    """Bytes of one round on one rank."""

    steady: int
    gather: int
    forward: int
    backward: int
    steady_with_gradients: int


class Meter(Protocol):
    """Follows memory while entered."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exc: Any) -> None: ...

    def reset(self) -> None:
        """Start a new peak."""

    def live(self) -> int:
        """Bytes alive now."""

    def peak(self) -> int:
        """The most bytes alive since ``reset``."""


class LiveStorages(TorchDispatchMode):
    """Follows the storages of all tensors that pass through an operator while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peak = 0

    def reset(self) -> None:
        self._peak = self.live()

    def live(self) -> int:
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def peak(self) -> int:
        return self._peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self._see(local_of(value) if isinstance(value, DTensor) else value)
        self._peak = max(self._peak, self.live())
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        # A tensor that wraps another, as one on its way does, claims memory of its own and has
        # none; the other passes through operators itself.
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        if tensor.device.type != "meta" and not is_wrapper:
            storage = tensor.untyped_storage()
            self._storages[id(storage)] = weakref.ref(storage)


class _Allocator:
    """What CUDA's caching allocator has given out."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        pass

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def live(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


def make_meter() -> Meter:
    """The meter of this rank's device."""
    return _Allocator() if rank_device().type == "cuda" else LiveStorages()


def measure_memory(options: MemoryOptions) -> tuple[SystemMemory, ...]:
    """FSDP2, owner shards as they run on this device, and owner shards with the release of a
    block put off as on devices with streams. Called on all ranks, which return the same."""
    shape = scaled_model(options.dim, options.blocks)
    plan = plan_blocks(model_blocks(shape), dist.get_world_size())
    mesh = rank_mesh()  # before anything is counted: it holds a small tensor

    def owner(defer: bool | None) -> ShardedModel:
        return shard_model(shape, plan, mesh, options.transport, OwnerContext(defer_release=defer))

    systems: dict[str, Callable[[], ShardedModel]] = {
        _STOCK: lambda: shard_model(shape, None, mesh),
        "owner": lambda: owner(None),
        "owner, deferred release": lambda: owner(True),
    }
    rounds: dict[str, list[_Peaks]] = {name: [] for name in systems}
    for _ in range(options.repeats):
        for name, make in systems.items():
            rounds[name].append(_measure(make, options))
    block = plan.blocks[0]
    return tuple(
        _summary(name, peaks, _predicted_gather(name, block, options.transport))
        for name, peaks in rounds.items()
    )


def _measure(make: Callable[[], ShardedModel], options: MemoryOptions) -> _Peaks:
    meter = make_meter()
    before = settled(meter)
    with meter:
        model = make().model
        x = sample(scaled_model(options.dim, options.blocks), options.tokens)
        model(x).sum().backward()  # FSDP2 makes what it keeps in the first step
        for param in model.parameters():
            param.grad = None
    steady = settled(meter)

    def phase(run: Callable[[], Any]) -> tuple[int, Any]:
        with meter:
            meter.reset()
            value = run()
            synchronise(rank_device())
            peak = meter.peak()
        settled(meter)
        return peak - steady, value

    first = model.layers[0]
    assert isinstance(first, FSDPModule)
    gather, _ = phase(first.unshard)
    first.reshard()
    forward, loss = phase(lambda: model(x).sum())
    backward, _ = phase(loss.backward)
    del loss
    gradients = settled(meter) - steady
    return _Peaks(steady - before - x.nbytes, gather, forward, backward, gradients)


def settled(meter: Meter) -> int:
    """Bytes alive once this rank's finished transfers have let go of their tensors. Called while
    the meter is not entered, so that the barrier's own tensor is none of them."""
    gc.collect()
    synchronise(rank_device())
    dist.barrier()
    return meter.live()


def _predicted_gather(name: str, block: BlockPlan, transport: str) -> int | None:
    if block.world_size == 1:
        return None
    if name == _STOCK:
        return fsdp_gather_bytes(block, _ITEMSIZE)
    if transport == "auto":
        transport = choose_transport(block, _ITEMSIZE, _ITEMSIZE)
    return owner_gather_bytes(block, transport, _ITEMSIZE)


def _summary(name: str, rounds: list[_Peaks], predicted_gather: int | None) -> SystemMemory:
    records = [asdict(peaks) for peaks in rounds]
    lowest = {key: spread(min(record[key] for record in records)).max for key in records[0]}
    return SystemMemory(
        name,
        lowest["steady"],
        MemoryPhase(predicted_gather, lowest["gather"]),
        MemoryPhase(None, lowest["forward"]),
        MemoryPhase(None, lowest["backward"]),
        lowest["steady_with_gradients"],
    )
