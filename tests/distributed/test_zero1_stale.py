"""Resident blocks never compute with stale weights, after whatever changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.distributed.test_recovery import FAULTS, FaultError, Saboteur
from tests.distributed.test_zero1 import are_equal, predict
from tests.distributed.toy import (
    ObservedFactory,
    Run,
    Sharded,
    batch,
    buffers_of,
    full_state,
    loss_of,
    make_toy,
    max_difference,
    mesh_of,
    owner_parameters,
    rows_of,
    run_transports,
    shard_toy,
    train,
    train_oracle,
)
from tests.harness import run_ranks
from torchtitan_matrixfsdp.comm import Traffic
from torchtitan_matrixfsdp.optim import LocalStepOptimizer, create_adam_state
from torchtitan_matrixfsdp.runtime import (
    STEP_GATHER,
    BufferStateError,
    OwnerDTensor,
    reset_iter_state,
)
from torchtitan_matrixfsdp.runtime.buffers import BufferState

TOLERANCE = 1e-12  # a few float64 steps; 1e-15 is seen


def _zero3_after(run: Run, steps: int, change: Callable[[Sharded], None]) -> torch.nn.Module:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = replace(run, mode="zero3")
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    train(sharded, run, steps, rank, ranks)
    change(sharded)
    train(sharded, run, steps, rank, ranks, start=steps)
    return sharded.model


def _halve(sharded: Sharded) -> None:
    with torch.no_grad():
        for param in owner_parameters(sharded.model).values():
            param.mul_(0.5)


def _load_initial(sharded: Sharded) -> None:
    """As checkpoints do; the optimizers go on."""
    initial = shard_toy(make_toy(), mesh_of(1, dist.get_world_size()), Run())
    sharded.model.load_state_dict(initial.model.state_dict())


def _write_unseen(sharded: Sharded) -> None:
    """As a collective or a fused kernel does: no version counter moves."""
    for param in owner_parameters(sharded.model).values():
        local = param.to_local().detach()
        version = local._version
        with torch.autograd._unsafe_preserve_version_counter(local):
            local.fill_(0.25)
        assert local._version == version


CHANGES: dict[str, tuple[Callable[[Sharded], None], bool]] = {
    "load_state_dict": (_load_initial, False),
    "in place, declared": (_halve, True),
    "unseen, declared": (_write_unseen, True),
}


def _changed(transport: str) -> dict[str, bool]:
    """Weights change after the step was published, with its gather still unused, and after a
    forward has used it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, (change, is_declared) in CHANGES.items():
        for run in (Run(transport=transport), Run(transport=transport, evaluate=True)):
            run = replace(run, mode="zero1")
            sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
            train(sharded, run, 2, rank, ranks)
            change(sharded)
            if is_declared:
                sharded.context.invalidate()
            train(sharded, run, 2, rank, ranks, start=2)
            reference = _zero3_after(run, 2, change)
            found[f"{name}, evaluate={run.evaluate}"] = are_equal(sharded.model, reference)
    return found


def test_weights_that_change_between_steps_are_gathered_again() -> None:
    for found in run_transports(_changed, 2):
        assert all(found.values()), found


def _halve_data(sharded: Sharded) -> None:
    for param in owner_parameters(sharded.model).values():
        param.data.mul_(0.5)


def _halve_local(sharded: Sharded) -> None:
    with torch.no_grad():
        for param in owner_parameters(sharded.model).values():
            param.to_local().mul_(0.5)


def _draw(sharded: Sharded) -> None:
    torch.manual_seed(3)
    for param in owner_parameters(sharded.model).values():
        torch.nn.init.normal_(param, std=0.1)


def _undeclared(transport: str) -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    messages = []
    for evaluate, change in product((False, True), (_halve, _halve_data, _halve_local, _draw)):
        run = Run(mode="zero1", transport=transport, evaluate=evaluate)
        sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
        train(sharded, run, 1, rank, ranks)
        change(sharded)
        with pytest.raises(BufferStateError) as raised:
            loss_of(sharded.model, *batch(1))
        messages.append(str(raised.value))
        # The remedy that the message names.
        reset_iter_state(sharded.model)
        sharded.context.invalidate()
        train(sharded, run, 1, rank, ranks, start=1)
        reference = _zero3_after(run, 1, change)
        assert are_equal(sharded.model, reference)
    return messages


def test_an_undeclared_write_raises_on_its_owner() -> None:
    """Each of the two ranks owns a part of the first block."""
    for messages in run_transports(_undeclared, 2):
        for message in messages:
            assert "layers.0." in message and "the weight was written after" in message
            assert "OwnerContext.invalidate() on every rank" in message


def _fused(params: list[torch.nn.Parameter]) -> LocalStepOptimizer:
    """Moves no version counter, so that nothing but the step itself gives it away."""

    def adamw(groups: Any, of_local: Any) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
        create_adam_state(optimizer)
        return optimizer

    return LocalStepOptimizer(params, adamw)


def _unpublished(transport: str) -> tuple[bool, Traffic, Traffic]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    models = []
    for mode in ("zero1", "zero3"):
        run = Run(mode=mode, transport=transport)
        sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
        params = list(sharded.model.parameters())
        # One rank's optimizer lists what it owns; those of the others list everything.
        mine = [p for p in params if not isinstance(p, OwnerDTensor) or p.is_owner]
        optimizer = _fused(mine if rank == 0 else params)
        for step in range(4):
            optimizer.zero_grad()
            tokens, targets = batch(step)
            rows = rows_of(rank, ranks)
            loss_of(sharded.model, tokens[rows], targets[rows]).backward()
            optimizer.step()
        models.append(sharded)
    ours, theirs = models
    assert STEP_GATHER not in ours.counter.totals
    counted, predicted = ours.counter.total("gather"), predict(ours, "gather", 4)
    return are_equal(ours.model, theirs.model), counted, predicted


