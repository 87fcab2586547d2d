"""The entry point: shard one block of a model by owner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from torchtitan_matrixfsdp.comm import TransportFactory
from torchtitan_matrixfsdp.layout import BlockPlan, MatrixShard, canonical_fqn
from torchtitan_matrixfsdp.runtime import fsdp_older
from torchtitan_matrixfsdp.runtime.buffers import OwnerContext
from torchtitan_matrixfsdp.runtime.fsdp_compat import (
    append_param_group,
    drop_unsharded_gradients,
    local_of,
    mesh_device,
    mesh_infos,
    param_groups_of,
    register_foreach_type,
)
from torchtitan_matrixfsdp.runtime.owner_dtensor import OwnerDTensor
from torchtitan_matrixfsdp.runtime.owner_group import OwnerComm, OwnerParamGroup
from torchtitan_matrixfsdp.runtime.resident import ResidentParamGroup


def sum_gradients(model: nn.Module) -> None:
    """Have every FSDP unit in ``model`` sum gradients over the ranks, and not average them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no PREMUL_SUM, which FSDP2 would use for the factor.
            module.set_force_sum_reduction_for_comms(True)


def owner_shard(
    module: nn.Module,
    block: BlockPlan,
    *,
    mesh: DeviceMesh,
    transport: TransportFactory,
    context: OwnerContext,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    resident: bool = False,
) -> nn.Module:
    """Shard every parameter of ``module`` as ``block`` says, inside FSDP2's lifecycle.

    ``module`` becomes an ``FSDPModule``: prefetch lists, gradient sync, reshard and the other
    FSDP2 methods work on it. Call it bottom-up, on every rank of the mesh, and on the root with
    plain ``fully_shard``.

    Args:
        module: one FSDP unit, on meta or on the mesh's device.
        block: its plan; ``block.world_size`` must be the mesh's shard size. FQNs are
            ``block.name`` plus the module's own canonical names, shapes are logical.
        mesh: 1D (shard) or 2D (replicate, shard).
        transport: makes what moves the block.
        context: one for all blocks of a model.
        reshard_after_forward: as in FSDP2; an integer (a smaller mesh) is refused.
        mp_policy: FSDP2 mixed precision; float16 is refused (no loss scaling here).
        offload_policy: FSDP2's; with ``CPUOffloadPolicy`` owner shards, gradients and hence
            optimizer state live in host memory. Refused with ``resident``.
        resident: keep the block gathered: forward and backward move no parameter, and the owners'
            steps are gathered by :meth:`OwnerContext.publish`, which must follow every optimizer
            step. ``reshard_after_forward`` then has no effect.

    Parameters that tensor parallelism has made DTensors are owned in fragments: the owner's
    column of tp ranks stores them, each rank its own.

    Raises:
        NotImplementedError: an integer reshard, float16, or parameters that are DTensors in
            another way than sharded or replicated on a one-dimensional mesh.
        ValueError: plan and module or mesh do not fit (the message names the parameter), or
            ``resident`` with a CPU offload policy.
    """
    if resident and isinstance(offload_policy, CPUOffloadPolicy):
        raise ValueError(
            f"block {block.name}: resident parameters stay on the compute device, and received "
            "CPUOffloadPolicy; expected OffloadPolicy or None. Disable CPU offload, or residence."
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"block {block.name}: reshard_after_forward={reshard_after_forward!r} (resharding to "
            "a smaller mesh) is not supported with owner shards: expected True, False or None."
        )
    mp_policy = mp_policy or MixedPrecisionPolicy()
    offload_policy = offload_policy or OffloadPolicy()
    if torch.float16 in (mp_policy.param_dtype, mp_policy.reduce_dtype):
        raise NotImplementedError(
            f"block {block.name}: float16 mixed precision is not supported with owner shards; "
            "expected torch.bfloat16 or torch.float32."
        )
    shard_size = mesh.size(mesh.ndim - 1)
    if block.world_size != shard_size:
        raise ValueError(
            f"block {block.name}: planned for {block.world_size} ranks, but the mesh shards over "
            f"{shard_size}. Make the plan for the mesh's last dimension."
        )
    block, params = _in_fragments(block, _match_parameters(module, block))
    _require_one_gather_dtype(block, params, mp_policy)
    register_foreach_type(OwnerDTensor)
    if resident:
        # A reshard only changes which parameters the module shows; the memory stays.
        reshard_after_forward = True
    auto_reshard = True if reshard_after_forward is None else reshard_after_forward
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload_policy,
        ignored_params=set(params),
    )
    mesh_info, post_forward_mesh_info = mesh_infos(mesh, auto_reshard)
    context.connect(mesh_info.shard_process_group, mesh_device(mesh))
    group_type = ResidentParamGroup if resident else OwnerParamGroup
    group = group_type(
        list(params),
        (module,),
        params.__getitem__,
        OwnerComm(block, transport, mesh_info.shard_mesh_rank, context, resident),
        mesh_info=mesh_info,
        post_forward_mesh_info=post_forward_mesh_info,
        device=mesh_device(mesh),
        mp_policy=mp_policy,
        offload_policy=offload_policy,
    )
    append_param_group(module, group)
    return module


