"""Owner shards inside FSDP2: storage, traffic, agreement, refusals and operators."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.toy import (
    TRANSPORTS,
    Run,
    make_toy,
    mesh_of,
    metas_of,
    owner_parameters,
    route_toy,
    rows_of,
    shard_toy,
)
from tests.harness import run_ranks, run_ranks_expect_error
from torchtitan_matrixfsdp.comm import TransportFactory, agree_on_plan
from torchtitan_matrixfsdp.layout import (
    make_plan,
)
from torchtitan_matrixfsdp.runtime import (
    Owner,
    OwnerContext,
    OwnerDTensor,
    owner_shard,
    whole_tensor_random,
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


def _many_matrices(count: int) -> list[tuple[float, int]]:
    return [_train_many_matrices(count, name) for name in TRANSPORTS]


def _train_many_matrices(count: int, transport: str) -> tuple[float, int]:
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
    run = Run(planner="role_greedy", transport=transport)
    sharded = shard_toy(model, mesh_of(1, ranks), run)
    data = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(3):
        sharded.optimizers[0].zero_grad()
        rows = data[rank * 16 // ranks : (rank + 1) * 16 // ranks]
        model(rows).square().mean().backward()
        sharded.optimizers[0].step()
    total = sum(p.full_tensor().sum() for p in model.parameters())
    owned = sum(p.is_owner for p in owner_parameters(model).values())
    return total.item(), owned


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 19])
def test_ranks_that_own_nothing(count: int) -> None:
    """Case 20: 5 and 19 matrices at W=8; nothing hangs, all ranks end with the same weights, which
    the transports sum in different orders."""
    results = run_ranks(_many_matrices, 8, count, timeout_s=240)
    for by_rank in zip(*results, strict=True):
        assert sum(owned for _, owned in by_rank) == count
        assert len({total for total, _ in by_rank}) == 1
    totals = [total for total, _ in results[0]]
    assert max(totals) - min(totals) < 1e-12


REFUSED = {
    "integer reshard": "reshard_after_forward=2",
    "float16": "float16 mixed precision",
    "world size": "planned for 3 ranks, but the mesh shards over 2",
    "extra parameter": "layers.0.extra",
    "mixed dtypes": "several dtypes",
    "frozen later": "layers.0.up.weight: requires_grad is False",
}


def _refuse(what: str) -> None:
    model = make_toy()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    _, blocks = metas_of(model)
    world_size = 3 if what == "world size" else 2
    plan = make_plan("role_greedy", blocks, set(route_toy(model).matrices), world_size)
    options: dict[str, Any] = {
        "mesh": mesh,
        "transport": TransportFactory("p2p"),
        "context": OwnerContext(),
    }
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


def _refusals() -> dict[str, str]:
    messages = {}
    for what in REFUSED:
        with pytest.raises((NotImplementedError, ValueError)) as raised:
            _refuse(what)
        messages[what] = str(raised.value)
    return messages


def test_refusals_name_the_block_and_happen_on_every_rank() -> None:
    for messages in run_ranks(_refusals, 2):
        for what, fragment in REFUSED.items():
            assert "layers.0" in messages[what] and fragment in messages[what]


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


SHAPES = {"conv": (8, 4, 3, 3), "experts": (4, 16, 8), "row": (1, 16), "transposed": (8, 16)}


class ShapesBlock(nn.Module):
    """Weights of one to four dimensions; one is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            weight = torch.randn(shape, dtype=torch.float64) / 4
            if name == "transposed":
                weight = weight.T.contiguous().T
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.transposed.T
        x = torch.einsum("nd,emd->nm", x, self.experts) + self.row
        x = nn.functional.conv2d(x.view(-1, 4, 2, 2), self.conv, padding=1)
        return torch.tanh(x).sum((2, 3))


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ShapesBlock()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def _shapes() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    kinds = []
    for name in TRANSPORTS:
        torch.manual_seed(5)
        model = Shapes()
        oracle = Shapes()
        oracle.load_state_dict(model.state_dict())
        assert not model.layers[0].transposed.is_contiguous()
        run = Run(planner="role_greedy", transport=name)
        sharded = shard_toy(model, mesh_of(1, 2), run, include=["layers"])
        data = torch.randn(12, 16, dtype=torch.float64)
        model(data[rows_of(rank, 2)]).square().mean().backward()
        oracle(data).square().mean().backward()
        for fqn, param in owner_parameters(model).items():
            reference = oracle.get_parameter(fqn)
            assert torch.equal(param.full_tensor(), reference), fqn
            torch.testing.assert_close(
                param.grad.full_tensor(), reference.grad, rtol=1e-12, atol=1e-14
            )
            kinds.append((fqn.removeprefix("layers.0."), sharded.plan.shard(fqn).kind.value))
    return kinds


def test_weights_of_any_rank_and_stride() -> None:
    """Case 27: two dimensions are a matrix, 1xN and transposed too; 3D and 4D weights belong to
    the tail, which an elementwise optimizer steps. All keep their values and get their gradients.
    """
    kinds = {"conv": "tail", "experts": "tail", "row": "matrix", "transposed": "matrix"}
    for found in run_ranks(_shapes, 2):
        assert len(found) == len(SHAPES) * len(TRANSPORTS)
        assert dict(found) == kinds
