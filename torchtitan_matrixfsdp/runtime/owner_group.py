"""The parameter group of one block, and the three collectives that differ from stock.

[Note: streams and lifetimes]
The order is FSDP2's. Gather: the owner's parameters are cast into the block buffer in the copy-in
stream, travel in the all-gather stream, and are read by the compute stream after the gather's
event; nothing is copied out ([Note: block buffers] says when the memory is given back). Reduction:
gradients are packed in the compute stream, travel and are summed in the reduce-scatter stream, and
the packed buffer is held by the reduce-scatter state until its event has passed. The owner's
reduced gradient is a view into one flat tensor which the sharded gradients keep alive until
``zero_grad`` ([Note: pinned gradients]). On CPU streams are no-ops and all of this is sequential.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan_matrixfsdp.comm import TransportFactory, view_segment
from torchtitan_matrixfsdp.layout import BlockPlan
from torchtitan_matrixfsdp.runtime.buffers import BlockBuffer, BufferState, OwnerContext
from torchtitan_matrixfsdp.runtime.fsdp_compat import (
    AllGather,
    AllGatherResult,
    FSDPParam,
    FSDPParamGroup,
    ReduceScatter,
    Reduction,
    TrainingState,
    device_handle,
    disable_functorch_if_active,
    dynamo_disable,
    local_of,
    post_accumulate_grad_hooks,
    rebind,
    reduce_adapter,
    root_of,
)
from torchtitan_matrixfsdp.runtime.fsdp_older import counts_unused_parameters
from torchtitan_matrixfsdp.runtime.owner_dtensor import OwnerDTensor
from torchtitan_matrixfsdp.runtime.owner_param import OwnerParam, ShardLookup


class PendingWorks(dist.Work):
    """Several started works as one, for FSDP2 code that waits for a single handle."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        self._works.clear()
        return True


class OwnerComm(AllGather, ReduceScatter):
    """Carries a block's transports and memory through the places where stock FSDP2 passes its
    all-gather and reduce-scatter objects. It is never called as a collective itself.

    Attributes:
        block: the block's plan.
        rank: this rank within the shard group.
        context: what the model's blocks share.
        gather_transport: moves every parameter of the block.
        reduce_transport: moves the gradients of its trainable parameters.
        buffer: the unsharded parameters' memory.
    """

    def __init__(
        self,
        block: BlockPlan,
        transport: TransportFactory,
        rank: int,
        context: OwnerContext,
        is_resident: bool = False,
    ) -> None:
        self.block = block
        self.rank = rank
        self.context = context
        name = transport.choose(block)  # once: both directions go the same way
        self.gather_transport = transport(name, block, rank, context.counter)
        self.reduce_transport = transport(name, block.trainable(), rank, context.counter)
        self.buffer = BlockBuffer(block.name, self.gather_transport.layout.numel, is_resident)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"block {self.block.name}: stock collective reached an owner group")


def _owner_comm(comm: Any) -> OwnerComm:
    if not isinstance(comm, OwnerComm):
        raise NotImplementedError(_custom_collective(type(comm).__name__))
    return comm


def _custom_collective(what: str) -> str:
    return (
        f"{what} on a module with owner shards: they have collectives of their own. Choose the "
        "transport with owner_fsdp.transport."
    )


@torch.no_grad()
def owner_all_gather(
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    async_op: bool,
    copy_in_stream: torch.Stream,
    all_gather_stream: torch.Stream,
    device: torch.device,
    all_gather_comm: Any,
) -> AllGatherResult:
    """Stands in for ``foreach_all_gather``: fills the block buffer from all owners."""
    comm = _owner_comm(all_gather_comm)
    handle = device_handle(device)
    params = _owner_params(fsdp_params)
    dtype = params[0].gather_dtype
    if (readers := comm.context.revive(comm.buffer)) is not None:
        copy_in_stream.wait_event(readers)
    with handle.stream(copy_in_stream):
        flat = comm.buffer.start_gather(dtype, device)
        _copy_in(flat, params)
    all_gather_stream.wait_stream(copy_in_stream)
    with handle.stream(all_gather_stream):
        works = PendingWorks(comm.gather_transport.gather(flat, group))
        if not async_op:
            works.wait()  # on CUDA this orders the stream, not the host
        event = all_gather_stream.record_event()
    numels = [p.shard.numel for p in params]
    return AllGatherResult(
        all_gather_output=flat,
        all_gather_event=event,
        all_gather_work=works if async_op else None,
        param_all_gather_input_dtypes=[[dtype] for _ in params],
        param_all_gather_input_numels=[[n] for n in numels],
        all_gather_input_split_sizes=numels,
    )


