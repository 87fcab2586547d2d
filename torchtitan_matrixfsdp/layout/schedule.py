"""Which ranges of a block buffer travel between which ranks.

All ranks derive their transfers from the plan, so the messages that one rank posts are the ones its
peers expect. Volumes are in elements: the itemsize on the wire is the transport's choice (parameter
dtype for a gather, reduce dtype for a reduction).

Two kinds of schedule:

- *fan-out* (``p2p_*``): every run goes from its owner to every other rank, and back;
- *overflow* (``overflow_*``): what an owner's runs have outside its own slice goes to the ranks
  whose slices it lies in, and back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchtitan_matrixfsdp.layout.buffer import BufferLayout, Segment


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message: ``segment`` of the block buffer from rank ``src`` to rank ``dst``.

    Ranks count within the shard group. The segment has the same place on both sides.
    """

    src: int
    dst: int
    segment: Segment


def p2p_gather_of(layout: BufferLayout, rank: int) -> tuple[Transfer, ...]:
    """Returns the transfers that ``rank`` sends or receives when every owner's runs go to every
    other rank; ordered by (src, dst, start), O(W), no empty ones."""
    transfers = [Transfer(o, rank, run) for o, run in _all_runs(layout) if o != rank]
    others = [r for r in range(layout.block.world_size) if r != rank]
    transfers += [Transfer(rank, other, run) for run in layout.runs(rank) for other in others]
    return _in_order(transfers)


def p2p_reduce_of(layout: BufferLayout, rank: int) -> tuple[Transfer, ...]:
    """Returns the transfers that ``rank`` sends or receives when every rank's copy of each run goes
    to its owner: the gather's, turned round."""
    return _in_order(_reverse(p2p_gather_of(layout, rank)))


def overflow_gather_of(layout: BufferLayout, rank: int) -> tuple[Transfer, ...]:
    """Returns the transfers that ``rank`` sends or receives before the all-gather of slices: each
    owner's elements outside its own slice go to the rank whose slice they lie in.

    Ordered by (src, dst, start), no empty ones.

    Raises:
        ValueError: the layout has no slices.
    """
    size = layout.slice_numel
    if size == 0 and layout.numel > 0:
        raise ValueError(f"block {layout.block.name}: the buffer is not arranged in slices")
    transfers = []
    own = layout.slice_of(rank)
    for owner, run in _all_runs(layout):
        if owner != rank:
            transfers.append(Transfer(owner, rank, run.overlap(own)))
            continue
        for holder in range(run.start // size, (run.stop - 1) // size + 1):
            if holder != rank:
                transfers.append(Transfer(rank, holder, run.overlap(layout.slice_of(holder))))
    return _in_order(t for t in transfers if t.segment.numel)


def overflow_reduce_of(layout: BufferLayout, rank: int) -> tuple[Transfer, ...]:
    """Returns the transfers that ``rank`` sends or receives after the reduce-scatter to slices: the
    gather's, turned round."""
    return _in_order(_reverse(overflow_gather_of(layout, rank)))


def sent_elements(transfers: Iterable[Transfer], rank: int) -> int:
    """Returns the elements that ``rank`` sends."""
    return sum(transfer.segment.numel for transfer in transfers if transfer.src == rank)


def sent_messages(transfers: Iterable[Transfer], rank: int) -> int:
    """Returns the messages that ``rank`` sends."""
    return sum(transfer.src == rank for transfer in transfers)


def _all_runs(layout: BufferLayout) -> list[tuple[int, Segment]]:
    return [(owner, run) for owner in layout.block.owners for run in layout.runs(owner)]


def _reverse(transfers: Iterable[Transfer]) -> list[Transfer]:
    return [Transfer(t.dst, t.src, t.segment) for t in transfers]


def _in_order(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    # Messages between two ranks match by order: both sides must post them alike.
    return tuple(sorted(transfers, key=lambda t: (t.src, t.dst, t.segment.start)))
