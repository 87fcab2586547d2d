"""The placement of what lives on one rank of a mesh dimension; see [Note: owner DTensors]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from torchtitan_matrixfsdp.runtime.fsdp_compat import local_shape_and_offset


class Owner(Placement):
    """Placement: all of it on group-local rank ``owner`` of a mesh dimension."""

    def __init__(self, owner: int) -> None:
        super().__init__()
        self.owner = owner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and other.owner == self.owner

    def __hash__(self) -> int:
        return hash(("Owner", self.owner))

    def __repr__(self) -> str:
        return f"Owner({self.owner})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[type[Owner], tuple[int]]:
        # The C++ base has no pickle support, and async checkpoint staging pickles specs.
        return (Owner, (self.owner,))


def owner_local_shape(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> torch.Size:
    """The shape of this rank's local tensor of an owner DTensor: its fragment, or numel 0."""
    sizes, _ = local_shape_and_offset(shape, mesh, placements)
    return torch.Size(sizes if is_owner_in(mesh, placements) else (0, *sizes[1:]))


def is_owner_in(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Whether this rank is the owner in every ``Owner`` dimension of ``mesh``."""
    # Not get_local_rank: the process that writes asynchronous checkpoints has a mesh that was sent
    # to it, and none of its groups.
    coordinate = mesh.get_coordinate()
    return coordinate is not None and all(
        coordinate[dim] == placement.owner
        for dim, placement in enumerate(placements)
        if isinstance(placement, Owner)
    )


def check_owner_layout(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> None:
    """Check the placements of an owner DTensor of global ``shape``.

    Raises:
        ValueError: they fit neither the mesh nor the shape, or none is an ``Owner``.
    """

    def legal(placement: Placement, dim: int) -> bool:
        if isinstance(placement, Owner):
            return 0 <= placement.owner < mesh.size(dim)
        if isinstance(placement, Shard):
            return 0 <= placement.dim < len(shape)
        return placement.is_replicate()

    has_owner = any(isinstance(p, Owner) for p in placements)
    fits = len(placements) == mesh.ndim and len(shape) > 0
    if not (has_owner and fits and all(legal(p, d) for d, p in enumerate(placements))):
        raise ValueError(
            f"owner DTensor of shape {tuple(shape)}: placements {tuple(placements)} on a mesh of "
            f"{tuple(mesh.shape)}; legal: one per mesh dimension, each Owner(rank of it), "
            "Replicate() or Shard(dimension of the tensor), at least one Owner, and 1D or more."
        )