def _copy_in(flat: torch.Tensor, params: list[OwnerParam]) -> None:
    """Cast what this rank owns into its places."""
    owned = [p for p in params if p.is_owner]
    if owned:
        torch._foreach_copy_(
            [view_segment(flat, p.segment) for p in owned], [p.gather_source() for p in owned]
        )


@torch.no_grad()
def owner_all_gather_copy_out(
    result: AllGatherResult, fsdp_params: list[FSDPParam], group: dist.ProcessGroup
) -> None:
    """Stands in for ``foreach_all_gather_copy_out``: waits; there is nothing to copy."""
    buffer = result.all_gather_output
    if result.all_gather_event is not None:
        device_handle(buffer.device).current_stream().wait_event(result.all_gather_event)
    if isinstance(result.all_gather_work, dist.Work):
        result.all_gather_work.wait()


@torch.no_grad()
def owner_reduce(
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
    reduce_scatter_group: dist.ProcessGroup,
    reduce_scatter_stream: torch.Stream,
    reduce_scatter_comm: Any,
    orig_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    device: torch.device,
    gradient_divide_factor: float | None,
    all_reduce_group: dist.ProcessGroup | None,
    all_reduce_stream: torch.Stream,
    all_reduce_grads: bool,
    partial_reduce_output: torch.Tensor | None,
    all_reduce_hook: Callable[[torch.Tensor], None] | None,
    force_sum_reduction_for_comms: bool = False,
) -> Reduction:
    """Stands in for ``foreach_reduce``: SUM to the owner in reduce dtype, then divide.

    ``unsharded_grads`` (each ``[*shape]``, in the parameter or reduce dtype) owns the only
    references to the gradients; clearing it frees them. ``gradient_divide_factor`` ``None``
    means the data-parallel size, as in FSDP2.
    """
    comm = _owner_comm(reduce_scatter_comm)
    transport = comm.reduce_transport
    layout = transport.layout
    params = _owner_params(fsdp_params)
    _require_all_gradients(layout.block, params)
    handle = device_handle(device)
    world_size = reduce_scatter_group.size()
    replicas = all_reduce_group.size() if all_reduce_group is not None else 1
    mean = float(world_size * replicas)
    divisor = mean if gradient_divide_factor is None else gradient_divide_factor
    buffer = comm.allocate(
        (layout.numel,), dtype=reduce_dtype or unsharded_grads[0].dtype, device=device
    )
    segments = [layout.segments[p.shard.fqn] for p in params]
    torch._foreach_copy_(
        [view_segment(buffer, segment) for segment in segments],
        [grad.reshape(-1) for grad in unsharded_grads],
    )
    unsharded_grads.clear()
    reduce_scatter_stream.wait_stream(handle.current_stream())
    all_reduce_input = all_reduce_event = None
    with handle.stream(reduce_scatter_stream):
        reduced = transport.reduce(buffer, reduce_scatter_group)
        comm.context.pins.check_unpinned(comm.block.name, reduced)
        reduce_scatter_event = reduce_scatter_stream.record_event()
        post_reduce_stream = reduce_scatter_stream
        if all_reduce_group is not None:
            if partial_reduce_output is not None:
                reduced += partial_reduce_output
            if not all_reduce_grads:
                comm.context.pins.pin_partial(comm.block.name, reduced)
                event = post_reduce_stream.record_event()
                stream = post_reduce_stream
                return Reduction(
                    buffer, reduce_scatter_event, stream, event, partial_output=reduced
                )
            post_reduce_stream = all_reduce_stream
            all_reduce_stream.wait_stream(reduce_scatter_stream)
            with handle.stream(all_reduce_stream):
                if reduced.numel() > 0:  # every rank of a replicate group owns the same
                    dist.all_reduce(reduced, group=all_reduce_group)
                # Held by the group across layers, so that the allocator cannot hand the
                # block to the next layer's reduction while this one is in flight.
                all_reduce_input = reduced
                all_reduce_event = all_reduce_stream.record_event()
    if all_reduce_hook is not None:
        post_reduce_stream = all_reduce_stream
        all_reduce_stream.wait_stream(reduce_scatter_stream)
        with handle.stream(all_reduce_stream):
            all_reduce_hook(reduced)
    with handle.stream(post_reduce_stream):
        if divisor != 1.0:
            reduced.div_(divisor)
        gradient = reduced if orig_dtype is None else reduced.to(orig_dtype)
        for param, segment in zip(params, segments, strict=True):
            start = layout.offset_in_runs(segment, comm.rank) if param.is_owner else 0
            numel = segment.numel if param.is_owner else 0
            own = gradient.narrow(0, start, numel).view(param.sharded_size)
            _accumulate(param, own, post_reduce_stream)
        comm.context.pins.pin(comm.block.name, [p.sharded_param for p in params])
        post_reduce_event = post_reduce_stream.record_event()
    return Reduction(
        buffer,
        reduce_scatter_event,
        post_reduce_stream,
        post_reduce_event,
        all_reduce_input,
        all_reduce_event,
    )


