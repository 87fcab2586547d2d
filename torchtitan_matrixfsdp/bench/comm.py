"""One block's gather and reduction under every transport, beside FSDP2's of the same block.

[Note: what is timed]
Every time is a ratio of two, taken in one run, one right after the other, in alternating order.
Each starts behind a barrier and counts until the slowest rank is done.

*To the collective*: the transport alone, on a buffer that is there, to one bare
``all_gather_single`` or ``reduce_scatter_single`` of FSDP2's equal slices of the block.

*To FSDP2*: the whole path, through the same methods on both sides. A gather is ``unshard`` and
``reshard``: memory, copy-in, transfer, FSDP2's copy-out, and giving the memory back. A reduction is
``post_backward``: resharding, packing the gradients, transfer and sum, views into the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from torchtitan_matrixfsdp.bench.blocks import LAYOUTS, ShapeBlock, block_layout
from torchtitan_matrixfsdp.bench.ranks import rank_device, rank_mesh, seconds, slowest
from torchtitan_matrixfsdp.bench.results import (
    LayoutResult,
    Operation,
    Ratio,
    Sent,
    TransportResult,
    spread,
)
from torchtitan_matrixfsdp.bench.sent import SentBytes
from torchtitan_matrixfsdp.comm import Traffic, TrafficCounter, Transport, TransportFactory
from torchtitan_matrixfsdp.comm.transport import all_gather_single, reduce_scatter_single
from torchtitan_matrixfsdp.layout import BlockPlan, fsdp_slice_numel, fsdp_volume
from torchtitan_matrixfsdp.runtime import OwnerContext, owner_shard, sum_gradients
from torchtitan_matrixfsdp.runtime.fsdp_compat import FSDPParamGroup, param_groups_of

_WARM_UPS = 2
_SEED = 11


@dataclass(frozen=True)
class CommOptions:
    """What ``comm`` measures.

    Attributes:
        transports: names, each of which is measured.
        repeats: pairs of times for each ratio.
        dim: width of the blocks.
        dtype: of parameters and gradients, on the wire too.
    """

    transports: tuple[str, ...]
    repeats: int
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Work:
    """Something to time, and what makes it ready each time."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def measure_layouts(options: CommOptions) -> tuple[LayoutResult, ...]:
    """Every layout under every transport. Called on all ranks, which return the same.

    Raises:
        RuntimeError: a rank counts other traffic than predicted, ours or FSDP2's, or gathers other
            parameters than FSDP2 does.
    """
    return tuple(_measure_layout(name, options) for name in LAYOUTS)


def _measure_layout(name: str, options: CommOptions) -> LayoutResult:
    world_size = dist.get_world_size()
    mesh = rank_mesh()
    block = block_layout(name, options.dim, world_size, options.dtype)
    itemsize = options.dtype.itemsize
    chosen = TransportFactory("auto", itemsize, itemsize).choose(block)
    # "auto" is one of the others; under its own name only one of them.
    names = dict.fromkeys(chosen if t == "auto" else t for t in options.transports)
    stock = _Stock(block, mesh, options.dtype)
    owners = [_Owner(block, transport, mesh, options.dtype) for transport in names]
    fsdp2_bytes = fsdp_volume(block).elements * itemsize
    for operation in ("gather", "reduce"):
        if stock.sent(operation) != fsdp2_bytes:
            raise RuntimeError(f"{name}: FSDP2's {operation} does not send {fsdp2_bytes} bytes")
    for owner in owners:
        if not owner.holds_the_same(stock):
            raise RuntimeError(f"{name}, {owner.name}: the gathered parameters are not FSDP2's")
    results = []
    for owner in owners:
        operations = []
        for operation in ("gather", "reduce"):
            predicted, counted = owner.traffic(operation)
            bare = _time_pairs(stock.collective(operation), owner.bare(operation), options.repeats)
            whole = _time_pairs(stock.path(operation), owner.path(operation), options.repeats)
            operations.append(Operation(predicted, counted, Ratio.of(bare), Ratio.of(whole)))
        results.append(TransportResult(owner.name, owner.name == chosen, *operations))
    return LayoutResult(name, block.gamma, block.nbytes, fsdp2_bytes, tuple(results))


