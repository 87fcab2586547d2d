"""Which part of a tensor a rank stores, whatever its layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard

from torchtitan_matrixfsdp.runtime import OwnerDTensor
from torchtitan_matrixfsdp.runtime.fsdp_compat import local_shape_and_offset


@dataclass(frozen=True)
class Part:
    """A box of a tensor.

    Attributes:
        local: the rank's storage of it, which can be written to.
        begins: first index in each dimension of the whole tensor.
    """

    local: torch.Tensor
    begins: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """What selects it from the whole tensor."""
        return tuple(
            slice(begin, begin + size)
            for begin, size in zip(self.begins, self.local.shape, strict=True)
        )


@torch.no_grad()
def part_here(tensor: torch.Tensor) -> Part | None:
    """What this rank stores of ``tensor``; ``None`` if nothing. No communication."""
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach(), (0,) * tensor.ndim)
    local = tensor.to_local()  # without grad: the storage itself, and writes to it are counted
    if isinstance(tensor, OwnerDTensor) and not tensor.is_owner:
        return None
    _, begins = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(local, tuple(begins)) if local.numel() > 0 or tensor.numel() == 0 else None


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is stored in fragments, so that no rank has it whole."""
    if not isinstance(tensor, DTensor):
        return False
    if isinstance(tensor, OwnerDTensor):
        return any(isinstance(placement, Shard) for placement in tensor.placements)
    return any(not placement.is_replicate() for placement in tensor.placements)