def _owner_params(fsdp_params: list[FSDPParam]) -> list[OwnerParam]:
    return [p for p in fsdp_params if isinstance(p, OwnerParam)]


def _accumulate(param: OwnerParam, grad: torch.Tensor, stream: torch.Stream) -> None:
    """Add ``grad`` (this rank's part, on the compute device) to the sharded gradient."""
    sharded = param.sharded_param
    hooks = post_accumulate_grad_hooks(sharded)
    if param.offload_to_cpu:
        # Only the optimizer may find a copy in flight: an addition or a hook reads at once.
        overlap = param.pin_memory and sharded.grad is None and not hooks
        grad = grad.to(torch.device("cpu"), non_blocking=overlap)
        if overlap:
            # FSDP2 makes the host wait for it at the end of backward.
            param.grad_offload_event = stream.record_event()
    if sharded.grad is None:
        sharded.grad = param.to_sharded_dtensor(grad)
    else:
        assert isinstance(sharded.grad, OwnerDTensor)
        local_of(sharded.grad).add_(grad)
    for hook in hooks:
        hook(sharded)


def _require_all_gradients(block: BlockPlan, params: list[OwnerParam]) -> None:
    """A missing gradient would shift nothing here, but would leave another rank's bytes in the
    buffer; a frozen parameter's gradient would have no segment. Both are caller mistakes."""
    planned = {shard.fqn for shard in block.shards}
    got = {param.shard.fqn for param in params}
    if planned != got:
        raise RuntimeError(
            f"block {block.name}: gradients for {sorted(got - planned)} were not planned and "
            f"{sorted(planned - got)} are missing. requires_grad must not change after the model "
            "has been sharded, and set_reduce_scatter_unused_params must stay on: a parameter that "
            "this rank did not use still takes part."
        )


def _alloc_nothing(tensor: torch.Tensor) -> None:
    """Stands in for ``alloc_storage`` where stock FSDP2 allocates parameter by parameter."""


_stock_init = rebind(FSDPParamGroup.__init__, FSDPParam=OwnerParam)
_stock_unshard = rebind(FSDPParamGroup.unshard, foreach_all_gather=owner_all_gather)
_stock_wait_for_unshard = rebind(
    FSDPParamGroup.wait_for_unshard,
    foreach_all_gather_copy_out=owner_all_gather_copy_out,
    alloc_storage=_alloc_nothing,
)


