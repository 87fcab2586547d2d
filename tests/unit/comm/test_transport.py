"""What a transport says it will send, and the counters; without a process group."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.layout.models import BlockMeta, Model, param
from torchtitan_matrixfsdp.comm import (
    TRANSPORTS,
    P2PTransport,
    Traffic,
    TrafficCounter,
    transport_factory,
    view_segment,
)
from torchtitan_matrixfsdp.layout import BlockPlan, Segment, make_plan

ODD = {"a.w1": (7, 5), "a.w2": (1, 9), "a.w3": (33, 128), "a.bias": (13,)}
SIZES = (1, 2, 3, 4, 8)


def plan_block(world_size: int, shapes: dict[str, tuple[int, ...]]) -> BlockPlan:
    """A block whose 2D weights are matrices, each with an owner of its own if there are enough."""
    model = Model(
        (BlockMeta("a", tuple(param(fqn, shape) for fqn, shape in shapes.items())),),
        frozenset(fqn for fqn, shape in shapes.items() if len(shape) == 2),
    )
    return make_plan("role_greedy", model.blocks, model.matrices, world_size).block("a")


def owned_elements(block: BlockPlan) -> list[int]:
    """By rank, from the shapes alone."""
    owned = [0] * block.world_size
    for shard in block.shards:
        owned[shard.owner] += math.prod(shard.shape)
    return owned


BLOCKS = {
    "odd shapes": ODD,
    "one owner for all": {"a.b1": (5,), "a.b2": (7,), "a.b3": (1,)},
    "one matrix": {"a.w": (7, 5)},
    "zero-sized": {"a.w1": (0, 4), "a.w2": (3, 3)},
    "no elements": {"a.w1": (0, 4)},
    "no parameters": {},
}


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", list(BLOCKS))
def test_predictions_have_their_closed_form(name: str, world_size: int) -> None:
    block = plan_block(world_size, BLOCKS[name])
    owned = owned_elements(block)
    total = sum(owned)
    owning = sum(elements > 0 for elements in owned)
    assert total == sum(math.prod(shape) for shape in BLOCKS[name].values())
    for itemsize in (2, 4, 8):
        counter = TrafficCounter()
        transports = [P2PTransport(block, rank, counter) for rank in range(world_size)]
        gathers = [transport.predict_gather(itemsize) for transport in transports]
        reduces = [transport.predict_reduce(itemsize) for transport in transports]
        for rank, elements in enumerate(owned):
            to_owner = world_size - 1 if elements else 0
            others = owning - (elements > 0)
            assert gathers[rank] == Traffic((world_size - 1) * elements * itemsize, to_owner)
            assert reduces[rank] == Traffic((total - elements) * itemsize, others)
        # Both directions move every element to, or from, the W - 1 ranks without it.
        everything = Traffic((world_size - 1) * total * itemsize, (world_size - 1) * owning)
        assert sum(gathers, Traffic()) == sum(reduces, Traffic()) == everything
        assert counter.totals == {}, "predicting is not sending"


def test_predictions_by_hand() -> None:
    # Each rank sends its own matrix in a gather and its gradient of the other's in a reduction.
    block = plan_block(2, {"a.w1": (7, 5), "a.w2": (1, 9)})
    assert [block.owned_numel(rank) for rank in range(2)] == [35, 9]
    first, second = (P2PTransport(block, rank, TrafficCounter()) for rank in range(2))
    assert (first.predict_gather(4), first.predict_reduce(2)) == (Traffic(140, 1), Traffic(18, 1))
    assert (second.predict_gather(4), second.predict_reduce(2)) == (Traffic(36, 1), Traffic(70, 1))


def test_some_blocks_leave_ranks_without_a_matrix() -> None:
    """Case 20: the table above really has them."""
    assert owned_elements(plan_block(8, ODD)).count(0) >= 4
    assert owned_elements(plan_block(4, BLOCKS["one owner for all"])).count(0) == 3


def test_one_rank_sends_nothing_and_needs_no_group() -> None:
    """Case 19: W = 1 is the same code."""
    block = plan_block(1, ODD)
    counter = TrafficCounter()
    transport = P2PTransport(block, 0, counter)
    buffer = torch.arange(float(block.numel))
    before = buffer.clone()
    assert transport.gather(buffer, None) == []  # type: ignore[arg-type]
    reduced = transport.reduce(buffer, None)  # type: ignore[arg-type]
    assert torch.equal(reduced, before) and torch.equal(buffer, before)
    buffer.zero_()  # the caller may free or reuse it
    assert torch.equal(reduced, before)
    assert counter.total("gather") == counter.total("reduce") == Traffic(0, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_count_within_the_group(rank: int) -> None:
    """Case 24: a global rank is refused where it can be told."""
    with pytest.raises(ValueError, match=f"rank {rank} is not in the shard group"):
        P2PTransport(plan_block(2, ODD), rank, TrafficCounter())


def test_view_segment_is_a_view() -> None:
    buffer = torch.arange(10.0)
    view = view_segment(buffer, Segment(3, 4))
    view.mul_(-1)
    assert buffer.tolist() == [0, 1, 2, -3, -4, -5, -6, 7, 8, 9]
    assert view_segment(buffer, Segment(10, 0)).numel() == 0


def test_transports_by_name() -> None:
    assert transport_factory("p2p") is TRANSPORTS["p2p"] is P2PTransport


@pytest.mark.parametrize("name", ["P2P", "nccl", ""])
def test_an_unknown_transport(name: str) -> None:
    with pytest.raises(ValueError, match=r"owner_fsdp\.transport") as raised:
        transport_factory(name)
    message = str(raised.value)
    assert f"received {name!r}" in message
    assert "legal: ['p2p']" in message
    assert 'Set owner_fsdp.transport = "p2p"' in message


def test_counter_adds_by_operation() -> None:
    counter = TrafficCounter()
    assert counter.total("gather") == Traffic(0, 0)
    assert counter.totals == {}, "asking for a total records nothing"
    counter.record("gather", Traffic(100, 3))
    counter.record("gather", Traffic(20, 1))
    counter.record("reduce", Traffic(7, 2))
    assert counter.total("gather") == Traffic(120, 4)
    assert counter.total("reduce") == Traffic(7, 2)
    assert counter.total("broadcast") == Traffic()
    counter.reset()
    assert counter.total("gather") == counter.total("reduce") == Traffic()


def test_counters_are_apart() -> None:
    one, other = TrafficCounter(), TrafficCounter()
    one.record("gather", Traffic(1, 1))
    assert other.total("gather") == Traffic()
