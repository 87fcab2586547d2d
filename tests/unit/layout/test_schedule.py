from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.models import SMALL, Model, models, weights, weights_model, world_sizes
from torchtitan_matrixfsdp.layout import (
    PLANNERS,
    BlockPlan,
    MatrixShard,
    RoleKind,
    Segment,
    Transfer,
    make_plan,
    p2p_gather,
    p2p_gather_of,
    p2p_reduce,
    p2p_reduce_of,
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


@SMALL
@given(models(), world_sizes.filter(lambda w: w <= 16), st.sampled_from(sorted(PLANNERS)))
def test_one_ranks_transfers_are_those_that_involve_it(model: Model, world_size: int, planner: str):
    plan = make_plan(planner, model.blocks, model.matrices, world_size)
    for block in plan.blocks:
        for everyone, of_rank in ((p2p_gather, p2p_gather_of), (p2p_reduce, p2p_reduce_of)):
            transfers = everyone(block)
            for rank in range(world_size):
                involved = tuple(t for t in transfers if rank in (t.src, t.dst))
                assert of_rank(block, rank) == involved


def shard_of(fqn: str, owner: int, start: int, numel: int, trainable: bool) -> MatrixShard:
    kind = RoleKind.MATRIX if trainable else RoleKind.FROZEN
    segment = Segment(start, numel)
    return MatrixShard(fqn, (1, numel), "float32", 4, kind, trainable, "a", owner, segment)


def test_trainable_parameters_packed_by_hand():
    # Listed in the module's order, which is not the buffer's. Rank 1 owns frozen weights only.
    block = BlockPlan(
        "a",
        4,
        (
            shard_of("a.last", 2, 16, 2, trainable=True),
            shard_of("a.frozen", 0, 0, 4, trainable=False),
            shard_of("a.first", 0, 4, 6, trainable=True),
            shard_of("a.adapter", 1, 10, 5, trainable=False),
            shard_of("a.middle", 2, 15, 1, trainable=True),
        ),
    )
    packed = block.trainable()
    assert packed.shards == (
        shard_of("a.last", 2, 7, 2, trainable=True),
        shard_of("a.first", 0, 0, 6, trainable=True),
        shard_of("a.middle", 2, 6, 1, trainable=True),
    )
    assert (packed.name, packed.world_size, packed.numel) == ("a", 4, 9)
    assert packed.owners == (0, 2)
    ranges = [packed.owner_range(rank) for rank in range(4)]
    assert ranges == [Segment(0, 6), Segment(6, 0), Segment(6, 3), Segment(9, 0)]
    assert block.numel == 18, "the gathered block still has the frozen weights"


@SMALL
@given(models(), world_sizes.filter(lambda w: w <= 16), st.sampled_from(sorted(PLANNERS)))
def test_trainable_parameters_are_packed_by_owner(model: Model, world_size: int, planner: str):
    plan = make_plan(planner, model.blocks, model.matrices, world_size)
    for block in plan.blocks:
        packed = block.trainable()
        kept = [shard for shard in block.shards if shard.trainable]
        if len(kept) == len(block.shards):
            assert packed is block
        assert [_but_segment(s) for s in packed.shards] == [_but_segment(s) for s in kept]
        filled = [e for shard in packed.shards for e in _elements(shard.segment)]
        assert sorted(filled) == list(range(packed.numel))
        for rank in range(world_size):
            owned = [e for s in packed.shards if s.owner == rank for e in _elements(s.segment)]
            assert sorted(owned) == list(_elements(packed.owner_range(rank)))
        assert packed.trainable() is packed


def _but_segment(shard: MatrixShard) -> tuple[object, ...]:
    place = (shard.block, shard.owner, shard.segment.numel)
    return (shard.fqn, shard.shape, shard.dtype, shard.itemsize, shard.kind, *place)


def _elements(segment: Segment) -> range:
    return range(segment.start, segment.stop)