def test_a_step_that_is_not_published_is_gathered_by_the_next_forward() -> None:
    for is_equal, counted, predicted in run_transports(_unpublished, 2):
        assert is_equal, "to zero3, bitwise"
        assert counted == predicted


def _wrong_order() -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(mode="zero1", partitioned=True)
    sharded = shard_toy(make_toy(), mesh_of(2, ranks), run)
    train(sharded, run, 1, rank, ranks)
    for optimizer in sharded.optimizers:
        optimizer.step()
    sharded.context.publish()
    sharded.partition.publish()
    full_state(sharded.model)  # waits for the broadcasts
    with pytest.raises(BufferStateError) as raised:
        loss_of(sharded.model, *batch(1))
    return str(raised.value)


def test_replicas_that_publish_after_the_gather_are_caught() -> None:
    for message in run_ranks(_wrong_order, 4):
        assert "PartitionedReplicas.publish() before OwnerContext.publish()" in message


def _recover(transport: str) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, targets = batch(99)
    rows = rows_of(rank, ranks)
    saboteur = Saboteur()
    run = Run(mode="zero1", transport=ObservedFactory(transport, saboteur))
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    faults = [name for name in FAULTS if "gather" not in name]
    for step, name in enumerate(faults):
        disarm = FAULTS[name](sharded, saboteur)
        with pytest.raises(FaultError):
            loss_of(sharded.model, tokens[rows], targets[rows]).backward()
        disarm()
        reset_iter_state(sharded.model)
        train(sharded, run, 1, rank, ranks, start=step)
    saboteur.operation, saboteur.countdown = "gather", 1
    with pytest.raises(FaultError):
        sharded.context.publish()
    reset_iter_state(sharded.model)
    train(sharded, run, 1, rank, ranks, start=len(faults))
    return max_difference(sharded.model, train_oracle(len(faults) + 1, 1))


def test_training_recovers_from_a_fault() -> None:
    """In a forward, a backward, a reduction, and in the gather of a step."""
    assert max(run_transports(_recover, 2)) < TOLERANCE


def _frozen(transport: str) -> tuple[bool, dict[str, int]]:
    """One block is frozen, one in part, and one has a weight that no rank uses."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gathers: dict[str, int] = {}

    def observe(operation: str, block: str) -> None:
        if operation == "gather":
            gathers[block] = gathers.get(block, 0) + 1

    models = []
    for mode in ("zero3", "zero1"):
        model = make_toy()
        model.layers[1].unused = torch.nn.Linear(5, 5, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(model.layers[1].unused.weight)
        for name, param in model.named_parameters():
            if name.startswith("layers.0.") or "layers.2.up" in name:
                param.requires_grad_(False)
        gathers.clear()
        run = Run(mode=mode, transport=ObservedFactory(transport, observe))
        sharded = shard_toy(model, mesh_of(1, ranks), run)
        train(sharded, run, 3, rank, ranks)
        models.append(model)
    return are_equal(*models), dict(gathers)


def test_frozen_and_unused_parameters() -> None:
    for is_equal, gathers in run_transports(_frozen, 2):
        assert is_equal, "to zero3, bitwise"
        assert gathers == {"layers.0": 1, "layers.1": 4, "layers.2": 4}, "frozen blocks stay"


def _state(sharded: Sharded) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(sharded.model),
        "optimizers": [get_optimizer_state_dict(sharded.model, o) for o in sharded.optimizers],
    }


def _move(folder: Path, source: str, target: str) -> bool:
    """Two steps in ``source``, saved, two more in ``target``: the bits of four steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(1, ranks)
    runs = {mode: Run(mode=mode) for mode in ("zero1", "zero3")}
    straight = shard_toy(make_toy(), mesh, runs[source])
    train(straight, runs[source], 2, rank, ranks)
    dcp.save(_state(straight), checkpoint_id=folder / source)
    train(straight, runs[source], 2, rank, ranks, start=2)
    resumed = shard_toy(make_toy(), mesh, runs[target])
    # It has trained on other data: what is gathered then must not survive the load.
    train(resumed, runs[target], 1, rank, ranks, start=7)
    state = _state(resumed)
    dcp.load(state, checkpoint_id=folder / source)
    set_model_state_dict(resumed.model, state["model"])
    for optimizer, saved in zip(resumed.optimizers, state["optimizers"], strict=True):
        set_optimizer_state_dict(resumed.model, optimizer, saved)
    assert all(b.state is not BufferState.UNSHARDED for b in buffers_of(resumed.model))
    train(resumed, runs[target], 2, rank, ranks, start=2)
    return are_equal(resumed.model, straight.model)


def _moves(folder: Path) -> dict[tuple[str, str], bool]:
    pairs = [("zero1", "zero3"), ("zero3", "zero1")]
    return {pair: _move(folder, *pair) for pair in pairs}


def test_a_checkpoint_serves_both_modes(tmp_path: Path) -> None:
    for found in run_ranks(_moves, 2, tmp_path):
        assert all(found.values()), found
