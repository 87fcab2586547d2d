from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.layout.models import (
    SMALL,
    block_of,
    block_plans,
    transformer,
)
from tests.unit.layout.moves import busiest, gather_hops, reduce_hops, volumes
from torchtitan_matrixfsdp.layout import (
    ALIGNMENT,
    TRANSPORT_MODELS,
    BlockPlan,
    LinkModel,
    Volume,
    aligned,
    broadcast_volume,
    choose_transport,
    make_plan,
    reduce_volume,
    ring_volume,
    transport_seconds,
)

QUICK = settings(SMALL, max_examples=40)
every_transport = pytest.mark.parametrize("name", sorted(TRANSPORT_MODELS))
BALANCED = TRANSPORT_MODELS["balanced"]


def sent(name: str, block: BlockPlan) -> tuple[list[int], list[int]]:
    """By rank: elements sent in a gather and in a reduction of the whole block."""
    model = TRANSPORT_MODELS[name]
    layout = model.arrange(block)
    ranks = range(block.world_size)
    return (
        [model.gather(layout, rank).elements for rank in ranks],
        [model.reduce(layout, rank).elements for rank in ranks],
    )


def test_collectives_by_hand():
    assert ring_volume(5, 4) == Volume(15, 3)
    assert ring_volume(0, 4) == ring_volume(5, 1) == Volume()
    # From rank 1 of 4: 1 -> 2 -> 3 -> 0, and back.
    assert [broadcast_volume(5, 1, rank, 4).elements for rank in range(4)] == [0, 5, 5, 5]
    assert [reduce_volume(5, 1, rank).elements for rank in range(4)] == [5, 0, 5, 5]
    assert broadcast_volume(0, 1, 1, 4) == reduce_volume(0, 1, 0) == Volume()
    assert broadcast_volume(5, 0, 0, 1) == reduce_volume(5, 0, 0) == Volume()


def test_one_owner_by_hand():
    # 96 elements of rank 2 of 4, in slices of 24.
    block = block_of(4, [(96, 2)])
    assert sent("p2p", block) == ([0, 0, 288, 0], [96, 96, 0, 96])
    assert sent("broadcast", block) == ([96, 0, 96, 96], [96, 96, 0, 96])
    assert sent("balanced", block) == ([72, 72, 72 + 72, 72], [96, 96, 72, 96])
    found = {name: m.busiest(m.arrange(block)) for name, m in TRANSPORT_MODELS.items()}
    assert found == {
        "p2p": Volume(288, 3),
        "broadcast": Volume(96, 3),
        "balanced": Volume(72 + 72, 3 + 3),
    }


@every_transport
@QUICK
@given(block=block_plans())
def test_closed_forms_are_the_totals_of_the_messages(name, block):
    model = TRANSPORT_MODELS[name]
    layout = model.arrange(block)
    size = block.world_size
    gather = gather_hops(name, layout)
    summed, replaced = reduce_hops(name, layout)
    for hops, closed in ((gather, model.gather), (summed + replaced, model.reduce)):
        found = [closed(layout, rank) for rank in range(size)]
        expected = volumes(hops, size)
        assert [(volume.elements, volume.messages) for volume in found] == expected
        assert model.busiest(layout).elements == busiest(hops, size)
    if name == "broadcast":
        in_turn = len(gather)  # one ring after another, hop by hop
    else:
        posted = [sum(t.src == rank for t in gather) for rank in range(size)]
        awaited = [sum(t.dst == rank for t in gather) for rank in range(size)]
        in_turn = max(posted + awaited)
    assert model.busiest(layout).messages == in_turn


def bounds(block: BlockPlan) -> tuple[float, float]:
    """What a rank may send in a gather and in a reduction under ``balanced``, in elements.

    With G the gaps after the block's parameters and T the padding after the last, W * S = P + G + T
    and T <= (W - 1) * ALIGNMENT. A rank sends (W - 1) * S in the ring. Before a gather it sends at
    most its own runs: L_r and the gaps within, at most G. After a reduction it sends at most the
    slice that it holds, S. Hence

        gather:  (W - 1)/W (P + G + T) + L_r + G <= (1 + (gamma - 1)/W) P + 2 G + T
        reduce:  (W - 1) S + S                    = P + G + T

    so both are at most (1 + gamma/W) P + 2 G + (W - 1) * ALIGNMENT.
    """
    size = block.world_size
    gaps = sum(aligned(shard.numel) - shard.numel for shard in block.shards)
    padding = (size - 1) * ALIGNMENT
    gather = (1 + (block.gamma - 1) / size) * block.numel + 2 * gaps + padding
    return gather, block.numel + gaps + padding


