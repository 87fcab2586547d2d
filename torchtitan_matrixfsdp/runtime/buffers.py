"""Who may touch a block's memory, and when: explicit states, each transition asserted.

[Note: block buffers]
A block's unsharded parameters are views into one flat buffer, whose storage is resized in place:
views that autograd saved in forward are valid again after the gather in backward. Its states:

    RELEASED   no storage
    GATHERING  storage is there and a gather writes it; nobody may read
    UNSHARDED  whole; the block's modules read it
    RETIRED    resharded, but kernels queued earlier may still read it: pinned, until the streams
               that could reuse the memory have waited for the event recorded at the reshard
    RESIDENT   resharded, and kept with what it holds: only in a resident block

    RELEASED -> GATHERING -> UNSHARDED -> RETIRED -> RELEASED
                GATHERING -> RELEASED   a gather that nobody used, or that a fault interrupted
                RETIRED -> GATHERING    revived: gathered again before its memory was given back

and of a resident block, which is never RETIRED and, once gathered, never RELEASED:

    RELEASED -> GATHERING -> UNSHARDED -> RESIDENT -> UNSHARDED   nothing moves: it is fresh
                GATHERING -> RESIDENT   a gather that nobody used, or that a fault interrupted
                RESIDENT -> GATHERING   it is not fresh ([Note: resident weights] in ``resident``)

Stock FSDP2 keeps two copies while it unshards (the all-gather output and the parameters), because
it allocates the first in the copy-in stream and frees it behind an event, and the second in the
compute stream, where freeing needs no event. With one buffer, written by the copy-in and all-gather
streams and read by the compute stream, the event decides: in forward the memory of block i is given
back when block i+1 is waited for, after block i+1's gather was issued. That gather thus never
waits for block i's compute, which is what lets them overlap; it is the same point at which stock
frees its all-gather output. The last block's is given back when the root's forward ends, as stock
does. Where nothing can overlap it is given back at once: in backward, where the gather that may
overlap was issued a block earlier; where gathers run in the compute stream (``async_op``); on CPU.

[Note: pinned gradients]
The owner's reduced gradients of a block are views into one flat tensor, pinned from the reduction
until the optimizer has consumed them (``grad`` is set to None). So is the sum over the shard group
that waits for its all-reduce (HSDP with ``set_requires_all_reduce(False)``), until it is used.
Reference counts keep the memory; they do not keep a transport, a pool or a hook from writing it
again or from freeing its storage. :class:`GradientPins` knows what is pinned and raises in both
cases.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchtitan_matrixfsdp.comm import TrafficCounter
from torchtitan_matrixfsdp.runtime.fsdp_compat import dynamo_disable, local_of


class BufferStateError(RuntimeError):
    """Memory was about to be used or freed while something else relies on it."""


class BufferState(Enum):
    """See [Note: block buffers]."""

    RELEASED = "released"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    RETIRED = "retired"
    RESIDENT = "resident"


class BlockBuffer:
    """The flat buffer of one block's unsharded parameters.

    Attributes:
        name: the block.
        numel: elements when materialised.
        is_resident: whether it keeps its storage while its parameters are sharded.
        state: see [Note: block buffers].
        is_fresh: a resident buffer holds the owners' weights, or will once the gather under way
            has ended. The same on every rank.
    """

    def __init__(self, name: str, numel: int, is_resident: bool = False) -> None:
        self.name = name
        self.numel = numel
        self.is_resident = is_resident
        self.state = BufferState.RELEASED
        self.is_fresh = False
        self._flat: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        """The buffer, 1D ``[numel]``: one tensor for the buffer's whole life.

        Raises:
            BufferStateError: it has no storage.
        """
        if self._flat is None or self.state is BufferState.RELEASED:
            raise BufferStateError(f"block {self.name}: its buffer is read while released")
        return self._flat

    def start_gather(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate the storage in the current stream, for a gather to write.

        Raises:
            BufferStateError: the buffer is being gathered or in use, or needs no gather.
        """
        if self.is_fresh:
            raise BufferStateError(f"block {self.name}: its buffer is gathered while it is fresh")
        legal = (BufferState.RELEASED, BufferState.RETIRED, BufferState.RESIDENT)
        self._leave(*legal, to=BufferState.GATHERING)
        if self._flat is None:
            # A tensor made in inference mode could never be saved for backward later.
            with torch.inference_mode(False):
                self._flat = torch.empty(self.numel, dtype=dtype, device=device)
        nbytes = self._flat.numel() * self._flat.element_size()
        if self._flat.untyped_storage().size() != nbytes:
            self._flat.untyped_storage().resize_(nbytes)
        return self._flat

    def finish_gather(self) -> None:
        """The compute stream has waited for the gather: modules may read."""
        self._leave(BufferState.GATHERING, to=BufferState.UNSHARDED)

    def occupy(self) -> None:
        """Modules read what a resident buffer holds; no gather was needed.

        Raises:
            BufferStateError: it is not at rest, or what it holds is not the owners' weights.
        """
        if not self.is_fresh:
            raise BufferStateError(f"block {self.name}: its buffer is used while it is stale")
        self._leave(BufferState.RESIDENT, to=BufferState.UNSHARDED)

    def rest(self) -> None:
        """The parameters of a resident block are sharded again, or nobody came for a gather."""
        self._leave(BufferState.UNSHARDED, BufferState.GATHERING, to=BufferState.RESIDENT)

    def validate(self) -> None:
        """A gather of a resident block is started: what it brings counts until the weights change.

        Raises:
            BufferStateError: none is.
        """
        if self.state is not BufferState.GATHERING:
            raise BufferStateError(
                f"block {self.name}: its buffer is {self.state.value}, not filled"
            )
        self.is_fresh = True

    def invalidate(self) -> None:
        """The owners' weights change, or may have; the next use must gather. On every rank."""
        self.is_fresh = False

    def retire(self) -> None:
        """The parameters are sharded again; queued kernels may still read."""
        self._leave(BufferState.UNSHARDED, to=BufferState.RETIRED)

    def release(self) -> None:
        """Free the storage. The caller has ordered every reader and writer before this.

        Raises:
            BufferStateError: modules may still read it.
        """
        self._leave(BufferState.RETIRED, BufferState.GATHERING, to=BufferState.RELEASED)
        if self._flat is not None:
            self._flat.untyped_storage().resize_(0)

    def _leave(self, *legal: BufferState, to: BufferState) -> None:
        never = {BufferState.RESIDENT}
        if self.is_resident:
            never = {BufferState.RETIRED, BufferState.RELEASED}
        if to in never or self.state not in legal:
            kind = "a resident" if self.is_resident else "an ordinary"
            raise BufferStateError(
                f"block {self.name}: its buffer is {self.state.value} and cannot become "
                f"{to.value}; legal before: {', '.join(state.value for state in legal)}"
                f"{f'; never in {kind} block' if to in never else ''}"
            )
        self.state = to


