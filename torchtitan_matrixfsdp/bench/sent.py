"""Counts what a rank hands to its process group, from outside the code that sends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_matrixfsdp.layout import (
    all_to_all_volume,
    broadcast_volume,
    reduce_volume,
    ring_volume,
)


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends while the mode is on, in the ring convention of
    ``layout.volumes``, whoever calls the collective: FSDP2, DTensor or a transport.

    It watches the operators of all process groups' collectives in the dispatcher.

    Attributes:
        total: bytes so far.

    Raises:
        NotImplementedError: a collective that it has no rule for; not counting it would be wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def take(self) -> int:
        """Returns the bytes since the last call, and starts anew."""
        taken, self.total = self.total, 0
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            rule = _RULES.get(func.name().partition("::")[2])
            if rule is None:
                raise NotImplementedError(f"no rule for what {func.name()} sends")
            self.total += rule(args)
        return func(*args, **(kwargs or {}))


Rule = Callable[[tuple[Any, ...]], int]
"""From the operator's arguments to the bytes sent."""


def _ring(slice_: torch.Tensor, world_size: int) -> int:
    return ring_volume(slice_.numel(), world_size).elements * slice_.element_size()


def _all_gather(args: tuple[Any, ...]) -> int:
    return _ring(args[1], _group(args[2]).size())


def _reduce_scatter(args: tuple[Any, ...]) -> int:
    return _ring(args[0], _group(args[2]).size())


def _broadcast(args: tuple[Any, ...]) -> int:
    (tensor,), group, root = args[0], _group(args[1]), args[2]
    volume = broadcast_volume(tensor.numel(), root, group.rank(), group.size())
    return volume.elements * tensor.itemsize


def _reduce(args: tuple[Any, ...]) -> int:
    (tensor,), group, root = args[0], _group(args[1]), args[3]
    return reduce_volume(tensor.numel(), root, group.rank()).elements * tensor.itemsize


def _all_to_all(args: tuple[Any, ...]) -> int:
    tensor, group, splits = args[1], _group(args[2]), args[4]
    if not splits:
        splits = [tensor.size(0) // group.size()] * group.size()
    elements = tensor.numel() // max(1, tensor.size(0))  # of an entry of the first dimension
    return all_to_all_volume(splits, group.rank()).elements * elements * tensor.itemsize


def _group(boxed: Any) -> dist.ProcessGroup:
    """The process group of an operator's argument."""
    group: dist.ProcessGroup = dist.ProcessGroup.unbox(boxed)
    return group


def _nothing(args: tuple[Any, ...]) -> int:
    return 0


_RULES: dict[str, Rule] = {
    "_allgather_base_": _all_gather,
    "all_gather_into_tensor": lambda args: _ring(args[0], args[1]),
    "_reduce_scatter_base_": _reduce_scatter,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "alltoall_base_": _all_to_all,
    "send": lambda args: sum(tensor.nbytes for tensor in args[0]),
    "recv_": _nothing,
    "wait_tensor": _nothing,
    "_wrap_tensor_autograd": _nothing,
}
