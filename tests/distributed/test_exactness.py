"""float64 training equals one process, for every world size, planner and FSDP2 option."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.distributed.toy import (
    TRANSPORTS,
    OracleWeights,
    Run,
    kinds_of,
    make_toy,
    max_difference,
    mesh_of,
    oracle_weights,
    shard_toy,
    train,
)
from tests.harness import run_ranks
from torchtitan_matrixfsdp.optim import STOCK_STEPS

STEPS = 20
LAYERS = 2
# 20 steps in float64 with float64 Newton-Schulz: what differs from one process is the order of
# summation over ranks (1e-16 per gradient), amplified by the orthogonalisation. 1e-15 is seen.
TOLERANCE = 1e-12

RUNS = {
    "plain": Run(),
    "role_greedy": Run(planner="role_greedy"),
    "scope_greedy": Run(planner="scope_greedy"),
    "accumulate": Run(accumulation=3),
    "accumulate deferred": Run(accumulation=3, deferred=True),
    "checkpointing": Run(checkpointing=True),
    "checkpointing, accumulate": Run(checkpointing=True, accumulation=3),
    "no reshard": Run(reshard=False),
    "explicit prefetch": Run(explicit_prefetch=True),
    "async unshard": Run(async_unshard=True),
    "deferred all-reduce": Run(accumulation=3, deferred_all_reduce=True),
    "evaluate between steps": Run(evaluate=True),
    "layers run twice": Run(repeat=2),
    **{f"stock {step}": Run(mode="stock", stock_step=step) for step in STOCK_STEPS},
}


def _train_all(replicas: int, oracles: OracleWeights) -> dict[str, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    differences = {}
    for index, (name, run) in enumerate(RUNS.items()):
        # Another transport for the same options at each world size; some release late, as on a GPU.
        transport = TRANSPORTS[(index + ranks + replicas) % len(TRANSPORTS)]
        is_late = (index // len(TRANSPORTS) + ranks) % 2 == 0
        run = replace(run, transport=transport, defer_release=is_late)
        sharded = shard_toy(make_toy(layers=LAYERS), mesh_of(replicas, ranks), run)
        train(sharded, run, STEPS, rank, ranks)
        differences[f"{name}, {transport}"] = max_difference(
            sharded.model, oracles[run.accumulation, run.repeat]
        )
    return differences


@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [(1, 1), (2, 1), (3, 1), (4, 2), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_float64_equals_one_process(ranks: int, replicas: int) -> None:
    """Cases 1, 2, 3, 4 and 19: whole matrices, one step per batch, sums, gloo, W = 1; every
    transport at every world size."""
    oracles = oracle_weights(STEPS, kinds_of(RUNS.values()), LAYERS)
    for differences in run_ranks(_train_all, ranks, replicas, oracles, timeout_s=240):
        assert [what.rpartition(", ")[0] for what in differences] == list(RUNS)
        assert {what.rpartition(", ")[2] for what in differences} == set(TRANSPORTS)
        assert max(differences.values()) < TOLERANCE, differences
