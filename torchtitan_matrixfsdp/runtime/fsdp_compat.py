"""The one file that uses private parts of FSDP2 and DTensor, and knows torch's versions.

[Note: what we lean on]
FSDP2 has no public hook for "another placement" or "another collective with uneven sizes".
It does have a lifecycle (hooks, prefetch, streams, mixed precision, accumulation, storage
resizing) that we keep whole. Three of its module functions are replaced for owner groups,
and one class: ``foreach_all_gather``, ``foreach_all_gather_copy_out``, ``foreach_reduce``
and ``FSDPParam``. Stock methods find these names in their module's globals, so
:func:`rebind` makes a private copy of a method in which those names resolve to ours. Nothing
of torch is modified, and a name that torch no longer uses raises at import instead of
silently running stock code.

[Note: torch versions]
torch 2.11, 2.12 and 2.13 differ in what we lean on, and nothing but this file and ``fsdp_older``
knows how:

- 2.11 holds one parameter group per module, later ones a list;
- 2.11 gives a parameter its mesh before ``_init_sharded_param``, later ones pass it in, and
  look for parameters managed twice;
- ``foreach_reduce`` also returns the stream of its last event from 2.13 on;
- 2.13 puts another decorator on ``unshard`` and ``wait_for_unshard``, and 2.12 on
  ``post_backward``;
- 2.11 never calls the ``__torch_dispatch__`` of a DTensor subclass;
- only 2.13 has ``reset_iter_state`` and counts unused parameters as zero gradients. For the
  others both are written in ``fsdp_older``.

``fsdp_check`` stops every other minor version, and a release in the range that lacks a name.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_matrixfsdp.runtime.fsdp_check import RANGE, SUPPORTED_TORCH, TORCH

# isort: split
# The line above has checked the installed torch. Only now its private parts.
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _get_device_from_mesh,
    _get_mesh_info,
    _get_post_forward_mesh_info,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_foreach_types

__all__ = [
    "SUPPORTED_TORCH",
    "AllGather",
    "AllGatherResult",
    "DTensorSpec",
    "DispatchingDTensor",
    "FSDPMeshInfo",
    "FSDPParam",
    "FSDPParamGroup",
    "ReduceScatter",
    "Reduction",
    "ShardedState",
    "TrainingState",
    "append_param_group",
    "claim_original",
    "concatenate_meshes",
    "contiguous_strides",
    "device_handle",
    "disable_functorch_if_active",
    "drop_unsharded_gradients",
    "dynamo_disable",
    "groups_of",
    "init_mesh_info",
    "local_of",
    "local_shape_and_offset",
    "make_spec",
    "mesh_device",
    "mesh_infos",
    "param_groups_of",
    "post_accumulate_grad_hooks",
    "rebind",
    "reduce_adapter",
    "register_foreach_type",
    "root_of",
    "set_local",
    "spec_of",
]

_Method = Callable[..., Any]


# The decorators that FSDP2 puts on the methods which we rebind, where it does.
def disable_functorch_if_active(method: _Method) -> _Method:
    """What FSDP2 decorates ``unshard`` and ``wait_for_unshard`` with (nothing before 2.13)."""
    return _fsdp_common._disable_functorch_if_active(method) if TORCH >= (2, 13) else method


def dynamo_disable(method: _Method) -> _Method:
    """What FSDP2 decorates ``post_backward`` with (nothing in 2.11)."""
    return _fsdp_common._dynamo_disable(method) if TORCH >= (2, 12) else method


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
            f"owner groups cannot be attached. Install a supported torch: {RANGE}."
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
    info = _get_mesh_info(mesh)
    assert isinstance(info, FSDPMeshInfo)
    return info, _get_post_forward_mesh_info(reshard_after_forward, info)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank that FSDP2 uses for ``mesh``."""
    return _get_device_from_mesh(mesh)


def init_mesh_info(param: FSDPParam, mesh_info: FSDPMeshInfo | None) -> FSDPMeshInfo:
    """Give ``param`` its mesh at the start of ``_init_sharded_param``; ``mesh_info`` is what
    torch passed there (``None`` in 2.11, whose constructor has set it before)."""
    if TORCH >= (2, 12):
        assert mesh_info is not None
        param.mesh_info = mesh_info
        param._shard_mesh = param._init_shard_mesh()
    assert isinstance(param.mesh_info, FSDPMeshInfo)
    return param.mesh_info


def param_groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """The parameter groups that FSDP2 runs for ``module``'s hooks."""
    return groups_of(fully_shard.state(module))  # type: ignore[attr-defined]


