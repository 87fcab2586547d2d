"""Which replica of a hybrid-sharded model steps which matrix.

Under HSDP every replica has the same owner plan, so R ranks own each matrix and would all run the
same optimizer step on it. Partitioned, each matrix is stepped on one of them, which sends the
result to the others: the matrix optimizer's work and state fall by the number of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan_matrixfsdp.layout.costs import muon_flops
from torchtitan_matrixfsdp.layout.greedy import largest_first
from torchtitan_matrixfsdp.layout.plan import OwnerPlan
from torchtitan_matrixfsdp.layout.roles import RoleKind


def assign_replicas(plan: OwnerPlan, replicas: int) -> Mapping[str, int]:
    """Returns the replica, from 0, that steps each matrix of the plan, by FQN.

    The owners of one shard rank share that rank's matrices among them: the largest first by
    Newton-Schulz FLOPs, each to the replica with the least so far, the lowest among equals. The
    largest share is thus at most the mean plus one matrix.

    Raises:
        ValueError: fewer than one replica.
    """
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; legal: >= 1")
    owned: dict[int, list[tuple[int, str]]] = {}
    for block in plan.blocks:
        for shard in block.shards:
            if shard.kind is RoleKind.MATRIX:
                cost = muon_flops(shard.shape, steps=1)
                owned.setdefault(shard.owner, []).append((-cost, shard.fqn))
    assigned: dict[str, int] = {}
    for matrices in owned.values():
        matrices.sort()
        shared_out = largest_first([-negated for negated, _ in matrices], replicas)
        assigned |= {fqn: r for (_, fqn), r in zip(matrices, shared_out, strict=True)}
    # In the order of the blocks: forward will need them so.
    in_order = (shard.fqn for block in plan.blocks for shard in block.shards)
    return {fqn: assigned[fqn] for fqn in in_order if fqn in assigned}