class OwnerParamGroup(FSDPParamGroup):
    """FSDP2's parameter group with owner shards: its lifecycle, our three collectives."""

    def __init__(
        self,
        params: list[nn.Parameter],
        modules: tuple[nn.Module, ...],
        lookup: ShardLookup,
        comm: OwnerComm,
        **stock_arguments: Any,
    ) -> None:
        _stock_init(self, params, modules, shard_placement_fn=lookup, **stock_arguments)
        self._all_gather_comm = comm
        self._reduce_scatter_comm = comm
        self._comm = comm
        for param in _owner_params(self.fsdp_params):
            param.attach(comm.buffer, comm.gather_transport.layout.segments[param.shard.fqn])
        defer = comm.context.defer_release
        self._defer_release = self.device.type != "cpu" if defer is None else defer
        # A parameter that this rank's batch did not use must still take part in the block's
        # reduction: it counts as a zero gradient, so that all ranks step alike.
        self.reduce_scatter_unused_params = True

    def set_symm_mem(self, backend: Any = "NCCL") -> None:
        """Refused: owner groups move uneven segments."""
        raise NotImplementedError(_custom_collective("set_symm_mem_for_comm"))

    def set_allocate_memory_from_process_group(self, enable: bool) -> None:
        """Refused: owner groups move uneven segments."""
        raise NotImplementedError(_custom_collective("set_allocate_memory_from_process_group"))

    def lazy_init(self) -> None:
        super().lazy_init()
        root = root_of(self.modules[0])
        if self._defer_release and root is not None:
            self._comm.context.release_after(root)

    # rebind peels decorators off, so the stock ones are put back on.
    @disable_functorch_if_active
    def unshard(self, async_op: bool = False) -> None:
        """Start the gather, as in FSDP2; nothing if one is under way or done."""
        was_pending = self._all_gather_result is not None
        _stock_unshard(self, async_op)
        is_started = self._all_gather_result is not None and not was_pending
        if is_started and self._comm.block.world_size == 1:
            # Stock copies parameter by parameter here, in the compute stream: no reader to order.
            self._comm.context.revive(self._comm.buffer)
            params = _owner_params(self.fsdp_params)
            self._comm.buffer.start_gather(params[0].gather_dtype, self.device)
            for param in params:
                param.wait_arrival()

    @disable_functorch_if_active
    def wait_for_unshard(self) -> None:
        """Wait for the gather and put the unsharded parameters on the modules, as in FSDP2."""
        if self._all_gather_result is None:
            return
        # This block's gather is issued, so earlier blocks may give their memory back.
        self._comm.context.release_retired()
        _stock_wait_for_unshard(self)
        self._comm.buffer.finish_gather()

    post_backward = counts_unused_parameters(
        dynamo_disable(
            rebind(FSDPParamGroup.post_backward, foreach_reduce=reduce_adapter(owner_reduce))
        )
    )

    def finalize_backward(self) -> None:
        """The end of a backward: memory that nobody came for is given back, and what the optimizer
        will read is checked."""
        super().finalize_backward()
        self._abandon_gather()
        self._comm.context.release_retired()
        self._comm.context.pins.verify(self._comm.block.name)

    def _to_sharded(self) -> None:
        was_sharded = self.is_sharded
        super()._to_sharded()
        if was_sharded:
            if self._all_gather_result is None:
                self._abandon_gather()  # what reset_iter_state has waited for and dropped
            return
        self._give_back()

    def _give_back(self) -> None:
        """The parameters are sharded again: the memory goes once its readers are done."""
        self._comm.buffer.retire()
        # A gather in the compute stream waits for this block anyway.
        is_overlapped = self._defer_release and not self.unshard_async_op
        if is_overlapped and self._training_state == TrainingState.FORWARD:
            event = self._compute_event()
            wait = self._wait_all_gather_streams_on_event
            self._comm.context.defer(self._comm.buffer, event, wait)
        else:
            self._release_behind_compute()

    def _abandon_gather(self) -> None:
        """Give back a gather that nobody used, or that a fault interrupted."""
        if self._comm.buffer.state is not BufferState.GATHERING:
            return
        # An interrupted gather left no event, so its streams are waited for.
        compute = self.device_handle.current_stream()
        compute.wait_stream(self.comm_ctx.all_gather_copy_in_stream)
        compute.wait_stream(self.comm_ctx.all_gather_stream)
        self._release_behind_compute()

    def _release_behind_compute(self) -> None:
        """Free the buffer; its memory belongs to the stream that it was allocated in, which must
        wait for the compute stream before it gets it again."""
        self._wait_all_gather_streams_on_event(self._compute_event())
        self._comm.buffer.release()

    def _compute_event(self) -> torch.Event:
        event = self.device_handle.Event()
        event.record()
        return event