def groups_of(state: Any) -> list[FSDPParamGroup]:
    if TORCH >= (2, 12):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def append_param_group(module: nn.Module, group: FSDPParamGroup) -> None:
    """Add ``group`` to the parameter groups that FSDP2 runs for ``module``'s hooks.

    Raises:
        RuntimeError: torch 2.11, which holds one group, and ``module`` has one.
    """
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    if TORCH >= (2, 12):
        state._fsdp_param_groups.append(group)
        return
    if state._fsdp_param_group is not None:
        raise RuntimeError(
            f"{type(module).__name__} has a parameter group already, and torch "
            f"{torch.__version__} runs one per module. Shard its other parameters in modules of "
            "their own, or install torch >=2.12."
        )
    state._fsdp_param_group = group


def root_of(module: nn.Module) -> nn.Module | None:
    """The root whose first forward made ``module`` part of it; ``None`` before that."""
    states = fully_shard.state(module)._state_ctx.all_states  # type: ignore[attr-defined]
    root: nn.Module | None = states[0]._modules[0] if states else None
    return root


def device_handle(device: torch.device) -> Any:
    """FSDP2's stream and event module for ``device`` (no-op streams on CPU)."""
    return _get_device_handle(device.type)


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The mesh with the dimensions of both, which are parts of one mesh."""
    return DeviceMesh._concatenate([first, second])


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    return make_contiguous_strides_for(shape)


def claim_original(param: nn.Parameter, fqn: str) -> int:
    """Note that an owner group manages the original parameter ``param`` as ``fqn``. Returns its
    identity, by which FSDP2 finds parameters that stock groups manage too (2.12 or newer).

    Raises:
        ValueError: another owner parameter was made of it. Both would train apart.
    """
    owned_as = vars(param).setdefault("_owned_as", fqn)
    if owned_as != fqn:
        raise ValueError(
            f"{fqn}: this parameter is shared with {owned_as}, which an owner group manages "
            "already. Shared parameters must be in one FSDP unit: untie them, or shard both "
            "modules with fully_shard([module_a, module_b])."
        )
    return _fsdp_param._get_orig_param_uid(param) if TORCH >= (2, 12) else id(param)


class _SubclassDispatch(TorchDispatchMode):
    """Hands operators on a :class:`DispatchingDTensor` to its ``__torch_dispatch__``."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for cls in types:
            if issubclass(cls, DispatchingDTensor):
                return cls.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class DispatchingDTensor(DTensor):
    """Base of a DTensor class that answers operators in its own ``__torch_dispatch__``.

    torch 2.11 takes every subclass for a plain DTensor there (pytorch/pytorch#177716) and never
    calls it. A dispatch mode comes before that short cut, so each call of torch's Python API on
    such a tensor runs under one. What torch's C++ calls by itself, it calls on no owner shard:
    autograd only ever sees the unsharded parameter.
    """

    if TORCH < (2, 12):

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass(), _SubclassDispatch():
                return func(*args, **(kwargs or {}))


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


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Give a DTensor another local tensor of the same shape and dtype, in other memory."""
    tensor._local_tensor = local


def drop_unsharded_gradients(module: nn.Module) -> None:
    """Forget what autograd has accumulated under ``module`` and no reduction has taken yet."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            for group in param_groups_of(submodule):
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


@dataclass(frozen=True)
class Reduction:
    """What stands in for ``foreach_reduce`` hands back to ``post_backward``.

    Attributes:
        scatter_input: the packed gradients, held until ``scatter_event`` has passed.
        scatter_event: recorded when ``scatter_input`` is no longer read (``None`` on CPU, as
            all events).
        post_stream: where ``post_event`` was recorded.
        post_event: recorded when the sharded gradients are complete.
        all_reduce_input: what the replicas sum, held until ``all_reduce_event`` has passed.
        all_reduce_event: recorded after that sum.
        partial_output: reduced over the shard group only, when the sum over replicas waits for
            a later microbatch.
    """

    scatter_input: torch.Tensor
    scatter_event: torch.Event | None
    post_stream: torch.Stream
    post_event: torch.Event | None
    all_reduce_input: torch.Tensor | None = None
    all_reduce_event: torch.Event | None = None
    partial_output: torch.Tensor | None = None


def reduce_adapter(reduce: Callable[..., Reduction]) -> Callable[..., tuple[Any, ...]]:
    """``reduce``, which takes the parameters of ``foreach_reduce``, with the result that this
    torch's ``post_backward`` unpacks."""

    @functools.wraps(reduce)
    def in_stock_form(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        done = reduce(*args, **kwargs)
        return (
            done.scatter_input,
            done.scatter_event,
            *((done.post_stream,) if TORCH >= (2, 13) else ()),
            done.post_event,
            done.all_reduce_input,
            done.all_reduce_event,
            done.partial_output,
        )

    return in_stock_form
