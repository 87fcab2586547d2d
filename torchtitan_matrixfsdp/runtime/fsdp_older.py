"""What FSDP2 does by itself from torch 2.13 on, for 2.11 and 2.12 too.

:func:`reset_iter_state` and zero gradients for parameters that a rank did not use; see
[Note: torch versions] in ``fsdp_compat``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import Work
from torch.distributed.fsdp import FSDPModule, fully_shard

from torchtitan_matrixfsdp.runtime.fsdp_check import TORCH
from torchtitan_matrixfsdp.runtime.fsdp_compat import (
    FSDPParam,
    FSDPParamGroup,
    TrainingState,
    groups_of,
    param_groups_of,
)

_Method = Callable[..., Any]


def reset_iter_state(root: FSDPModule) -> None:
    """Wait for what an interrupted forward or backward has started, free what it has gathered
    or reduced in part, and let the next iteration begin afresh.

    Raises:
        RuntimeError: ``root`` is not the root of the sharded model.
    """
    if TORCH >= (2, 13):
        root.reset_iter_state()
        return
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    if state._is_root is None:
        return  # nothing has run yet
    if not state._is_root:
        raise RuntimeError("reset_iter_state must be called on the root FSDP module")
    comm = state._comm_ctx
    stream = state._device_handle.current_stream()
    reductions = comm.reduce_scatter_states if TORCH >= (2, 12) else [comm.reduce_scatter_state]
    # A buffer may go back to the allocator once this stream is ordered after its last use.
    for held in (comm.all_gather_state, *reductions):
        if held is not None and held.event is not None:
            stream.wait_event(held.event)
    comm.all_gather_state = None
    if TORCH >= (2, 12):
        comm.reduce_scatter_states.clear()
    else:
        comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in groups_of(each):
            _reset_group(group, stream)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: FSDPParamGroup, stream: Any) -> None:
    gathered = group._all_gather_result
    if gathered is not None:
        if gathered.all_gather_event is not None:
            stream.wait_event(gathered.all_gather_event)
        if isinstance(gathered.all_gather_work, Work):
            gathered.all_gather_work.wait()
        group._all_gather_result = None
    group._wait_for_post_backward()
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def counts_unused_parameters(post_backward: _Method) -> _Method:
    """Decorates ``FSDPParamGroup.post_backward`` so that a trainable parameter without a
    gradient takes part in the reduction as zeros. From 2.13 on FSDP2 does so itself, where
    the group's ``reduce_scatter_unused_params`` is set."""
    return post_backward if TORCH >= (2, 13) else _with_zero_gradients(post_backward)


def _with_zero_gradients(post_backward: _Method) -> _Method:
    last_backward: WeakKeyDictionary[FSDPParamGroup, int] = WeakKeyDictionary()

    @functools.wraps(post_backward)
    def with_zeros(group: FSDPParamGroup, *unused: Any) -> Any:
        # Idle: FSDP2's callback at the end of backward has come to a group that did not run.
        # 2.11 comes to a unit of several modules once for each, when the first has reduced.
        backward = torch._C._current_graph_task_id()
        idle = group._training_state is TrainingState.IDLE
        if group.reduce_grads and not (idle and last_backward.get(group) == backward):
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):  # absent before the first gather
                    _fill_gradient(param)
        last_backward[group] = backward
        return post_backward(group, *unused)

    return with_zeros


def _fill_gradient(param: FSDPParam) -> None:
    unsharded = param.unsharded_param
    has_gradient = param.unsharded_accumulated_grad is not None or unsharded.grad is not None
    if unsharded.requires_grad and not has_gradient:
        unsharded.grad = torch.zeros_like(unsharded)


class _CountingGroup(FSDPParamGroup):
    """A stock group, for a torch whose own cannot count unused parameters."""

    post_backward = _with_zero_gradients(FSDPParamGroup.post_backward)


def count_unused_parameters(module: FSDPModule) -> None:
    """Let a parameter in ``module``'s own FSDP2 unit that this rank's batch did not use take
    part in the unit's reduction as a zero gradient, so that all ranks reduce and step alike.

    FSDP2's ``set_reduce_scatter_unused_params``, for every supported torch. Owner groups count
    them without being asked.
    """
    if TORCH >= (2, 13):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in param_groups_of(module):
        if type(group) is FSDPParamGroup:
            group.__class__ = _CountingGroup
