"""Owner shards inside FSDP2: storage, traffic, agreement, refusals and recovery."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.distributed.toy import (
    Block,
    Run,
    batch,
    loss_of,
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
from tests.harness import run_ranks, run_ranks_expect_error
from torchtitan_matrixfsdp.comm import TrafficCounter, agree_on_plan, transport_factory
from torchtitan_matrixfsdp.layout import RoleKind, make_plan
from torchtitan_matrixfsdp.runtime import (
    Owner,
    OwnerDTensor,
    fsdp_compat,
    owner_shard,
    reset_iter_state,
    whole_tensor_random,
)


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the local tensors."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def _account(run: Run, replicas: int) -> dict[str, tuple[int, int]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(replicas, ranks)
    sharded = shard_toy(make_toy(), mesh, run)
    shard_rank = mesh.get_local_rank(mesh.ndim - 1)
    train(sharded, run, 2, rank, ranks)
    plan = sharded.plan
    assert plan is not None
    owners = owner_parameters(sharded.model)
    matrix = [p for n, p in owners.items() if plan.shard(n).kind is RoleKind.MATRIX]
    tails = [p for n, p in owners.items() if plan.shard(n).kind is RoleKind.TAIL]

    def planned(kind: RoleKind) -> int:
        shards = [s for block in plan.blocks for s in block.shards]
        return sum(s.nbytes for s in shards if s.owner == shard_rank and s.kind is kind)

    muon, adamw = sharded.optimizers
    outputs = [
        output
        for layer in sharded.model.layers
        for group in fsdp_compat.param_groups_of(layer)
        for param in group.fsdp_params
        for output in param.all_gather_outputs
    ]
    momentum = [muon.state[p]["momentum_buffer"] for p in matrix]
    moments = [adamw.state[p][k] for p in tails for k in ("exp_avg", "exp_avg_sq")]
    return {
        "parameters": (_storage_bytes(list(owners.values())), plan.owned_bytes(shard_rank)),
        "gradients": (
            _storage_bytes([p.grad for p in owners.values()]),
            plan.owned_bytes(shard_rank),
        ),
        "momentum": (_storage_bytes(momentum), planned(RoleKind.MATRIX)),
        "AdamW moments": (_storage_bytes(moments), 2 * planned(RoleKind.TAIL)),
        "unsharded parameters": (_storage_bytes(outputs), 0),
        "outputs seen": (len(outputs), len(owners)),
    }


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_every_byte_is_the_plans(ranks: int, replicas: int) -> None:
    """Between steps a rank stores what the plan says, to the byte, and nothing else."""
    total = 0
    for account in run_ranks(_account, ranks, Run(), replicas):
        for what, (found, planned) in account.items():
            assert found == planned, what
        total += account["parameters"][0]
    _, blocks = metas_of(make_toy())
    assert total == replicas * sum(p.nbytes for b in blocks for p in b.params)


def _traffic(run: Run) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    sharded.counter.reset()
    train(sharded, run, 1, rank, ranks)
    gathers = 2 if run.reshard else 1
    rows = []
    for operation, times in (("gather", gathers * run.accumulation), ("reduce", run.accumulation)):
        factory = transport_factory("p2p")
        itemsize = 8
        expected_bytes = expected_messages = closed_form = 0
        for block in sharded.plan.blocks:
            transport = factory(block, rank, TrafficCounter())
            predict = (
                transport.predict_gather if operation == "gather" else transport.predict_reduce
            )
            expected_bytes += times * predict(itemsize).sent_bytes
            expected_messages += times * predict(itemsize).messages
            owned = block.owned_numel(rank)
            elements = (ranks - 1) * owned if operation == "gather" else block.numel - owned
            closed_form += times * elements * itemsize
        counted = sharded.counter.total(operation)
        rows.append(
            (operation, (counted.sent_bytes, counted.messages), (expected_bytes, expected_messages))
        )
        rows.append((operation + " closed form", (counted.sent_bytes, 0), (closed_form, 0)))
    return rows


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("run", [Run(), Run(reshard=False), Run(accumulation=2)])
def test_counted_traffic_is_the_predicted(ranks: int, run: Run) -> None:
    """Bytes and messages sent, exactly; gather (W-1) L_r, reduce T - L_r (paper section 4.2)."""
    for rows in run_ranks(_traffic, ranks, run):
        for what, counted, predicted in rows:
            assert counted == predicted, what


def _step_collectives(mode: str) -> tuple[int, int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(mode=mode)
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


def test_the_step_does_not_communicate() -> None:
    """Ours: zero collectives. The same counter sees one gather per matrix of the stock step."""
    assert all(count == 0 for count, _ in run_ranks(_step_collectives, 2, "zero3"))
    assert all(
        count == matrices > 0 for count, matrices in run_ranks(_step_collectives, 2, "stock")
    )


def _plan_of_rank(world_size: int, planner: str) -> Any:
    model = make_toy()
    _, blocks = metas_of(model)
    return make_plan(planner, blocks, set(route_toy(model).matrices), world_size)


def _agree(bad_rank: int | None) -> None:
    plan = _plan_of_rank(3, "role_greedy")
    if dist.get_rank() == bad_rank:
        block = plan.blocks[0]
        shards = tuple(replace(s, dtype="float16") for s in block.shards)
        plan = replace(plan, blocks=(replace(block, shards=shards), *plan.blocks[1:]))
    agree_on_plan(plan)


def test_plans_agree_or_every_rank_stops() -> None:
    assert run_ranks(_agree, 3, None) == [None, None, None]
    for name, message in run_ranks_expect_error(_agree, 3, 2):
        assert name == "PlanDisagreementError"
        assert "layers.0.norm.weight" in message and "float16" in message
        fingerprint = _plan_of_rank(3, "role_greedy").fingerprint
        assert fingerprint in message and message.count("fingerprint") == 1 and " has " in message


def _many_matrices(count: int) -> tuple[list[float], int]:
    """``count`` one-matrix blocks: more ranks than roles in every block."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(6, 6, bias=False)) for _ in range(count)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    torch.manual_seed(3)
    model = Model().double()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharded = shard_toy(model, mesh_of(1, ranks), Run(planner="role_greedy"))
    data = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(3):
        sharded.optimizers[0].zero_grad()
        rows = data[rank * 16 // ranks : (rank + 1) * 16 // ranks]
        model(rows).square().mean().backward()
        sharded.optimizers[0].step()
    total = sum(p.full_tensor().sum() for p in model.parameters())
    owned = sum(p.is_owner for p in owner_parameters(model).values())
    return [total.item()], owned


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 19])
def test_ranks_that_own_nothing(count: int) -> None:
    """Case 20: 5 and 19 matrices at W=8; nothing hangs, all ranks end with the same weights."""
    results = run_ranks(_many_matrices, 8, count, timeout_s=240)
    assert sum(owned for _, owned in results) == count
    assert len({total[0] for total, _ in results}) == 1


