from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.models import (
    SMALL,
    Model,
    models,
    param,
    transformer,
    weights,
    weights_model,
    world_sizes,
)
from torchtitan_matrixfsdp.layout import (
    PLANNERS,
    BlockMeta,
    OwnerPlan,
    PlanError,
    RoleKind,
    build_roles,
    make_plan,
)

planner_names = st.sampled_from(sorted(PLANNERS))
every_planner = pytest.mark.parametrize("planner", sorted(PLANNERS))

# Tails of 5 and 1 elements beside weights of 6, 4 and 7: small enough to plan on paper.
TWO_BLOCKS = Model(
    (
        BlockMeta("a", (param("a.bias", (5,)), param("a.w1", (2, 3)), param("a.w2", (2, 2)))),
        BlockMeta("b", (param("b.w", (1, 7)), param("b.bias", (1,)))),
    ),
    frozenset({"a.w1", "a.w2", "b.w"}),
)


def owners_of(plan: OwnerPlan) -> dict[str, int]:
    return {shard.fqn: shard.owner for block in plan.blocks for shard in block.shards}


def planned(planner: str, model: Model, world_size: int) -> OwnerPlan:
    return make_plan(planner, model.blocks, model.matrices, world_size)


def test_role_greedy_by_hand():
    # a: 6 -> r0, 4 -> r1, tail 5 -> r1 (loads 6, 9); b: 7 -> r0 (13, 9), tail 1 -> r1.
    plan = planned("role_greedy", TWO_BLOCKS, 2)
    assert owners_of(plan) == {"a.w1": 0, "a.w2": 1, "a.bias": 1, "b.w": 0, "b.bias": 1}
    assert plan.rank_bytes() == (4 * 13, 4 * 10)
    assert [shard.fqn for shard in plan.block("a").shards] == ["a.bias", "a.w1", "a.w2"]


def test_role_greedy_places_even_the_largest_tail_last():
    model = Model((BlockMeta("a", (param("a.b", (9,)), param("a.w", (1, 2)))),), frozenset({"a.w"}))
    assert owners_of(planned("role_greedy", model, 2)) == {"a.w": 0, "a.b": 1}
    assert owners_of(planned("scope_greedy", model, 2)) == {"a.b": 0, "a.w": 1}


def test_scope_greedy_by_hand():
    # 7 (b.w) -> r0, 6 (a.w1) -> r1, 5 (a's tail) -> r1, 4 (a.w2) -> r0, 1 (b's tail) -> r0.
    plan = planned("scope_greedy", TWO_BLOCKS, 2)
    assert owners_of(plan) == {"b.w": 0, "a.w1": 1, "a.bias": 1, "a.w2": 0, "b.bias": 0}
    assert plan.rank_bytes() == (4 * 12, 4 * 11)


@every_planner
def test_ties_go_to_the_first_role_and_the_lowest_rank(planner):
    plan = planned(planner, weights_model(weights("a", 3, 3, 3), weights("b", 3, 3)), 4)
    assert owners_of(plan) == {"a.w0": 0, "a.w1": 1, "a.w2": 2, "b.w0": 3, "b.w1": 0}


def test_cost_aware_takes_scope_where_it_balances_better():
    # The hand-made model: largest rank 13 against 12, worst workspace 2*9 against 2*11 <= 1.35*18.
    plan = planned("cost_aware", TWO_BLOCKS, 2)
    assert (plan.planner, plan.chosen) == ("cost_aware", "scope_greedy")
    assert owners_of(plan) == owners_of(planned("scope_greedy", TWO_BLOCKS, 2))


def test_cost_aware_keeps_role_where_scope_is_no_better():
    plan = planned("cost_aware", weights_model(weights("a", 2, 2), weights("b", 2, 2)), 2)
    assert (plan.planner, plan.chosen) == ("cost_aware", "role_greedy")


