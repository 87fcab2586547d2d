"""The whole account of a model's step, by formula: no rank and no tensor is needed."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_matrixfsdp.bench.blocks import MODELS, model_blocks, plan_blocks
from torchtitan_matrixfsdp.bench.results import ModelAccount, Spread, SystemAccount
from torchtitan_matrixfsdp.layout import (
    BASELINE_STEPS,
    TRANSPORT_MODELS,
    RoleKind,
    StepAccount,
    StepShape,
    fsdp_accounts,
    owner_accounts,
)


def account_model(model: str, world_size: int, shape: StepShape) -> ModelAccount:
    """What every rank sends for the blocks of ``model`` (a key of ``MODELS``), ours under each
    transport and stock FSDP2 with each optimizer step."""
    plan = plan_blocks(model_blocks(MODELS[model]), world_size)
    fsdp2 = {step: fsdp_accounts(plan, step, shape) for step in BASELINE_STEPS}
    stock = next(iter(fsdp2.values()))  # they differ in the step alone
    systems = [
        _system(f"owner, {transport}", owner_accounts(plan, transport, shape), stock)
        for transport in (*TRANSPORT_MODELS, "auto")
    ]
    systems += [_system(f"fsdp2, {step}", accounts, stock) for step, accounts in fsdp2.items()]
    shards = [shard for block in plan.blocks for shard in block.shards]
    return ModelAccount(
        model=model,
        world_size=world_size,
        matrix_bytes=sum(s.nbytes for s in shards if s.kind is RoleKind.MATRIX),
        gamma_max=max(plan.gammas()),
        gather_itemsize=shape.gather_itemsize,
        reduce_itemsize=shape.reduce_itemsize,
        step_itemsize=shape.step_itemsize,
        result_itemsize=shape.result_itemsize,
        microbatches=shape.microbatches,
        systems=tuple(systems),
    )


def _system(
    name: str, accounts: Sequence[StepAccount], stock: Sequence[StepAccount]
) -> SystemAccount:
    return SystemAccount(
        system=name,
        forward=Spread.of([a.forward for a in accounts]),
        backward=Spread.of([a.backward for a in accounts]),
        step=Spread.of([a.step for a in accounts]),
        prefetched=Spread.of([a.prefetched for a in accounts]),
        exposed=Spread.of([a.exposed for a in accounts]),
        prefetched_over_fsdp2=Spread.of(
            [a.prefetched - s.prefetched for a, s in zip(accounts, stock, strict=True)]
        ),
    )
