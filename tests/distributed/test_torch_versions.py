"""What torch 2.13 does by itself and the compat file does for 2.11 and 2.12, tested on any of them.

`fsdp_older.TORCH` is set to an older version where the code for it needs nothing that newer ones
lack, so that what CI installs runs both.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.test_gradients import Branching, expected_branch_gradients
from tests.distributed.toy import (
    Run,
    batch,
    loss_of,
    make_toy,
    max_difference,
    mesh_of,
    rows_of,
    shard_toy,
    train,
    train_oracle,
)
from tests.harness import run_ranks
from torchtitan_matrixfsdp.runtime import fsdp_older, reset_iter_state

VERSIONS = (fsdp_older.TORCH, min(fsdp_older.TORCH, (2, 12)))


def _stock_branch_gradients() -> list[dict[str, torch.Tensor]]:
    """Of stock FSDP2 as it counts unused parameters, and as we do for torch before 2.13."""
    rank = dist.get_rank()
    tokens, targets = batch(0)
    rows = rows_of(rank, 2)
    found = []
    for version in VERSIONS:
        torch.manual_seed(7)
        model = Branching().double()
        with mock.patch.object(fsdp_older, "TORCH", version):
            sharded = shard_toy(model, mesh_of(1, 2), Run(mode="stock"))
        loss_of(model, tokens[rows], targets[rows]).backward()
        for optimizer in sharded.optimizers:
            optimizer.step()
        named = model.layers[0].named_parameters()
        found.append({f"layers.0.{n}": p.grad.full_tensor() for n, p in named})
    return found


def test_unused_parameters_of_row_sharded_units_count_as_zero() -> None:
    """Case 21 for stock FSDP2 shards."""
    expected = expected_branch_gradients()
    for found in run_ranks(_stock_branch_gradients, 2):
        for grads in found:
            for name, grad in expected.items():
                torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-14)
            assert grads["layers.0.dead.weight"].abs().max() == 0


class Skipping(nn.Module):
    """Its second unit is a pair of modules; its third runs on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.spare = (nn.Linear(3, 3) for _ in range(3))
        self.pair = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.uses_spare = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pair[1](self.pair[0](self.first(x)))
        return self.last(x + self.spare(x) if self.uses_spare else x)


def _reductions_per_parameter() -> None:
    for version in VERSIONS:
        model = Skipping()
        mesh = mesh_of(1, 1)
        for unit in (list(model.pair), model.spare, model):
            fully_shard(unit, mesh=mesh)
        counts: dict[str, int] = {}
        with mock.patch.object(fsdp_older, "TORCH", version):
            for module in (model.pair[0], model.spare, model):
                module.set_force_sum_reduction_for_comms(True)
                fsdp_older.count_unused_parameters(module)
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda _, name=name, counts=counts: counts.update({name: counts[name] + 1})
            )
        for model.uses_spare in (True, False, True):
            counts.update(dict.fromkeys(dict(model.named_parameters()), 0))
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            assert counts == dict.fromkeys(counts, 1)
            assert (model.spare.weight.grad.full_tensor() != 0).any() == model.uses_spare


def test_a_unit_reduces_once_whether_its_module_ran_or_not() -> None:
    """As FSDP2 counts unused parameters, and as we do for torch before 2.13."""
    run_ranks(_reductions_per_parameter, 1)


def _recover() -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), Run())
    model = sharded.model
    tokens, targets = batch(99)

    class FaultError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise FaultError

    mix = model.layers[1].mix
    for version in VERSIONS:
        for register in (mix.register_forward_hook, mix.register_full_backward_hook):
            handle = register(fail)
            with contextlib.suppress(FaultError):
                loss_of(model, tokens[:6], targets[:6]).backward()
                raise AssertionError("the fault did not fire")
            handle.remove()
            with mock.patch.object(fsdp_older, "TORCH", version):
                reset_iter_state(model)
    train(sharded, Run(), 3, rank, ranks)
    return max_difference(model, train_oracle(3, 1))


def test_recovery_without_torchs_own_reset() -> None:
    assert max(run_ranks(_recover, 2)) < 1e-12