@settings(SMALL, max_examples=80)
@given(block_plans(max_world=16, max_weights=16))
def test_balanced_sends_no_more_than_its_bound(block):
    for part in (block, block.trainable()):
        gathered, reduced = sent("balanced", part)
        gather, reduce = bounds(part)
        assert max(gathered) <= gather + 1e-6
        assert max(reduced) <= reduce
        gaps = sum(aligned(shard.numel) - shard.numel for shard in part.shards)
        allowance = 2 * gaps + (part.world_size - 1) * ALIGNMENT
        for most in (max(gathered), max(reduced)):
            assert most <= (1 + part.gamma / part.world_size) * part.numel + allowance + 1e-6


@QUICK
@given(block_plans(max_world=16, max_weights=16, multiple_of=ALIGNMENT))
def test_shapes_without_gaps_are_padded_by_less_than_an_alignment_a_rank(block):
    for most in map(max, sent("balanced", block)):
        assert (
            most
            <= (1 + block.gamma / block.world_size) * block.numel
            + (block.world_size - 1) * ALIGNMENT
            + 1e-6
        )


def test_the_gaps_of_small_parameters_are_part_of_the_bound():
    # 100 scalars take 800 elements: an allowance for ranks alone would not cover them.
    block = block_of(2, [], tail=[1] * 100)
    (most, _), _ = sent("balanced", block)
    assert most > (1 + block.gamma / 2) * block.numel + 2 * ALIGNMENT
    assert most <= bounds(block)[0]


def fsdp2_elements(shapes: list[tuple[int, ...]], world_size: int) -> int:
    """What each rank sends in FSDP2's all-gather or reduce-scatter of parameters on Shard(0).

    Each parameter is padded to W chunks of equally many rows, and a ring passes W - 1 chunks on.
    """
    rows = [(math.ceil(shape[0] / world_size), shape) for shape in shapes]
    return (world_size - 1) * sum(n * math.prod(shape[1:]) for n, shape in rows)


@every_transport
@QUICK
@given(
    world_size=st.integers(1, 8),
    per_rank=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4),
)
def test_a_balanced_block_sends_what_fsdp2_does(name, world_size, per_rank):
    """gamma = 1: every rank owns weights of the same shapes, whose rows W divides."""
    shapes = [(n * world_size, 8 * c) for n, c in per_rank]
    owned = [(math.prod(shape), rank) for shape in shapes for rank in range(world_size)]
    block = block_of(world_size, owned)
    expected = fsdp2_elements(shapes * world_size, world_size)
    assert block.gamma == 1.0
    assert sent(name, block) == ([expected] * world_size, [expected] * world_size)


def test_odd_shapes_send_no_more_than_fsdp2_where_owners_share_evenly():
    # FSDP2 pads 7 rows to 8 over 2 ranks, and 33 to 36 over 4; whole weights need no such padding.
    assert fsdp2_elements([(7, 8)] * 2, 2) == 64
    assert sent("balanced", block_of(2, [(56, 0), (56, 1)]))[0] == [56, 56]
    assert fsdp2_elements([(33, 128)] * 4, 4) == 3 * 4 * 9 * 128
    block = block_of(4, [(33 * 128, rank) for rank in range(4)])
    assert sent("balanced", block)[0] == [3 * 33 * 128] * 4


@QUICK
@given(block_plans(max_world=16))
def test_other_transports_send_what_the_design_says(block):
    """p2p: (W - 1) L_r, so gamma (W - 1)/W P at most, and P back; broadcast: P at most."""
    size = block.world_size
    gaps = sum(aligned(shard.numel) - shard.numel for shard in block.shards)
    gathered, reduced = sent("p2p", block)
    most = block.gamma * (size - 1) / size * block.numel
    assert max(gathered) <= most + (size - 1) * gaps + 1e-6
    assert max(reduced) <= block.numel + gaps
    assert max(map(max, sent("broadcast", block))) <= block.numel + gaps


def test_an_idle_owner_costs_no_round():
    """A rank that owns empty parameters only is an owner, but has no message."""
    with_idle, without = block_of(4, [(64, 0), (0, 1)]), block_of(4, [(64, 0)])
    for model in TRANSPORT_MODELS.values():
        assert model.busiest(model.arrange(with_idle)) == model.busiest(model.arrange(without))
        nothing = model.arrange(block_of(4, [(0, 1)]))
        assert model.busiest(nothing) == Volume()


LINK = LinkModel(latency_s=1e-6, bytes_per_s=1e9, chunk_bytes=64)


@every_transport
def test_seconds_by_hand(name):
    # Two gathers in 2 bytes and one reduction in 4 of 72 + 72, 288 or 96 elements; a frozen weight
    # of 32 elements on rank 0 of 4 (8 to a slice) is gathered only. A broadcast is relayed: each of
    # its hops waits for a chunk of 64 bytes besides.
    wait = 1e-6 + (64e-9 if name == "broadcast" else 0)
    block = block_of(4, [(96, 2)])
    moved, rounds = {"balanced": (144, 6), "p2p": (288, 3), "broadcast": (96, 3)}[name]
    assert transport_seconds(name, block, 2, 4, LINK) == pytest.approx(
        moved * (2 * 2 + 4) / 1e9 + 3 * rounds * wait, rel=1e-12
    )
    frozen = block_of(4, [(32, 0)], frozen={0})
    moved, rounds = {"balanced": (48, 6), "p2p": (96, 3), "broadcast": (32, 3)}[name]
    assert transport_seconds(name, frozen, 2, 4, LINK) == pytest.approx(
        moved * 2 * 2 / 1e9 + 2 * rounds * wait, rel=1e-12
    )


