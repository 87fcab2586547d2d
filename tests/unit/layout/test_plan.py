from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from torchtitan_matrixfsdp.layout import (
    BlockPlan,
    MatrixShard,
    OwnerPlan,
    PlanError,
    RoleKind,
)


def placed(fqn: str, shape: tuple[int, ...], kind: RoleKind, owner: int) -> MatrixShard:
    return MatrixShard(
        fqn=fqn,
        shape=shape,
        dtype="float32",
        itemsize=4,
        kind=kind,
        trainable=kind is not RoleKind.FROZEN,
        block=fqn.rpartition(".")[0],
        owner=owner,
    )


# Of layers.0 rank 0 owns 16 elements, rank 1 12 and rank 2 16; layers.1 is rank 1's alone. Rank 3
# owns nothing.
PLAN = OwnerPlan(
    planner="by_hand",
    world_size=4,
    blocks=(
        BlockPlan(
            "layers.0",
            4,
            (
                placed("layers.0.norm", (4,), RoleKind.TAIL, owner=2),
                placed("layers.0.wq", (4, 4), RoleKind.MATRIX, owner=0),
                placed("layers.0.wo", (4, 3), RoleKind.MATRIX, owner=1),
                placed("layers.0.bias", (2,), RoleKind.TAIL, owner=2),
                placed("layers.0.base", (2, 5), RoleKind.FROZEN, owner=2),
            ),
        ),
        BlockPlan("layers.1", 4, (placed("layers.1.wq", (4, 4), RoleKind.MATRIX, owner=1),)),
    ),
    chosen="by_hand",
)


def test_fragments_take_the_place_of_the_whole():
    """A tensor-parallel rank's block: the same owners and order, some parts empty."""
    block = PLAN.blocks[0]
    shapes = {
        "layers.0.norm": (4,),
        "layers.0.wq": (2, 4),
        "layers.0.wo": (0, 3),
        "layers.0.bias": (2,),
        "layers.0.base": (2, 3),
    }
    fragments = block.fragmented(shapes)
    assert [(s.fqn, s.owner) for s in fragments.shards] == [(s.fqn, s.owner) for s in block.shards]
    assert {s.fqn: s.shape for s in fragments.shards} == shapes
    assert [fragments.owned_numel(rank) for rank in range(4)] == [8, 0, 12, 0]
    assert fragments.numel == 20
    OwnerPlan(planner="by_hand", world_size=4, blocks=(fragments,), chosen="by_hand")  # valid
    assert fragments.trainable().numel == 14
    assert block.fragmented({s.fqn: s.shape for s in block.shards}) == block


def with_shard(fqn: str, /, **changes: Any) -> OwnerPlan:
    """PLAN, built anew with one shard changed."""
    blocks = tuple(
        replace(
            block,
            shards=tuple(replace(s, **changes) if s.fqn == fqn else s for s in block.shards),
        )
        for block in PLAN.blocks
    )
    return replace(PLAN, blocks=blocks)


def with_first_block(change: Callable[[BlockPlan], BlockPlan]) -> OwnerPlan:
    return replace(PLAN, blocks=(change(PLAN.blocks[0]), PLAN.blocks[1]))


def test_sizes_of_a_block():
    block = PLAN.block("layers.0")
    assert (block.numel, block.nbytes) == (44, 176)
    assert block.owners == (0, 1, 2)
    assert [block.owned_numel(rank) for rank in range(4)] == [16, 12, 16, 0]
    assert [block.owned_bytes(rank) for rank in range(4)] == [64, 48, 64, 0]
    assert block.gamma == 4 * 64 / 176
    assert [PLAN.block("layers.1").owned_numel(rank) for rank in range(4)] == [0, 16, 0, 0]