@dataclass(frozen=True)
class _Pin:
    """Who relies on one storage: gradients of ``params``, or a partial sum."""

    block: str
    params: Sequence[nn.Parameter] = ()
    partial: weakref.ref[torch.Tensor] | None = None

    def holds(self, storage: int) -> bool:
        if self.partial is not None and self.partial() is not None:
            return True
        return any(_gradient_storage(p) == storage for p in self.params)


class GradientPins:
    """The sums that an optimizer or an all-reduce has yet to consume; see
    [Note: pinned gradients]."""

    def __init__(self) -> None:
        self._pins: dict[int, _Pin] = {}  # by the storage's address

    def check_unpinned(self, block: str, reduced: torch.Tensor) -> None:
        """Check that a reduction's result is not memory that still holds earlier ones.

        Raises:
            BufferStateError: it is; what was there is lost already.
        """
        if reduced.numel() == 0:
            return
        storage = reduced.untyped_storage().data_ptr()
        pin = self._pins.get(storage)
        if pin is not None and pin.holds(storage):
            raise BufferStateError(
                f"block {block}: its reduction wrote into the memory of block {pin.block}'s "
                "gradients, which nobody has consumed yet. A transport must return storage of its "
                "own."
            )

    def pin(self, block: str, params: Sequence[nn.Parameter]) -> None:
        """Pin the memory that the gradients of ``params`` are in now.

        Raises:
            BufferStateError: a hook has freed it already.
        """
        by_storage: dict[int, list[nn.Parameter]] = {}
        for param in params:
            check_gradient(param, f"block {block}: ")
            by_storage.setdefault(_gradient_storage(param), []).append(param)
        by_storage.pop(0, None)
        # An earlier microbatch's memory stays pinned: it is where the sum is accumulated.
        self._pins |= {storage: _Pin(block, held) for storage, held in by_storage.items()}

    def pin_partial(self, block: str, partial: torch.Tensor) -> None:
        """Pin ``partial``, which waits for its all-reduce, for as long as the tensor lives."""
        if partial.numel():
            pin = _Pin(block, partial=weakref.ref(partial))
            self._pins[partial.untyped_storage().data_ptr()] = pin

    def verify(self, block: str) -> None:
        """Check that the pinned gradients of ``block`` still have their memory.

        Raises:
            BufferStateError: the storage was freed before the optimizer consumed it.
        """
        for storage, pin in list(self._pins.items()):
            if pin.block != block:
                continue
            for param in pin.params:
                check_gradient(param, f"block {block}: ")
            if not pin.holds(storage):
                del self._pins[storage]


def check_gradient(param: torch.Tensor, where: str = "") -> None:
    """Check that the gradient of ``param``, if there is one, has memory. Reading it without would
    not raise, but crash. The message begins with ``where``.

    Raises:
        BufferStateError: the storage was freed before the optimizer consumed it.
    """
    if param.grad is None:
        return
    local = _local_gradient(param.grad)
    if local.numel() > 0 and local.untyped_storage().size() == 0:
        raise BufferStateError(
            f"{where}the storage of a gradient of shape {tuple(param.shape)} was freed before an "
            "optimizer consumed it"
        )


