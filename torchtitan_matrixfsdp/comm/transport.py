"""Moving a block's parameters and gradients between the ranks of one process group.

A transport serves one rank and one block. It works on a flat *block buffer*, 1D of
``layout.numel`` elements in the arrangement ``layout``, which the transport chooses:

- ``gather``: on entry the calling rank's own runs are filled; afterwards all runs are.
- ``reduce``: on entry the whole buffer holds this rank's contribution, and it may be overwritten;
  the returned 1D tensor is this rank's runs, concatenated and SUMMED over the group. Never AVG or
  PREMUL_SUM: gloo has no PREMUL_SUM, and an average over ranks is not what TorchTitan's
  token-weighted loss needs. The caller divides.

Alignment gaps hold garbage, before and after.

Ranks are always group-local (``group_peer``): a shard group of a HSDP mesh does not contain
the global ranks 0..W-1.

[Note: order of messages]
gloo matches the messages of two ranks by the order in which both post them, and NCCL runs the
operations of a communicator in the order in which ranks issue them. So every rank posts its
transfers in the schedule's order, and collectives in the order of owners, whatever it owns.

NCCL lets some ranks of a group send while others have nothing to do only after a first operation
that all of them took part in. So whoever makes transports runs a collective on the same group
first (``runtime`` does, in ``OwnerContext.connect``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_matrixfsdp.comm.traffic import Traffic, TrafficCounter
from torchtitan_matrixfsdp.layout import (
    TRANSPORT_MODELS,
    BlockPlan,
    BufferLayout,
    Segment,
    Transfer,
    Volume,
    broadcast_volume,
    choose_transport,
    overflow_gather_of,
    overflow_reduce_of,
    p2p_gather_of,
    p2p_reduce_of,
    reduce_volume,
    ring_volume,
)

try:
    from torch.distributed import all_gather_single as all_gather_single
    from torch.distributed import reduce_scatter_single as reduce_scatter_single
except ImportError:  # their names before torch 2.13, which deprecates these
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


def view_segment(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The 1D view of ``segment`` in a 1D ``buffer``; numel 0 for an empty segment."""
    return buffer.narrow(0, segment.start, segment.numel)


