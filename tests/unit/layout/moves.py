"""Every message of one operation of a transport, hop by hop.

Written apart from ``layout/volumes.py``, which it serves to check: there are closed forms, here are
the rings themselves. Point-to-point messages come from the schedules, each rank's sends from its
own list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from torchtitan_matrixfsdp.layout import (
    BufferLayout,
    Segment,
    Transfer,
    overflow_gather_of,
    overflow_reduce_of,
    p2p_gather_of,
    p2p_reduce_of,
)

Hops = list[Transfer]
Of = Callable[[BufferLayout, int], Sequence[Transfer]]

# A rank's buffer: one number per element, None where it holds garbage.
Buffer = list[int | None]


def posted(layout: BufferLayout, of: Of) -> Hops:
    """What all ranks send.

    Raises:
        AssertionError: for two ranks, what one sends is not what the other expects, in its order.
    """
    ranks = range(layout.block.world_size)
    lists = [of(layout, rank) for rank in ranks]
    for src in ranks:
        for dst in ranks:
            sent = [t for t in lists[src] if (t.src, t.dst) == (src, dst)]
            expected = [t for t in lists[dst] if (t.src, t.dst) == (src, dst)]
            assert sent == expected, (src, dst)
            assert src != dst or not sent
    return [t for rank in ranks for t in lists[rank] if t.src == rank]


def ring(layout: BufferLayout) -> Hops:
    """An all-gather: in step k rank r passes on the slice of the rank that is k behind it."""
    size = layout.block.world_size
    slices = [Segment(r * layout.slice_numel, layout.slice_numel) for r in range(size)]
    return _some(
        Transfer(r, (r + 1) % size, slices[(r - k) % size])
        for k in range(size - 1)
        for r in range(size)
    )


def path(layout: BufferLayout, owner: int) -> Hops:
    """A broadcast of each of the owner's runs: once around, without the way back to the owner."""
    size = layout.block.world_size
    return [
        Transfer((owner + k) % size, (owner + k + 1) % size, run)
        for run in layout.runs(owner)
        for k in range(size - 1)
    ]


def gather_hops(name: str, layout: BufferLayout) -> Hops:
    """All messages of a gather, in an order in which they can be carried out."""
    if name == "p2p":
        return posted(layout, p2p_gather_of)
    if name == "broadcast":
        return list(chain(*(path(layout, r) for r in range(layout.block.world_size))))
    assert name == "balanced"
    return posted(layout, overflow_gather_of) + ring(layout)


def reduce_hops(name: str, layout: BufferLayout) -> tuple[Hops, Hops]:
    """All messages of a reduction: those that are added on arrival, then those that replace."""
    if name == "p2p":
        return posted(layout, p2p_reduce_of), []
    if name == "broadcast":
        return turned_round(gather_hops(name, layout)), []
    assert name == "balanced"
    return turned_round(ring(layout)), posted(layout, overflow_reduce_of)


def turned_round(hops: Hops) -> Hops:
    return [Transfer(t.dst, t.src, t.segment) for t in reversed(hops)]


def carry_out(buffers: list[Buffer], hops: Hops) -> None:
    """Copies what each message carries, in order."""
    for t in hops:
        place = slice(t.segment.start, t.segment.stop)
        buffers[t.dst][place] = buffers[t.src][place]


def carry_out_sums(buffers: list[Buffer], hops: Hops) -> None:
    """Adds what each message carries to what its receiver has, in order."""
    for t in hops:
        for e in range(t.segment.start, t.segment.stop):
            mine, theirs = buffers[t.dst][e], buffers[t.src][e]
            buffers[t.dst][e] = None if mine is None or theirs is None else mine + theirs


def volumes(hops: Hops, world_size: int) -> list[tuple[int, int]]:
    """By rank: elements and messages sent."""
    return [
        (sum(t.segment.numel for t in hops if t.src == r), sum(t.src == r for t in hops))
        for r in range(world_size)
    ]


def busiest(hops: Hops, world_size: int) -> int:
    """The most elements that a rank sends or receives."""
    moved = [0] * (2 * world_size)
    for t in hops:
        moved[t.src] += t.segment.numel
        moved[world_size + t.dst] += t.segment.numel
    return max(moved)


def _some(hops: Iterable[Transfer]) -> Hops:
    return [t for t in hops if t.segment.numel]
