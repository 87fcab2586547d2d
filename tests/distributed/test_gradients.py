"""Owner shards inside FSDP2: whose gradient it is, how it is summed, and what is done with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.toy import (
    ADAMW,
    DIM,
    Run,
    Toy,
    batch,
    full_state,
    loss_of,
    make_toy,
    mesh_of,
    metas_of,
    owner_groups,
    owner_parameters,
    route_toy,
    rows_of,
    run_transports,
    shard_toy,
    train,
)
from tests.harness import run_ranks
from torchtitan_matrixfsdp.comm import Traffic, TransportFactory
from torchtitan_matrixfsdp.layout import make_plan
from torchtitan_matrixfsdp.optim import LocalStepOptimizer, Muon, logical_shapes
from torchtitan_matrixfsdp.runtime import OwnerContext, owner_shard


def _clip(transport: str, replicas: int) -> tuple[float, float, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded = shard_toy(make_toy(), mesh_of(replicas, ranks), Run(transport=transport))
    model = sharded.model
    tokens, targets = batch(0)
    rows = rows_of(rank, ranks)
    loss_of(model, tokens[rows], targets[rows]).backward()
    grads = [p.grad for p in model.parameters()]
    total = torch.nn.utils.get_total_norm(grads, 2.0, False, True)
    largest = torch.nn.utils.get_total_norm(grads, math.inf, False, True)
    total, largest = (t.full_tensor() if isinstance(t, DTensor) else t for t in (total, largest))
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.01, total, True)
    after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], 2.0, False, True)
    return total.item(), largest.item(), after.full_tensor().item()


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_gradient_norm_counts_each_element_once(ranks: int, replicas: int) -> None:
    """Cases 5 and 24: owner and row-sharded parameters mixed, HSDP, one coefficient for all."""
    oracle = make_toy()
    loss_of(oracle, *batch(0)).backward()
    flat = torch.cat([p.grad.flatten() for p in oracle.parameters()])
    for total, largest, after in run_transports(_clip, ranks, replicas):
        assert total == pytest.approx(flat.norm().item(), rel=1e-13)
        assert largest == pytest.approx(flat.abs().max().item(), rel=1e-13)
        assert after == pytest.approx(0.01, rel=1e-4)  # torch divides by (norm + 1e-6)


def _masked_targets() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose ranks have very different numbers of valid labels."""
    tokens, targets = batch(0)
    targets[:3, 1:] = -100
    targets[3:5] = -100
    return tokens, targets


def _token_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """TorchTitan's loss: a sum, divided by the valid tokens of the whole batch."""
    total = (_masked_targets()[1] != -100).sum()
    logits = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / total


def _masked(transport: str) -> tuple[float, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), Run(transport=transport))
    for module in sharded.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    tokens, targets = _masked_targets()
    rows = rows_of(rank, ranks)
    _token_loss(sharded.model, tokens[rows], targets[rows]).backward()
    grads = [p.grad for p in sharded.model.parameters()]
    norm = torch.nn.utils.get_total_norm(grads, 2.0, False, True).full_tensor().item()
    sharded.optimizers[1].step()  # AdamW, which a wrong scale would not escape at eps
    oracle = make_toy()
    _token_loss(oracle, *_masked_targets()).backward()
    difference = max(
        (p.grad.full_tensor() - dict(oracle.named_parameters())[n].grad).abs().max().item()
        for n, p in sharded.model.named_parameters()
    )
    reference = torch.cat([p.grad.flatten() for p in oracle.parameters()]).norm().item()
    return difference, abs(norm / reference - 1)


def test_unevenly_masked_labels_are_summed_not_averaged() -> None:
    """Cases 3 and 4: W=4, loss per valid token, gradients and norm of one process."""
    for difference, norm_error in run_transports(_masked, 4):
        assert difference < 1e-14
        assert norm_error < 1e-13


class Branching(Toy):
    """Uses one of two matrices by the parity of the rank; a third is never used."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.layers[0] = Branch()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(DIM, DIM, bias=False)
        self.odd = nn.Linear(DIM, DIM, bias=False)
        self.dead = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.even if dist.get_rank() % 2 == 0 else self.odd)(x)


def _branch_gradients(transport: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = Branching().double()
    sharded = shard_toy(model, mesh_of(1, 2), Run(transport=transport))
    rank = dist.get_rank()
    tokens, targets = batch(0)
    rows = rows_of(rank, 2)
    loss_of(model, tokens[rows], targets[rows]).backward()
    for optimizer in sharded.optimizers:
        optimizer.step()
    return {n: p.grad.full_tensor() for n, p in owner_parameters(model).items()}


def expected_branch_gradients() -> dict[str, torch.Tensor]:
    """From plain models: the gradient of the rank that used a branch, halved by the mean."""
    expected: dict[str, torch.Tensor] = {}
    for rank in range(2):
        torch.manual_seed(7)
        model = Branching().double()
        tokens, targets = batch(0)
        x = model.embedding(tokens[6 * rank : 6 * rank + 6])
        chosen = [model.layers[0].even, model.layers[0].odd][rank]
        logits = model.head(model.norm(x + chosen(x)))
        targets = targets[6 * rank : 6 * rank + 6]
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        expected[f"layers.0.{'even' if rank == 0 else 'odd'}.weight"] = chosen.weight.grad / 2
    return expected


def test_parameters_unused_on_some_ranks_count_as_zero() -> None:
    """Case 21: branch on rank parity. The gradient is the other rank's, halved by the mean."""
    expected = expected_branch_gradients()
    for grads in run_transports(_branch_gradients, 2):
        for name, grad in expected.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-14)
        assert grads["layers.0.dead.weight"].abs().max() == 0