EVEN = block_of(8, [(1 << 20, rank) for rank in range(8)])
ONE_OWNER = block_of(8, [(1 << 26, 3)])
TWO_SMALL_OWNERS = block_of(8, [(64, 3), (64, 5)])


@pytest.mark.parametrize(
    ("block", "name"),
    [
        # All three send the same, but one all-gather has fewer rounds than eight broadcasts.
        (EVEN, "balanced"),
        # A broadcast sends the block once; the others send it twice, or seven times from one rank.
        (ONE_OWNER, "broadcast"),
        # The same, but so small that the hops of a broadcast wait longer than the bytes take.
        (block_of(8, [(1 << 20, 3)]), "balanced"),
        # Latency rules: seven messages, against two broadcasts of seven hops or two phases.
        (TWO_SMALL_OWNERS, "p2p"),
        # Nothing to send.
        (block_of(1, [(64, 0)]), "balanced"),
        (block_of(8, []), "balanced"),
    ],
)
def test_each_transport_has_blocks_that_it_suits(block, name):
    assert choose_transport(block, 2, 4) == name


@QUICK
@given(block_plans(), st.sampled_from([(2, 4), (4, 4), (2, 2)]), st.sampled_from([0.0, 1e-9, 1.0]))
def test_the_cheapest_is_chosen_and_among_equals_the_first(block, itemsizes, latency):
    link = LinkModel(latency_s=latency, bytes_per_s=1e9)
    seconds = [
        transport_seconds(name, block, *itemsizes, link)
        for name in ("balanced", "p2p", "broadcast")
    ]
    chosen = choose_transport(block, *itemsizes, link)
    assert chosen == ("balanced", "p2p", "broadcast")[seconds.index(min(seconds))]


@every_transport
@QUICK
@given(block=block_plans(), gather=st.integers(1, 4), reduce=st.integers(1, 4))
def test_more_bytes_or_a_slower_link_never_take_less(name, block, gather, reduce):
    seconds = transport_seconds(name, block, gather, reduce, LINK)
    assert seconds >= 0.0
    assert transport_seconds(name, block, gather + 1, reduce, LINK) >= seconds
    assert transport_seconds(name, block, gather, reduce + 1, LINK) >= seconds
    assert transport_seconds(name, block, gather, reduce, replace(LINK, latency_s=2e-6)) >= seconds
    faster = replace(LINK, bytes_per_s=2e9)
    assert transport_seconds(name, block, gather, reduce, faster) <= seconds


def test_balanced_is_never_far_from_the_best_in_bytes():
    """Where no latency is paid, its busiest rank moves at most twice what a broadcast's does."""
    link = LinkModel(latency_s=0.0)
    for world_size in (2, 4, 16, 64):
        for weights in (1, 3, 8, 12):
            block = block_of(
                world_size, [(4096 * (1 + i % 3), i * 5 % world_size) for i in range(weights)]
            )
            balanced = transport_seconds("balanced", block, 2, 4, link)
            assert balanced <= 2 * transport_seconds("broadcast", block, 2, 4, link)


_PRINT_CHOICES = """
from tests.unit.layout.models import transformer
from torchtitan_matrixfsdp.layout import TRANSPORT_MODELS, choose_transport, make_plan
model = transformer(layers=4)
for world_size in (3, 8, 40):
    for block in make_plan("cost_aware", model.blocks, set(model.matrices), world_size).blocks:
        layouts = [TRANSPORT_MODELS[name].arrange(block) for name in sorted(TRANSPORT_MODELS)]
        places = [[(fqn, s.start) for fqn, s in at.segments.items()] for at in layouts]
        print(choose_transport(block, 2, 4), places)
"""


def test_choices_and_places_do_not_depend_on_the_hash_seed():
    outputs = set()
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        outputs.add(
            subprocess.run(
                [sys.executable, "-c", _PRINT_CHOICES],
                env=env,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 12


def test_thousands_of_ranks():
    """126 blocks on 4096 ranks: CPU seconds, with much room for a slow machine."""
    model = transformer(layers=126, dim=4096, hidden=14336)
    plan = make_plan("role_greedy", model.blocks, model.matrices, 4096)
    start = time.process_time()
    chosen = {choose_transport(block, 2, 4) for block in plan.blocks}
    assert chosen == {"balanced"}, "8 roles on 4096 ranks: fan-out costs gamma times as much"
    assert time.process_time() - start < 15