def reset_iter_state(model: nn.Module) -> None:
    """Make the root ``model`` ready for another step after its forward or backward has raised.

    FSDP2's ``reset_iter_state`` (for torch 2.11 and 2.12 too, which lack it), and what torch 2.13
    forgets there: the gradients of units whose backward was interrupted, to which the next
    backward would add. The failed iteration is lost; sharded gradients are left to ``zero_grad``.

    Raises:
        TypeError: ``model`` is not sharded by FSDP2.
        RuntimeError: ``model`` is not the root.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(f"reset_iter_state: {type(model).__name__} is not an FSDP2 module")
    fsdp_older.reset_iter_state(model)
    drop_unsharded_gradients(model)
    for module in model.modules():
        for group in param_groups_of(module) if isinstance(module, FSDPModule) else ():
            if isinstance(group, ResidentParamGroup):
                group.invalidate()  # ranks may have come to different ends of the iteration


def _match_parameters(module: nn.Module, block: BlockPlan) -> Mapping[nn.Parameter, MatrixShard]:
    planned = {shard.fqn: shard for shard in block.shards}
    found: dict[nn.Parameter, MatrixShard] = {}
    names = []
    for name, param in module.named_parameters():
        fqn = canonical_fqn(f"{block.name}.{name}")
        names.append(fqn)
        if fqn in planned:
            found[param] = planned[fqn]
    missing, unplanned = set(planned) - set(names), set(names) - set(planned)
    if missing or unplanned:
        raise ValueError(
            f"block {block.name}: planned parameters that the module lacks: {sorted(missing)}; "
            f"parameters of the module that no role holds: {sorted(unplanned)}"
        )
    for param, shard in found.items():
        if param.requires_grad != shard.trainable:
            raise ValueError(
                f"{shard.fqn}: requires_grad is {param.requires_grad}, planned as "
                f"{shard.trainable}. Freeze parameters before planning."
            )
    return found


def _in_fragments(
    block: BlockPlan, params: Mapping[nn.Parameter, MatrixShard]
) -> tuple[BlockPlan, Mapping[nn.Parameter, MatrixShard]]:
    """The block as this tp rank stores and moves it; unchanged without tensor parallelism."""
    if not any(isinstance(param, DTensor) for param in params):
        return block, params
    shapes = {}
    for param, shard in params.items():
        if tuple(param.shape) != shard.shape:
            raise ValueError(
                f"{shard.fqn}: the plan has shape {shard.shape}, the module's parameter "
                f"{tuple(param.shape)}. Plan the model that is sharded."
            )
        shapes[shard.fqn] = shard.shape
        if isinstance(param, DTensor):
            (placement, *more) = param.placements
            if more or not (placement.is_replicate() or isinstance(placement, Shard)):
                raise NotImplementedError(
                    f"{shard.fqn}: a DTensor with placements {param.placements} cannot be owned in "
                    "fragments; expected Shard or Replicate on the one dimension of a tensor-"
                    "parallel mesh. Disable expert parallelism."
                )
            shapes[shard.fqn] = tuple(local_of(param).shape)
    fragments = block.fragmented(shapes)
    by_fqn = {shard.fqn: shard for shard in fragments.shards}
    return fragments, {param: by_fqn[shard.fqn] for param, shard in params.items()}


def _require_one_gather_dtype(
    block: BlockPlan, params: Mapping[nn.Parameter, MatrixShard], policy: MixedPrecisionPolicy
) -> None:
    """One flat buffer has one dtype. With a parameter dtype all floats are cast to it."""
    if policy.param_dtype is not None and all(p.is_floating_point() for p in params):
        return
    dtypes = {p.dtype: shard.fqn for p, shard in params.items()}
    if len(dtypes) > 1:
        raise ValueError(
            f"block {block.name}: parameters of several dtypes {dtypes} (dtype: example). Use "
            "one training.dtype, or a mixed-precision parameter dtype that casts them all."
        )
