from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.layout.models import SMALL, block_of, block_plans
from tests.unit.layout.moves import (
    Buffer,
    carry_out,
    carry_out_sums,
    gather_hops,
    posted,
    reduce_hops,
)
from torchtitan_matrixfsdp.layout import (
    TRANSPORT_MODELS,
    BlockPlan,
    BufferLayout,
    Segment,
    Transfer,
    arrange_by_owner,
    arrange_in_slices,
    overflow_gather_of,
    overflow_reduce_of,
    p2p_gather_of,
    p2p_reduce_of,
    sent_elements,
    sent_messages,
)

QUICK = settings(SMALL, max_examples=40)
every_transport = pytest.mark.parametrize("name", sorted(TRANSPORT_MODELS))
every_schedule = pytest.mark.parametrize(
    ("arrange", "of"),
    [
        (arrange_by_owner, p2p_gather_of),
        (arrange_by_owner, p2p_reduce_of),
        (arrange_in_slices, p2p_gather_of),
        (arrange_in_slices, p2p_reduce_of),
        (arrange_in_slices, overflow_gather_of),
        (arrange_in_slices, overflow_reduce_of),
    ],
)


def elements(segment: Segment) -> range:
    return range(segment.start, segment.stop)


def test_fan_out_by_hand():
    # Rank 0 owns [0, 4), rank 1 [8, 11), rank 2 nothing.
    layout = arrange_by_owner(block_of(3, [(4, 0), (3, 1)]))
    first, second = Segment(0, 4), Segment(8, 3)
    of_rank = [p2p_gather_of(layout, rank) for rank in range(3)]
    assert of_rank[0] == (
        Transfer(0, 1, first),
        Transfer(0, 2, first),
        Transfer(1, 0, second),
    )
    assert of_rank[2] == (Transfer(0, 2, first), Transfer(1, 2, second))
    back = [p2p_reduce_of(layout, rank) for rank in range(3)]
    assert back[0] == (Transfer(0, 1, second), Transfer(1, 0, first), Transfer(2, 0, first))
    assert back[2] == (Transfer(2, 0, first), Transfer(2, 1, second))
    assert [sent_elements(of_rank[rank], rank) for rank in range(3)] == [8, 6, 0]
    assert [sent_messages(of_rank[rank], rank) for rank in range(3)] == [2, 2, 0]
    assert [sent_elements(back[rank], rank) for rank in range(3)] == [3, 4, 7]
    assert [sent_messages(back[rank], rank) for rank in range(3)] == [1, 1, 2]


def test_overflow_by_hand():
    # 64 elements of rank 0 in slices of 24: it fills its own and lends to both others.
    layout = arrange_in_slices(block_of(3, [(64, 0)]))
    to_first, to_second = Transfer(0, 1, Segment(24, 24)), Transfer(0, 2, Segment(48, 16))
    assert overflow_gather_of(layout, 0) == (to_first, to_second)
    assert overflow_gather_of(layout, 1) == (to_first,)
    assert overflow_gather_of(layout, 2) == (to_second,)
    from_first, from_second = Transfer(1, 0, Segment(24, 24)), Transfer(2, 0, Segment(48, 16))
    assert overflow_reduce_of(layout, 0) == (from_first, from_second)
    assert overflow_reduce_of(layout, 1) == (from_first,)


def test_two_runs_in_one_slice_are_two_messages_in_their_order():
    # Rank 1's weight lies between two of rank 0's, all three in the slice of rank 2.
    block = block_of(3, [(8, 0), (8, 1), (8, 0)])
    places = {"a.w0": Segment(80, 8), "a.w1": Segment(72, 8), "a.w2": Segment(64, 8)}
    layout = BufferLayout(block, places, 96, 32)
    assert overflow_gather_of(layout, 0) == (
        Transfer(0, 2, Segment(64, 8)),
        Transfer(0, 2, Segment(80, 8)),
    )
    assert overflow_gather_of(layout, 2) == (
        Transfer(0, 2, Segment(64, 8)),
        Transfer(0, 2, Segment(80, 8)),
        Transfer(1, 2, Segment(72, 8)),
    )


def test_overflow_needs_slices():
    layout = arrange_by_owner(block_of(2, [(4, 0)]))
    for of in (overflow_gather_of, overflow_reduce_of):
        with pytest.raises(ValueError, match="block a: the buffer is not arranged in slices"):
            of(layout, 0)
    assert overflow_gather_of(arrange_by_owner(block_of(2, [])), 0) == ()