def _refuse(what: str) -> None:
    model = make_toy()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    _, blocks = metas_of(model)
    world_size = 3 if what == "world size" else 2
    plan = make_plan("role_greedy", blocks, set(route_toy(model).matrices), world_size)
    options: dict[str, Any] = {"mesh": mesh, "transport": transport_factory("p2p")}
    layer = model.layers[0]
    if what == "integer reshard":
        options["reshard_after_forward"] = 2
    elif what == "float16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float16)
    elif what == "extra parameter":
        layer.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    elif what == "mixed dtypes":
        layer.up.weight.data = layer.up.weight.data.float()
    elif what == "frozen later":
        layer.up.weight.requires_grad_(False)
    owner_shard(layer, plan.block("layers.0"), **options)


@pytest.mark.parametrize(
    ("what", "fragment"),
    [
        ("integer reshard", "reshard_after_forward=2"),
        ("float16", "float16 mixed precision"),
        ("world size", "planned for 3 ranks, but the mesh shards over 2"),
        ("extra parameter", "layers.0.extra"),
        ("mixed dtypes", "several dtypes"),
        ("frozen later", "layers.0.up.weight: requires_grad is False"),
    ],
)
def test_refusals_name_the_block_and_happen_on_every_rank(what: str, fragment: str) -> None:
    for name, message in run_ranks_expect_error(_refuse, 2, what):
        assert name in ("NotImplementedError", "ValueError")
        assert "layers.0" in message and fragment in message


