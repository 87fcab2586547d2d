"""HSDP with partitioned replicas: each matrix is stepped on one replica and sent to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.test_trainer import HSDP, SMALL
from tests.distributed.toy import (
    Run,
    Sharded,
    full_state,
    make_toy,
    max_difference,
    mesh_of,
    metas_of,
    owner_parameters,
    route_toy,
    shard_toy,
    train,
    train_oracle,
)
from tests.distributed.trainer import Record, run_job
from tests.harness import run_ranks
from tests.support import CorpusPaths
from torchtitan_matrixfsdp.comm import Traffic
from torchtitan_matrixfsdp.layout import assign_replicas, broadcast_volume, make_plan, muon_flops
from torchtitan_matrixfsdp.runtime import Owner, OwnerDTensor

STEPS = 5


def _momentum(sharded: Sharded) -> list[OwnerDTensor]:
    states = sharded.optimizers[0].state.values()
    return [state["momentum_buffer"] for state in states]


def _expected_updates(sharded: Sharded, replicas: int) -> Traffic:
    """What this rank sends in one step's updates, from the plan alone."""
    total = Traffic()
    steppers = assign_replicas(sharded.plan, replicas)
    for fqn, param in owner_parameters(sharded.model).items():
        if fqn in steppers and param.is_owner:
            mine = param.device_mesh.get_local_rank(0)
            volume = broadcast_volume(param.numel(), steppers[fqn], mine, replicas)
            total += Traffic(volume.elements * 8, volume.messages)
    return total


def _toy(replicas: int) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(partitioned=True, accumulation=2, deferred_all_reduce=True)
    sharded = shard_toy(make_toy(), mesh_of(replicas, ranks), run)
    train(sharded, run, STEPS, rank, ranks)
    # The last updates are still on their way: reading waits for them.
    difference = max_difference(sharded.model, train_oracle(STEPS, run.accumulation))
    momentum = _momentum(sharded)
    whole = [m.full_tensor() for m in momentum]
    return {
        "difference": difference,
        "state numel": sum(m.to_local().numel() for m in momentum),
        "owned numel": sum(
            p.to_local().numel() for p in owner_parameters(sharded.model).values() if p.ndim == 2
        ),
        "placements": {type(p) for m in momentum for p in m.placements},
        "momentum": [m.sum().item() for m in whole],
        "updates": (sharded.counter.total("update"), _expected_updates(sharded, replicas)),
        "weights": {n: w.sum().item() for n, w in full_state(sharded.model).items()},
    }


def test_partitioned_replicas_equal_one_process() -> None:
    """Float64, replicas 2 x shards 2 and 4 x 1: the oracle's weights; every matrix has its state on
    one replica alone, and what is sent is each matrix once around the replicas."""
    for replicas in (2, 4):
        found = run_ranks(_toy, 4, replicas)
        matrix_numel = sum(p.numel() for n, p in _toy_matrices())
        assert sum(rank["state numel"] for rank in found) == matrix_numel
        assert sum(rank["owned numel"] for rank in found) == replicas * matrix_numel
        for rank in found:
            assert rank["difference"] < 1e-12
            assert rank["placements"] == {Owner}
            assert rank["momentum"] == found[0]["momentum"]
            assert rank["weights"] == found[0]["weights"], "replicas drifted apart"
            sent, expected = rank["updates"]
            assert sent == Traffic(STEPS * expected.sent_bytes, STEPS * expected.messages)
        assert sum(rank["updates"][0].sent_bytes for rank in found) == (
            STEPS * (replicas - 1) * matrix_numel * 8
        )


def _toy_matrices() -> list[tuple[str, torch.nn.Parameter]]:
    named = make_toy().named_parameters()
    return [(n, p) for n, p in named if n.startswith("layers") and p.ndim == 2]


def test_the_work_is_divided() -> None:
    """The largest replica's share is at most the mean plus one matrix, for every owner."""
    model = make_toy(layers=6)
    _, blocks = metas_of(model)
    plan = make_plan("cost_aware", blocks, set(route_toy(model).matrices), 2)
    for replicas in (1, 2, 3):
        steppers = assign_replicas(plan, replicas)
        assert list(steppers) == [s.fqn for b in plan.blocks for s in b.shards if s.fqn in steppers]
        for owner in range(2):
            costs = {f: muon_flops(plan.shard(f).shape, 1) for f in steppers}
            owned = [f for f in steppers if plan.shard(f).owner == owner]
            shares = [sum(costs[f] for f in owned if steppers[f] == r) for r in range(replicas)]
            assert max(shares) <= sum(shares) / replicas + max(costs[f] for f in owned)


def _trainer(corpus: CorpusPaths, tmp: Path) -> dict[str, Record]:
    job = [*SMALL, *HSDP, "--lr_scheduler.total_steps=5"]
    partitioned = [*job, "--owner_fsdp.replicas=partitioned"]
    checkpoint = ["--checkpoint.enable", "--checkpoint.interval=2"]
    records = {
        "redundant": run_job([*job, "--training.steps=5"], corpus, tmp / "redundant"),
        "partitioned": run_job([*partitioned, "--training.steps=5"], corpus, tmp / "partitioned"),
    }
    # The last save holds the weights while they may still be on their way.
    run_job([*partitioned, *checkpoint, "--training.steps=2"], corpus, tmp / "parts")
    again = [*partitioned, *checkpoint, "--training.steps=5"]
    records["resumed"] = run_job(again, corpus, tmp / "parts")
    # Redundant replicas read what partitioned ones saved: state by name, whoever stepped it.
    other = [*job, *checkpoint, "--training.steps=5", "--checkpoint.load_step=2"]
    records["resumed redundant"] = run_job(other, corpus, tmp / "parts")
    return records


def test_partitioned_equals_redundant_through_the_trainer(
    corpus_dir: CorpusPaths, tmp_path: Path
) -> None:
    """Replicas 2 x shards 2: the same bits as when every replica steps, also after a resume, and
    after a resume in the other mode."""
    for found in run_ranks(_trainer, 4, corpus_dir, tmp_path, timeout_s=280):
        plain = found["redundant"]
        assert len(plain.losses) == 5
        assert found["partitioned"].losses == plain.losses
        assert found["partitioned"].norms == plain.norms
        assert found["partitioned"].final == plain.final
        for name in ("resumed", "resumed redundant"):
            assert found[name].losses == plain.losses[2:], name
            assert found[name].final == plain.final, name
