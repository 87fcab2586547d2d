from __future__ import annotations

import math
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.layout.models import SMALL, block_of, block_plans, transformer
from torchtitan_matrixfsdp.layout import (
    ALIGNMENT,
    BlockPlan,
    BufferLayout,
    RoleKind,
    Segment,
    aligned,
    arrange_by_owner,
    arrange_in_slices,
    make_plan,
    overflow_gather_of,
    sent_elements,
)

both = pytest.mark.parametrize("arrange", [arrange_by_owner, arrange_in_slices])

QUICK = settings(SMALL, max_examples=40)


def places(layout: BufferLayout) -> dict[str, tuple[int, int]]:
    return {fqn: (s.start, s.stop) for fqn, s in layout.segments.items()}


def elements(segment: Segment) -> range:
    return range(segment.start, segment.stop)


def home(layout: BufferLayout, rank: int) -> Segment:
    return Segment(rank * layout.slice_numel, layout.slice_numel)


def overflows(layout: BufferLayout) -> list[int]:
    """By rank: elements of its runs outside its slice, counted one by one."""
    counts = []
    for rank in range(layout.block.world_size):
        own = set(elements(home(layout, rank)))
        counts.append(sum(e not in own for run in layout.runs(rank) for e in elements(run)))
    return counts


def role_list(block: BlockPlan) -> list[tuple[int, int]]:
    """Each role's (aligned size, owner)."""
    weights = [s for s in block.shards if s.kind is not RoleKind.TAIL]
    tail = [s for s in block.shards if s.kind is RoleKind.TAIL]
    roles = [(aligned(s.numel), s.owner) for s in weights]
    return roles + ([(sum(aligned(s.numel) for s in tail), tail[0].owner)] if tail else [])


def roles_with_places(layout: BufferLayout) -> list[tuple[int, tuple[int, int]]]:
    """Each role's (start, (aligned size, owner))."""
    weights = [s for s in layout.block.shards if s.kind is not RoleKind.TAIL]
    tail = [s for s in layout.block.shards if s.kind is RoleKind.TAIL]
    first = [layout.segments[s.fqn].start for s in [*weights, *tail[:1]]]
    return list(zip(first, role_list(layout.block), strict=True))


def overflow_in_order(roles: list[tuple[int, int]], slice_numel: int) -> int:
    """Aligned elements outside their owners' slices when the roles stand in this order."""
    start = outside = 0
    for size, owner in roles:
        first, last = owner * slice_numel, (owner + 1) * slice_numel
        outside += sum(not first <= e < last for e in range(start, start + size, ALIGNMENT))
        start += size
    return outside * ALIGNMENT


def aligned_overflow(layout: BufferLayout) -> int:
    """As ``overflow_in_order`` counts, gaps after parameters included."""
    outside = 0
    for shard in layout.block.shards:
        segment = layout.segments[shard.fqn]
        own = home(layout, shard.owner)
        cells = range(segment.start, segment.start + aligned(segment.numel), ALIGNMENT)
        outside += sum(not own.start <= cell < own.stop for cell in cells)
    return outside * ALIGNMENT


def test_segments_overlap_by_hand():
    assert Segment(3, 4).stop == 7
    assert Segment(0, 10).overlap(Segment(3, 4)) == Segment(3, 4)
    assert Segment(0, 5).overlap(Segment(3, 4)) == Segment(3, 2)
    assert Segment(3, 4).overlap(Segment(0, 5)) == Segment(3, 2)
    for apart in (Segment(0, 3), Segment(7, 2), Segment(4, 0)):
        assert Segment(3, 4).overlap(apart).numel == 0
        assert apart.overlap(Segment(3, 4)).numel == 0


def test_sizes_are_rounded_up_to_the_alignment():
    assert [aligned(n) for n in (0, 1, 7, 8, 9)] == [0, 8, 8, 8, 16]


# w0 (10) and the tail (3 + 4) of rank 1, w1 (16) of rank 0, w2 (5) of rank 0, w3 empty of rank 2.
BY_HAND = block_of(3, [(10, 1), (16, 0), (5, 0), (0, 2)], tail=[3, 4], tail_owner=1)


def test_by_owner_by_hand():
    layout = arrange_by_owner(BY_HAND)
    assert places(layout) == {
        "a.w1": (0, 16),
        "a.w2": (16, 21),
        "a.w0": (24, 34),
        "a.t0": (40, 43),
        "a.t1": (48, 52),
        "a.w3": (56, 56),
    }
    assert (layout.numel, layout.slice_numel) == (56, 0)
    assert [layout.runs(rank) for rank in range(3)] == [(Segment(0, 21),), (Segment(24, 28),), ()]
    assert [layout.packed_numel(rank) for rank in range(3)] == [21, 28, 0]
    assert layout.offset_in_runs(layout.segments["a.t1"], 1) == 24
    assert layout.offset_in_runs(layout.segments["a.w3"], 2) == 0


