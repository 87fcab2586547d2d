"""TorchTitan's ``parallelize_fn`` for owner models: routing, plan, and FSDP2 by owner.

Which path a job takes, all with the same model, data and optimizers:

| shard degree | mode  | blocks                    | Muon                           |
|--------------|-------|---------------------------|--------------------------------|
| > 1          | zero3 | owner shards              | on the owner, no communication |
| > 1          | zero1 | owner shards, kept gathered | on the owner, then blocks are gathered |
| > 1          | stock | FSDP2 row shards          | as ``owner_fsdp.stock_step`` says |
| 1, replicas  | any   | replicated (DDP)          | on every rank                  |
| 1            | any   | one device                | plain                          |

Embedding, head and final norm are stock FSDP2 row shards in the first two. The shard group is
TorchTitan's mesh "fsdp", which context parallelism shares: its ranks hold shards too, so its degree
counts into the shard degree of the table.
Both combine with tensor parallelism: shards are then of each tp rank's fragments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.models.llama3.infra.parallelize import (
    _op_sac_save_list,
    apply_compile,
    apply_ddp,
)
from torchtitan.tools.logging import logger

from torchtitan_matrixfsdp.comm import (
    PlanDisagreementError,
    TransportFactory,
    agree_on_choice,
    agree_on_plan,
)
from torchtitan_matrixfsdp.layout import (
    BlockMeta,
    OwnerPlan,
    ParamMeta,
    Routing,
    assign_replicas,
    canonical_fqn,
    make_plan,
    route,
)
from torchtitan_matrixfsdp.optim import Split
from torchtitan_matrixfsdp.runtime import (
    OwnerContext,
    count_unused_parameters,
    owner_shard,
    sum_gradients,
)
from torchtitan_matrixfsdp.titan.job_config import MatrixOptimizer
from torchtitan_matrixfsdp.titan.model import OwnerModelMixin, OwnerSetup
from torchtitan_matrixfsdp.titan.report import describe_transports
from torchtitan_matrixfsdp.titan.split import resolve_splits
from torchtitan_matrixfsdp.titan.stages import compiles_blocks
from torchtitan_matrixfsdp.titan.tensor_parallel import apply_tensor_parallel, check_model_cut
from torchtitan_matrixfsdp.titan.validation import (
    matrix_optimizer_of,
    owner_fsdp_of,
    validate_job_config,
)


def parallelize_owner_model(
    model: nn.Module, parallel_dims: ParallelDims, job_config: TitanJobConfig
) -> nn.Module:
    """Apply tensor and context parallelism, activation checkpointing, compilation and data
    parallelism to a whole model on meta. With a pipeline ``titan.pipeline`` does so to its parts.

    Leaves an :class:`OwnerSetup` on the model for the optimizer builder.

    Raises:
        ConfigError, RoutingError: the configuration asks for what cannot be done.
        PlanDisagreementError: ranks computed different plans.
    """
    validate_job_config(job_config, parallel_dims.world_size)
    check_model_cut(job_config, _ours(model).model_args)
    routing = route_model(model, matrix_optimizer_of(job_config))
    splits = split_model(model, routing, matrix_optimizer_of(job_config))
    parallelize_parts([model], routing, splits, parallel_dims, job_config)
    return model


def parallelize_parts(
    parts: Sequence[nn.Module],
    routing: Routing,
    splits: Mapping[str, Split],
    parallel_dims: ParallelDims,
    job_config: TitanJobConfig,
) -> None:
    """Parallelise, in place, the parts of a model that this rank holds.

    One plan covers all parts, so that load is carried from one to the next. ``routing`` and
    ``splits`` are those of the whole model: a part alone cannot tell a pattern that takes nothing
    anywhere from one whose weights lie in other parts.

    Raises:
        PlanDisagreementError: as for :func:`agree`.
    """
    models = [_ours(part) for part in parts]
    for model in models:
        _apply_before_sharding(model, parallel_dims, job_config)
    blocks = [block for model in models for block in describe_blocks(model)]
    plan = None
    steppers: Mapping[str, int] = {}
    context = OwnerContext()
    factory = _transport_factory(job_config)
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        mesh = parallel_dims.get_mesh(names)
        owner_fsdp = owner_fsdp_of(job_config)
        if owner_fsdp.is_owned:
            here = {param.fqn for block in blocks for param in block.params}
            matrices = here.intersection(routing.matrices)
            plan = make_plan(owner_fsdp.planner, blocks, matrices, mesh.size(mesh.ndim - 1))
            agree(plan, factory, parallel_dims)
            if parallel_dims.dp_replicate_enabled and owner_fsdp.replicas == "partitioned":
                steppers = assign_replicas(plan, parallel_dims.dp_replicate)
        for model in models:
            _apply_fsdp(model, mesh, plan, factory, context, job_config)
    elif parallel_dims.dp_replicate_enabled:
        # Sums gradients once the loss function has undone DDP's mean; see titan.loss.
        for model in models:
            apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), compiles_blocks(job_config))
    setup = OwnerSetup(
        routing,
        plan,
        context,
        matrix_optimizer_of(job_config),
        steppers,
        splits,
        owner_fsdp_of(job_config).stock_step,
    )
    for model in models:
        model.owner_setup = setup
    _log_setup(setup, job_config, parallel_dims)
    if plan is not None:
        for line in describe_transports(plan, factory):
            logger.info(line)


def _ours(part: nn.Module) -> OwnerModelMixin:
    if not isinstance(part, OwnerModelMixin):
        raise TypeError(f"expected a model of this plugin's train specs, got {type(part)}")
    return part


def agree(plan: OwnerPlan, factory: TransportFactory, parallel_dims: ParallelDims) -> None:
    """Check that all ranks which hold the same blocks hold the same plan and move each block by the
    same transport; a collective of all.

    Raises:
        PlanDisagreementError: on every rank of the job, other pipeline stages included.
    """
    # TorchTitan's mesh "loss" joins the replicas and shards of one pipeline rank.
    group = parallel_dims.get_mesh("loss").get_group() if parallel_dims.pp_enabled else None
    chosen = ", ".join(f"{block.name}: {factory.choose(block)}" for block in plan.blocks)
    fault = None
    try:
        agree_on_plan(plan, group)
        agree_on_choice("the transport of each block", chosen, group)
    except PlanDisagreementError as error:
        fault = str(error)
    if fault is not None and group is None:
        raise PlanDisagreementError(fault)
    if group is None:
        return
    # The other stages would wait for this one in their first send or receive.
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    rank = next((rank for rank, found in enumerate(faults) if found), None)
    if rank is not None:
        raise PlanDisagreementError(
            fault or f"in another pipeline stage (global rank {rank}): {faults[rank]}"
        )


def _apply_before_sharding(
    part: OwnerModelMixin, parallel_dims: ParallelDims, job_config: TitanJobConfig
) -> None:
    """What TorchTitan applies before FSDP, in its order."""
    apply_tensor_parallel(part, parallel_dims, job_config)
    if parallel_dims.cp_enabled:
        layers = part.get_submodule("layers").children()
        apply_cp_to_attention_module(
            [layer.get_submodule("attention.inner_attention") for layer in layers],
            parallel_dims.get_mesh("cp"),
            part.model_args.attn_type,
        )
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            part,
            job_config.activation_checkpoint,
            model_compile_enabled=compiles_blocks(job_config),
            op_sac_save_list=_op_sac_save_list,
            base_folder=job_config.job.dump_folder,
        )
    if compiles_blocks(job_config):
        # Each block by itself. FSDP's hooks are put on the compiled module: outside the graph,
        # which sees ordinary parameters.
        apply_compile(part, job_config.compile)


def route_model(model: nn.Module, options: MatrixOptimizer) -> Routing:
    """Which parameters of a TorchTitan model go to the matrix optimizer.

    Raises:
        RoutingError: a pattern takes nothing, or takes the embedding or the head.
    """
    block_of = {p.fqn: block.name for block in describe_blocks(model) for p in block.params}
    return route(describe_params(model), block_of, options.include, options.exclude)


def split_model(model: nn.Module, routing: Routing, options: MatrixOptimizer) -> dict[str, Split]:
    """The matrices of a TorchTitan model that Muon cuts into blocks.

    Raises:
        ConfigError: a rule of ``matrix_optimizer.split`` takes nothing, or does not fit.
    """
    if not options.split:
        return {}
    args = _ours(model).model_args
    shapes = {param.fqn: param.shape for param in describe_params(model)}
    return resolve_splits(
        options.split,
        {fqn: (shapes[fqn][0], shapes[fqn][1]) for fqn in routing.matrices},
        args.n_heads,
        args.n_kv_heads or args.n_heads,
    )


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


def _mixed_precision(job_config: TitanJobConfig) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of gathers and of reductions."""
    training = job_config.training
    return (
        TORCH_DTYPE_MAP[training.mixed_precision_param],
        TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )


