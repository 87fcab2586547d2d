"""TorchTitan's ``parallelize_fn`` for owner models: routing, plan, and FSDP2 by owner.

Which path a job takes, all with the same model, data and optimizers:

| shard degree | mode  | blocks                    | Muon                           |
|--------------|-------|---------------------------|--------------------------------|
| > 1          | zero3 | owner shards              | on the owner, no communication |
| > 1          | stock | FSDP2 row shards          | gathers each matrix at the step |
| 1, replicas  | any   | replicated (DDP)          | on every rank                  |
| 1            | any   | one device                | plain                          |

Embedding, head and final norm are stock FSDP2 row shards in the first two. Both combine with
tensor parallelism: shards are then of each tp rank's fragments (``titan.tensor_parallel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch.nn as nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list
from torchtitan.tools.logging import logger

from torchtitan_matrixfsdp.comm import TrafficCounter, agree_on_plan, transport_factory
from torchtitan_matrixfsdp.layout import (
    BlockMeta,
    OwnerPlan,
    ParamMeta,
    Routing,
    canonical_fqn,
    make_plan,
    route,
)
from torchtitan_matrixfsdp.runtime import owner_shard
from torchtitan_matrixfsdp.titan.job_config import MatrixOptimizer
from torchtitan_matrixfsdp.titan.model import OwnerModelMixin, OwnerSetup
from torchtitan_matrixfsdp.titan.tensor_parallel import apply_tensor_parallel, check_model_cut
from torchtitan_matrixfsdp.titan.validation import (
    matrix_optimizer_of,
    owner_fsdp_of,
    validate_job_config,
)


def parallelize_owner_model(
    model: nn.Module, parallel_dims: ParallelDims, job_config: TitanJobConfig
) -> nn.Module:
    """Apply tensor parallelism, activation checkpointing and data parallelism to a model on meta.

    Leaves an :class:`OwnerSetup` on the model for the optimizer builder.

    Raises:
        ConfigError, RoutingError: the configuration asks for what cannot be done.
        PlanDisagreementError: ranks computed different plans.
    """
    if not isinstance(model, OwnerModelMixin):
        raise TypeError(f"expected a model of this plugin's train specs, got {type(model)}")
    validate_job_config(job_config, parallel_dims.world_size)
    owner_fsdp = owner_fsdp_of(job_config)
    matrix_optimizer = matrix_optimizer_of(job_config)
    check_model_cut(job_config, model.model_args)
    apply_tensor_parallel(model, parallel_dims, job_config)
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=False,
            op_sac_save_list=_op_sac_save_list,
            base_folder=job_config.job.dump_folder,
        )
    blocks = describe_blocks(model)
    routing = route_model(model, matrix_optimizer)
    plan = None
    counter = TrafficCounter()
    if parallel_dims.dp_shard_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        mesh = parallel_dims.get_mesh(names)
        if owner_fsdp.mode == "zero3":
            plan = make_plan(
                owner_fsdp.planner, blocks, set(routing.matrices), mesh.size(mesh.ndim - 1)
            )
            agree_on_plan(plan)
        _apply_fsdp(model, mesh, plan, counter, job_config)
    elif parallel_dims.dp_replicate_enabled:
        # Sums gradients once the loss function has undone DDP's mean; see titan.loss.
        replicate(model, device_mesh=parallel_dims.get_mesh("dp_replicate"), bucket_cap_mb=100)
    model.owner_setup = OwnerSetup(routing, plan, counter, matrix_optimizer)
    _log_setup(model.owner_setup, job_config, parallel_dims)
    return model


def route_model(model: nn.Module, options: MatrixOptimizer) -> Routing:
    """Which parameters of a TorchTitan model go to the matrix optimizer.

    Raises:
        RoutingError: a pattern takes nothing, or takes the embedding or the head.
    """
    block_of = {p.fqn: block.name for block in describe_blocks(model) for p in block.params}
    return route(describe_params(model), block_of, options.include, options.exclude)


def describe_params(model: nn.Module) -> list[ParamMeta]:
    """Every distinct parameter of ``model`` by canonical name (a tied one once)."""
    return [_describe(name, param) for name, param in model.named_parameters()]


def describe_blocks(model: nn.Module) -> list[BlockMeta]:
    """The transformer blocks of ``model``, in order, with their parameters."""
    layers = model.get_submodule("layers")
    return [
        BlockMeta(
            f"layers.{layer_id}",
            tuple(
                _describe(f"layers.{layer_id}.{name}", param)
                for name, param in block.named_parameters()
            ),
        )
        for layer_id, block in layers.named_children()
    ]


def _describe(name: str, param: nn.Parameter) -> ParamMeta:
    return ParamMeta(
        fqn=canonical_fqn(name),
        shape=tuple(param.shape),
        dtype=str(param.dtype).removeprefix("torch."),
        itemsize=param.element_size(),
        trainable=param.requires_grad,
    )


def _apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: OwnerPlan | None,
    counter: TrafficCounter,
    job_config: TitanJobConfig,
) -> None:
    """FSDP2 as TorchTitan applies it, with owner shards for the blocks where there is a plan."""
    training = job_config.training
    mp_policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    policy = job_config.parallelism.fsdp_reshard_after_forward
    reshard = policy != "never"
    factory = transport_factory(owner_fsdp_of(job_config).transport)
    embedding, norm, output = (model.get_submodule(n) for n in ("tok_embeddings", "norm", "output"))
    tied = output.get_parameter("weight") is embedding.get_parameter("weight")
    if not tied:
        fully_shard(embedding, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard)
    for name, block in model.get_submodule("layers").named_children():
        if plan is None:
            fully_shard(block, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard)
        else:
            owner_shard(
                block,
                plan.block(f"layers.{name}"),
                mesh=mesh,
                transport=factory,
                counter=counter,
                mp_policy=mp_policy,
                reshard_after_forward=reshard,
            )
    # One FSDP unit for a tied weight: torch refuses to manage it in two. Like stock, the last
    # unit is kept after forward by default, since backward needs it at once.
    last = [embedding, norm, output] if tied else [norm, output]
    fully_shard(last, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=policy == "always")
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The trainer divides the loss by the global number of tokens: gradients are sums.
            module.set_gradient_divide_factor(1.0)
            # gloo has no PREMUL_SUM, which FSDP2 would use for the factor.
            module.set_force_sum_reduction_for_comms(True)
            # A parameter that this rank's batch did not use counts as a zero gradient.
            module.set_reduce_scatter_unused_params(True)


def _log_setup(setup: OwnerSetup, job_config: TitanJobConfig, parallel_dims: ParallelDims) -> None:
    routing, plan = setup.routing, setup.plan
    sections = {
        "owner_fsdp": asdict(owner_fsdp_of(job_config)),
        "matrix_optimizer": asdict(setup.matrix_optimizer),
        "optimizer": asdict(job_config.optimizer),
    }
    for name, options in sections.items():
        logger.info(f"[{name}] " + ", ".join(f"{k}={v!r}" for k, v in options.items()))
    taken = [pattern for _, pattern in routing.matched_by]
    by_pattern = ", ".join(f"{p!r}: {taken.count(p)}" for p in dict.fromkeys(taken))
    logger.info(
        f"Routing: {len(routing.matrices)} matrices on {setup.matrix_optimizer.name} (by pattern "
        f"{by_pattern}), {len(routing.elementwise)} elementwise tensors on "
        f"{job_config.optimizer.name}, {len(routing.frozen)} frozen"
    )
    if plan is None:
        logger.info(_describe_unplanned(parallel_dims))
        return
    owned = plan.rank_bytes()
    gammas = sorted(plan.gammas())
    logger.info(
        f"Owner plan {plan.fingerprint[:12]} by {plan.planner}"
        f"{'' if plan.chosen == plan.planner else f' (chose {plan.chosen})'}: {plan.num_roles} "
        f"roles of {len(plan.blocks)} blocks over {plan.world_size} ranks; bytes per rank min "
        f"{min(owned):,} max {max(owned):,} (max/mean {plan.imbalance:.3f}); gamma per block min "
        f"{gammas[0]:.2f} median {gammas[len(gammas) // 2]:.2f} max {gammas[-1]:.2f}"
    )
    if parallel_dims.tp_enabled:
        logger.info(
            f"Each rank of the plan is a column of {parallel_dims.tp} tensor-parallel ranks, which "
            "share its bytes"
        )
    roles_per_block = plan.num_roles / len(plan.blocks)
    if plan.world_size > roles_per_block:
        logger.warning(
            f"{plan.world_size} ranks share {roles_per_block:.1f} roles per block: in each block "
            f"some ranks own nothing, and gathers cost up to {gammas[-1]:.2f} times FSDP's "
            "all-gather (gamma). A smaller data_parallel_shard_degree with more replicas lowers it."
        )
    idle = [rank for rank, size in enumerate(owned) if size == 0]
    if idle:
        logger.warning(
            f"{len(idle)} of {plan.world_size} ranks own no block parameter: {_some(idle)}"
        )


def _describe_unplanned(parallel_dims: ParallelDims) -> str:
    if parallel_dims.dp_shard_enabled:
        return "owner_fsdp.mode is stock: FSDP2 row shards, Muon gathers each matrix at the step"
    if parallel_dims.dp_replicate_enabled:
        return "Shard degree is 1: replicated parameters (DDP), every rank steps all of them"
    return "One device: nothing is sharded, the optimizers step on whole parameters"


def _some(values: Sequence[int], limit: int = 8) -> str:
    shown = ", ".join(str(v) for v in values[:limit])
    return shown + (", ..." if len(values) > limit else "")