def test_cost_aware_keeps_role_where_the_workspace_forbids_scope():
    # scope: loads 6 and 10 against 11 and 5, so better; but both weights of a fall to rank 1, and
    # its workspace 2*10 exceeds 1.35 times role's worst, 2*6. Its padding, 2, would be legal.
    model = weights_model(weights("a", 5, 5), weights("b", 6))
    assert planned("scope_greedy", model, 2).rank_bytes() == (4 * 6, 4 * 10)
    assert planned("role_greedy", model, 2).rank_bytes() == (4 * 11, 4 * 5)
    assert planned("cost_aware", model, 2).chosen == "role_greedy"


def test_cost_aware_accepts_the_workspace_just_inside_its_limit():
    # The same shape of model with 2*8 against 1.35 * 2*6 = 16.2.
    assert planned("cost_aware", weights_model(weights("a", 4, 4), weights("b", 6)), 2).chosen == (
        "scope_greedy"
    )


@pytest.mark.parametrize(("world_size", "chosen"), [(3, "scope_greedy"), (4, "role_greedy")])
def test_cost_aware_keeps_role_where_the_padding_forbids_scope(world_size, chosen):
    # One weight per block: padding is W under any plan, and legal up to 3.0. The last block's
    # weight lands on a rank already loaded under role, but alone under scope.
    blocks = [weights(f"b{i}", 1) for i in range(world_size)] + [weights("big", 4)]
    model = weights_model(*blocks)
    role, scope = (
        planned("role_greedy", model, world_size),
        planned("scope_greedy", model, world_size),
    )
    assert max(scope.rank_bytes()) < max(role.rank_bytes())
    assert planned("cost_aware", model, world_size).chosen == chosen


def test_load_is_carried_across_blocks():
    """A plan per block restarts at rank 0 each time; one plan for all blocks spreads the surplus.

    7 matrices per block at W=32: the fullest rank must store near the mean, not 6 times as much.
    """
    model = transformer(layers=32)
    for planner in PLANNERS:
        assert planned(planner, model, 32).imbalance < 1.3

    restarted = [0] * 32
    for block in model.blocks:
        own = frozenset(p.fqn for p in block.params) & model.matrices
        for rank, owned in enumerate(make_plan("role_greedy", [block], own, 32).rank_bytes()):
            restarted[rank] += owned
    assert max(restarted) / (sum(restarted) / 32) > 6


@SMALL
@given(models(), world_sizes, planner_names)
def test_a_plan_covers_every_parameter_exactly_once(model, world_size, planner):
    plan = planned(planner, model, world_size)
    assert [block.name for block in plan.blocks] == [block.name for block in model.blocks]
    for meta, block in zip(model.blocks, plan.blocks, strict=True):
        # Everything that the block's parameters say of themselves is in the plan, in their order.
        assert [(s.fqn, s.shape, s.dtype, s.itemsize, s.trainable) for s in block.shards] == [
            (p.fqn, p.shape, p.dtype, p.itemsize, p.trainable) for p in meta.params
        ]
        assert sum(block.owned_numel(rank) for rank in range(world_size)) == block.numel
    matrices = {s.fqn for b in plan.blocks for s in b.shards if s.kind is RoleKind.MATRIX}
    assert matrices == model.matrices
    assert plan.num_roles == sum(len(b) for b in build_roles(model.blocks, model.matrices))
    assert sum(plan.rank_bytes()) == sum(p.nbytes for p in model.params)


@SMALL
@given(models(), world_sizes, planner_names)
def test_gamma_has_the_largest_role_as_its_floor(model, world_size, planner):
    plan = planned(planner, model, world_size)
    roles = build_roles(model.blocks, model.matrices)
    for block, block_roles, gamma in zip(plan.blocks, roles, plan.gammas(), strict=True):
        largest = max((role.nbytes for role in block_roles), default=0)
        floor = world_size * largest / block.nbytes if block.nbytes else 1.0
        assert max(1.0, floor) - 1e-9 <= gamma <= world_size + 1e-9


@SMALL
@given(models(), world_sizes, st.sampled_from(["role_greedy", "scope_greedy"]))
def test_greedy_rank_loads_differ_by_at_most_the_largest_role(model, world_size, planner):
    loads = planned(planner, model, world_size).rank_bytes()
    roles = build_roles(model.blocks, model.matrices)
    largest = max((role.nbytes for block in roles for role in block), default=0)
    assert max(loads) - min(loads) <= largest


