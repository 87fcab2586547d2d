"""Places roles on ranks: three pure functions with a stable order.

A planner sees the roles of all blocks at once, so load carries from block to block. Planning each
block on its own would restart from rank 0 every time and pile the surplus there: a transformer
with 7 matrices per block at W=32 would store more than 6 times the mean on its fullest rank.

All three weigh a role by its elements. Sorting keys and the argmin end in an index or a rank, so
ties never depend on the order of a set, on hashing or on the process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from torchtitan_matrixfsdp.layout._messages import config_message
from torchtitan_matrixfsdp.layout.block_plan import (
    BlockPlan,
    MatrixShard,
    check_world_size,
)
from torchtitan_matrixfsdp.layout.costs import gamma
from torchtitan_matrixfsdp.layout.params import BlockMeta
from torchtitan_matrixfsdp.layout.plan import OwnerPlan
from torchtitan_matrixfsdp.layout.roles import Role, RoleKind, build_roles

# What scope_greedy may cost before cost_aware refuses it (limits of the MatrixFSDP authors).
_WORKSPACE_LIMIT = 1.35
_PADDING_LIMIT = 3.0

BlockRoles: TypeAlias = Sequence[Sequence[Role]]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A planner's answer: ``owners[b][i]`` is the rank of role i of block b.

    ``chosen`` names the planner whose placement this is.
    """

    chosen: str
    owners: tuple[tuple[int, ...], ...]


Planner: TypeAlias = Callable[[BlockRoles, int], Assignment]


class _Ranks:
    """Ranks by cumulative load; hands out the least loaded one, the lowest rank among equals."""

    def __init__(self, world_size: int) -> None:
        self._heap = [(0, rank) for rank in range(world_size)]  # sorted, hence already a heap

    def take(self, numel: int) -> int:
        """Returns argmin over ranks of (load, rank), and adds ``numel`` to that rank's load."""
        load, rank = self._heap[0]
        heapq.heapreplace(self._heap, (load + numel, rank))
        return rank


def role_greedy(roles: BlockRoles, world_size: int) -> Assignment:
    """Places block after block: weights by (-numel, index), then the tail, each on the argmin.

    The tail comes last even where it outweighs the block's weights. Load carries to the next
    block.
    """
    ranks = _Ranks(world_size)
    owners = []
    for block in roles:
        block_owners = [0] * len(block)
        for role in sorted(block, key=lambda r: (r.kind is RoleKind.TAIL, -r.numel, r.index)):
            block_owners[role.index] = ranks.take(role.numel)
        owners.append(tuple(block_owners))
    return Assignment("role_greedy", tuple(owners))


def scope_greedy(roles: BlockRoles, world_size: int) -> Assignment:
    """Pools the roles of all blocks, by (-numel, block, role index), each on the argmin.

    Tails are pooled like any role: only their size counts. A tail's index is its block's highest,
    so it follows the weights of its own block that have the same size.
    """
    ranks = _Ranks(world_size)
    owners = [[0] * len(block) for block in roles]
    pool = [(-role.numel, b, role.index) for b, block in enumerate(roles) for role in block]
    for negated, b, index in sorted(pool):
        owners[b][index] = ranks.take(-negated)
    return Assignment("scope_greedy", tuple(tuple(block) for block in owners))


@dataclass(frozen=True, slots=True)
class _Score:
    """A whole assignment in elements: two measures of the ranks, two of the worst block."""

    largest_rank: int
    rank_spread: int  # largest rank - smallest rank
    workspace: int  # the worst block's W * max_r L_r
    padding: float  # the worst block's W * max_r L_r / P_B


def _score(roles: BlockRoles, assignment: Assignment, world_size: int) -> _Score:
    loads = [0] * world_size
    workspace = 0
    padding = 1.0
    for block, owners in zip(roles, assignment.owners, strict=True):
        owned: dict[int, int] = {}
        for role, owner in zip(block, owners, strict=True):
            owned[owner] = owned.get(owner, 0) + role.numel
            loads[owner] += role.numel
        shares = tuple(owned.values())
        workspace = max(workspace, world_size * max(shares, default=0))
        padding = max(padding, gamma(world_size, shares, sum(shares)))
    return _Score(max(loads), max(loads) - min(loads), workspace, padding)


def cost_aware(roles: BlockRoles, world_size: int) -> Assignment:
    """Takes scope_greedy where it balances ranks better and no block pays for it, else role_greedy.

    Both assignments are built whole. scope_greedy is taken when it strictly lowers the largest
    rank or the spread between largest and smallest rank, its workspace W * max_r L_r stays within
    1.35 times role_greedy's, and its padding W * max_r L_r / P_B within 3.0. The published rule
    does not say how blocks combine; here each measure is taken at its worst block, the two
    assignments separately. At large W a block's padding exceeds 3.0 whoever plans it, so that
    role_greedy is always taken there.
    """
    by_role = role_greedy(roles, world_size)
    by_scope = scope_greedy(roles, world_size)
    role_score = _score(roles, by_role, world_size)
    scope_score = _score(roles, by_scope, world_size)
    is_better = (
        scope_score.rank_spread < role_score.rank_spread
        or scope_score.largest_rank < role_score.largest_rank
    )
    is_affordable = (
        scope_score.workspace <= _WORKSPACE_LIMIT * role_score.workspace
        and scope_score.padding <= _PADDING_LIMIT
    )
    return by_scope if is_better and is_affordable else by_role


PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {"role_greedy": role_greedy, "scope_greedy": scope_greedy, "cost_aware": cost_aware}
)


def make_plan(
    name: str, blocks: Sequence[BlockMeta], matrices: AbstractSet[str], world_size: int
) -> OwnerPlan:
    """Returns the plan that planner ``name`` makes for the blocks on ``world_size`` ranks.

    ``matrices`` holds the canonical FQNs routed to the matrix optimizer. The result depends on the
    arguments' values only, so every rank of a shard group computes the same plan.

    Raises:
        ValueError: an unknown planner, or a matrix that lies in no block, is frozen or is not 2D.
        PlanError: ``world_size`` below 1, or a block or parameter listed twice.
    """
    planner = PLANNERS.get(name)
    if planner is None:
        legal = ", ".join(repr(known) for known in PLANNERS)
        raise ValueError(
            config_message(
                "owner_fsdp.planner", name, "unknown planner", legal, "use one of these names"
            )
        )
    check_world_size(world_size)
    roles = build_roles(blocks, matrices)
    assignment = planner(roles, world_size)
    block_plans = tuple(
        _block_plan(block, block_roles, owners, world_size)
        for block, block_roles, owners in zip(blocks, roles, assignment.owners, strict=True)
    )
    return OwnerPlan(name, world_size, block_plans, assignment.chosen)


def _block_plan(
    block: BlockMeta, roles: Sequence[Role], owners: Sequence[int], world_size: int
) -> BlockPlan:
    shards: dict[str, MatrixShard] = {}
    for owner, role in zip(owners, roles, strict=True):
        for param in role.params:
            shards[param.fqn] = MatrixShard(
                fqn=param.fqn,
                shape=param.shape,
                dtype=param.dtype,
                itemsize=param.itemsize,
                kind=role.kind,
                trainable=param.trainable,
                block=block.name,
                owner=owner,
            )
    return BlockPlan(block.name, world_size, tuple(shards[param.fqn] for param in block.params))
