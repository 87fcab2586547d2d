"""What a transport says it will send, and the counters; without a process group."""

from __future__ import annotations

import pytest
import torch

from tests.unit.layout.models import block_of
from torchtitan_matrixfsdp.comm import (
    TRANSPORT_NAMES,
    TRANSPORTS,
    BalancedTransport,
    BroadcastTransport,
    P2PTransport,
    Traffic,
    TrafficCounter,
    TransportFactory,
    view_segment,
)
from torchtitan_matrixfsdp.layout import (
    TRANSPORT_MODELS,
    BlockPlan,
    Segment,
    arrange_by_owner,
    arrange_in_slices,
    choose_transport,
)

every_transport = pytest.mark.parametrize("name", sorted(TRANSPORTS))


def predictions(name: str, block: BlockPlan, itemsize: int) -> list[tuple[Traffic, Traffic]]:
    """By rank: the traffic of a gather and of a reduction."""
    counter = TrafficCounter()
    ranks = [TRANSPORTS[name](block, rank, counter) for rank in range(block.world_size)]
    found = [(t.predict_gather(itemsize), t.predict_reduce(itemsize)) for t in ranks]
    assert counter.totals == {}, "predicting is not sending"
    return found


def test_p2p_by_hand() -> None:
    # Each rank sends its own matrix in a gather and its gradient of the other's in a reduction.
    first, second = predictions("p2p", block_of(2, [(35, 0), (9, 1)]), 4)
    assert first == (Traffic(140, 1), Traffic(36, 1))
    assert second == (Traffic(36, 1), Traffic(140, 1))


def test_broadcast_by_hand() -> None:
    # 0 -> 1 -> 2 with 35 elements, 1 -> 2 -> 0 with 9; the reductions go back the same way.
    first, second, third = predictions("broadcast", block_of(3, [(35, 0), (9, 1)]), 2)
    assert first == (Traffic(2 * 35, 1), Traffic(2 * 9, 1))
    assert second == (Traffic(2 * 44, 2), Traffic(2 * 35, 1))
    assert third == (Traffic(2 * 9, 1), Traffic(2 * 44, 2))


def test_balanced_by_hand() -> None:
    # Slices of 24; 16 of the 64 elements of rank 0 stand in rank 2's, 24 in rank 1's.
    first, second, third = predictions("balanced", block_of(3, [(64, 0)]), 8)
    assert first == (Traffic(8 * (48 + 40), 2 + 2), Traffic(8 * 48, 2))
    assert second == (Traffic(8 * 48, 2), Traffic(8 * (48 + 24), 2 + 1))
    assert third == (Traffic(8 * 48, 2), Traffic(8 * (48 + 16), 2 + 1))


@every_transport
@pytest.mark.parametrize(
    "block", [block_of(3, []), block_of(3, [(0, 1)], tail=[0]), block_of(1, [(5, 0)], tail=[3])]
)
def test_one_rank_or_an_empty_block_sends_nothing(name: str, block: BlockPlan) -> None:
    assert predictions(name, block, 4) == [(Traffic(), Traffic())] * block.world_size


@every_transport
def test_one_rank_needs_no_group(name: str) -> None:
    """Case 19: W = 1 is the same code."""
    block = block_of(1, [(35, 0), (0, 0), (9, 0)], tail=[13])
    counter = TrafficCounter()
    transport = TRANSPORTS[name](block, 0, counter)
    buffer = torch.arange(float(transport.layout.numel))
    before = buffer.clone()
    assert transport.gather(buffer, None) == []  # type: ignore[arg-type]
    assert torch.equal(buffer, before)
    reduced = transport.reduce(buffer, None)  # type: ignore[arg-type]
    buffer.zero_()  # the caller may free or reuse it
    assert reduced.shape == (transport.layout.packed_numel(0),)
    for shard in block.shards:
        segment = transport.layout.segments[shard.fqn]
        offset = transport.layout.offset_in_runs(segment, 0)
        part = reduced.narrow(0, offset, segment.numel)
        assert torch.equal(part, view_segment(before, segment))
    assert counter.total("gather") == counter.total("reduce") == Traffic(0, 0)


@every_transport
@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_count_within_the_group(name: str, rank: int) -> None:
    """Case 24: a global rank is refused where it can be told."""
    with pytest.raises(ValueError, match=f"rank {rank} is not in the shard group"):
        TRANSPORTS[name](block_of(2, [(35, 0)]), rank, TrafficCounter())


def test_view_segment_is_a_view() -> None:
    buffer = torch.arange(10.0)
    view = view_segment(buffer, Segment(3, 4))
    view.mul_(-1)
    assert buffer.tolist() == [0, 1, 2, -3, -4, -5, -6, 7, 8, 9]
    assert view_segment(buffer, Segment(10, 0)).numel() == 0


@every_transport
def test_transports_by_name(name: str) -> None:
    block = block_of(2, [(35, 0), (9, 1)])
    factory = TransportFactory(name)
    assert factory.choose(block) == name
    transport = factory(factory.choose(block), block, 1, TrafficCounter())
    assert type(transport) is TRANSPORTS[name]
    assert transport.name == name
    arrange = arrange_in_slices if name == "balanced" else arrange_by_owner
    assert transport.layout == arrange(block)


def test_every_transport_has_its_model() -> None:
    assert set(TRANSPORTS) == set(TRANSPORT_MODELS)
    assert set(TRANSPORTS.values()) == {P2PTransport, BroadcastTransport, BalancedTransport}
    assert ("auto", *TRANSPORTS) == TRANSPORT_NAMES


def test_auto_chooses_by_block_and_by_itemsize() -> None:
    even = block_of(8, [(1 << 20, rank) for rank in range(8)])
    one_owner = block_of(8, [(1 << 26, 3)])
    factory = TransportFactory("auto", gather_itemsize=2, reduce_itemsize=4)
    assert [factory.choose(block) for block in (even, one_owner)] == ["balanced", "broadcast"]
    # Two owners beside six idle ranks: fewer messages or fewer bytes, by the size of an element.
    near = block_of(8, [(14_000, 0), (14_000, 4)])
    for itemsizes in ((1, 1), (4, 4), (8, 8)):
        assert TransportFactory("auto", *itemsizes).choose(near) == choose_transport(
            near, *itemsizes
        )
    assert TransportFactory("auto", 1, 1).choose(near) != TransportFactory("auto", 8, 8).choose(
        near
    )


@pytest.mark.parametrize("name", ["P2P", "nccl", ""])
def test_an_unknown_transport(name: str) -> None:
    with pytest.raises(ValueError, match=r"owner_fsdp\.transport") as raised:
        TransportFactory(name)
    message = str(raised.value)
    assert f"received {name!r}" in message
    assert "legal: ['auto', 'p2p', 'broadcast', 'balanced']" in message
    assert 'Set owner_fsdp.transport = "auto"' in message


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