class ResidentBlock(Protocol):
    """A block that keeps its gathered parameters; see [Note: resident weights] in ``resident``."""

    @property
    def is_trainable(self) -> bool:
        """Whether an optimizer may step one of its parameters."""

    def holds_any_of(self, tensors: Collection[torch.Tensor]) -> bool:
        """Whether one of its parameters is among ``tensors``."""

    def publish(self) -> None:
        """Gather what the optimizer has stepped."""

    def invalidate(self) -> None:
        """Gather before the next use."""


@dataclass
class OwnerContext:
    """What the blocks of one model share on this rank. Make one per model.

    Attributes:
        counter: what this rank's transports have sent.
        pins: gradients that wait for an optimizer.
        defer_release: give back a block's memory in forward only when the next block is waited
            for; ``None``: on devices with streams.
    """

    counter: TrafficCounter = field(default_factory=TrafficCounter)
    pins: GradientPins = field(default_factory=GradientPins)
    defer_release: bool | None = None
    _retired: dict[BlockBuffer, tuple[torch.Event, Callable[[torch.Event], None]]] = field(
        default_factory=dict
    )
    _roots: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    _connected: list[dist.ProcessGroup] = field(default_factory=list)
    _residents: list[ResidentBlock] = field(default_factory=list)

    def connect(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """One collective on ``group`` before its first transfer, once per group.

        NCCL connects a group's ranks in its first operation, which all of them must take part in;
        in a batch of sends and receives some ranks may have nothing to post.
        """
        if all(known is not group for known in self._connected):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self._connected.append(group)

    def add_resident(self, block: ResidentBlock) -> None:
        """Let :meth:`publish` and :meth:`invalidate` reach ``block``; in the order of forward."""
        if not self._residents:
            self._hear_of_steps()
        self._residents.append(block)

    def _hear_of_steps(self) -> None:
        """Have the step of every torch optimizer that lists a parameter of a resident block
        invalidate all trainable ones: ranks may list what they own alone, and gather alike.

        Before a step and not after it: an optimizer made of several, whose step includes
        :meth:`publish`, ends later."""
        alive = weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if (context := alive()) is not None:
                stepped = {p for group in optimizer.param_groups for p in group["params"]}
                context._invalidate_trainable(stepped)

        handle = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, handle.remove).atexit = False

    def publish(self) -> None:
        """Gather into the resident blocks, if there are any, what the owners have stepped.

        Every rank calls it right after the optimizers' step (and after
        :meth:`PartitionedReplicas.publish`), once for all optimizers. One gather for each block
        that has trainable parameters, counted as ``"step_gather"``. If the call is missing, the
        next forward gathers.
        """
        for block in self._residents:
            if block.is_trainable:
                block.publish()

    def _invalidate_trainable(self, stepped: Collection[torch.Tensor]) -> None:
        if any(block.holds_any_of(stepped) for block in self._residents):
            for block in self._residents:
                if block.is_trainable:
                    block.invalidate()

    def invalidate(self) -> None:
        """Gather the resident blocks before their next use: call it, on every rank, after weights
        were written by other means than an optimizer's step or ``load_state_dict``."""
        for block in self._residents:
            block.invalidate()

    def defer(
        self, buffer: BlockBuffer, event: torch.Event, wait: Callable[[torch.Event], None]
    ) -> None:
        """Release ``buffer``, just retired, at the next :meth:`release_retired`.

        Args:
            buffer: the retired buffer.
            event: recorded after its last reader.
            wait: makes the streams that could reuse the memory wait for an event. Each root has
                gather streams of its own, so that it goes with the buffer.
        """
        self._retired[buffer] = event, wait

    def release_retired(self) -> None:
        """Order the readers of the deferred buffers before any reuse, then free."""
        for buffer, (event, wait) in self._retired.items():
            wait(event)
            buffer.release()
        self._retired.clear()

    def release_after(self, root: nn.Module) -> None:
        """Release what is still deferred whenever a forward of ``root`` ends. Idempotent."""
        if root not in self._roots:
            self._roots.add(root)
            root.register_forward_hook(dynamo_disable(lambda *_: self.release_retired()))

    def revive(self, buffer: BlockBuffer) -> torch.Event | None:
        """Take back a deferred ``buffer`` that is to be gathered again; the event to wait for
        before anything is written, ``None`` if it was not deferred."""
        event, _ = self._retired.pop(buffer, (None, None))
        return event


def _gradient_storage(param: nn.Parameter) -> int:
    """The address of the memory of the parameter's gradient on this rank, 0 for none."""
    return 0 if param.grad is None else _local_gradient(param.grad).untyped_storage().data_ptr()


def _local_gradient(grad: torch.Tensor) -> torch.Tensor:
    return local_of(grad) if isinstance(grad, DTensor) else grad
