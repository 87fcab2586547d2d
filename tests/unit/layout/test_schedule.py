from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.models import SMALL, Model, models, weights, weights_model, world_sizes
from torchtitan_matrixfsdp.layout import (
    PLANNERS,
    BlockPlan,
    Segment,
    Transfer,
    make_plan,
    p2p_gather,
    p2p_reduce,
    sent_elements,
    sent_messages,
)


def planned_block(world_size: int, *numels: int) -> BlockPlan:
    model = weights_model(weights("a", *numels))
    return make_plan("role_greedy", model.blocks, model.matrices, world_size).block("a")


def test_schedules_by_hand():
    # Rank 0 owns [0, 4), rank 1 [4, 7), rank 2 nothing.
    block = planned_block(3, 4, 3)
    first, second = Segment(0, 4), Segment(4, 3)
    assert p2p_gather(block) == (
        Transfer(0, 1, first),
        Transfer(0, 2, first),
        Transfer(1, 0, second),
        Transfer(1, 2, second),
    )
    assert p2p_reduce(block) == (
        Transfer(0, 1, second),
        Transfer(1, 0, first),
        Transfer(2, 0, first),
        Transfer(2, 1, second),
    )
    assert [sent_elements(p2p_gather(block), rank) for rank in range(3)] == [8, 6, 0]
    assert [sent_elements(p2p_reduce(block), rank) for rank in range(3)] == [3, 4, 7]
    assert [sent_messages(p2p_gather(block), rank) for rank in range(3)] == [2, 2, 0]
    assert [sent_messages(p2p_reduce(block), rank) for rank in range(3)] == [1, 1, 2]


def test_one_rank_or_an_empty_block_sends_nothing():
    for block in (planned_block(1, 4, 3), planned_block(3), planned_block(3, 0)):
        assert p2p_gather(block) == ()
        assert p2p_reduce(block) == ()


@SMALL
@given(models(), world_sizes.filter(lambda w: w <= 16), st.sampled_from(sorted(PLANNERS)))
def test_traffic_has_its_closed_form_and_reaches_everyone(
    model: Model, world_size: int, planner: str
):
    plan = make_plan(planner, model.blocks, model.matrices, world_size)
    for block in plan.blocks:
        gather, reduce = p2p_gather(block), p2p_reduce(block)
        for transfers in (gather, reduce):
            pairs = [(t.src, t.dst) for t in transfers]
            assert pairs == sorted(set(pairs))
            assert all(src != dst for src, dst in pairs)
            assert all(t.segment.numel > 0 for t in transfers)
        owning = [rank for rank in range(world_size) if block.owned_numel(rank)]
        for rank in range(world_size):
            owned = block.owned_numel(rank)
            others = len(owning) - (rank in owning)
            assert sent_elements(gather, rank) == (world_size - 1) * owned
            assert sent_elements(reduce, rank) == block.numel - owned
            assert sent_messages(gather, rank) == (world_size - 1 if owned else 0)
            assert sent_messages(reduce, rank) == others
            received = [e for t in gather if t.dst == rank for e in _elements(t.segment)]
            own = list(_elements(block.owner_range(rank)))
            assert sorted(received + own) == list(range(block.numel))
            copies = [t.segment for t in reduce if t.dst == rank]
            expected = world_size - 1 if owned else 0
            assert copies == [block.owner_range(rank)] * expected


def _elements(segment: Segment) -> range:
    return range(segment.start, segment.stop)
