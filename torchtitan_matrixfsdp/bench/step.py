"""One real training step of a scaled-down model under every system: what each rank sends.

The counts come from the dispatcher (``sent.SentBytes``), the predictions from the formulas of
``layout.account``. They must agree on every rank, for ours and for stock FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torchtitan_matrixfsdp.bench.blocks import (
    LlamaBlocks,
    LlamaShape,
    model_blocks,
    plan_blocks,
    scaled_model,
)
from torchtitan_matrixfsdp.bench.ranks import rank_device, rank_mesh
from torchtitan_matrixfsdp.bench.results import MeasuredStep, Phase, spread
from torchtitan_matrixfsdp.bench.sent import SentBytes
from torchtitan_matrixfsdp.comm import TransportFactory
from torchtitan_matrixfsdp.layout import (
    OwnerPlan,
    StepAccount,
    StepShape,
    fsdp_accounts,
    owner_accounts,
)
from torchtitan_matrixfsdp.optim import (
    GatherMuon,
    LocalStepOptimizer,
    Muon,
    create_adam_state,
    logical_shapes,
)
from torchtitan_matrixfsdp.runtime import OwnerContext, owner_shard, sum_gradients

_LAYERS = 3
_TOKENS = 16
_SEED = 13
_STOCK_STEP = "gather"


@dataclass(frozen=True)
class ShardedModel:
    """A sharded stack of blocks.

    Attributes:
        model: ``[batch, tokens, dim]`` to the same.
        context: of the owner shards; None under FSDP2.
    """

    model: LlamaBlocks
    context: OwnerContext | None


def shard_model(
    shape: LlamaShape,
    plan: OwnerPlan | None,
    mesh: DeviceMesh,
    transport: str = "auto",
    context: OwnerContext | None = None,
) -> ShardedModel:
    """The model of ``shape`` in float32, the same weights on every rank, sharded over ``mesh``: by
    owner as ``plan`` says, or without a plan by FSDP2."""
    torch.manual_seed(_SEED)
    with rank_device():
        model = LlamaBlocks(shape)
    if plan is not None:
        context = context or OwnerContext()
    for name, layer in model.layers.named_children():
        if plan is None or context is None:
            fully_shard(layer, mesh=mesh)
        else:
            owner_shard(
                layer,
                plan.block(f"layers.{name}"),
                mesh=mesh,
                transport=TransportFactory(transport),
                context=context,
            )
    fully_shard(model, mesh=mesh)
    sum_gradients(model)
    return ShardedModel(model, context)


def sample(shape: LlamaShape, tokens: int) -> torch.Tensor:
    """This rank's input: ``[1, tokens, dim]``."""
    return torch.randn(1, tokens, shape.dim, device=rank_device())


def measure_steps(transports: Sequence[str], dim: int) -> tuple[MeasuredStep, ...]:
    """One step under each of ``transports`` and under stock FSDP2 with the gather baseline, on
    Llama's blocks at width ``dim``. Called on all ranks, which return the same.

    Raises:
        RuntimeError: a rank counts other bytes than predicted.
    """
    shape = scaled_model(dim, _LAYERS)
    plan = plan_blocks(model_blocks(shape), dist.get_world_size())
    mesh = rank_mesh()
    steps = []
    for transport in transports:
        (predicted,) = owner_accounts(plan, transport, StepShape(), [dist.get_rank()])
        system = f"owner, {transport}"
        steps.append(_measure(system, shape, shard_model(shape, plan, mesh, transport), predicted))
    (predicted,) = fsdp_accounts(plan, _STOCK_STEP, StepShape(), [dist.get_rank()])
    steps.append(
        _measure(f"fsdp2, {_STOCK_STEP}", shape, shard_model(shape, None, mesh), predicted)
    )
    return tuple(steps)


def _measure(
    system: str, shape: LlamaShape, sharded: ShardedModel, predicted: StepAccount
) -> MeasuredStep:
    model = sharded.model
    optimizers = make_optimizers(model, is_stock=sharded.context is None)
    x = sample(shape, _TOKENS)
    counted = []
    with SentBytes() as sent:
        loss = model(x).square().mean()
        counted.append(sent.take())
        loss.backward()
        counted.append(sent.take())
        for optimizer in optimizers:
            optimizer.step()
        counted.append(sent.take())
    account = StepAccount(*counted)
    if account != predicted:
        raise RuntimeError(
            f"{system} on rank {dist.get_rank()}: predicted {predicted}, counted {account}"
        )
    if sharded.context is not None:
        totals = sharded.context.counter.totals.values()
        if sum(traffic.sent_bytes for traffic in totals) != account.total:
            raise RuntimeError(f"{system}: the transports counted {totals}, sent {account}")
    return MeasuredStep(
        system,
        Phase(spread(predicted.forward), spread(account.forward)),
        Phase(spread(predicted.backward), spread(account.backward)),
        Phase(spread(predicted.step), spread(account.step)),
    )


def make_optimizers(model: nn.Module, is_stock: bool) -> list[LocalStepOptimizer]:
    """Muon for the matrices of ``model``, on row shards where ``is_stock``, and AdamW."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]

    def muon(groups: list[dict[str, Any]], of_local: Mapping[torch.Tensor, torch.Tensor]) -> Muon:
        if is_stock:
            return GatherMuon(groups, of_local)
        return Muon(groups, logical_shapes=logical_shapes(of_local))

    def adamw(groups: list[dict[str, Any]], of_local: object) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW(groups)
        create_adam_state(optimizer)
        return optimizer

    return [LocalStepOptimizer(matrices, muon), LocalStepOptimizer(others, adamw)]
