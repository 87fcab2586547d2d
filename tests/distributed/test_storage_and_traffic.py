"""What a rank stores and sends: every byte is the plan's, and the step sends none."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.distributed.toy import (
    TRANSPORTS,
    Run,
    buffers_of,
    make_toy,
    mesh_of,
    metas_of,
    owner_groups,
    owner_parameters,
    shard_toy,
    train,
)
from tests.harness import run_ranks
from torchtitan_matrixfsdp.comm import Traffic, TrafficCounter, TransportFactory
from torchtitan_matrixfsdp.layout import ALIGNMENT, BufferLayout, RoleKind, overflow_reduce_of

ITEMSIZE = 8  # float64


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the local tensors."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def _reduced_elements(layout: BufferLayout, rank: int) -> int:
    """Elements of a block's reduced gradient: the rank's runs with the gaps inside them; or its
    slice, where that is what the reduce-scatter leaves and all that the rank owns begins it."""
    runs, own = layout.runs(rank), layout.slice_of(rank)
    if not layout.slice_numel or overflow_reduce_of(layout, rank):
        return layout.packed_numel(rank)
    is_first = [run.start for run in runs] == [own.start]
    return own.numel if is_first else layout.packed_numel(rank)


def _account(run: Run, replicas: int) -> dict[str, tuple[int, int]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(replicas, ranks)
    sharded = shard_toy(make_toy(), mesh, run)
    shard_rank = mesh.get_local_rank(mesh.ndim - 1)
    train(sharded, run, 2, rank, ranks)
    plan, groups = sharded.plan, owner_groups(sharded.model)
    assert plan is not None
    owners = owner_parameters(sharded.model)
    matrix = [p for n, p in owners.items() if plan.shard(n).kind is RoleKind.MATRIX]
    tails = [p for n, p in owners.items() if plan.shard(n).kind is RoleKind.TAIL]

    def planned(kind: RoleKind) -> int:
        shards = [s for block in plan.blocks for s in block.shards]
        return sum(s.nbytes for s in shards if s.owner == shard_rank and s.kind is kind)

    muon, adamw = sharded.optimizers
    momentum = [muon.state[p]["momentum_buffer"] for p in matrix]
    moments = [adamw.state[p][k] for p in tails for k in ("exp_avg", "exp_avg_sq")]
    gradients = [p.grad for p in owners.values()]
    reduced = 0
    for group in groups:
        layout = group._comm.reduce_transport.layout
        gaps = ALIGNMENT * len(layout.block.shards)
        elements = _reduced_elements(layout, shard_rank)
        assert elements <= max(layout.slice_numel, layout.block.owned_numel(shard_rank) + gaps)
        reduced += elements * ITEMSIZE
    # What autograd would read in backward are views into the block buffers.
    params = [param for group in groups for param in group.fsdp_params]
    unsharded = [view for param in params for view in param.all_gather_outputs]
    buffers = [buffer._flat for buffer in buffers_of(sharded.model)]
    elsewhere = {v.untyped_storage()._cdata for v in unsharded}
    elsewhere -= {b.untyped_storage()._cdata for b in buffers}
    owned = plan.owned_bytes(shard_rank)
    return {
        "parameters": (_storage_bytes(list(owners.values())), owned),
        "gradients": (sum(g.to_local().nbytes for g in gradients), owned),
        "memory of the gradients": (_storage_bytes(gradients), reduced),
        "momentum": (_storage_bytes(momentum), planned(RoleKind.MATRIX)),
        "AdamW moments": (_storage_bytes(moments), 2 * planned(RoleKind.TAIL)),
        "block buffers": (_storage_bytes(buffers), 0),
        "buffers seen": (len(buffers), len(plan.blocks)),
        "unsharded parameters seen": (len(unsharded), len(owners)),
        "unsharded parameters elsewhere": (len(elsewhere), 0),
    }


def _accounts(replicas: int) -> dict[str, dict[str, tuple[int, int]]]:
    return {name: _account(Run(transport=name), replicas) for name in TRANSPORTS}


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_every_byte_is_the_plans(ranks: int, replicas: int) -> None:
    """Between steps a rank stores what the plan says, to the byte, and nothing else: gradients
    have the gaps of their transport's arrangement, and the block buffers no memory."""
    _, blocks = metas_of(make_toy())
    whole = sum(p.nbytes for b in blocks for p in b.params)
    found = run_ranks(_accounts, ranks, replicas)
    for name in TRANSPORTS:
        for account in found:
            for what, (stored, planned) in account[name].items():
                assert stored == planned, f"{name}: {what}"
        assert sum(account[name]["parameters"][0] for account in found) == replicas * whole