@SMALL
@given(models(), world_sizes, planner_names, st.randoms(use_true_random=False))
def test_a_plan_is_the_same_on_every_call_and_for_every_set_order(model, world_size, planner, rng):
    first = planned(planner, model, world_size)
    shuffled = sorted(model.matrices)
    rng.shuffle(shuffled)
    again = make_plan(planner, list(model.blocks), dict.fromkeys(shuffled).keys(), world_size)
    assert again == first
    assert again.fingerprint == first.fingerprint


_PRINT_FINGERPRINTS = """
from tests.unit.layout.models import transformer
from torchtitan_matrixfsdp.layout import PLANNERS, make_plan
model = transformer(layers=5)
for planner in sorted(PLANNERS):
    print(make_plan(planner, model.blocks, set(model.matrices), 6).fingerprint)
"""


def test_a_plan_does_not_depend_on_the_hash_seed():
    expected = [planned(planner, transformer(5), 6).fingerprint for planner in sorted(PLANNERS)]
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        output = subprocess.run(
            [sys.executable, "-c", _PRINT_FINGERPRINTS],
            env=env,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert output.split() == expected


@every_planner
@pytest.mark.parametrize("count", [1, 5, 19])
def test_ranks_without_a_role_are_legal(planner, count):
    """Case 20: counts of matrices that don't divide by W=8, or that leave ranks with nothing."""
    model = weights_model(weights("a", *range(1, count + 1)))
    plan = planned(planner, model, 8)
    owning = {shard.owner for shard in plan.block("a").shards}
    assert len(owning) == min(count, 8)
    for rank in set(range(8)) - owning:
        assert plan.owned_bytes(rank) == 0
        assert plan.block("a").owned_numel(rank) == 0


@every_planner
def test_one_rank_owns_everything(planner):
    plan = planned(planner, TWO_BLOCKS, 1)
    assert set(owners_of(plan).values()) == {0}
    assert plan.gammas() == (1.0, 1.0)
    assert plan.imbalance == 1.0


@every_planner
def test_a_plan_without_blocks_is_legal(planner):
    plan = make_plan(planner, [], frozenset(), 4)
    assert (plan.rank_bytes(), plan.num_roles, plan.imbalance) == ((0, 0, 0, 0), 0, 1.0)


def test_frozen_weights_are_spread_like_matrices():
    block = BlockMeta("a", tuple(param(f"a.w{i}", (4, 4), trainable=False) for i in range(4)))
    plan = make_plan("role_greedy", [block], frozenset(), 4)
    assert plan.rank_bytes() == (64, 64, 64, 64)
    assert {shard.kind for shard in plan.block("a").shards} == {RoleKind.FROZEN}


def test_unknown_planner():
    with pytest.raises(ValueError) as error:
        make_plan("greedy", [], frozenset(), 2)
    message = str(error.value)
    assert "owner_fsdp.planner = 'greedy'" in message
    assert all(repr(name) in message for name in PLANNERS)


@pytest.mark.parametrize("world_size", [0, -1])
def test_world_size_below_one(world_size):
    with pytest.raises(PlanError, match=f"world_size is {world_size}; legal: >= 1"):
        make_plan("role_greedy", [], frozenset(), world_size)


def test_a_parameter_or_block_given_twice_is_refused():
    block = weights("a", 2, 2)
    with pytest.raises(PlanError, match="block 'a' is listed twice"):
        planned("role_greedy", weights_model(block, block), 2)
    twice = BlockMeta("a", (*block.params, block.params[0]))
    with pytest.raises(PlanError, match=r"a\.w0: listed in block 'a' and again in block 'a'"):
        planned("role_greedy", weights_model(twice), 2)


def test_thousands_of_ranks_and_tens_of_thousands_of_roles():
    """No time is asserted; a planner of quadratic cost would hold up the whole suite here."""
    model = transformer(layers=2500, dim=8, hidden=24)
    plan = planned("cost_aware", model, 4096)
    assert plan.num_roles == 2500 * 8
    assert plan.imbalance < 2
    assert len(plan.fingerprint) == 64
