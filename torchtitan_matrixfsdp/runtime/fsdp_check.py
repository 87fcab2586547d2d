"""Which torch this is, and whether it has what owner groups rely on inside FSDP2.

``fsdp_compat`` uses the names and hides how versions differ; here they are lists to hold an
installed torch against. Importing this file does so, before anything else of torch's private
parts is imported: an unknown minor version raises ImportError with the supported range, and a
release in the range that has renamed or reordered something raises RuntimeError with its name,
instead of failing in the middle of a step.
"""

from __future__ import annotations

import dis
import inspect
import typing
from typing import Any

import torch

SUPPORTED_TORCH = ((2, 11), (2, 12), (2, 13))
RANGE = ">=2.11,<2.14"


def _check_torch_version() -> tuple[int, int]:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) not in SUPPORTED_TORCH:
        raise ImportError(
            f"torchtitan_matrixfsdp.runtime supports torch {RANGE}, found {torch.__version__}: "
            "it relies on private FSDP2 names that change between minor versions. Install a "
            f'supported one: pip install "torch{RANGE}".'
        )
    return major, minor


TORCH = _check_torch_version()

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_state  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (  # noqa: E402
    FSDPCommContext,
    FSDPParamGroup,
)


def _faults_of_private_names(version: tuple[int, int]) -> list[str]:
    """What of the lists below the running torch, of minor ``version``, lacks: one phrase each."""
    faults = []
    for owner, function, names in _parameters(version):
        if function not in vars(owner):
            faults.append(f"{owner.__name__} does not define {function}")
            continue
        found = list(inspect.signature(vars(owner)[function]).parameters)
        if found != names.split():
            faults.append(f"{function} takes {found}, expected {names.split()}")
    for cls, names in _attributes(version):
        missing = set(names.split()) - _stored_attributes(cls)
        faults += [f"{cls.__name__} does not set {name}" for name in sorted(missing)]
    for cls, names in _methods(version):
        missing = set(names.split()) - set(vars(cls))
        faults += [f"{cls.__name__} does not define {name}" for name in sorted(missing)]
    returned = inspect.signature(_fsdp_collectives.foreach_reduce).return_annotation
    results = 7 if version >= (2, 13) else 6
    if len(typing.get_args(returned)) != results:
        faults.append(f"foreach_reduce returns {returned}, expected {results} values")
    return faults


def _parameters(version: tuple[int, int]) -> list[tuple[Any, str, str]]:
    """Module or class, what of it owner groups replace, override or call, and its parameters in
    order. Torch passes most of them by position, so another order would be taken for ours."""
    placement = "self param device shard_placement_fn"
    outputs = "self all_gather_input_numels all_gather_input_dtypes world_size device"
    return [
        (
            _fsdp_collectives,
            "foreach_all_gather",
            "fsdp_params group async_op all_gather_copy_in_stream all_gather_stream device "
            "all_gather_comm",
        ),
        (
            _fsdp_collectives,
            "foreach_all_gather_copy_out",
            "all_gather_result fsdp_params group",
        ),
        (
            _fsdp_collectives,
            "foreach_reduce",
            "fsdp_params unsharded_grads reduce_scatter_group reduce_scatter_stream "
            "reduce_scatter_comm orig_dtype reduce_dtype device gradient_divide_factor "
            "all_reduce_group all_reduce_stream all_reduce_grads partial_reduce_output "
            "all_reduce_hook force_sum_reduction_for_comms",
        ),
        (
            _fsdp_collectives,
            "AllGatherResult",
            "all_gather_output all_gather_event all_gather_work param_all_gather_input_dtypes "
            "param_all_gather_input_numels all_gather_input_split_sizes",
        ),
        (
            FSDPParam,
            "_init_sharded_param",
            f"{placement} mesh_info" if version >= (2, 12) else placement,
        ),
        (FSDPParam, "_init_sharded_post_forward_param_metadata", "self param"),
        (FSDPParam, "to_sharded_dtensor", "self tensor"),
        (
            FSDPParam,
            "init_all_gather_outputs",
            outputs if version >= (2, 13) else f"{outputs} force_recreate",
        ),
        (FSDPParam, "reset_sharded_param", "self"),
        (
            FSDPParamGroup,
            "__init__",
            "self params modules mesh_info post_forward_mesh_info device shard_placement_fn "
            "mp_policy offload_policy",
        ),
        (FSDPParamGroup, "unshard", "self async_op"),
        (FSDPParamGroup, "wait_for_unshard", "self"),
        (FSDPParamGroup, "post_backward", "self unused"),
    ]