def _fail_closed() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    rank = dist.get_rank()
    value = torch.arange(12.0).view(3, 4)
    tensor = OwnerDTensor.wrap(value if rank == 1 else value[:0], mesh, [Owner(1)], value.shape)
    assert torch.equal(tensor.full_tensor(), value)
    doubled = (tensor * 2 + tensor).full_tensor()
    assert torch.equal(doubled, value * 3)
    assert pickle.loads(pickle.dumps(Owner(1))) == Owner(1) != Owner(0)
    refused = []
    for name, operation in {
        "matmul": lambda: tensor @ tensor.T,
        "view": lambda: tensor.view(-1),
        "row": lambda: tensor[0],
        "sum": lambda: tensor.sum(),
        "plain operand": lambda: tensor + value,
        "other owner": lambda: (
            tensor
            + OwnerDTensor.wrap(value if rank == 0 else value[:0], mesh, [Owner(0)], value.shape)
        ),
        "equal": lambda: torch.equal(tensor, tensor),
        "norm of rows": lambda: torch.linalg.vector_norm(tensor, 2, dim=1),
        "foreach max": lambda: torch._foreach_max([tensor]),
        "foreach copy": lambda: torch._foreach_copy_([tensor], [value]),
        "redistribute": lambda: tensor.redistribute(placements=[torch.distributed.tensor.Shard(0)]),
        "randn_like": lambda: torch.randn_like(tensor),
    }.items():
        try:
            operation()
        except NotImplementedError:
            refused.append(name)
    return refused


def test_operators_without_a_shardwise_meaning_raise() -> None:
    """An owner DTensor computes elementwise, and never redistributes behind the caller's back."""
    expected = ["matmul", "view", "row", "sum", "plain operand", "other owner"]
    expected += ["equal", "norm of rows", "foreach max", "foreach copy", "redistribute"]
    assert run_ranks(_fail_closed, 2) == [[*expected, "randn_like"]] * 2


def _truncated(bound: float) -> list[bool]:
    """Owner-shaped, row-sharded and plain tensors, filled one after another from one seed."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    rank = dist.get_rank()
    shape = torch.Size([33, 12])

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return nn.init.trunc_normal_(tensor, std=1.0, a=-bound, b=bound)

    torch.manual_seed(11)
    plain = [fill(torch.empty(shape)) for _ in range(3)]
    end = torch.get_rng_state()
    torch.manual_seed(11)
    local = torch.empty(shape if rank == 1 else (0, 12))
    with whole_tensor_random(), torch.no_grad():
        drawn = [
            fill(OwnerDTensor.wrap(local, mesh, [Owner(1)], shape)),
            fill(distribute_tensor(torch.empty(shape), mesh, [Shard(0)])),
            fill(OwnerDTensor.wrap(local.clone(), mesh, [Owner(1)], shape)),
        ]
    same = [torch.equal(d.full_tensor(), p) for d, p in zip(drawn, plain, strict=True)]
    return [*same, torch.equal(end, torch.get_rng_state())]


# 1.0 rejects a third of the draws, so the loop runs many times; 0.3 takes torch's other algorithm.
@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_rejection_sampling_follows_the_unsharded_tensor(bound: float) -> None:
    """Case 23: the loop of trunc_normal_ ends for all ranks when it ends for the whole tensor."""
    assert run_ranks(_truncated, 2, bound) == [[True] * 4] * 2


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
    # The second time as for a torch without a reset_iter_state of its own.
    for version in (fsdp_compat.TORCH, min(fsdp_compat.TORCH, (2, 12))):
        for register in (mix.register_forward_hook, mix.register_full_backward_hook):
            handle = register(fail)
            with contextlib.suppress(FaultError):
                loss_of(model, tokens[:6], targets[:6]).backward()
                raise AssertionError("the fault did not fire")
            handle.remove()
            with mock.patch.object(fsdp_compat, "TORCH", version):
                reset_iter_state(model)
    train(sharded, Run(), 3, rank, ranks)
    return max_difference(model, train_oracle(3, 1))


def test_training_recovers_from_a_fault_in_forward_or_backward() -> None:
    """After reset_iter_state the next steps are those of a run without the fault."""
    assert max(run_ranks(_recover, 2)) < 1e-13


def _non_contiguous() -> float:
    block = Block().double()
    block.mix.weight = nn.Parameter(block.mix.weight.detach().T.contiguous().T)
    assert not block.mix.weight.is_contiguous()
    reference = block.mix.weight.detach().clone()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([block])

    model = Model()
    _, blocks = metas_of(model)
    plan = make_plan("role_greedy", blocks, set(), 2)
    dist.broadcast(reference, 0)
    with torch.no_grad():
        block.mix.weight.copy_(reference)
    owner_shard(
        block, plan.block("layers.0"), mesh=mesh_of(1, 2), transport=transport_factory("p2p")
    )
    return (block.mix.weight.full_tensor() - reference).abs().max().item()


def test_strides_are_irrelevant() -> None:
    """Case 27: a transposed weight keeps its values."""
    assert run_ranks(_non_contiguous, 2) == [0.0, 0.0]