def _train_branching(model: nn.Module, optimizers: list[LocalStepOptimizer], steps: range) -> None:
    rank = dist.get_rank()
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        tokens, targets = batch(step)
        rows = rows_of(rank, 2)
        loss_of(model, tokens[rows], targets[rows]).backward()
        for optimizer in optimizers:
            optimizer.step()


def _state(model: nn.Module, optimizers: list[LocalStepOptimizer]) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer_state = get_optimizer_state_dict(model, optimizers, options=options)
    return {"model": get_model_state_dict(model), "optimizer": optimizer_state}


def _resume_with_a_dead_matrix(transport: str, folder: Path) -> tuple[bool, bool, str]:
    folder = str(folder / transport)
    run = Run(transport=transport)
    torch.manual_seed(7)
    first = Branching().double()
    whole = shard_toy(first, mesh_of(1, 2), run)
    _train_branching(first, whole.optimizers, range(2))
    before = full_state(first)
    dcp.save(_state(first, whole.optimizers), checkpoint_id=folder)
    unchanged = all(torch.equal(before[n], w) for n, w in full_state(first).items())
    _train_branching(first, whole.optimizers, range(2, 4))

    torch.manual_seed(8)
    second = Branching().double()
    resumed = shard_toy(second, mesh_of(1, 2), run)
    state = _state(second, resumed.optimizers)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(second, state["model"])
    set_optimizer_state_dict(
        second,
        resumed.optimizers,
        state["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=True),
    )
    _train_branching(second, resumed.optimizers, range(2, 4))
    after = full_state(second)
    same = all(torch.equal(after[n], w) for n, w in full_state(first).items())

    state["model"]["layers.0.unknown.weight"] = torch.zeros(3)
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException as error:
        return unchanged, same, str(error)
    return unchanged, same, ""


def test_a_matrix_without_a_gradient_does_not_break_resume(tmp_path: Path) -> None:
    """Case 22: saved and resumed bit-exactly through DCP; a missing parameter is still an error."""
    for unchanged, same, error in run_transports(_resume_with_a_dead_matrix, 2, tmp_path):
        assert unchanged
        assert same
        assert "layers.0.unknown.weight" in error


def _is_frozen(name: str) -> bool:
    """One matrix, one norm, and the whole of layer 2."""
    return "layers.1.up" in name or "layers.0.norm" in name or name.startswith("layers.2.")


def _frozen(transport: str) -> tuple[bool, bool, dict[str, bool]]:
    model = make_toy()
    for name, param in model.named_parameters():
        if _is_frozen(name):
            param.requires_grad_(False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(transport=transport)
    sharded = shard_toy(model, mesh_of(1, ranks), run)
    before = full_state(model)
    train(sharded, run, 2, rank, ranks)
    after = full_state(model)
    kept = {n: torch.equal(before[n], after[n]) for n in before if n.startswith("layers")}
    comms = [group._comm for group in owner_groups(model)]
    reduced = sum((comm.reduce_transport.predict_reduce(8) for comm in comms), Traffic())
    everything = sum((comm.gather_transport.predict_reduce(8) for comm in comms), Traffic())
    is_predicted = sharded.counter.total("reduce") == reduced + reduced
    return is_predicted, reduced.sent_bytes < everything.sent_bytes, kept


def test_frozen_parameters_are_gathered_but_never_reduced() -> None:
    for is_predicted, is_less, kept in run_transports(_frozen, 2):
        assert is_predicted and is_less
        for name, unchanged in kept.items():
            assert unchanged == _is_frozen(name), name


def _tied(transport: str) -> tuple[bool, float]:
    class Tied(Toy):
        def __init__(self) -> None:
            super().__init__(layers=1)
            self.head.weight = self.embedding.weight

    torch.manual_seed(7)
    model = Tied().double()
    torch.manual_seed(7)
    oracle = Tied().double()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(1, ranks)
    _, blocks = metas_of(model)
    plan = make_plan("role_greedy", blocks, set(route_toy(model).matrices), ranks)
    owner_shard(
        model.layers[0],
        plan.block("layers.0"),
        mesh=mesh,
        transport=TransportFactory(transport),
        context=OwnerContext(),
    )
    fully_shard([model.embedding, model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    tokens, targets = batch(0)
    rows = rows_of(rank, ranks)
    loss_of(model, tokens[rows], targets[rows]).backward()
    loss_of(oracle, tokens, targets).backward()
    grad = model.embedding.weight.grad.full_tensor()
    same = model.embedding.weight is model.head.weight
    return same, (grad - oracle.embedding.weight.grad).abs().max().item()


def test_tied_weights_keep_both_gradient_halves() -> None:
    """Case 25: one parameter, and the gradient of both uses."""
    for same, difference in run_transports(_tied, 2):
        assert same
        assert difference < 1e-14


def _mixed_precision(transport: str) -> tuple[str, dict[str, torch.Tensor]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen: list[str] = []
    model = make_toy(torch.float32)
    run = Run(mp_policy=policy, transport=transport)
    sharded = shard_toy(model, mesh_of(1, ranks), run)
    model.layers[0].register_forward_pre_hook(
        lambda module, args: seen.append(str(module.up.weight.dtype))
    )
    sent = {"gather": Traffic(), "reduce": Traffic()}
    tokens, targets = batch(0)
    rows = rows_of(rank, ranks)
    loss_of(model, tokens[rows], targets[rows]).backward()
    for group in owner_groups(model):
        gather, reduce = group._comm.gather_transport, group._comm.reduce_transport
        sent["gather"] += sum([gather.predict_gather(2)] * 2, Traffic())  # bfloat16, twice
        sent["reduce"] += reduce.predict_reduce(4)  # float32
    assert sharded.counter.totals == sent
    return seen[0], {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def test_mixed_precision_gathers_and_reduces_in_its_dtypes() -> None:
    """Case 19: gradients are those of a bfloat16 model on each rank's rows, summed in float32."""
    reference: dict[str, torch.Tensor] = {}
    for rank in range(2):
        model = make_toy(torch.float32).bfloat16()
        tokens, targets = batch(0)
        rows = rows_of(rank, 2)
        loss_of(model, tokens[rows], targets[rows]).backward()
        for name, param in model.named_parameters():
            share = param.grad.float()
            reference[name] = reference[name] + share if name in reference else share
    for dtype, grads in run_transports(_mixed_precision, 2):
        assert dtype == "torch.bfloat16"
        for name, grad in grads.items():
            assert grad.dtype == torch.float32
            # The same bfloat16 kernels on the same rows, then one float32 sum of two terms.
            assert torch.equal(grad, reference[name] / 2), name


def _groups() -> tuple[list[float], float, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), Run())
    model = sharded.model
    named = list(model.named_parameters())
    decayed = [p for n, p in named if p.ndim == 1 and "norm" not in n]
    kept = [p for n, p in named if "norm" in n]

    def adamw(groups, of_local):
        from torchtitan_matrixfsdp.optim import create_adam_state

        optimizer = torch.optim.AdamW(groups, **{**ADAMW, "weight_decay": 0.5})
        create_adam_state(optimizer)
        return optimizer

    optimizer = LocalStepOptimizer(
        [{"params": decayed}, {"params": kept, "weight_decay": 0.0}], adamw
    )
    matrices = LocalStepOptimizer(
        [p for n, p in named if p.ndim == 2 and n.startswith("layers")],
        lambda groups, of_local: Muon(
            groups, lr=0.0, ns_dtype=torch.float64, logical_shapes=logical_shapes(of_local)
        ),
    )
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    norms = []
    before = full_state(model)
    for _ in range(3):
        optimizer.zero_grad()
        matrices.zero_grad()
        model.zero_grad()
        tokens, targets = batch(0)
        rows = rows_of(rank, ranks)
        loss_of(model, tokens[rows], targets[rows]).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], 2.0, False, True)
        norms.append(norm.full_tensor().item())
        optimizer.step()
        matrices.step()
    after = full_state(model)
    moved = max((after[n] - before[n]).abs().max().item() for n in after)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1.0
    for p in [*decayed, *kept]:
        p.grad.zero_()
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][name].zero_()
    before = full_state(model)
    optimizer.step()
    after = full_state(model)
    drift = max((after[n] - before[n]).abs().max().item() for n, _ in named if "norm" in n)
    ratio = (after["layers.0.mix.bias"] / before["layers.0.mix.bias"]).mean().item()
    return [*norms, moved], drift, ratio


def test_zero_grad_and_the_callers_groups_are_honoured() -> None:
    """Case 28: lr 0 on the same batch gives the same gradient three times; no-decay groups hold."""
    for (first, second, third, moved), drift, ratio in run_ranks(_groups, 2):
        assert first == second == third
        assert moved == 0.0
        assert drift == 0.0
        assert ratio == pytest.approx(0.5)
