"""The one file that names private parts of FSDP2 and DTensor.

[Note: what we lean on]
FSDP2 has no public hook for "another placement" or "another collective with uneven sizes".
It does have a lifecycle (hooks, prefetch, streams, mixed precision, accumulation, storage
resizing) that we keep whole. Three of its module functions are replaced for owner groups,
and one class: ``foreach_all_gather``, ``foreach_all_gather_copy_out``, ``foreach_reduce``
and ``FSDPParam``. Stock methods find these names in their module's globals, so
:func:`rebind` makes a private copy of a method in which those names resolve to ours. Nothing
of torch is modified, and a name that torch no longer uses raises at import instead of
silently running stock code.

Everything here was read and run against torch 2.13. The version check below is the contract:
another minor version fails at import with the supported range.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

SUPPORTED_TORCH = (2, 13)


def _check_torch_version() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) != SUPPORTED_TORCH:
        raise ImportError(
            f"torchtitan_matrixfsdp.runtime supports torch >= 2.13, < 2.14, found "
            f"{torch.__version__}: it relies on private FSDP2 names that change between minor "
            'versions. Install a supported one: pip install "torch>=2.13,<2.14".'
        )


_check_torch_version()

from torch._prims_common import make_contiguous_strides_for  # noqa: E402
from torch.distributed.device_mesh import _get_device_handle  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # noqa: E402
    FSDPMeshInfo,
    _disable_functorch_if_active,
    _dynamo_disable,
)
from torch.distributed.fsdp._fully_shard._fsdp_init import (  # noqa: E402
    _get_device_from_mesh,
    _get_mesh_info,
    _get_post_forward_mesh_info,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import (  # noqa: E402
    FSDPParam,
    ShardedState,
    _get_orig_param_uid,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: E402
from torch.distributed.tensor._utils import (  # noqa: E402
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import Placement  # noqa: E402
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types  # noqa: E402
from torch.utils._foreach_utils import _foreach_supported_types as _util_foreach_types  # noqa: E402

__all__ = [
    "SUPPORTED_TORCH",
    "AllGather",
    "AllGatherResult",
    "DTensorSpec",
    "FSDPMeshInfo",
    "FSDPParam",
    "FSDPParamGroup",
    "ReduceScatter",
    "ShardedState",
    "append_param_group",
    "concatenate_meshes",
    "contiguous_strides",
    "device_handle",
    "disable_functorch_if_active",
    "drop_unsharded_gradients",
    "dynamo_disable",
    "local_of",
    "local_shape_and_offset",
    "make_spec",
    "mesh_device",
    "mesh_infos",
    "orig_param_uid",
    "post_accumulate_grad_hooks",
    "rebind",
    "register_foreach_type",
    "spec_of",
]


# The decorators that FSDP2 puts on the methods which we rebind.
disable_functorch_if_active = _disable_functorch_if_active
dynamo_disable = _dynamo_disable


def rebind(function: Callable[..., Any], **replacements: Any) -> Callable[..., Any]:
    """A private copy of a stock function whose named globals resolve to ``replacements``.

    Decorators that keep ``__wrapped__`` are peeled off first and must be applied again by the
    caller where their effect matters.

    Raises:
        RuntimeError: the function does not use one of the names. Running it would silently
            run stock code, so an unknown torch must stop here.
    """
    inner = function
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    used = _global_names(inner.__code__)
    missing = sorted(set(replacements) - used)
    if missing:
        raise RuntimeError(
            f"{function.__qualname__} of torch {torch.__version__} no longer uses {missing}; "
            "owner groups cannot be attached. Install a supported torch: >= 2.13, < 2.14."
        )
    copy = types.FunctionType(
        inner.__code__,
        {**inner.__globals__, **replacements},
        inner.__name__,
        inner.__defaults__,
        inner.__closure__,
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy


def _global_names(code: types.CodeType) -> set[str]:
    # Not co_names, which holds attribute names as well.
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def mesh_infos(
    mesh: DeviceMesh, reshard_after_forward: bool
) -> tuple[FSDPMeshInfo, FSDPMeshInfo | None]:
    """FSDP2's description of a 1D (shard) or 2D (replicate, shard) mesh, and of the mesh that
    parameters are resharded to after forward (``None``: they are not)."""
    info = _get_mesh_info(mesh, None)
    assert isinstance(info, FSDPMeshInfo)
    return info, _get_post_forward_mesh_info(reshard_after_forward, info)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank that FSDP2 uses for ``mesh``."""
    return _get_device_from_mesh(mesh)


def append_param_group(module: nn.Module, group: FSDPParamGroup) -> None:
    """Add ``group`` to the parameter groups that FSDP2 runs for ``module``'s hooks."""
    fully_shard.state(module)._fsdp_param_groups.append(group)  # type: ignore[attr-defined]


def device_handle(device: torch.device) -> Any:
    """FSDP2's stream and event module for ``device`` (no-op streams on CPU)."""
    return _get_device_handle(device.type)


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The mesh with the dimensions of both, which are parts of one mesh."""
    return DeviceMesh._concatenate([first, second])


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    return make_contiguous_strides_for(shape)


def orig_param_uid(param: nn.Parameter) -> int:
    """FSDP2's identity of an original parameter, by which it finds one managed twice."""
    return _get_orig_param_uid(param)


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    dtype: torch.dtype,
) -> DTensorSpec:
    """A DTensor spec of a contiguous global tensor of ``shape`` and ``dtype``."""
    meta = TensorMeta(shape, contiguous_strides(shape), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def local_shape_and_offset(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What ``Shard`` placements leave of ``shape`` on this rank, and where it begins.

    Placements that are no shards count as replication. An empty part begins at the end.
    """
    return compute_local_shape_and_global_offset(shape, mesh, placements)


def spec_of(tensor: DTensor) -> DTensorSpec:
    """The spec of a DTensor."""
    return tensor._spec


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself: no autograd node, no view, unlike ``to_local`` under grad."""
    return tensor._local_tensor


def drop_unsharded_gradients(module: nn.Module) -> None:
    """Forget what autograd has accumulated under ``module`` and no reduction has taken yet."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            for group in fully_shard.state(submodule)._fsdp_param_groups:  # type: ignore[attr-defined]
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):  # absent before the first gather
                        param._unsharded_param.grad = None


def register_foreach_type(cls: type[torch.Tensor]) -> None:
    """Let foreach optimizers and gradient clipping take lists that hold ``cls``.

    torch looks the exact type up in two lists; DTensor adds itself to them in the same way.
    Idempotent, and called when a model is sharded, never on import.
    """
    for supported in (_optim_foreach_types, _util_foreach_types):
        if cls not in supported:
            supported.append(cls)


def post_accumulate_grad_hooks(param: nn.Parameter) -> list[Callable[[nn.Parameter], None]]:
    """The hooks that run once a gradient has been accumulated into ``param``."""
    hooks = param._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []
