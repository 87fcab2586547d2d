"""One block of a plan: its parameters, their owners and their places in the block's buffer.

The block buffer is laid out by owner rank, then by role, then by the parameters' own order, with
no padding. So each owner's region is one contiguous range, and one transfer moves it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torchtitan_matrixfsdp.layout.costs import gamma
from torchtitan_matrixfsdp.layout.roles import RoleKind


class PlanError(ValueError):
    """A plan breaks its own rules; the message names the parameter, the value and the range."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range of a block buffer, in elements."""

    start: int
    numel: int

    @property
    def stop(self) -> int:
        """The first element after the range."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """What one parameter knows of the plan, tail parameters included.

    ``shape`` is the logical shape (the fragment's in a ``fragmented`` block); ``owner`` is a rank
    within the shard group; ``segment`` is the parameter's place in the buffer of ``block``.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    kind: RoleKind
    trainable: bool
    block: str
    owner: int
    segment: Segment

    @property
    def nbytes(self) -> int:
        """Bytes in the stored dtype."""
        return self.segment.numel * self.itemsize


@dataclass(frozen=True)
class BlockPlan:
    """One block of a plan. ``shards`` stand in the block's own parameter order.

    Segments count elements: a transport that moves a block as one buffer needs one dtype for it.
    """

    name: str
    world_size: int
    shards: tuple[MatrixShard, ...]

    @cached_property
    def numel(self) -> int:
        """Elements of the materialised block."""
        return sum(shard.segment.numel for shard in self.shards)

    @cached_property
    def nbytes(self) -> int:
        """P_B: bytes of the materialised block in the stored dtypes."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that own a parameter of this block, ascending; the others own nothing."""
        return tuple(self._ranges)

    def owner_range(self, rank: int) -> Segment:
        """Returns the part of the block buffer that ``rank`` owns.

        A rank that owns nothing gets numel 0, at the position where its part would begin.

        Raises:
            ValueError: the rank is not in range(world_size).
        """
        check_rank(rank, self.world_size)
        found = self._ranges.get(rank)
        if found is not None:
            return found
        owners = self.owners
        position = bisect_left(owners, rank)
        is_past_last = position == len(owners)
        return Segment(self.numel if is_past_last else self._ranges[owners[position]].start, 0)

    def owned_numel(self, rank: int) -> int:
        """Returns the elements of this block that ``rank`` owns."""
        return self.owner_range(rank).numel

    def owned_bytes(self, rank: int) -> int:
        """Returns L_r: the bytes of this block that ``rank`` owns, in the stored dtypes."""
        check_rank(rank, self.world_size)
        return self._bytes.get(rank, 0)

    @cached_property
    def gamma(self) -> float:
        """W * max_r L_r / P_B in bytes: 1 is perfect, W is one owner for the whole block."""
        return gamma(self.world_size, tuple(self._bytes.values()), self.nbytes)

    def trainable(self) -> BlockPlan:
        """Returns the layout of what is reduced: the trainable parameters, packed anew."""
        if all(shard.trainable for shard in self.shards):
            return self
        return self._packed({s.fqn: s.shape for s in self.shards if s.trainable})

    def fragmented(self, shapes: Mapping[str, tuple[int, ...]]) -> BlockPlan:
        """Returns the layout of one tensor-parallel rank: the same owners and order, with each
        parameter's fragment in the place of the whole, packed anew.

        ``shapes`` gives every fragment's shape by FQN. A plan itself is always made of logical
        shapes: it is then the same on every rank, even where fragments are uneven.
        """
        return self._packed({s.fqn: shapes[s.fqn] for s in self.shards})

    def _packed(self, shapes: Mapping[str, tuple[int, ...]]) -> BlockPlan:
        start = 0
        moved: dict[str, MatrixShard] = {}
        for shard in sorted(self.shards, key=_buffer_order):
            if shard.fqn in shapes:
                shape = shapes[shard.fqn]
                segment = Segment(start, math.prod(shape))
                moved[shard.fqn] = replace(shard, shape=shape, segment=segment)
                start = segment.stop
        in_order = tuple(moved[shard.fqn] for shard in self.shards if shard.fqn in shapes)
        return BlockPlan(self.name, self.world_size, in_order)

    # Both maps hold owners only. W entries per block would be too many for thousands of ranks.
    @cached_property
    def _ranges(self) -> Mapping[int, Segment]:
        numels: dict[int, int] = {}
        for shard in self.shards:
            numels[shard.owner] = numels.get(shard.owner, 0) + shard.segment.numel
        ranges: dict[int, Segment] = {}
        start = 0
        for rank in sorted(numels):
            ranges[rank] = Segment(start, numels[rank])
            start += numels[rank]
        return ranges

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
    _check_segments(block)


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
    numel = math.prod(shard.shape)
    if shard.segment.numel != numel:
        raise PlanError(
            f"{shard.fqn}: its segment has {shard.segment.numel} elements; legal: {numel}, from "
            f"its shape {shard.shape}"
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


def _check_segments(block: BlockPlan) -> None:
    position = 0
    previous: MatrixShard | None = None
    for shard in sorted(block.shards, key=_buffer_order):
        start = shard.segment.start
        if start != position:
            fault = "overlaps what is before it" if start < position else "leaves a gap before it"
            after = f"after {previous.fqn}" if previous else "at the block's beginning"
            raise PlanError(
                f"{shard.fqn}: its segment starts at element {start} and {fault}; legal: "
                f"{position}, {after} in block {block.name!r}"
            )
        if previous is not None and shard.owner < previous.owner:
            raise PlanError(
                f"{shard.fqn}: owner {shard.owner} comes after owner {previous.owner} of "
                f"{previous.fqn} in the buffer of block {block.name!r}; legal: segments ordered "
                "by owner, so that each owner's part is one range"
            )
        position = shard.segment.stop
        previous = shard


def _buffer_order(shard: MatrixShard) -> tuple[int, int, int]:
    # Owner before numel: of several segments that start together, all but the last are empty.
    return (shard.segment.start, shard.owner, shard.segment.numel)