@every_schedule
@pytest.mark.parametrize(
    "block", [block_of(1, [(4, 0), (3, 0)]), block_of(3, []), block_of(3, [(0, 0), (0, 2)])]
)
def test_one_rank_or_an_empty_block_sends_nothing(arrange, of, block):
    assert [of(arrange(block), rank) for rank in range(block.world_size)] == [()] * block.world_size


@every_schedule
@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_outside_the_group_are_refused(arrange, of, rank):
    layout = arrange(block_of(2, [(4, 0), (30, 1)]))
    with pytest.raises(ValueError, match=f"rank {rank} .*legal: 0 to 1"):
        of(layout, rank)


@every_schedule
@QUICK
@given(block=block_plans())
def test_what_one_rank_sends_its_peers_expect(arrange, of, block):
    """No rank sends to itself, nothing is empty, and each pair agrees on the order."""
    layout = arrange(block)
    posted(layout, of)
    for rank in range(block.world_size):
        transfers = of(layout, rank)
        keys = [(t.src, t.dst, t.segment.start) for t in transfers]
        assert keys == sorted(set(keys))
        assert all(rank in (t.src, t.dst) and t.src != t.dst for t in transfers)
        assert all(t.segment.numel > 0 for t in transfers)


@QUICK
@given(block=block_plans())
def test_overflow_goes_once_to_the_slice_it_lies_in(block):
    layout = arrange_in_slices(block)
    hops = posted(layout, overflow_gather_of)
    for t in hops:
        slice_of_receiver = range(t.dst * layout.slice_numel, (t.dst + 1) * layout.slice_numel)
        assert set(elements(t.segment)) <= set(slice_of_receiver)
    moved = [e for t in hops for e in elements(t.segment)]
    assert len(moved) == len(set(moved))


def value(element: int, rank: int) -> int:
    """A number that no sum of other ranks' or elements' numbers can be mistaken for."""
    return 1 + element * 1009 + (1 << (40 + rank))


def owned_by(block: BlockPlan, layout: BufferLayout, rank: int) -> list[int]:
    own = [layout.segments[s.fqn] for s in block.shards if s.owner == rank]
    return [e for segment in own for e in elements(segment)]


@every_transport
@QUICK
@given(block=block_plans())
def test_a_gather_fills_every_rank(name, block):
    """Carried out on lists: each rank starts with what it owns, and ends with every parameter."""
    layout = TRANSPORT_MODELS[name].arrange(block)
    expected: Buffer = [None] * layout.numel
    buffers: list[Buffer] = [[None] * layout.numel for _ in range(block.world_size)]
    for rank, buffer in enumerate(buffers):
        for e in owned_by(block, layout, rank):
            buffer[e] = expected[e] = value(e, rank)
    carry_out(buffers, gather_hops(name, layout))
    assert buffers == [expected] * block.world_size


@every_transport
@QUICK
@given(block=block_plans())
def test_a_reduction_sums_every_ranks_contribution_once(name, block):
    """Carried out on lists: each rank ends with the whole sum of what it owns."""
    layout = TRANSPORT_MODELS[name].arrange(block)
    ranks = range(block.world_size)
    buffers: list[Buffer] = [[value(e, r) for e in range(layout.numel)] for r in ranks]
    sums, replacements = reduce_hops(name, layout)
    carry_out_sums(buffers, sums)
    if name == "balanced":
        # A reduce-scatter leaves a rank its slice and nothing else.
        for rank, buffer in enumerate(buffers):
            own = layout.slice_of(rank)
            buffer[: own.start] = [None] * own.start
            buffer[own.stop :] = [None] * (layout.numel - own.stop)
    carry_out(buffers, replacements)
    for rank, buffer in enumerate(buffers):
        for e in owned_by(block, layout, rank):
            assert buffer[e] == sum(value(e, r) for r in ranks)


@QUICK
@given(block_plans(), st.booleans())
def test_the_trainable_part_keeps_its_owners(block, in_slices):
    """What is reduced is arranged for itself: frozen weights take no room in it."""
    part = block.trainable()
    kept = [shard for shard in block.shards if shard.trainable]
    assert list(part.shards) == kept
    assert (part is block) == (len(kept) == len(block.shards))
    layout = arrange_in_slices(part) if in_slices else arrange_by_owner(part)
    assert layout.segments.keys() == {shard.fqn for shard in kept}
    for rank in range(block.world_size):
        own = sum(shard.numel for shard in kept if shard.owner == rank)
        assert part.owned_numel(rank) == own <= layout.packed_numel(rank)
