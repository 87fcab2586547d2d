"""One block of a plan: its parameters and their owners.

Where the parameters stand in the block's flat buffer is not part of the plan: transports arrange
it to their own advantage (see :mod:`~torchtitan_matrixfsdp.layout.buffer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torchtitan_matrixfsdp.layout.costs import gamma
from torchtitan_matrixfsdp.layout.roles import RoleKind


class PlanError(ValueError):
    """A plan breaks its own rules; the message names the parameter, the value and the range."""


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """What one parameter knows of the plan, tail parameters included.

    ``shape`` is the logical shape (the fragment's in a ``fragmented`` block); ``owner`` is a rank
    within the shard group of ``block``.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    kind: RoleKind
    trainable: bool
    block: str
    owner: int

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the stored dtype."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class BlockPlan:
    """One block of a plan. ``shards`` stand in the block's own parameter order."""

    name: str
    world_size: int
    shards: tuple[MatrixShard, ...]

    @cached_property
    def numel(self) -> int:
        """Elements of the materialised block."""
        return sum(shard.numel for shard in self.shards)

    @cached_property
    def nbytes(self) -> int:
        """P_B: bytes of the materialised block in the stored dtypes."""
        return sum(shard.nbytes for shard in self.shards)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The ranks that own a parameter of this block, ascending; the others own nothing."""
        return tuple(sorted(self._numels))

    def owned_numel(self, rank: int) -> int:
        """Returns the elements of this block that ``rank`` owns."""
        check_rank(rank, self.world_size)
        return self._numels.get(rank, 0)

    def owned_bytes(self, rank: int) -> int:
        """Returns L_r: the bytes of this block that ``rank`` owns, in the stored dtypes."""
        check_rank(rank, self.world_size)
        return self._bytes.get(rank, 0)

    @cached_property
    def gamma(self) -> float:
        """W * max_r L_r / P_B in bytes: 1 is perfect, W is one owner for the whole block."""
        return gamma(self.world_size, tuple(self._bytes.values()), self.nbytes)

    def trainable(self) -> BlockPlan:
        """Returns what is reduced: the trainable parameters alone."""
        kept = tuple(shard for shard in self.shards if shard.trainable)
        return self if kept == self.shards else BlockPlan(self.name, self.world_size, kept)

    def fragmented(self, shapes: Mapping[str, tuple[int, ...]]) -> BlockPlan:
        """Returns the block of one tensor-parallel rank: the same owners and order, with each
        parameter's fragment in the place of the whole.

        ``shapes`` gives every fragment's shape by FQN. A plan itself is always made of logical
        shapes: it is then the same on every rank, even where fragments are uneven.
        """
        kept = tuple(replace(shard, shape=shapes[shard.fqn]) for shard in self.shards)
        return BlockPlan(self.name, self.world_size, kept)

    # Both maps hold owners only. W entries per block would be too many for thousands of ranks.
    @cached_property
    def _numels(self) -> Mapping[int, int]:
        owned: dict[int, int] = {}
        for shard in self.shards:
            owned[shard.owner] = owned.get(shard.owner, 0) + shard.numel
        return owned

    @cached_property
    def _bytes(self) -> Mapping[int, int]:
        owned: dict[int, int] = {}
        for shard in self.shards:
            owned[shard.owner] = owned.get(shard.owner, 0) + shard.nbytes
        return owned


def check_world_size(world_size: int) -> None:
    """Raises PlanError unless ``world_size`` counts at least one rank."""
    if world_size < 1:
        raise PlanError(f"world_size is {world_size}; legal: >= 1, the ranks of the shard group")


def check_rank(rank: int, world_size: int) -> None:
    """Raises ValueError unless ``rank`` is a rank of the shard group."""
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is not in the shard group; legal: 0 to {world_size - 1} (the rank within "
            "the group, not the global rank)"
        )


def check_block(block: BlockPlan) -> None:
    """Raises PlanError unless the block keeps every rule that ``OwnerPlan`` lists."""
    for shard in block.shards:
        _check_shard(shard, block)
    _check_one_tail_owner(block)


def _check_shard(shard: MatrixShard, block: BlockPlan) -> None:
    if shard.block != block.name:
        raise PlanError(
            f"{shard.fqn}: block is {shard.block!r}; legal: {block.name!r}, the block that lists it"
        )
    if not 0 <= shard.owner < block.world_size:
        raise PlanError(
            f"{shard.fqn}: owner is {shard.owner}; legal: 0 to {block.world_size - 1} (ranks of "
            "the shard group)"
        )
    ndim = len(shard.shape)
    is_matrix = shard.trainable and ndim == 2
    is_frozen = not shard.trainable and ndim >= 2
    if (shard.kind is RoleKind.MATRIX and not is_matrix) or (
        shard.kind is RoleKind.FROZEN and not is_frozen
    ):
        raise PlanError(
            f"{shard.fqn}: kind is {shard.kind.value!r} with shape {shard.shape} and "
            f"trainable={shard.trainable}; legal: 'matrix' for a trainable 2D weight, 'frozen' "
            "for a frozen one of 2 or more dimensions, 'tail' for any"
        )


def _check_one_tail_owner(block: BlockPlan) -> None:
    tail = [shard for shard in block.shards if shard.kind is RoleKind.TAIL]
    for shard in tail:
        if shard.owner != tail[0].owner:
            raise PlanError(
                f"{shard.fqn}: owner is {shard.owner}; legal: {tail[0].owner}, which owns the "
                f"tail of block {block.name!r} from {tail[0].fqn} on"
            )