def test_sizes_of_a_plan():
    assert PLAN.rank_bytes() == (64, 112, 64, 0)
    assert [PLAN.owned_bytes(rank) for rank in range(4)] == [64, 112, 64, 0]
    assert PLAN.imbalance == 112 / 60
    assert PLAN.gammas() == (4 * 64 / 176, 4.0)
    assert PLAN.num_roles == 5


def test_mixed_dtypes_count_in_bytes():
    plan = with_shard("layers.0.wo", dtype="bfloat16", itemsize=2)
    assert plan.shard("layers.0.wo").nbytes == 24
    assert plan.rank_bytes() == (64, 88, 64, 0)
    assert plan.block("layers.0").gamma == 4 * 64 / 152


def test_look_ups():
    assert PLAN.shard("layers.0.wo").owner == 1
    assert PLAN.shard("layers.0._checkpoint_wrapped_module.wo") is PLAN.shard("layers.0.wo")
    with pytest.raises(KeyError, match=r"no parameter 'tok_embeddings\.weight'.*6 parameters"):
        PLAN.shard("tok_embeddings.weight")
    with pytest.raises(KeyError, match=r"no block 'layers\.2'.*layers\.1"):
        PLAN.block("layers.2")


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_group_are_refused(rank):
    block = PLAN.block("layers.0")
    for ask in (PLAN.owned_bytes, block.owned_numel, block.owned_bytes):
        with pytest.raises(ValueError, match=f"rank {rank} .*legal: 0 to 3"):
            ask(rank)


@pytest.mark.parametrize(
    ("mutate", "fragments"),
    [
        (
            lambda: with_shard("layers.1.wq", fqn="layers.0.wq"),
            ["layers.0.wq", "block 'layers.0'", "again in block 'layers.1'", "once"],
        ),
        (
            lambda: replace(PLAN, blocks=(PLAN.blocks[0], PLAN.blocks[0])),
            ["block 'layers.0'", "twice"],
        ),
        (lambda: with_shard("layers.0.wq", owner=4), ["layers.0.wq", "owner is 4", "0 to 3"]),
        (lambda: with_shard("layers.0.wq", owner=-1), ["layers.0.wq", "owner is -1", "0 to 3"]),
        (
            lambda: with_shard("layers.0.bias", owner=3),
            ["layers.0.bias", "owner is 3", "legal: 2", "tail", "layers.0.norm"],
        ),
        (
            lambda: with_shard("layers.0.bias", kind=RoleKind.MATRIX),
            ["layers.0.bias", "kind is 'matrix'", "(2,)", "2D"],
        ),
        (
            lambda: with_shard("layers.0.wq", trainable=False),
            ["layers.0.wq", "kind is 'matrix'", "trainable=False"],
        ),
        (
            lambda: with_shard("layers.0.base", trainable=True),
            ["layers.0.base", "kind is 'frozen'", "trainable=True"],
        ),
        (
            lambda: with_shard("layers.0.wq", block="layers.1"),
            ["layers.0.wq", "block is 'layers.1'", "'layers.0'"],
        ),
        (
            lambda: with_first_block(lambda b: replace(b, world_size=8)),
            ["block 'layers.0'", "world_size is 8", "4"],
        ),
        (lambda: replace(PLAN, world_size=0), ["world_size is 0", ">= 1"]),
    ],
)
def test_a_broken_plan_cannot_be_built(mutate, fragments):
    with pytest.raises(PlanError) as error:
        mutate()
    message = str(error.value)
    assert not [part for part in fragments if part not in message], message


def test_ranks_that_own_empty_parameters_only_are_owners_of_nothing():
    shards = (
        placed("a.e0", (0, 3), RoleKind.MATRIX, owner=0),
        placed("a.e1", (0,), RoleKind.TAIL, owner=1),
        placed("a.w1", (1, 5), RoleKind.MATRIX, owner=3),
        placed("a.e2", (0, 1), RoleKind.MATRIX, owner=3),
    )
    block = OwnerPlan("by_hand", 4, (BlockPlan("a", 4, shards),), "by_hand").block("a")
    assert block.owners == (0, 1, 3)
    assert [block.owned_numel(rank) for rank in range(4)] == [0, 0, 0, 5]
    assert block.gamma == 4.0


