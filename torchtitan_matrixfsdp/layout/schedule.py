"""The point-to-point schedule of one block, and exactly what it sends.

A schedule lists every rank's transfers. All ranks derive the same list from the plan, so the
messages that one rank posts are the ones its peers expect. Volumes are in elements: the itemsize
on the wire is the transport's choice (parameter dtype for a gather, reduce dtype for a reduction).

With L_r the elements that rank r owns and T their sum, rank r sends (W - 1) * L_r elements in a
gather and T - L_r in a reduction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchtitan_matrixfsdp.layout.block_plan import BlockPlan, Segment


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message: ``segment`` of the block buffer from rank ``src`` to rank ``dst``.

    Ranks count within the shard group. The segment has the same place on both sides.
    """

    src: int
    dst: int
    segment: Segment


def p2p_gather(block: BlockPlan) -> tuple[Transfer, ...]:
    """Returns each owner's part going to every other rank, ordered by (src, dst).

    Ranks that own no element of the block send nothing; empty messages are never listed.
    """
    parts = _parts(block)
    return tuple(Transfer(o, d, s) for o, s in parts for d in range(block.world_size) if d != o)


def p2p_reduce(block: BlockPlan) -> tuple[Transfer, ...]:
    """Returns every rank's copy of each other owner's part going there, ordered by (src, dst).

    The owner receives W - 1 copies, which it sums with its own in rank order.
    """
    parts = _parts(block)
    return tuple(Transfer(r, o, s) for r in range(block.world_size) for o, s in parts if r != o)


def p2p_gather_of(block: BlockPlan, rank: int) -> tuple[Transfer, ...]:
    """Returns the transfers of ``p2p_gather(block)`` that ``rank`` sends or receives.

    O(W), where the whole list has W times as many: what a rank computes at start-up.
    """
    own = block.owner_range(rank)
    received = [Transfer(o, rank, s) for o, s in _parts(block) if o != rank]
    sent = [Transfer(rank, d, own) for d in range(block.world_size) if d != rank and own.numel]
    return tuple(sorted(received + sent, key=_by_ranks))


def p2p_reduce_of(block: BlockPlan, rank: int) -> tuple[Transfer, ...]:
    """Returns the transfers of ``p2p_reduce(block)`` that ``rank`` sends or receives; O(W)."""
    own = block.owner_range(rank)
    sent = [Transfer(rank, o, s) for o, s in _parts(block) if o != rank]
    received = [Transfer(r, rank, own) for r in range(block.world_size) if r != rank and own.numel]
    return tuple(sorted(received + sent, key=_by_ranks))


def sent_elements(transfers: Iterable[Transfer], rank: int) -> int:
    """Returns the elements that ``rank`` sends."""
    return sum(transfer.segment.numel for transfer in transfers if transfer.src == rank)


def sent_messages(transfers: Iterable[Transfer], rank: int) -> int:
    """Returns the messages that ``rank`` sends."""
    return sum(transfer.src == rank for transfer in transfers)


def _by_ranks(transfer: Transfer) -> tuple[int, int]:
    return transfer.src, transfer.dst


def _parts(block: BlockPlan) -> tuple[tuple[int, Segment], ...]:
    ranges = ((owner, block.owner_range(owner)) for owner in block.owners)
    return tuple((owner, segment) for owner, segment in ranges if segment.numel)