class _Sharded:
    """One sharded block and the operations on it that are timed."""

    def __init__(self, block: nn.Module) -> None:
        assert isinstance(block, FSDPModule)
        self._module = module = block
        sum_gradients(module)
        # FSDP2 makes its streams in the first forward.
        module(torch.ones((), device=rank_device())).backward()
        (self._group,) = param_groups_of(module)
        self._gradients = [
            torch.randn_like(param.unsharded_param) for param in self._unsharded().fsdp_params
        ]
        module.reshard()

    def path(self, operation: str) -> _Work:
        """The whole path of a gather or reduction."""
        if operation == "gather":
            return _Work(self._gather)
        return _Work(self._reduce, self._backward)

    def parameters(self) -> list[torch.Tensor]:
        """The gathered parameters, copied."""
        params = [p.unsharded_param.detach().clone() for p in self._unsharded().fsdp_params]
        self._module.reshard()
        return params

    def sent(self, operation: str) -> int:
        """Bytes that pass through the dispatcher in the whole path."""
        work = self.path(operation)
        work.prepare()
        with SentBytes() as sent:
            work.run()
        return sent.total

    def _unsharded(self) -> FSDPParamGroup:
        self._module.unshard()
        return self._group

    def _gather(self) -> None:
        self._module.unshard()
        self._module.reshard()

    def _backward(self) -> None:
        """Leaves the group as autograd leaves it: unsharded, every parameter with a gradient."""
        for sharded in self._module.parameters():
            sharded.grad = None
        for param, gradient in zip(self._unsharded().fsdp_params, self._gradients, strict=True):
            param.unsharded_param.grad = gradient

    def _reduce(self) -> None:
        self._group.post_backward()
        self._group.finalize_backward()


class _Stock(_Sharded):
    """FSDP2's block."""

    def __init__(self, block: BlockPlan, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        module = _module(block, dtype)
        fully_shard(module, mesh=mesh)
        super().__init__(module)
        numel = fsdp_slice_numel(block)
        self._whole = torch.ones(mesh.size() * numel, dtype=dtype, device=rank_device())
        self._slice = self._whole.narrow(0, dist.get_rank() * numel, numel)
        self._sum = torch.empty_like(self._slice)

    def collective(self, operation: str) -> _Work:
        """The bare collective on FSDP2's slices; the all-gather in place, as FSDP2 calls it."""
        if operation == "gather":
            return _Work(lambda: all_gather_single(self._whole, self._slice))
        return _Work(lambda: reduce_scatter_single(self._sum, self._whole))


class _Owner(_Sharded):
    """Our block under one transport."""

    def __init__(
        self, block: BlockPlan, transport: str, mesh: DeviceMesh, dtype: torch.dtype
    ) -> None:
        self.name = transport
        factory = TransportFactory(transport)
        module = owner_shard(
            _module(block, dtype), block, mesh=mesh, transport=factory, context=OwnerContext()
        )
        super().__init__(module)
        self._counter = TrafficCounter()
        chosen = factory.choose(block)
        self._transport: Transport = factory(chosen, block, dist.get_rank(), self._counter)
        self._process_group = mesh.get_group()
        numel = self._transport.layout.numel
        self._buffer = torch.ones(numel, dtype=dtype, device=rank_device())

    def bare(self, operation: str) -> _Work:
        """The transport alone. A reduction may overwrite its buffer, so that is filled anew."""
        if operation == "gather":
            return _Work(self._transfer)
        return _Work(
            lambda: self._transport.reduce(self._buffer, self._process_group),
            lambda: self._buffer.fill_(1),
        )

    def traffic(self, operation: str) -> tuple[Sent, Sent]:
        """What is predicted for one operation, and what it sends.

        Raises:
            RuntimeError: they differ on this rank, or from what passes through the dispatcher.
        """
        transport = self._transport
        predict = transport.predict_gather if operation == "gather" else transport.predict_reduce
        predicted = predict(self._buffer.element_size())
        work = self.bare(operation)
        work.prepare()
        self._counter.reset()
        with SentBytes() as sent:
            work.run()
        counted = self._counter.total(operation)
        if counted != predicted or sent.total != predicted.sent_bytes:
            raise RuntimeError(
                f"{self.name} {operation} on rank {dist.get_rank()}: predicted {predicted}, "
                f"counted {counted}, seen in the dispatcher {sent.total} bytes"
            )
        return _sent(predicted), _sent(counted)

    def holds_the_same(self, stock: _Sharded) -> bool:
        """Whether a gather gives FSDP2's parameters, bit for bit."""
        return all(map(torch.equal, self.parameters(), stock.parameters()))

    def _transfer(self) -> None:
        for work in self._transport.gather(self._buffer, self._process_group):
            work.wait()


def _module(block: BlockPlan, dtype: torch.dtype) -> ShapeBlock:
    torch.manual_seed(_SEED)
    return ShapeBlock(block, dtype, rank_device())


def _sent(traffic: Traffic) -> Sent:
    return Sent(spread(traffic.sent_bytes), spread(traffic.messages))


def _time_pairs(baseline: _Work, ours: _Work, repeats: int) -> list[tuple[float, float]]:
    """Seconds of (baseline, ours), the slowest rank's, in alternating order."""
    pairs = []
    for repeat in range(_WARM_UPS + repeats):
        if repeat % 2 == 0:
            first = _seconds(baseline)
            pair = (first, _seconds(ours))
        else:
            second = _seconds(ours)
            pair = (_seconds(baseline), second)
        if repeat >= _WARM_UPS:
            pairs.append(pair)
    return _slowest(pairs)


def _seconds(work: _Work) -> float:
    work.prepare()
    return seconds(work.run)


def _slowest(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(baseline, ours) for baseline, ours in slowest(pairs)]
