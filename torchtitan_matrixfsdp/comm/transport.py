"""Moving a block's segments between the ranks of one process group.

A transport serves one rank and one block. It works on a flat *block buffer*, 1D of
``block.numel`` elements, laid out as :class:`~torchtitan_matrixfsdp.layout.BlockPlan` says
(each rank's segments are one contiguous range):

- ``gather``: on entry the calling rank's own range is filled; afterwards the whole buffer is.
- ``reduce``: on entry the whole buffer holds this rank's contribution; the returned 1D tensor
  is this rank's own range SUMMED over the group. Never AVG or PREMUL_SUM: gloo has no
  PREMUL_SUM, and an average over ranks is not what TorchTitan's token-weighted loss needs.
  The caller divides.

Ranks are always group-local (``group_peer``): a shard group of a HSDP mesh does not contain
the global ranks 0..W-1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from torchtitan_matrixfsdp.comm.traffic import Traffic, TrafficCounter
from torchtitan_matrixfsdp.layout import (
    BlockPlan,
    Segment,
    Transfer,
    p2p_gather_of,
    p2p_reduce_of,
    sent_elements,
    sent_messages,
)


class Transport(Protocol):
    """How the segments of one block travel to and from one rank."""

    def gather(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """Start filling ``buffer`` (1D, ``[block.numel]``) from all owners.

        Returns the pending works, which the caller waits for on the stream that will read
        the buffer. The buffer must stay alive until then.
        """
        ...

    def reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the SUM over the group of this rank's own range, 1D ``[owned numel]``, in the
        buffer's dtype."""
        ...

    def predict_gather(self, itemsize: int) -> Traffic:
        """Exactly what this rank sends in one gather of elements of ``itemsize`` bytes."""
        ...

    def predict_reduce(self, itemsize: int) -> Traffic:
        """Exactly what this rank sends in one reduction of elements of ``itemsize`` bytes."""
        ...


class TransportFactory(Protocol):
    """Makes the transport of one block for one rank."""

    def __call__(self, block: BlockPlan, rank: int, counter: TrafficCounter) -> Transport: ...


def view_segment(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The 1D view of ``segment`` in a 1D ``buffer``; numel 0 for an empty segment."""
    return buffer.narrow(0, segment.start, segment.numel)


class P2PTransport:
    """The paper's fan-out: each owner sends its range to every other rank, and receives
    every other rank's contribution to it (MatrixFSDP, arXiv 2607.05895).

    Only non-empty ranges travel, in one batch per operation. Reductions are summed in rank
    order on the owner, so they are bitwise reproducible and equal to a loop over ranks;
    this costs the owner a scratch of ``(W - 1) * L_r`` elements.
    """

    def __init__(self, block: BlockPlan, rank: int, counter: TrafficCounter) -> None:
        self._rank = rank
        self._world_size = block.world_size
        self._own = block.owner_range(rank)
        self._counter = counter
        # O(W) transfers, computed once: the hot path only posts them.
        self._gather = p2p_gather_of(block, rank)
        self._reduce = p2p_reduce_of(block, rank)

    def gather(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        ops = []
        for transfer in self._gather:
            view = view_segment(buffer, transfer.segment)
            if transfer.src == self._rank:
                ops.append(dist.P2POp(dist.isend, view, group=group, group_peer=transfer.dst))
            else:
                ops.append(dist.P2POp(dist.irecv, view, group=group, group_peer=transfer.src))
        return self._start_batch("gather", ops)

    def reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ops = []
        contributions: dict[int, torch.Tensor] = {}
        for transfer in self._reduce:
            if transfer.src == self._rank:
                view = view_segment(buffer, transfer.segment)
                ops.append(dist.P2POp(dist.isend, view, group=group, group_peer=transfer.dst))
            else:
                scratch = buffer.new_empty(transfer.segment.numel)
                contributions[transfer.src] = scratch
                ops.append(dist.P2POp(dist.irecv, scratch, group=group, group_peer=transfer.src))
        for work in self._start_batch("reduce", ops):
            work.wait()
        if self._own.numel == 0:
            return buffer.new_empty(0)
        contributions[self._rank] = view_segment(buffer, self._own)
        # Rank order, not arrival order: float addition is not associative.
        total = contributions[0].clone()
        for src in range(1, self._world_size):
            total.add_(contributions[src])
        return total

    def predict_gather(self, itemsize: int) -> Traffic:
        return self._traffic(self._gather, itemsize)

    def predict_reduce(self, itemsize: int) -> Traffic:
        return self._traffic(self._reduce, itemsize)

    def _traffic(self, transfers: Sequence[Transfer], itemsize: int) -> Traffic:
        return Traffic(
            sent_elements(transfers, self._rank) * itemsize, sent_messages(transfers, self._rank)
        )

    def _start_batch(self, operation: str, ops: list[dist.P2POp]) -> list[dist.Work]:
        # Counted from what is posted, not from the schedule that predicts it.
        sent = [op.tensor.nbytes for op in ops if op.op is dist.isend]
        self._counter.record(operation, Traffic(sum(sent), len(sent)))
        # batch_isend_irecv([]) raises, and a rank of a one-rank group has nothing to do.
        return dist.batch_isend_irecv(ops) if ops else []


TRANSPORTS: Mapping[str, TransportFactory] = {"p2p": P2PTransport}


def transport_factory(name: str) -> TransportFactory:
    """The factory of a transport by its TOML name.

    Raises:
        ValueError: ``name`` is unknown; the message gives the legal names.
    """
    if name not in TRANSPORTS:
        raise ValueError(
            f"owner_fsdp.transport: received {name!r}; legal: {sorted(TRANSPORTS)}. "
            'Set owner_fsdp.transport = "p2p".'
        )
    return TRANSPORTS[name]