def test_in_slices_by_hand():
    # 56 aligned elements in slices of 24: rank 0 fills its own, and of rank 1's 32 the last 8 stand
    # in rank 2's slice: the 4 elements of t1, whose gap nobody sends.
    layout = arrange_in_slices(BY_HAND)
    assert (layout.numel, layout.slice_numel) == (72, 24)
    assert places(layout) == {
        "a.w1": (0, 16),
        "a.w2": (16, 21),
        "a.w0": (24, 34),
        "a.t0": (40, 43),
        "a.t1": (48, 52),
        "a.w3": (40, 40),
    }
    slices = [layout.slice_of(rank) for rank in range(3)]
    assert slices == [Segment(0, 24), Segment(24, 24), Segment(48, 24)]
    assert [layout.runs(rank) for rank in range(3)] == [(Segment(0, 21),), (Segment(24, 28),), ()]
    assert overflows(layout) == [0, 4, 0]


def test_roles_between_those_of_others_make_several_runs():
    layout = BufferLayout(
        block_of(2, [(16, 0), (16, 1), (8, 0)]),
        {"a.w0": Segment(0, 16), "a.w1": Segment(16, 16), "a.w2": Segment(32, 8)},
        40,
    )
    assert layout.runs(0) == (Segment(0, 16), Segment(32, 8))
    assert layout.offset_in_runs(Segment(32, 8), 0) == 16
    assert layout.offset_in_runs(Segment(36, 2), 0) == 20, "parts of a parameter have a place too"


@both
@QUICK
@given(block=block_plans())
def test_every_parameter_has_a_place_of_its_own(arrange, block):
    layout = arrange(block)
    assert layout.block is block
    assert layout.segments.keys() == {shard.fqn for shard in block.shards}
    taken = [0] * layout.numel
    for shard in block.shards:
        segment = layout.segments[shard.fqn]
        assert segment.numel == math.prod(shard.shape)
        assert segment.start % ALIGNMENT == 0
        assert 0 <= segment.start <= segment.stop <= layout.numel
        for e in elements(segment):
            taken[e] += 1
    assert max(taken, default=0) <= 1
    assert sum(taken) == block.numel


@both
@QUICK
@given(block=block_plans())
def test_runs_cover_a_ranks_parameters_and_the_gaps_between_them(arrange, block):
    layout = arrange(block)
    owner_at: dict[int, int] = {}
    for shard in block.shards:
        owner_at |= dict.fromkeys(elements(layout.segments[shard.fqn]), shard.owner)
    seen: list[int] = []
    for rank in range(block.world_size):
        runs = layout.runs(rank)
        covered = [e for run in runs for e in elements(run)]
        seen += covered
        assert covered == sorted(covered)
        assert all(one.stop < after.start for one, after in pairwise(runs))
        assert layout.packed_numel(rank) == len(covered)
        own = [e for e, owner in owner_at.items() if owner == rank]
        assert set(own) <= set(covered)
        gaps = sorted(set(covered) - set(own))
        assert not set(gaps) & owner_at.keys()
        # Gaps lie inside runs, and none is as long as the alignment.
        assert all(run.numel and {run.start, run.stop - 1} <= set(own) for run in runs)
        assert all(not set(range(e, e + ALIGNMENT)) <= set(gaps) for e in gaps)
        for shard in block.shards:
            if shard.owner == rank:
                segment = layout.segments[shard.fqn]
                offset = layout.offset_in_runs(segment, rank)
                assert covered[offset : offset + segment.numel] == list(elements(segment))
                assert 0 <= offset <= len(covered)
    assert len(seen) == len(set(seen))


@QUICK
@given(block_plans())
def test_by_owner_each_rank_has_one_run_and_the_ranks_follow_one_another(block):
    layout = arrange_by_owner(block)
    runs = [run for rank in range(block.world_size) for run in layout.runs(rank)]
    assert all(len(layout.runs(rank)) <= 1 for rank in range(block.world_size))
    assert runs == sorted(runs, key=lambda run: run.start)
    stops = [segment.stop for segment in layout.segments.values()]
    assert layout.numel == max(stops, default=0), "no padding at the end"


@QUICK
@given(block_plans())
def test_slices_are_equal_aligned_and_padded_by_little(block):
    layout = arrange_in_slices(block)
    assert layout.numel == block.world_size * layout.slice_numel
    assert layout.slice_numel % ALIGNMENT == 0
    sizes = sum(aligned(shard.numel) for shard in block.shards)
    assert 0 <= layout.numel - sizes <= (block.world_size - 1) * ALIGNMENT
    tail = [layout.segments[s.fqn] for s in block.shards if s.kind is RoleKind.TAIL]
    for one, after in pairwise(tail):
        assert after.start == one.start + aligned(one.numel)


