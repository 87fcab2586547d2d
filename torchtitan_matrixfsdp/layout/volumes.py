"""What a rank sends under each transport, and which transport is the cheapest for a block.

One convention for all: a rank's volume is what it sends in the ring form of a collective, the
form in which every rank sends least. With W ranks, an all-gather or reduce-scatter of slices of S
elements sends (W - 1) S from every rank in W - 1 messages. A broadcast of n elements passes once
around the ring from its root: n from every rank but the last, the one before the root. A reduction
to a root is the same path backwards: n from every rank but the root. A point-to-point transfer
sends what it carries, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torchtitan_matrixfsdp.layout.block_plan import BlockPlan
from torchtitan_matrixfsdp.layout.buffer import BufferLayout, arrange_by_owner, arrange_in_slices
from torchtitan_matrixfsdp.layout.schedule import (
    Transfer,
    overflow_gather_of,
    overflow_reduce_of,
    sent_elements,
    sent_messages,
)


@dataclass(frozen=True, slots=True)
class Volume:
    """What one rank sends in one operation: elements, and the messages they travel in."""

    elements: int = 0
    messages: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.elements + other.elements, self.messages + other.messages)


def ring_volume(slice_numel: int, world_size: int) -> Volume:
    """Returns what each rank sends in an all-gather or reduce-scatter of W equal slices."""
    if slice_numel == 0:
        return Volume()
    return Volume((world_size - 1) * slice_numel, world_size - 1)


def broadcast_volume(numel: int, root: int, rank: int, world_size: int) -> Volume:
    """Returns what ``rank`` sends in a broadcast of ``numel`` elements from ``root``."""
    is_last = (rank + 1) % world_size == root
    return Volume() if is_last or numel == 0 else Volume(numel, 1)


def reduce_volume(numel: int, root: int, rank: int) -> Volume:
    """Returns what ``rank`` sends in a reduction of ``numel`` elements to ``root``."""
    return Volume() if rank == root or numel == 0 else Volume(numel, 1)


def transfer_volume(transfers: tuple[Transfer, ...], rank: int) -> Volume:
    """Returns what ``rank`` sends in a list of transfers."""
    return Volume(sent_elements(transfers, rank), sent_messages(transfers, rank))


VolumeOf = Callable[[BufferLayout, int], Volume]


@dataclass(frozen=True, slots=True)
class TransportModel:
    """A transport without its collectives: its arrangement, and what it moves.

    Attributes:
        arrange: the block buffer's arrangement.
        gather, reduce: what a rank sends in one gather or one reduction.
        busiest: the most elements that any rank sends or receives in a gather, and the messages
            that must follow one another; latency is paid for each. A reduction is the gather
            turned round, so both are the same there.
        relays: whether ranks pass on what others sent before all of it has arrived, so that each
            of those messages also waits for a chunk.
    """

    arrange: Callable[[BlockPlan], BufferLayout]
    gather: VolumeOf
    reduce: VolumeOf
    busiest: Callable[[BufferLayout], Volume]
    relays: bool = False


# The volumes are closed forms, the schedules are lists: tests hold one against the other.
def _p2p_gather(layout: BufferLayout, rank: int) -> Volume:
    others = layout.block.world_size - 1
    return Volume(others * layout.packed_numel(rank), others * len(layout.runs(rank)))


def _p2p_reduce(layout: BufferLayout, rank: int) -> Volume:
    others = [owner for owner in layout.block.owners if owner != rank]
    elements = sum(layout.packed_numel(owner) for owner in others)
    return Volume(elements, sum(len(layout.runs(owner)) for owner in others))


def _p2p_busiest(layout: BufferLayout) -> Volume:
    block = layout.block
    largest = max(map(layout.packed_numel, block.owners), default=0)
    # A rank's sends leave one after another: an all-gather of slices as large costs the same.
    return ring_volume(largest, block.world_size)


def _broadcast_gather(layout: BufferLayout, rank: int) -> Volume:
    block = layout.block
    volumes = (
        broadcast_volume(layout.packed_numel(root), root, rank, block.world_size)
        for root in block.owners
    )
    return sum(volumes, Volume())


def _broadcast_reduce(layout: BufferLayout, rank: int) -> Volume:
    volumes = (reduce_volume(layout.packed_numel(o), o, rank) for o in layout.block.owners)
    return sum(volumes, Volume())


def _broadcast_busiest(layout: BufferLayout) -> Volume:
    size = layout.block.world_size
    owned = [layout.packed_numel(rank) for rank in layout.block.owners]
    spared = min(owned) if len(owned) == size else 0
    # Each passes around the ring, and one communicator runs them in turn.
    return Volume(sum(owned) - spared, (size - 1) * sum(numel > 0 for numel in owned))


def _balanced_gather(layout: BufferLayout, rank: int) -> Volume:
    ring = ring_volume(layout.slice_numel, layout.block.world_size)
    return ring + transfer_volume(overflow_gather_of(layout, rank), rank)


def _balanced_reduce(layout: BufferLayout, rank: int) -> Volume:
    ring = ring_volume(layout.slice_numel, layout.block.world_size)
    return ring + transfer_volume(overflow_reduce_of(layout, rank), rank)


def _balanced_busiest(layout: BufferLayout) -> Volume:
    elements: Counter[tuple[str, int]] = Counter()
    messages: Counter[tuple[str, int]] = Counter()
    for owner in layout.block.owners:
        for transfer in overflow_gather_of(layout, owner):
            if transfer.src == owner:
                for side in (("sent", owner), ("received", transfer.dst)):
                    elements[side] += transfer.segment.numel
                    messages[side] += 1
    overflow = Volume(max(elements.values(), default=0), max(messages.values(), default=0))
    return ring_volume(layout.slice_numel, layout.block.world_size) + overflow


# In the order of preference among equals: an all-gather is what backends run best.
TRANSPORT_MODELS: Mapping[str, TransportModel] = MappingProxyType(
    {
        "balanced": TransportModel(
            arrange_in_slices, _balanced_gather, _balanced_reduce, _balanced_busiest
        ),
        "p2p": TransportModel(arrange_by_owner, _p2p_gather, _p2p_reduce, _p2p_busiest),
        "broadcast": TransportModel(
            arrange_by_owner, _broadcast_gather, _broadcast_reduce, _broadcast_busiest, relays=True
        ),
    }
)


@dataclass(frozen=True, slots=True)
class LinkModel:
    """What a link costs: seconds per message that must wait for another, bytes per second, and the
    bytes that a relaying rank receives before it sends them on.

    The defaults are one 200 Gbit/s port per rank and NCCL's order of chunk. Only their ratios
    matter to a choice.
    """

    latency_s: float = 5e-6
    bytes_per_s: float = 25e9
    chunk_bytes: int = 512 * 1024


def transport_seconds(
    name: str, block: BlockPlan, gather_itemsize: int, reduce_itemsize: int, link: LinkModel
) -> float:
    """Returns the modelled seconds of a step's transfers of one block: two gathers, one reduction.

    Each operation takes what its busiest rank sends or receives, at the link's rate, and for each
    round one latency; a relayed one waits for a chunk besides, of the mean message at most.
    """
    model = TRANSPORT_MODELS[name]
    gather = model.busiest(model.arrange(block))
    trainable = block.trainable()
    reduce = gather if trainable is block else model.busiest(model.arrange(trainable))
    nbytes = 2 * gather.elements * gather_itemsize + reduce.elements * reduce_itemsize
    rounds = 2 * gather.messages + reduce.messages
    wait = link.latency_s
    if model.relays and block.owners:
        mean_bytes = block.numel * gather_itemsize / len(block.owners)
        wait += min(link.chunk_bytes, mean_bytes) / link.bytes_per_s
    return nbytes / link.bytes_per_s + rounds * wait


def choose_transport(
    block: BlockPlan,
    gather_itemsize: int,
    reduce_itemsize: int,
    link: LinkModel | None = None,
) -> str:
    """Returns the name of the transport that the model finds cheapest for ``block``.

    Depends on the arguments' values only, so every rank chooses alike. ``gather_itemsize`` and
    ``reduce_itemsize`` are the bytes per element on the wire.
    """
    link = link or LinkModel()
    return min(
        TRANSPORT_MODELS,
        key=lambda name: transport_seconds(name, block, gather_itemsize, reduce_itemsize, link),
    )