def _closed_form(name: str, layout: BufferLayout, operation: str, rank: int) -> int:
    """The elements that ``rank`` sends, from the arrangement alone (paper section 4.2)."""
    ranks = layout.block.world_size
    owned = [sum(run.numel for run in layout.runs(r)) for r in range(ranks)]
    if name == "p2p":
        return (ranks - 1) * owned[rank] if operation == "gather" else sum(owned) - owned[rank]
    if name == "broadcast":
        # Around the ring: all send but the last one of a gather, and all but the root of a
        # reduction.
        spared = (rank + 1) % ranks if operation == "gather" else rank
        return sum(owned) - owned[spared]
    elements = [
        (owner, at // layout.slice_numel)
        for owner in range(ranks)
        for run in layout.runs(owner)
        for at in range(run.start, run.stop)
    ]
    away = [(owner, home) for owner, home in elements if owner != home]
    sender = 0 if operation == "gather" else 1
    return (ranks - 1) * layout.slice_numel + sum(pair[sender] == rank for pair in away)


def _traffic(run: Run) -> list[tuple[str, Traffic, Traffic, int]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    train(sharded, run, 1, rank, ranks)
    factory = TransportFactory(run.transport)
    transports = [
        factory(factory.choose(block), block, rank, TrafficCounter())
        for block in sharded.plan.blocks
    ]
    rows = []
    for operation in ("gather", "reduce"):
        times = run.accumulation * (2 if operation == "gather" and run.reshard else 1)
        predicted, closed_form = Traffic(), 0
        for transport in transports:
            is_gather = operation == "gather"
            predict = transport.predict_gather if is_gather else transport.predict_reduce
            elements = _closed_form(transport.name, transport.layout, operation, rank)
            predicted = sum([predict(ITEMSIZE)] * times, predicted)
            closed_form += times * elements * ITEMSIZE
        what = f"{run.transport} {operation}, {run}"
        rows.append((what, sharded.counter.total(operation), predicted, closed_form))
    return rows


def _traffics(runs: list[Run]) -> list[tuple[str, Traffic, Traffic, int]]:
    return [row for run in runs for row in _traffic(run)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_counted_traffic_is_the_predicted(ranks: int) -> None:
    """Bytes and messages sent, exactly, by every transport; and the bytes in closed form."""
    kinds = [Run(), Run(reshard=False), Run(accumulation=2)]
    runs = [replace(run, transport=name) for run in kinds for name in TRANSPORTS]
    for rows in run_ranks(_traffics, ranks, runs):
        assert len(rows) == 2 * len(runs)
        for what, counted, predicted, closed_form in rows:
            assert counted == predicted, what
            assert counted.sent_bytes == closed_form > 0, what


def _step_collectives(run: Run) -> tuple[int, int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    train(sharded, run, 1, rank, ranks)
    counter = sharded.counter
    before = dict(counter.totals)
    # CommDebugMode does not see point-to-point messages, so those are made to fail.
    silent = [
        mock.patch.object(dist, name, side_effect=AssertionError(name))
        for name in ("isend", "irecv", "send", "recv", "batch_isend_irecv")
    ]
    with contextlib.ExitStack() as stack, CommDebugMode() as debug:
        for patch in silent:
            stack.enter_context(patch)
        for optimizer in sharded.optimizers:
            optimizer.step()
    assert dict(counter.totals) == before
    return debug.get_total_counts(), len(sharded.routing.matrices)


def _steps(runs: list[Run]) -> list[tuple[int, int]]:
    return [_step_collectives(run) for run in runs]


def test_the_step_does_not_communicate() -> None:
    """Ours: zero collectives. The same counter sees one gather per matrix of the stock step."""
    runs = [*(Run(transport=name) for name in TRANSPORTS), Run(mode="stock")]
    for *ours, stock in run_ranks(_steps, 2, runs):
        assert [count for count, _ in ours] == [0] * len(TRANSPORTS)
        count, matrices = stock
        assert count == matrices > 0
