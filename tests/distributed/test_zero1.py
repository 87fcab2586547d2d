"""Resident blocks: gathered once per optimizer step, never in forward or backward, never stale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.distributed.test_buffers import WAYS
from tests.distributed.toy import (
    TRANSPORTS,
    OracleWeights,
    Run,
    Sharded,
    batch,
    buffers_of,
    full_state,
    kinds_of,
    loss_of,
    make_toy,
    max_difference,
    mesh_of,
    oracle_weights,
    owner_groups,
    owner_parameters,
    rows_of,
    run_transports,
    shard_toy,
    train,
    train_oracle,
)
from tests.harness import run_ranks
from torchtitan_matrixfsdp.comm import Traffic
from torchtitan_matrixfsdp.runtime import STEP_GATHER, OwnerDTensor

STEPS = 8
LAYERS = 2
TOLERANCE = 1e-12  # as in test_exactness; 1e-15 is seen
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

RUNS = {
    "plain": Run(),
    "accumulate": Run(accumulation=3),
    "accumulate deferred": Run(accumulation=3, deferred=True),
    "checkpointing": Run(checkpointing=True),
    "no reshard": Run(reshard=False),
    "explicit prefetch": Run(explicit_prefetch=True),
    "async unshard": Run(async_unshard=True, accumulation=3),
    "deferred all-reduce": Run(accumulation=3, deferred_all_reduce=True),
    "evaluate between steps": Run(evaluate=True, defer_release=True),
    "layers run twice": Run(repeat=2),
    "partitioned replicas": Run(partitioned=True),
}


def are_equal(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = full_state(model), full_state(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _train_all(replicas: int, oracles: OracleWeights) -> dict[str, tuple[float, bool]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(replicas, ranks)
    found = {}
    for index, (name, run) in enumerate(RUNS.items()):
        transport = TRANSPORTS[(index + ranks + replicas) % len(TRANSPORTS)]
        run = replace(run, transport=transport, partitioned=run.partitioned and replicas > 1)
        models = []
        for mode in ("zero1", "zero3"):
            sharded = shard_toy(make_toy(layers=LAYERS), mesh, replace(run, mode=mode))
            train(sharded, run, STEPS, rank, ranks)
            models.append(sharded.model)
        oracle = oracles[run.accumulation, run.repeat]
        found[f"{name}, {transport}"] = max_difference(models[0], oracle), are_equal(*models)
    return found


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_float64_equals_one_process_and_zero3_bitwise(ranks: int, replicas: int) -> None:
    oracles = oracle_weights(STEPS, kinds_of(RUNS.values()), LAYERS)
    for found in run_ranks(_train_all, ranks, replicas, oracles, timeout_s=240):
        assert {what.rpartition(", ")[2] for what in found} == set(TRANSPORTS)
        for what, (difference, is_equal) in found.items():
            assert difference < TOLERANCE, what
            assert is_equal, f"{what}: the arithmetic is that of zero3"


def _ways(part: int) -> dict[str, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for index, (name, (run, prepare)) in enumerate(WAYS.items()):
        if name == "evaluated first":  # it asserts that nothing is kept
            continue
        layers = 1 if name == "twice in a row" else 3
        run = replace(run, mode="zero1", transport=TRANSPORTS[(index + part) % len(TRANSPORTS)])
        sharded = shard_toy(make_toy(layers=layers), mesh_of(1, ranks), run)
        prepare(sharded)
        train(sharded, run, 3, rank, ranks)
        oracle = train_oracle(3, run.accumulation, run.repeat, layers)
        found[name] = max_difference(sharded.model, oracle)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_gathers_by_hand_or_in_vain_recomputation_and_compiled_blocks(ranks: int) -> None:
    for found in run_ranks(_ways, ranks, ranks):
        assert len(found) == len(WAYS) - 1
        assert max(found.values()) < TOLERANCE, found


def _bf16(transport: str) -> tuple[bool, list[tuple[torch.dtype, int, int]]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    models = []
    for mode in ("zero1", "zero3"):
        run = Run(mode=mode, transport=transport, mp_policy=BF16, accumulation=2, evaluate=True)
        sharded = shard_toy(make_toy(torch.float32), mesh_of(1, ranks), run)
        train(sharded, run, 3, rank, ranks)
        models.append(sharded.model)
    kept = [
        (buffer.flat.dtype, buffer.flat.untyped_storage().nbytes(), buffer.numel)
        for buffer in buffers_of(models[0])
    ]
    return are_equal(*models), kept


def test_mixed_precision_keeps_the_gather_dtype() -> None:
    for is_equal, kept in run_transports(_bf16, 2):
        assert is_equal, "to zero3, bitwise"
        for dtype, nbytes, numel in kept:
            assert (dtype, nbytes) == (torch.bfloat16, 2 * numel)


def predict(sharded: Sharded, operation: str, times: int) -> Traffic:
    total = Traffic()
    for group in owner_groups(sharded.model):
        comm = group._comm
        if operation == "gather":
            total += comm.gather_transport.predict_gather(8)
        else:
            total += comm.reduce_transport.predict_reduce(8)
    return Traffic(total.sent_bytes * times, total.messages * times)


MOVING = [
    Run(),
    Run(reshard=False, evaluate=True),
    Run(accumulation=3),
    Run(accumulation=3, deferred=True, checkpointing=True),
]


def _traffic(run: Run) -> tuple[dict[str, Traffic], dict[str, Traffic]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    counter, model = sharded.counter, sharded.model
    tokens, targets = batch(0)
    with torch.no_grad():
        loss_of(model, tokens, targets)
    assert counter.totals == {"gather": predict(sharded, "gather", 1)}, "the first use"
    loss_of(model, tokens, targets).backward()
    assert counter.total("gather") == predict(sharded, "gather", 1)
    assert STEP_GATHER not in counter.totals
    counter.reset()
    train(sharded, run, 3, rank, ranks)
    reductions = 3 * (1 if run.deferred else run.accumulation)
    return dict(counter.totals), {
        STEP_GATHER: predict(sharded, "gather", 3),
        "reduce": predict(sharded, "reduce", reductions),
    }


def _traffics() -> list[tuple[str, dict[str, Traffic], dict[str, Traffic]]]:
    runs = [replace(run, mode="zero1", transport=name) for run in MOVING for name in TRANSPORTS]
    return [(str(run), *_traffic(run)) for run in runs]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_gathers_each_block_once_and_nothing_else_does(ranks: int) -> None:
    """Bytes and messages, exactly: none in forward and backward, one prediction a step."""
    for rows in run_ranks(_traffics, ranks):
        for what, counted, predicted in rows:
            assert counted == predicted, what
            assert counted[STEP_GATHER].sent_bytes > 0, what


def _kept(
    transport: str,
) -> tuple[set[tuple[int, ...]], set[tuple[str, ...]], set[tuple[str, ...]]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(mode="zero1", transport=transport)
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    model, buffers = sharded.model, buffers_of(sharded.model)
    train(sharded, run, 1, rank, ranks)
    addresses, at_rest, in_use = set(), set(), set()

    def look(*_: Any) -> None:
        addresses.add(tuple(buffer.flat.untyped_storage().data_ptr() for buffer in buffers))
        assert all(b.flat.untyped_storage().nbytes() == b.numel * 8 for b in buffers)

    def look_inside(*_: Any) -> None:
        look()
        in_use.add(tuple(buffer.state.value for buffer in buffers))

    model.layers[1].mix.register_forward_hook(look_inside)
    for step in range(1, 4):
        for optimizer in sharded.optimizers:
            optimizer.zero_grad()
        tokens, targets = batch(step)
        rows = rows_of(rank, ranks)
        loss_of(model, tokens[rows], targets[rows]).backward()
        look()
        at_rest.add(tuple(buffer.state.value for buffer in buffers))
        # What clipping and optimizers find between backward and forward.
        params = [p for group in owner_groups(model) for p in group.fsdp_params]
        shown = dict(owner_parameters(model))
        assert len(shown) == len(params)
        assert all(isinstance(p.grad, OwnerDTensor) for p in shown.values())
        assert all(p.unsharded_param.grad is None for p in params), "freed once reduced"
        for optimizer in sharded.optimizers:
            optimizer.step()
        sharded.context.publish()
        look()
    return addresses, at_rest, in_use


def test_the_memory_stays_and_the_parameters_are_the_owners() -> None:
    for addresses, at_rest, in_use in run_transports(_kept, 2):
        assert len(addresses) == 1, "one storage for the whole run"
        assert at_rest == {("resident",) * 3}
        # The third block's gather waits for its forward, as a prefetch would.
        assert in_use == {("resident", "unsharded", "gathering")}


def test_cpu_offload_is_refused() -> None:
    for message in run_ranks(_offload, 1):
        assert "layers.0: resident parameters stay on the compute device" in message


def _offload() -> str:
    with pytest.raises(ValueError) as raised:
        shard_toy(make_toy(), mesh_of(1, 1), Run(mode="zero1", offload=True))
    return str(raised.value)
