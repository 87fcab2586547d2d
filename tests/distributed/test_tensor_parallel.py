"""Tensor parallelism: owned fragments, the step's exchange, and TorchTitan's trainer on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.optim import Optimizer

from tests.distributed.trainer import add_tiny_flavors, build_trainer, record_metrics, whole_weights
from tests.harness import run_ranks
from tests.support import CorpusPaths
from torchtitan_matrixfsdp.comm import TrafficCounter
from torchtitan_matrixfsdp.cpu_device import use_cpu_device
from torchtitan_matrixfsdp.optim import TP_STEP, LocalStepOptimizer, Muon, Split, TensorParallelMuon
from torchtitan_matrixfsdp.runtime import Owner, OwnerDTensor, owner_local_shape

STEPS = 6
JOB = [
    "--training.seq_len=64",
    "--training.local_batch_size=1",
    "--matrix_optimizer.ns_dtype=float32",
    f"--lr_scheduler.total_steps={STEPS}",
]
TP = ["--parallelism.tensor_parallel_degree=2", "--owner_fsdp.tensor_parallel=gather"]
STOCK = ["--owner_fsdp.mode=stock"]
CHECKPOINT = ["--checkpoint.enable", "--checkpoint.interval=3"]


@dataclass
class Outcome:
    """What one rank saw of a job."""

    losses: list[float]
    norms: list[float]
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]
    sent: tuple[int, int]
    predicted: tuple[int, int]


def _run(overrides: list[str], corpus: CorpusPaths, folder: Path) -> Outcome:
    trainer = build_trainer([*JOB, *overrides], corpus, folder)
    record = record_metrics(trainer)
    (model,) = trainer.model_parts
    initial = {name: weight.clone() for name, weight in whole_weights(model).items()}
    trainer.train()
    sent = model.owner_setup.counter.total(TP_STEP)
    matrix_optimizer = trainer.optimizers.optimizers[0].inner
    predicted = (0, 0)
    if isinstance(matrix_optimizer, TensorParallelMuon):
        step = matrix_optimizer.predict()
        predicted = (step.sent_bytes * STEPS, step.messages * STEPS)
    final = whole_weights(model)
    trainer.close()
    return Outcome(
        record.losses, record.norms, initial, final, (sent.sent_bytes, sent.messages), predicted
    )


def _oracle(corpus: CorpusPaths, tmp: Path) -> Outcome:
    """DDP on as many ranks as the tensor-parallel job has data-parallel ones: the same data."""
    return _run(
        [
            f"--training.steps={STEPS}",
            "--activation_checkpoint.mode=none",
            f"--parallelism.data_parallel_replicate_degree={dist.get_world_size()}",
            "--parallelism.data_parallel_shard_degree=1",
        ],
        corpus,
        tmp,
    )


def _jobs(corpus: CorpusPaths, tmp: Path) -> dict[str, Any]:
    whole = [f"--training.steps={STEPS}"]
    return {
        "tied": _tied(),
        "exchange": _exchange(),
        "zero3": _run([*TP, *whole, "--activation_checkpoint.mode=none"], corpus, tmp / "whole"),
        "stock": _run([*TP, *STOCK, *whole], corpus, tmp / "stock"),
        "first": _run([*TP, *CHECKPOINT, "--training.steps=3"], corpus, tmp / "parts"),
        "second": _run([*TP, *CHECKPOINT, *whole], corpus, tmp / "parts"),
    }


# A column of two ranks holds: rows and columns cut evenly, unevenly and with an empty part, and a
# matrix that both hold whole.
MATRICES: list[tuple[tuple[int, int], list[Any]]] = [
    ((8, 6), [Owner(0), Shard(0)]),
    ((5, 12), [Owner(1), Shard(1)]),
    ((7, 4), [Owner(0), Shard(0)]),
    ((1, 3), [Owner(1), Shard(0)]),
    ((6, 10), [Owner(0), Shard(1)]),
    ((6, 6), [Owner(0), Replicate()]),
    ((4, 10), [Owner(1), Shard(1)]),
]

SPLITS = [None] * (len(MATRICES) - 1) + [Split(1, 5)]


def _exchange() -> dict[str, Any]:
    """Three steps of Muon on fragments and of Muon on whole matrices, from the same gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    column, counter = mesh.get_local_rank("fsdp"), TrafficCounter()
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def fragment(whole: torch.Tensor, placements: list[Any]) -> OwnerDTensor:
        (owner, cut), rank = placements, mesh.get_local_rank("tp")
        part = whole
        if isinstance(cut, Shard):
            chunks = whole.chunk(2, cut.dim)
            part = chunks[rank] if rank < len(chunks) else whole.narrow(cut.dim, 0, 0)
        part = part if column == owner.owner else part[:0]
        assert part.shape == owner_local_shape(mesh, placements, whole.shape)
        return OwnerDTensor.wrap(part.clone(), mesh, placements, whole.shape)

    wholes = [nn.Parameter(draw(shape)) for shape, _ in MATRICES]
    params = [
        nn.Parameter(fragment(w.detach(), p)) for w, (_, p) in zip(wholes, MATRICES, strict=True)
    ]
    options: dict[str, Any] = {
        "lr": 0.1,
        "ns_dtype": torch.bfloat16,
        "adjust_lr": "original",
        "coefficients": "polar_express",
    }
    # Blocks of the whole matrix, across the fragments' edge.
    split = dict(zip(params, SPLITS, strict=True))

    def muon(
        groups: list[dict[str, Any]], of_local: Mapping[torch.Tensor, torch.Tensor]
    ) -> Optimizer:
        local_split = {local: split[p] for local, p in of_local.items() if split[p] is not None}
        return TensorParallelMuon(groups, of_local, counter, split=local_split, **options)

    optimizer = LocalStepOptimizer(params, muon)
    whole_split = {w: s for w, s in zip(wholes, SPLITS, strict=True) if s is not None}
    reference = Muon(wholes, split=whole_split, **options)
    for _ in range(3):
        for whole, param, (shape, placements) in zip(wholes, params, MATRICES, strict=True):
            whole.grad = draw(shape)
            param.grad = fragment(whole.grad, placements)
        optimizer.step()
        reference.step()
    state = optimizer.state
    inner = optimizer.inner
    assert isinstance(inner, TensorParallelMuon)
    return {
        "weights": [torch.equal(p.full_tensor(), w) for p, w in zip(params, wholes, strict=True)],
        "momentum": [
            torch.equal(
                state[p]["momentum_buffer"].full_tensor(), reference.state[w]["momentum_buffer"]
            )
            for p, w in zip(params, wholes, strict=True)
        ],
        "operations": list(counter.totals),
        "sent": counter.total(TP_STEP),
        "predicted": sum([inner.predict()] * 3, start=type(inner.predict())()),
        "column": column,
    }