def _attributes(version: tuple[int, int]) -> list[tuple[type, str]]:
    """Attributes that a class sets in its own code: those that an owner parameter sets in its
    place, because stock methods read them, and those that the runtime reads or resets."""
    several_groups = version >= (2, 12)
    return [
        (
            FSDPParam,
            "mesh_info _module_info fsdp_placement is_dtensor _orig_size _contiguous_orig_stride "
            "_spmd_mesh _spmd_placements _sharding_spec sharded_size contiguous_sharded_stride "
            "padded_sharded_param_size _sharded_param_data sharded_param sharded_state "
            "all_gather_outputs unsharded_accumulated_grad _unsharded_param"
            + (" _shard_mesh _orig_param_uid _unsharded_dtensor_spec" if several_groups else ""),
        ),
        (
            FSDPParamGroup,
            "fsdp_params _all_gather_comm _reduce_scatter_comm _training_state reduce_grads "
            "_all_gather_result _partial_reduce_output _post_forward_indices unshard_async_op "
            "unshard_in_backward" + (" reduce_scatter_unused_params" if version >= (2, 13) else ""),
        ),
        (
            _fsdp_state.FSDPState,
            "_comm_ctx _state_ctx _training_state _is_root _device_handle _modules_to_run_forward "
            + ("_fsdp_param_groups" if several_groups else "_fsdp_param_group"),
        ),
        (
            _fsdp_state.FSDPStateContext,
            "all_states iter_forward_root post_backward_final_callback_queued",
        ),
        (
            FSDPCommContext,
            "all_gather_state post_forward_order "
            + ("reduce_scatter_states" if several_groups else "reduce_scatter_state"),
        ),
    ]


def _methods(version: tuple[int, int]) -> list[tuple[type, str]]:
    """Methods and properties that the runtime calls or overrides."""
    return [
        (
            FSDPParam,
            "_setattr_on_modules all_gather_inputs alloc_all_gather_outputs unsharded_param"
            + (" _init_shard_mesh" if version >= (2, 12) else ""),
        ),
        (
            FSDPParamGroup,
            "set_allocate_memory_from_process_group _to_sharded _to_unsharded use_training_state "
            "_wait_all_gather_streams_on_event"
            + ("" if version >= (2, 13) else " _wait_for_post_backward"),
        ),
        (
            FSDPModule,
            "set_gradient_divide_factor set_force_sum_reduction_for_comms"
            + (" reset_iter_state set_reduce_scatter_unused_params" if version >= (2, 13) else ""),
        ),
    ]


def _stored_attributes(cls: type) -> set[str]:
    """Names of the attributes that ``cls`` assigns in its own methods."""
    functions = [inspect.unwrap(f) for f in vars(cls).values() if inspect.isfunction(f)]
    instructions = [i for f in functions for i in dis.get_instructions(f)]
    return {i.argval for i in instructions if i.opname == "STORE_ATTR"}


if _faults := _faults_of_private_names(TORCH):
    raise RuntimeError(
        f"torch {torch.__version__} lacks private parts of FSDP2 that owner groups rely on: "
        f"{'; '.join(_faults)}. Install a release of torch {RANGE} that has them."
    )