@settings(SMALL, max_examples=25)
@given(block_plans(max_world=6, max_weights=5))
def test_up_to_six_roles_no_order_overflows_less(block):
    layout = arrange_in_slices(block)
    roles = role_list(block)
    least = min(overflow_in_order(list(order), layout.slice_numel) for order in permutations(roles))
    assert aligned_overflow(layout) == least


@settings(SMALL, max_examples=20)
@given(block_plans(max_weights=15, min_weights=13))
def test_beyond_twelve_roles_no_move_of_one_role_helps(block):
    layout = arrange_in_slices(block)
    found = aligned_overflow(layout)
    roles = role_list(block)
    assert len(roles) > 12
    by_owner = sorted(roles, key=lambda role: role[1])
    assert found <= overflow_in_order(by_owner, layout.slice_numel)
    order = sorted(roles_with_places(layout))
    for i in range(len(order)):
        rest = [role for j, (_, role) in enumerate(order) if j != i]
        for place in range(len(order)):
            moved = [*rest[:place], order[i][1], *rest[place:]]
            assert overflow_in_order(moved, layout.slice_numel) >= found


@QUICK
@given(block_plans(max_weights=9, multiple_of=ALIGNMENT))
def test_without_gaps_the_overflow_is_what_is_sent(block):
    layout = arrange_in_slices(block)
    assert aligned_overflow(layout) == sum(overflows(layout))


@QUICK
@given(block_plans(max_weights=18))
def test_overflow_has_its_bounds(block):
    layout = arrange_in_slices(block)
    counted = overflows(layout)
    assert sum(counted) >= sum(
        max(0, block.owned_numel(rank) - layout.slice_numel) for rank in range(block.world_size)
    )
    for rank, overflow in enumerate(counted):
        transfers = overflow_gather_of(layout, rank)
        assert sent_elements(transfers, rank) == overflow
        # The bytes a rank sends ahead of a step's gathers are at most those it owns, with gaps.
        assert overflow <= layout.packed_numel(rank)
        owned = [s for s in block.shards if s.owner == rank and s.numel]
        gaps = sum(aligned(s.numel) - s.numel for s in owned)
        assert layout.packed_numel(rank) <= block.owned_numel(rank) + gaps


@pytest.mark.parametrize("weights_per_rank", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_balanced_block_has_no_overflow(world_size, weights_per_rank):
    """With 3 weights on each of 8 ranks there are too many roles for the exact search."""
    sizes = {1: [48], 2: [40, 8], 3: [24, 8, 16]}[weights_per_rank]
    owned = [(n, rank) for n in sizes for rank in reversed(range(world_size))]
    layout = arrange_in_slices(block_of(world_size, owned))
    assert layout.slice_numel == 48
    assert overflows(layout) == [0] * world_size
    assert all(layout.runs(rank) == (layout.slice_of(rank),) for rank in range(world_size))


@pytest.mark.parametrize("planner", ["role_greedy", "cost_aware"])
def test_overflow_over_a_model_is_at_most_the_bytes_a_rank_owns(planner):
    model = transformer(layers=6)
    for world_size in (2, 5, 16):
        plan = make_plan(planner, model.blocks, model.matrices, world_size)
        layouts = [arrange_in_slices(block) for block in plan.blocks]
        for rank in range(world_size):
            sent = sum(sent_elements(overflow_gather_of(at, rank), rank) for at in layouts)
            assert 4 * sent <= plan.owned_bytes(rank), "these shapes have no gaps"


@both
@pytest.mark.parametrize("block", [block_of(3, []), block_of(3, [(0, 2)], tail=[0])])
def test_a_block_without_elements_takes_no_room(arrange, block):
    layout = arrange(block)
    assert (layout.numel, layout.slice_numel) == (0, 0)
    assert set(layout.segments.values()) <= {Segment(0, 0)}
    assert [layout.runs(rank) for rank in range(3)] == [()] * 3
    assert [layout.offset_in_runs(Segment(0, 0), rank) for rank in range(3)] == [0] * 3


@both
@pytest.mark.parametrize("rank", [-1, 3])
def test_ranks_outside_the_group_are_refused(arrange, rank):
    layout = arrange(BY_HAND)
    for ask in (layout.runs, layout.packed_numel, layout.slice_of):
        with pytest.raises(ValueError, match=f"rank {rank} .*legal: 0 to 2"):
            ask(rank)


@settings(SMALL, max_examples=10)
@given(block_plans(max_weights=16), st.randoms(use_true_random=False))
def test_an_arrangement_depends_on_the_plan_alone(block, rng):
    first = arrange_in_slices(block)
    again = arrange_in_slices(BlockPlan(block.name, block.world_size, tuple(block.shards)))
    assert list(again.segments.items()) == list(first.segments.items())
    renamed = block_of(block.world_size, [(s.numel, s.owner) for s in block.shards])
    assert arrange_in_slices(renamed).slice_numel == first.slice_numel