class Transport(ABC):
    """How one block travels to and from one rank.

    Attributes:
        name: the transport's name in the configuration.
        layout: the arrangement of the block buffer.

    Raises:
        ValueError: ``rank`` is not in range(world_size): a global rank, perhaps.
    """

    name: str

    def __init__(self, block: BlockPlan, rank: int, counter: TrafficCounter) -> None:
        self._model = TRANSPORT_MODELS[self.name]
        self.layout: BufferLayout = self._model.arrange(block)
        self._rank = rank
        self._runs = self.layout.runs(rank)
        self._world_size = block.world_size
        self._counter = counter

    @abstractmethod
    def gather(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Start filling ``buffer`` (1D, ``[layout.numel]``) from all owners.

        Returns the pending works, which the caller waits for on the stream that will read
        the buffer. The buffer must stay alive until then.
        """

    @abstractmethod
    def reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the SUM over the group of this rank's runs, 1D ``[layout.packed_numel(rank)]``, in
        the buffer's dtype and with storage of its own."""

    def predict_gather(self, itemsize: int) -> Traffic:
        """Exactly what this rank sends in one gather of elements of ``itemsize`` bytes."""
        return _traffic(self._model.gather(self.layout, self._rank), itemsize)

    def predict_reduce(self, itemsize: int) -> Traffic:
        """Exactly what this rank sends in one reduction of elements of ``itemsize`` bytes."""
        return _traffic(self._model.reduce(self.layout, self._rank), itemsize)

    def _own_runs(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [view_segment(buffer, run) for run in self._runs]

    def _post(
        self,
        operation: str,
        transfers: Sequence[Transfer],
        group: dist.ProcessGroup,
        sent: Callable[[Segment], torch.Tensor],
        received: Callable[[Transfer], torch.Tensor],
    ) -> list[dist.Work]:
        """Post ``transfers`` in one batch; both callables give the 1D tensor of a transfer."""
        sends: list[torch.Tensor] = []
        ops: list[dist.P2POp] = []
        for transfer in transfers:
            if transfer.src == self._rank:
                sends.append(sent(transfer.segment))
                ops.append(_p2p_op(dist.isend, sends[-1], group, transfer.dst))
            else:
                ops.append(_p2p_op(dist.irecv, received(transfer), group, transfer.src))
        # Counted from what is posted, not from the schedule that predicts it.
        self._counter.record(operation, Traffic(sum(s.nbytes for s in sends), len(sends)))
        # batch_isend_irecv([]) raises, and some ranks have nothing to do.
        return dist.batch_isend_irecv(ops) if ops else []

    def _record(self, operation: str, volume: Volume, tensor: torch.Tensor) -> None:
        self._counter.record(operation, _traffic(volume, tensor.element_size()))


def _traffic(volume: Volume, itemsize: int) -> Traffic:
    return Traffic(volume.elements * itemsize, volume.messages)


class P2PTransport(Transport):
    """The paper's fan-out: each owner sends its range to every other rank, and receives
    every other rank's contribution to it (MatrixFSDP, arXiv 2607.05895).

    Only non-empty ranges travel, in one batch per operation. Reductions are summed in rank
    order on the owner, so they are bitwise reproducible and equal to a loop over ranks;
    this costs the owner a scratch of ``(W - 1) * L_r`` elements.
    """

    name = "p2p"

    def __init__(self, block: BlockPlan, rank: int, counter: TrafficCounter) -> None:
        super().__init__(block, rank, counter)
        # O(W) transfers, computed once: the hot path only posts them.
        self._gather = p2p_gather_of(self.layout, rank)
        self._reduce = p2p_reduce_of(self.layout, rank)

    def gather(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        return self._post(
            "gather",
            self._gather,
            group,
            lambda segment: view_segment(buffer, segment),
            lambda transfer: view_segment(buffer, transfer.segment),
        )

    def reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        contributions: dict[int, torch.Tensor] = {}

        def receive(transfer: Transfer) -> torch.Tensor:
            scratch = buffer.new_empty(transfer.segment.numel)
            contributions[transfer.src] = scratch
            return scratch

        works = self._post(
            "reduce", self._reduce, group, lambda segment: view_segment(buffer, segment), receive
        )
        for work in works:
            work.wait()
        own = self._own_runs(buffer)
        if not own:
            return buffer.new_empty(0)
        (contributions[self._rank],) = own  # one run an owner in this arrangement
        # Rank order, not arrival order: float addition is not associative.
        total = contributions[0].clone()
        for src in range(1, self._world_size):
            total.add_(contributions[src])
        return total


class BroadcastTransport(Transport):
    """One broadcast from each owner of all that it owns, and one reduction to it back.

    Sends about the block's bytes from every rank, whatever the imbalance, but an owner waits for
    the ones before it. The order of the sum is the backend's, the same in every run.
    """

    name = "broadcast"

    def gather(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        works: list[dist.Work] = []
        if self._world_size == 1:
            return works
        for owner in self.layout.block.owners:
            for run in self.layout.runs(owner):
                view = view_segment(buffer, run)
                volume = broadcast_volume(view.numel(), owner, self._rank, self._world_size)
                self._record("gather", volume, view)
                work = dist.broadcast(view, group=group, group_src=owner, async_op=True)
                works.append(_started(work))
        return works

    def reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        works: list[dist.Work] = []
        for owner in self.layout.block.owners if self._world_size > 1 else ():
            for run in self.layout.runs(owner):
                view = view_segment(buffer, run)
                self._record("reduce", reduce_volume(view.numel(), owner, self._rank), view)
                work = dist.reduce(view, group=group, group_dst=owner, async_op=True)
                works.append(_started(work))
        for work in works:
            work.wait()
        own = self._own_runs(buffer)
        # A copy: the caller gives the buffer back to the next block's reduction.
        return torch.cat(own) if own else buffer.new_empty(0)


class BalancedTransport(Transport):
    """An all-gather and a reduce-scatter of W equal slices, whatever the plan's balance.

    Before the all-gather each owner hands what it owns outside its own slice (its overflow) to the
    ranks whose slices it lies in; after the reduce-scatter they hand the sums back. With no
    overflow both are FSDP's collectives and nothing else. Per rank, sent: at most
    ``(1 + gamma_B / W) * P_B`` bytes in a gather and ``P_B`` in a reduction, plus alignment:
    ``(W - 1) * ALIGNMENT`` elements, and twice the gaps after parameters whose size is no multiple
    of ``ALIGNMENT``.

    The order of the sum is the backend's reduce-scatter's, the same in every run.
    """

    name = "balanced"

    def __init__(self, block: BlockPlan, rank: int, counter: TrafficCounter) -> None:
        super().__init__(block, rank, counter)
        self._gather = overflow_gather_of(self.layout, rank)
        self._reduce = overflow_reduce_of(self.layout, rank)
        self._slice = self.layout.slice_of(rank)

    def gather(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        if self._world_size == 1 or self.layout.numel == 0:
            return []
        works = self._post(
            "gather",
            self._gather,
            group,
            lambda segment: view_segment(buffer, segment),
            lambda transfer: view_segment(buffer, transfer.segment),
        )
        # The all-gather reads what arrives. On CUDA this orders streams, not the host.
        for work in works:
            work.wait()
        own = view_segment(buffer, self._slice)
        self._record("gather", ring_volume(own.numel(), self._world_size), own)
        # In place: each rank's input is its slice of the output, as in FSDP2.
        work = all_gather_single(buffer, own, group=group, async_op=True)
        return [_started(work)]

    def reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if self._world_size == 1 or self.layout.numel == 0:
            own = self._own_runs(buffer)
            return torch.cat(own) if own else buffer.new_empty(0)
        part = buffer.new_empty(self._slice.numel)
        self._record("reduce", ring_volume(part.numel(), self._world_size), part)
        reduce_scatter_single(part, buffer, op=dist.ReduceOp.SUM, group=group)
        if not self._reduce and len(self._runs) == 1 and self._runs[0].start == self._slice.start:
            return part.narrow(0, 0, self._runs[0].numel)  # the usual case when balanced
        total = buffer.new_empty(self.layout.packed_numel(self._rank))

        def in_part(segment: Segment) -> torch.Tensor:
            return part.narrow(0, segment.start - self._slice.start, segment.numel)

        def in_total(segment: Segment) -> torch.Tensor:
            return total.narrow(0, self.layout.offset_in_runs(segment, self._rank), segment.numel)

        works = self._post("reduce", self._reduce, group, in_part, lambda t: in_total(t.segment))
        for run in self._runs:
            at_home = run.overlap(self._slice)
            if at_home.numel:
                in_total(at_home).copy_(in_part(at_home))
        for work in works:
            work.wait()
        return total


def _p2p_op(
    kind: Callable[..., Any], tensor: torch.Tensor, group: dist.ProcessGroup, peer: int
) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=group, group_peer=peer)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # async_op=True on a member of the group
    return work


class TransportFactory:
    """Chooses and makes the transports of one block for one rank.

    Args:
        name: ``"p2p"``, ``"broadcast"``, ``"balanced"``, or ``"auto"``: the cheapest for each
            block by :func:`~torchtitan_matrixfsdp.layout.choose_transport`.
        gather_itemsize: bytes of an element on the wire in a gather, for ``"auto"``.
        reduce_itemsize: the same in a reduction.

    Raises:
        ValueError: ``name`` is unknown; the message gives the legal names.
    """

    def __init__(self, name: str, gather_itemsize: int = 4, reduce_itemsize: int = 4) -> None:
        if name not in TRANSPORT_NAMES:
            raise ValueError(
                f"owner_fsdp.transport: received {name!r}; legal: {list(TRANSPORT_NAMES)}. "
                'Set owner_fsdp.transport = "auto".'
            )
        self.name = name
        self._itemsizes = gather_itemsize, reduce_itemsize

    def choose(self, block: BlockPlan) -> str:
        """Returns the name of the transport that ``block`` gets; the same on every rank."""
        return choose_transport(block, *self._itemsizes) if self.name == "auto" else self.name

    def __call__(
        self, name: str, block: BlockPlan, rank: int, counter: TrafficCounter
    ) -> Transport:
        """The transport ``name``, as :meth:`choose` gave it, of ``block`` or of its trainable
        part."""
        return TRANSPORTS[name](block, rank, counter)


TRANSPORTS: Mapping[str, type[Transport]] = {
    cls.name: cls for cls in (P2PTransport, BroadcastTransport, BalancedTransport)
}
TRANSPORT_NAMES = ("auto", *TRANSPORTS)
