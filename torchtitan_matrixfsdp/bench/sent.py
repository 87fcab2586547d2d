"""Counts what a rank hands to its process group, from outside the code that sends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_matrixfsdp.layout import broadcast_volume, reduce_volume, ring_volume


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends while the mode is on, in the ring convention of
    ``layout.volumes``, whoever calls the collective: FSDP2, DTensor or a transport.

    It watches the operators of the default process group's collectives in the dispatcher.

    Attributes:
        total: bytes so far.

    Raises:
        NotImplementedError: a collective that it has no rule for; not counting it would be wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()

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
            self.total += rule(args, self._rank, self._world_size)
        return func(*args, **(kwargs or {}))


Rule = Callable[[tuple[Any, ...], int, int], int]
"""From the operator's arguments, the rank and W to the bytes sent."""


def _ring(slice_: torch.Tensor, world_size: int) -> int:
    return ring_volume(slice_.numel(), world_size).elements * slice_.element_size()


def _broadcast(args: tuple[Any, ...], rank: int, world_size: int) -> int:
    (tensor,), _, root = args[:3]
    return broadcast_volume(tensor.numel(), root, rank, world_size).elements * tensor.itemsize


def _reduce(args: tuple[Any, ...], rank: int, world_size: int) -> int:
    (tensor,), _, _, root = args[:4]
    return reduce_volume(tensor.numel(), root, rank).elements * tensor.itemsize


_RULES: dict[str, Rule] = {
    "_allgather_base_": lambda args, rank, size: _ring(args[1], size),
    "all_gather_into_tensor": lambda args, rank, size: _ring(args[0], size),
    "_reduce_scatter_base_": lambda args, rank, size: _ring(args[0], size),
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "send": lambda args, rank, size: sum(tensor.nbytes for tensor in args[0]),
    "recv_": lambda args, rank, size: 0,
    "wait_tensor": lambda args, rank, size: 0,
    "_wrap_tensor_autograd": lambda args, rank, size: 0,
}
