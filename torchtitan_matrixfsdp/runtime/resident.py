"""Blocks that stay gathered: only gradients and optimizer state live on the owner (ZeRO-1).

[Note: resident weights]
The plan, the owner DTensors, the reduction of each backward, the step and the checkpoint are those
of every owner block. What differs is when parameters move: not in forward and backward, but once
after each optimizer step, in :meth:`OwnerContext.publish` (ZeRO, arXiv 1910.02054, section 5.1; as
gradients are reduced to the owner in each backward, section 5.2 too). Each rank keeps the block
buffer, in the gather dtype, beside what it owns. A reshard only changes which parameters the
modules show: clipping, optimizers and checkpoints look for the owner DTensors.

The fault to exclude is the silent use of stale weights. Whether a buffer is fresh decides whether
ranks meet in a collective, so all ranks must decide alike, from what all of them do. A buffer is

- stale until its first gather, so that ``init_weights`` and a checkpoint may come before;
- stale when a torch optimizer begins a step that may concern it (a hook that torch runs before
  every optimizer's step), when ``load_state_dict`` or ``to_empty`` has been called, after
  ``reset_iter_state``, and after :meth:`OwnerContext.invalidate`;
- fresh once a gather is started. ``publish`` starts one for each trainable block. A use of a stale
  buffer gathers first: a step that is not published costs time, not correctness.

Other writes are noticed only by the rank that stores the weight (by torch's version counter, or
because another replica has sent it). It must not gather alone, so it raises at the next use. Writes
that no counter sees (a collective, a kernel of the caller's own) are for the caller to declare, by
``invalidate``.

Streams: ``publish`` is a forward prefetch of every block. It runs in the all-gather streams, behind
the optimizer and the buffer's last readers in the compute stream. The next forward waits for each
block's event, as for any prefetch, and needs no other until the next ``publish``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn as nn

from torchtitan_matrixfsdp.runtime.buffers import BufferState, BufferStateError
from torchtitan_matrixfsdp.runtime.fsdp_compat import (
    TrainingState,
    disable_functorch_if_active,
    root_of,
)
from torchtitan_matrixfsdp.runtime.owner_dtensor import OwnerDTensor
from torchtitan_matrixfsdp.runtime.owner_group import (
    OwnerComm,
    OwnerParamGroup,
    owner_all_gather_copy_out,
)
from torchtitan_matrixfsdp.runtime.owner_param import OwnerParam, ShardLookup

STEP_GATHER = "step_gather"
"""The name under which :meth:`ResidentParamGroup.publish` counts what it sends."""


class ResidentParamGroup(OwnerParamGroup):
    """The owner group of a block that stays gathered; see [Note: resident weights]."""

    def __init__(
        self,
        params: list[nn.Parameter],
        modules: tuple[nn.Module, ...],
        lookup: ShardLookup,
        comm: OwnerComm,
        **stock_arguments: Any,
    ) -> None:
        super().__init__(params, modules, lookup, comm, **stock_arguments)
        self._defer_release = False  # nothing is released
        self._writes: dict[OwnerParam, int] = {}  # of what this rank owns, at the last gather
        comm.context.add_resident(self)

    def invalidate(self) -> None:
        """Gather before the next use. On every rank."""
        self._comm.buffer.invalidate()

    @property
    def is_trainable(self) -> bool:
        """Whether one of the parameters needs a gradient."""
        return any(param.sharded_param.requires_grad for param in self.fsdp_params)

    def holds_any_of(self, tensors: Collection[torch.Tensor]) -> bool:
        """Whether one of the sharded parameters is among ``tensors``."""
        return any(param.sharded_param in tensors for param in self.fsdp_params)

    def publish(self) -> None:
        """Start gathering what the owners have stepped, as a prefetch of the next forward.

        Before the first forward there is nothing to keep up to date, nor streams. A single rank
        copies when the parameters are used.
        """
        self.invalidate()
        if self._comm.block.world_size == 1 or root_of(self.modules[0]) is None:
            return
        with (
            self.use_training_state(TrainingState.FORWARD),
            self._comm.context.counter.counted_as("gather", STEP_GATHER),
        ):
            self.unshard(self.unshard_async_op)

    @disable_functorch_if_active
    def unshard(self, async_op: bool = False) -> None:
        """Start a gather if the buffer is not fresh; else nothing moves.

        Raises:
            BufferStateError: on the owner, which alone can tell: a weight was written and nobody
                said so.
        """
        buffer = self._comm.buffer
        if buffer.is_fresh:
            self._check_unwritten()
            return
        self._drop_pending()
        if self.is_unsharded and self._training_state != TrainingState.PRE_BACKWARD:
            self._to_sharded()  # kept by set_reshard_after_forward or _backward
        # The buffer's readers and the optimizer are in the compute stream.
        self._wait_all_gather_streams_on_event(self._compute_event())
        writes = {param: _shard_of(param).writes for param in self._owned()}
        super().unshard(async_op)
        if self._all_gather_result is not None:
            buffer.validate()
            self._writes = writes

    @disable_functorch_if_active
    def wait_for_unshard(self) -> None:
        """Put the unsharded parameters on the modules, after a gather if one is under way."""
        if self._all_gather_result is not None:
            super().wait_for_unshard()
            return
        buffer = self._comm.buffer
        is_unwanted = self._training_state == TrainingState.PRE_BACKWARD and (
            not self.unshard_in_backward
        )
        if buffer.state is not BufferState.RESIDENT or not buffer.is_fresh or is_unwanted:
            return
        if self._training_state == TrainingState.FORWARD and self.comm_ctx.all_gather_state:
            # As stock does here: free the output of the last row-sharded unit's all-gather.
            self._wait_all_gather_streams_on_event(self.comm_ctx.all_gather_state.event)
            self.comm_ctx.all_gather_state = None
        for param in self.fsdp_params:
            param.init_unsharded_param()
        self._to_unsharded()
        buffer.occupy()

    def _owned(self) -> list[OwnerParam]:
        return [p for p in self.fsdp_params if isinstance(p, OwnerParam) and p.is_owner]

    def _check_unwritten(self) -> None:
        for param, writes in self._writes.items():
            if _shard_of(param).writes != writes:
                raise BufferStateError(
                    f"{param.shard.fqn}: the weight was written after block "
                    f"{self._comm.block.name} was gathered, and not by an optimizer's step that "
                    "OwnerContext.publish() followed or by load_state_dict. Call "
                    "OwnerContext.invalidate() on every rank after such a write, and "
                    "PartitionedReplicas.publish() before OwnerContext.publish()."
                )

    def _drop_pending(self) -> None:
        """Wait for a gather that was started before the weights changed, and forget it."""
        if self._all_gather_result is None:
            return
        group = self._all_gather_process_group
        owner_all_gather_copy_out(self._all_gather_result, self.fsdp_params, group)
        self._all_gather_result = None
        self._comm.buffer.rest()

    def _give_back(self) -> None:
        self._comm.buffer.rest()

    def _release_behind_compute(self) -> None:
        """A gather that nobody used stays, and was waited for. One rank copies later than that."""
        if self._comm.block.world_size == 1:
            self.invalidate()
        self._comm.buffer.rest()


def _shard_of(param: OwnerParam) -> OwnerDTensor:
    assert isinstance(param.sharded_param, OwnerDTensor)
    return param.sharded_param
