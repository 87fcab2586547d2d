"""The baselines' steps on row shards: the oracle's weights, and exactly the bytes of the formulas.

``test_exactness`` trains a whole model with each of them, at several world sizes and with replicas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness import run_ranks
from tests.oracle import OracleMuon
from torchtitan_matrixfsdp.bench.sent import SentBytes
from torchtitan_matrixfsdp.comm import Traffic, TrafficCounter
from torchtitan_matrixfsdp.optim import (
    STOCK_STEP,
    STOCK_STEPS,
    LocalStepOptimizer,
    RowShardMuon,
    stock_muon,
)

STEPS = 3
# Fewer rows than ranks, rows that do not divide, tall, wide and square.
SHAPES = [(16, 8), (3, 10), (1, 4), (9, 9), (6, 20)]
MUON: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}


def _draw(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _compare(
    stock_step: str, mesh: DeviceMesh, shapes: list[tuple[int, int]], ns_dtype: torch.dtype
) -> dict[str, Any]:
    """Three steps of a stock optimizer and of the oracle, from the same gradients."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    generator = torch.Generator().manual_seed(3)
    wholes = [nn.Parameter(_draw(generator, shape)) for shape in shapes]
    params = [nn.Parameter(distribute_tensor(w.detach(), mesh, placements)) for w in wholes]
    counter = TrafficCounter()
    optimizer = LocalStepOptimizer(
        params,
        lambda groups, of_local: stock_muon(
            stock_step, groups, of_local, counter, ns_dtype=ns_dtype, **MUON
        ),
    )
    oracle = OracleMuon(wholes, MUON["lr"], MUON["weight_decay"], MUON["momentum"])
    with SentBytes() as sent:
        for _ in range(STEPS):
            for whole, param in zip(wholes, params, strict=True):
                whole.grad = _draw(generator, tuple(whole.shape))
                param.grad = distribute_tensor(whole.grad, mesh, placements, src_data_rank=None)
            sent.take()
            optimizer.step()
            seen = sent.take()
            oracle.step()
    inner = optimizer.inner
    assert isinstance(inner, RowShardMuon)
    gathered = [param.full_tensor() for param in params]
    return {
        "step": stock_step,
        "difference": max(
            ((a - b).abs().max().item() for a, b in zip(gathered, wholes, strict=True)), default=0.0
        ),
        "counted": counter.total(STOCK_STEP),
        "predicted": sum([inner.predict()] * STEPS, start=Traffic()),
        "seen": STEPS * seen,
        "operations": set(counter.totals),
    }


def _every_step(counts: list[int], ns_dtype: torch.dtype, replicas: int) -> list[dict[str, Any]]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("r", "s"))
    mesh = mesh if replicas > 1 else mesh["s"]
    sets = [[SHAPES[i % len(SHAPES)] for i in range(count)] for count in counts]
    return [_compare(step, mesh, shapes, ns_dtype) for shapes in sets for step in STOCK_STEPS]


@pytest.mark.parametrize(("ranks", "replicas", "counts"), [(8, 1, [5, 19]), (4, 2, [5])], ids=str)
def test_the_oracles_weights_and_the_formulas_bytes(
    ranks: int, replicas: int, counts: list[int]
) -> None:
    """Cases 1, 20 and 24: float64, with Newton-Schulz in float64; counts that do not divide,
    empty rows, the second replica's own group. Three steps amplify rounding to 1e-14."""
    for results in run_ranks(_every_step, ranks, counts, torch.float64, replicas):
        assert len(results) == len(counts) * len(STOCK_STEPS)
        for result in results:
            assert result["difference"] < 1e-12, result
            assert result["counted"] == result["predicted"], result
            assert result["counted"].sent_bytes == result["seen"], result
            assert result["operations"] <= {STOCK_STEP}
            assert result["seen"] > 0


def _two_ranks() -> tuple[dict[str, int], list[str]]:
    mesh = init_device_mesh("cpu", (2,))
    results = [_compare(step, mesh, [(2, 3)], torch.bfloat16) for step in STOCK_STEPS]
    assert all(r["counted"] == r["predicted"] for r in results)
    return {r["step"]: r["seen"] // STEPS for r in results}, _refusals()


def _refusals() -> list[str]:
    """What each constructor says; then what looks alike and is stepped."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))

    def cut(*placements: Any, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(torch.ones(4, 4, dtype=dtype), mesh, placements))

    rows, columns = Shard(0), Shard(1)
    messages = []
    for step, params in (
        ("gather_once", [cut(rows, columns)]),
        ("all_to_all", [cut(columns, Replicate())]),
        ("all_to_all", [cut(rows, Replicate()), cut(Replicate(), rows)]),
        ("gather_once", [cut(rows, Replicate(), dtype=d) for d in (torch.half, torch.float)]),
        ("wait", [cut(rows, Replicate())]),
    ):
        of_local = {p.to_local().detach(): p for p in params if isinstance(p, DTensor)}
        with pytest.raises(ValueError) as raised:
            stock_muon(step, list(of_local), of_local, TrafficCounter())
        messages.append(str(raised.value))
    # A matrix in two cuts is gathered, and not counted; a plain parameter is stepped as it is.
    fragments = cut(rows, columns)
    assert isinstance(fragments, DTensor)
    local = fragments.to_local().detach()
    plain = nn.Parameter(torch.ones(4, 4))
    cases = [(step, plain, plain) for step in STOCK_STEPS]
    for step, param, whole in (("gather", local, fragments), *cases):
        param.grad = torch.ones_like(param)
        before = param.detach().clone()
        counter = TrafficCounter()
        optimizer = stock_muon(step, [param], {param: whole}, counter)
        optimizer.step()
        assert not torch.equal(param, before) and not counter.totals
        if whole is plain:
            assert optimizer.predict() == Traffic()
        else:
            with pytest.raises(ValueError, match='Use "gather" with tensor parallelism'):
                optimizer.predict()
    return messages


def test_dtypes_on_the_wire_and_what_cannot_be_packed() -> None:
    """One 2x3 float64 matrix, worker 0: rank 1's row goes there in 8 bytes per element and comes
    back in Newton-Schulz's 2."""
    (mine, found), (other, _) = run_ranks(_two_ranks, 2)
    assert mine == {"gather": 24, "gather_once": 24, "all_to_all": 3 * 2}
    assert other == {"gather": 24, "gather_once": 24, "all_to_all": 3 * 8}
    two_cuts, columns, groups, dtypes, unknown = found
    assert 'Use "gather" with tensor parallelism' in two_cuts and "(4, 4)" in two_cuts
    assert "legal: Shard(0) on one dimension of the mesh" in columns
    assert "sharded over 2 groups of ranks; legal: one" in groups
    assert "several dtypes ['torch.float16', 'torch.float32']" in dtypes
    assert "received 'wait'; legal: ['gather', 'gather_once', 'all_to_all']" in unknown