def _tied() -> dict[str, Any]:
    """Qwen3's tied weight under the plan, on meta: its training needs attention on DTensors."""
    use_cpu_device()
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.qwen3 import qwen3_args

    from torchtitan_matrixfsdp.titan.model import OwnerQwen3
    from torchtitan_matrixfsdp.titan.parallelize import describe_params
    from torchtitan_matrixfsdp.titan.tensor_parallel import apply_tensor_parallel

    add_tiny_flavors()
    with torch.device("meta"):
        model = OwnerQwen3(qwen3_args["tiny"])
    before = describe_params(model)
    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=4)
    apply_tensor_parallel(model, dims, JobConfig())
    return {
        "tied": model.tok_embeddings.weight is model.output.weight,
        "logical": describe_params(model) == before,
        "cut": str(model.layers["0"].attention.wo.weight.placements),
    }


def relative(values: list[float], reference: list[float]) -> float:
    pairs = zip(values, reference, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def largest(weights: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    assert weights.keys() == others.keys()
    return max((weights[n] - others[n]).abs().max().item() for n in weights)


@pytest.mark.timeout(600)
def test_tensor_parallel_equals_ddp(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """float32, tp 2 x shards 2 against DDP on two ranks. TP adds up a row-parallel product in two
    halves, so that losses, norms and weights, which move by 0.06, agree to 1e-5 (3e-7 is seen)."""
    oracle = run_ranks(_oracle, 2, corpus_dir, tmp_path / "ddp", timeout_s=200)[0]
    found = run_ranks(_jobs, 4, corpus_dir, tmp_path / "tp", timeout_s=280)
    _check_exchange([rank["exchange"] for rank in found])
    matrices = [w for n, w in oracle.final.items() if n.startswith("layers.") and w.ndim == 2]
    for name in ("zero3", "stock"):
        outcomes: list[Outcome] = [rank[name] for rank in found]
        for ours in outcomes:
            assert len(ours.losses) == STEPS
            assert largest(ours.initial, oracle.initial) == 0, name
            assert largest(ours.final, ours.initial) > 0.02
            assert relative(ours.losses, oracle.losses) < 1e-5, name
            assert relative(ours.norms, oracle.norms) < 1e-5, name
            assert largest(ours.final, oracle.final) < 1e-5, name
            assert ours.sent == ours.predicted
            # Replicas on the tp mesh are the same bits, and so is what every rank gathers.
            assert ours.losses == outcomes[0].losses and ours.norms == outcomes[0].norms
            assert largest(ours.final, outcomes[0].final) == 0
        # Each matrix in two halves: one goes to its worker, one comes back, in float32.
        expected = STEPS * sum(4 * w.numel() for w in matrices) if name == "zero3" else 0
        assert sum(ours.sent[0] for ours in outcomes) == expected
    for rank in found:
        whole, first, second = rank["zero3"], rank["first"], rank["second"]
        # The parts ran with activation checkpointing, which changes no bit.
        assert first.losses + second.losses == whole.losses
        assert first.norms + second.norms == whole.norms
        assert largest(second.final, whole.final) == 0
        assert rank["tied"] == {"tied": True, "logical": True, "cut": "(Shard(dim=1),)"}


def _replicated(corpus: CorpusPaths, tmp: Path) -> Outcome:
    job = [*TP, "--parallelism.data_parallel_replicate_degree=2", f"--training.steps={STEPS}"]
    return _run(job, corpus, tmp)


@pytest.mark.slow
def test_replicas_shards_and_tensor_parallel_equal_ddp(
    corpus_dir: CorpusPaths, tmp_path: Path
) -> None:
    """Replicas 2 x shards 2 x tp 2. Slow: eight ranks on a few cores."""
    oracle = run_ranks(_oracle, 4, corpus_dir, tmp_path / "ddp", timeout_s=200)[0]
    found = run_ranks(_replicated, 8, corpus_dir, tmp_path / "tp", timeout_s=280)
    for ours in found:
        assert largest(ours.initial, oracle.initial) == 0
        assert relative(ours.losses, oracle.losses) < 1e-5
        assert relative(ours.norms, oracle.norms) < 1e-5
        assert largest(ours.final, oracle.final) < 1e-5
        assert largest(ours.final, found[0].final) == 0
        assert ours.sent == ours.predicted


def _check_exchange(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["weights"] == [True] * len(MATRICES)
        assert rank["momentum"] == [True] * len(MATRICES)
        assert rank["operations"] == [TP_STEP]
        assert rank["sent"] == rank["predicted"]
    # float32 updates to the worker, bfloat16 results back: 6 bytes for each element of a fragment
    # that is not its worker's. Even halves: 24, 30, 30 and 20 elements. 7x4: 16 or 12; 1x3: 3 or 0.
    totals = {c: sum(r["sent"].sent_bytes for r in found if r["column"] == c) for c in (0, 1)}
    assert totals[0] in (3 * 6 * (24 + 30 + 16), 3 * 6 * (24 + 30 + 12))
    assert totals[1] in (3 * 6 * (30 + 20 + 3), 3 * 6 * (30 + 20))