def test_the_trainable_part_of_a_block():
    block = PLAN.block("layers.0")
    part = block.trainable()
    assert [shard.fqn.rpartition(".")[2] for shard in part.shards] == ["norm", "wq", "wo", "bias"]
    assert (part.name, part.world_size, part.numel, part.owners) == ("layers.0", 4, 34, (0, 1, 2))
    assert [part.owned_numel(rank) for rank in range(4)] == [16, 12, 6, 0]
    assert block.numel == 44, "the gathered block still has the frozen weights"
    assert part.trainable() is part


def test_json_is_canonical_and_complete():
    text = PLAN.to_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    record = json.loads(text)
    assert (record["planner"], record["world_size"]) == ("by_hand", 4)
    assert record["blocks"][0]["shards"][1] == {
        "fqn": "layers.0.wq",
        "shape": [4, 4],
        "dtype": "float32",
        "itemsize": 4,
        "kind": "matrix",
        "trainable": True,
        "owner": 0,
    }


CHANGED = [
    (
        lambda: replace(PLAN, planner="other"),
        "the plan's planner is 'by_hand' here and 'other' there",
    ),
    (
        lambda: replace(PLAN, chosen="other"),
        "the plan's chosen is 'by_hand' here and 'other' there",
    ),
    (
        lambda: replace(
            PLAN, world_size=5, blocks=tuple(replace(b, world_size=5) for b in PLAN.blocks)
        ),
        "the plan's world_size is 4 here and 5 there",
    ),
    (
        lambda: with_shard("layers.1.wq", owner=2),
        "block 'layers.1', parameter 'layers.1.wq': owner is 1 here and 2 there",
    ),
    (
        lambda: with_shard("layers.0.wq", shape=(2, 8)),
        "block 'layers.0', parameter 'layers.0.wq': shape is [4, 4] here and [2, 8] there",
    ),
    (
        lambda: with_shard("layers.0.wo", dtype="bfloat16"),
        "block 'layers.0', parameter 'layers.0.wo': dtype is 'float32' here and 'bfloat16' there",
    ),
    (
        lambda: with_shard("layers.0.wo", fqn="layers.0.wv"),
        "block 'layers.0', parameter 2 is 'layers.0.wo' here and 'layers.0.wv' there",
    ),
    (lambda: replace(PLAN, blocks=PLAN.blocks[:1]), "block 1 is 'layers.1' here and absent there"),
    (
        lambda: replace(PLAN, blocks=PLAN.blocks[::-1]),
        "block 0 is 'layers.0' here and 'layers.1' there",
    ),
    (
        lambda: with_first_block(
            lambda b: replace(b, shards=tuple(s for s in b.shards if s.fqn != "layers.0.bias"))
        ),
        "block 'layers.0', parameter 3 is 'layers.0.bias' here and 'layers.0.base' there",
    ),
]


@pytest.mark.parametrize(("change", "difference"), CHANGED, ids=[text for _, text in CHANGED])
def test_any_change_alters_the_fingerprint_and_is_named(change, difference):
    changed = change()
    assert changed.fingerprint != PLAN.fingerprint
    assert PLAN.first_difference(changed.to_json()) == difference


def test_equal_plans_have_no_difference():
    copy = OwnerPlan(PLAN.planner, PLAN.world_size, PLAN.blocks, PLAN.chosen)
    assert copy == PLAN
    assert copy.fingerprint == PLAN.fingerprint
    assert PLAN.first_difference(copy.to_json()) is None


def test_a_field_of_another_version_is_named():
    record = json.loads(PLAN.to_json())
    record["format"] = 2
    assert PLAN.first_difference(json.dumps(record)) == "the plan's format is None here and 2 there"