def _transport_factory(job_config: TitanJobConfig) -> TransportFactory:
    param_dtype, reduce_dtype = _mixed_precision(job_config)
    transport = owner_fsdp_of(job_config).transport
    return TransportFactory(transport, param_dtype.itemsize, reduce_dtype.itemsize)


def _apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: OwnerPlan | None,
    factory: TransportFactory,
    context: OwnerContext,
    job_config: TitanJobConfig,
) -> None:
    """FSDP2 as TorchTitan applies it, with owner shards for the blocks where there is a plan."""
    param_dtype, reduce_dtype = _mixed_precision(job_config)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "offload_policy": (
            CPUOffloadPolicy() if job_config.training.enable_cpu_offload else OffloadPolicy()
        ),
    }
    policy = job_config.parallelism.fsdp_reshard_after_forward
    # With a pipeline, by default keep parameters from one microbatch to the next, as stock does.
    is_pipelined = job_config.parallelism.pipeline_parallel_degree > 1
    reshard = policy == "always" or (policy == "default" and not is_pipelined)
    # A pipeline stage lacks what other stages hold: TorchTitan leaves None in its place.
    children = dict(model.named_children())
    embedding = children.get("tok_embeddings")
    last = [children[name] for name in ("norm", "output") if name in children]
    tied = (
        embedding is not None
        and "output" in children
        and children["output"].get_parameter("weight") is embedding.get_parameter("weight")
    )
    if embedding is not None and not tied:
        fully_shard(embedding, **options, reshard_after_forward=reshard)
    for name, block in model.get_submodule("layers").named_children():
        if plan is None:
            fully_shard(block, **options, reshard_after_forward=reshard)
        else:
            owner_shard(
                block,
                plan.block(f"layers.{name}"),
                **options,
                transport=factory,
                context=context,
                reshard_after_forward=reshard,
                resident=owner_fsdp_of(job_config).mode == "zero1",
            )
    # One FSDP unit for a tied weight: torch refuses to manage it in two. Like stock, the last
    # unit is kept after forward by default, since backward needs it at once.
    if embedding is not None and tied:
        last = [embedding, *last]
    if last:
        fully_shard(last, **options, reshard_after_forward=policy == "always")
    fully_shard(model, **options)
    # The trainer divides the loss by the global number of tokens.
    sum_gradients(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A parameter that this rank's batch did not use counts as a zero gradient.
            count_unused_parameters(module)


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
        f"Routing: {len(routing.matrices)} matrices on {setup.matrix_optimizer.title} (by pattern "
        f"{by_pattern}), {len(routing.elementwise)} elementwise tensors on "
        f"{job_config.optimizer.name}, {len(routing.frozen)} frozen"
    )
    if setup.splits:
        logger.info(
            f"Split: {len(setup.splits)} matrices are orthogonalised in "
            f"{sum(split.parts for split in setup.splits.values())} blocks"
        )
    if plan is None:
        logger.info(_describe_unplanned(parallel_dims, setup.stock_step))
        return
    if not plan.blocks:
        logger.info("Owner plan: this pipeline rank holds no transformer block")
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
    if setup.steppers:
        work = [0] * parallel_dims.dp_replicate
        for replica in setup.steppers.values():
            work[replica] += 1
        logger.info(f"Replicas are partitioned: they step {work} matrices, and send them on")
    elif owner_fsdp_of(job_config).replicas == "partitioned":
        logger.warning('owner_fsdp.replicas = "partitioned" has no effect: there is one replica')
    roles_per_block = plan.num_roles / len(plan.blocks)
    if plan.world_size > roles_per_block:
        logger.warning(
            f"{plan.world_size} ranks share {roles_per_block:.1f} roles per block: in each block "
            f"some ranks own nothing (gamma up to {gammas[-1]:.2f}), and transports move more than "
            "FSDP's all-gather. A smaller data_parallel_shard_degree with more replicas lowers it."
        )
    idle = [rank for rank, size in enumerate(owned) if size == 0]
    if idle:
        logger.warning(
            f"{len(idle)} of {plan.world_size} ranks own no block parameter: {_some(idle)}"
        )


def _describe_unplanned(parallel_dims: ParallelDims, stock_step: str) -> str:
    if parallel_dims.fsdp_enabled:
        return f"owner_fsdp.mode is stock: FSDP2 row shards; Muon's step is {stock_step!r}"
    if parallel_dims.dp_replicate_enabled:
        return "Shard degree is 1: replicated parameters (DDP), every rank steps all of them"
    return "Nothing is sharded: the optimizers step on whole parameters"


def _some(values: Sequence[int], limit: int = 8) -> str:
    shown = ", ".join(str(v) for v in values[:limit])
    return shown + (", ..." if len(values) > limit else "")
