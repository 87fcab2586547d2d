"""Where the parameters of a block stand in its flat buffer.

A block is materialised in one flat 1D buffer, and its unsharded parameters are views into it.
Every parameter is contiguous there and starts at a multiple of ``ALIGNMENT`` elements. The order
is free, and each transport wants its own:

- *by owner*: what a rank owns is one range, which one message moves;
- *in slices*: the buffer is W equal slices, slice r being what rank r contributes to an
  all-gather; the order puts as much as possible of what a rank owns into its own slice. What
  remains elsewhere is its *overflow*.

Everything is counted in elements: one buffer has one dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from torchtitan_matrixfsdp.layout.block_plan import BlockPlan, check_rank
from torchtitan_matrixfsdp.layout.roles import RoleKind

# 16 bytes in bfloat16, what vectorised loads, TMA and cuBLAS's fast kernels ask of an address. The
# shapes of language models are multiples of it, so that it usually costs nothing.
ALIGNMENT = 8

# Up to here the best order of roles is found exactly; a dense transformer block has 8.
_EXACT_ROLES = 12


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range of a block buffer, in elements."""

    start: int
    numel: int

    @property
    def stop(self) -> int:
        """The first element after the range."""
        return self.start + self.numel

    def overlap(self, other: Segment) -> Segment:
        """Returns the common range; numel 0 where there is none."""
        start = max(self.start, other.start)
        return Segment(start, max(0, min(self.stop, other.stop) - start))


@dataclass(frozen=True)
class BufferLayout:
    """One arrangement of a block's parameters in a flat buffer of ``numel`` elements.

    Attributes:
        block: whose parameters.
        segments: each parameter's place, by FQN.
        numel: elements of the buffer, padding included.
        slice_numel: elements of one of the W equal slices; 0 where the arrangement has none.
    """

    block: BlockPlan
    segments: Mapping[str, Segment]
    numel: int
    slice_numel: int = 0

    def runs(self, rank: int) -> tuple[Segment, ...]:
        """Returns the ranges that ``rank`` owns, ascending; neighbours are merged, with the
        alignment gap between them. Empty parameters are in no run.

        Raises:
            ValueError: the rank is not in range(world_size).
        """
        check_rank(rank, self.block.world_size)
        return self._runs.get(rank, ())

    def packed_numel(self, rank: int) -> int:
        """Returns the elements in the runs of ``rank``: what it owns, and the alignment gaps inside
        its runs."""
        return sum(run.numel for run in self.runs(rank))

    def offset_in_runs(self, segment: Segment, rank: int) -> int:
        """Returns where a segment that ``rank`` owns stands in the concatenation of its runs."""
        passed = 0
        for run in self.runs(rank):
            if run.start <= segment.start and segment.stop <= run.stop:
                return passed + segment.start - run.start
            passed += run.numel
        return passed  # only an empty segment lies in no run

    def slice_of(self, rank: int) -> Segment:
        """Returns the slice that ``rank`` contributes to an all-gather.

        Raises:
            ValueError: the rank is not in range(world_size).
        """
        check_rank(rank, self.block.world_size)
        return Segment(rank * self.slice_numel, self.slice_numel)

    @cached_property
    def _runs(self) -> Mapping[int, tuple[Segment, ...]]:
        runs: dict[int, list[Segment]] = {}
        previous = -1
        for shard in sorted(self.block.shards, key=lambda s: self.segments[s.fqn].start):
            segment = self.segments[shard.fqn]
            if segment.numel == 0:
                continue
            own = runs.setdefault(shard.owner, [])
            if own and shard.owner == previous:
                own[-1] = Segment(own[-1].start, segment.stop - own[-1].start)
            else:
                own.append(segment)
            previous = shard.owner
        return {rank: tuple(own) for rank, own in runs.items()}


def aligned(numel: int) -> int:
    """Returns ``numel`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def arrange_by_owner(block: BlockPlan) -> BufferLayout:
    """Returns the arrangement by owner rank, then by the block's own parameter order."""
    ordered = sorted(range(len(block.shards)), key=lambda i: (block.shards[i].owner, i))
    segments, end = _place(block, ordered)
    return BufferLayout(block, segments, end)


def arrange_in_slices(block: BlockPlan) -> BufferLayout:
    """Returns the arrangement in W slices whose total overflow is the smallest.

    The parameters of the tail stay together, so that roles are what is ordered. Up to 12 roles the
    overflow is the minimum over all orders; beyond, it is never more than by owner, and no move of
    one role lowers it. The search counts the gap after each parameter too, although the gap at the
    end of a run is not sent. Slices are aligned: W * slice_numel exceeds the aligned sizes' sum by
    less than W * ALIGNMENT.
    """
    roles = _roles(block)
    sizes = tuple(sum(aligned(block.shards[i].numel) for i in role) for role in roles)
    owners = tuple(block.shards[role[0]].owner for role in roles)
    slice_numel = aligned(-(-sum(sizes) // block.world_size))
    order = _order_of_roles(sizes, owners, slice_numel)
    segments, _ = _place(block, [i for position in order for i in roles[position]])
    return BufferLayout(block, segments, block.world_size * slice_numel, slice_numel)


def _roles(block: BlockPlan) -> list[list[int]]:
    """The block's roles as lists of indices into its shards."""
    tail = [i for i, shard in enumerate(block.shards) if shard.kind is RoleKind.TAIL]
    weights = [[i] for i, shard in enumerate(block.shards) if shard.kind is not RoleKind.TAIL]
    return weights + ([tail] if tail else [])


def _place(block: BlockPlan, order: Iterable[int]) -> tuple[dict[str, Segment], int]:
    segments: dict[str, Segment] = {}
    start = end = 0
    for index in order:
        shard = block.shards[index]
        segments[shard.fqn] = Segment(start, shard.numel)
        end = max(end, start + shard.numel)
        start += aligned(shard.numel)
    return segments, end


# The blocks of a model share a few shapes and owner patterns.
@lru_cache(maxsize=4096)
def _order_of_roles(
    sizes: tuple[int, ...], owners: tuple[int, ...], slice_numel: int
) -> tuple[int, ...]:
    if len(sizes) <= _EXACT_ROLES:
        return _best_order(sizes, owners, slice_numel)
    return _improved_order(sizes, owners, slice_numel)


def _home_numel(start: int, size: int, owner: int, slice_numel: int) -> int:
    """Elements of a role at ``start`` that lie in its owner's slice."""
    # Without Segments: the searches below ask thousands of times.
    home = owner * slice_numel
    return max(0, min(start + size, home + slice_numel) - max(start, home))


def _best_order(
    sizes: tuple[int, ...], owners: tuple[int, ...], slice_numel: int
) -> tuple[int, ...]:
    """The order with most elements at home: a dynamic program over sets of roles.

    The next role's place is the sum of the sizes placed before it, whatever their order, so the
    best order of a set extends a best order of one of its subsets.
    """
    count = len(sizes)
    best = [-1] * (1 << count)
    last = [-1] * (1 << count)
    placed = [0] * (1 << count)
    best[0] = 0
    for chosen in range(1 << count):
        start = placed[chosen]
        for index in range(count):
            bit = 1 << index
            if chosen & bit:
                continue
            value = best[chosen] + _home_numel(start, sizes[index], owners[index], slice_numel)
            if value > best[chosen | bit]:  # strictly: ties go to the set that was seen first
                best[chosen | bit], last[chosen | bit] = value, index
                placed[chosen | bit] = start + sizes[index]
    order: list[int] = []
    chosen = (1 << count) - 1
    while chosen:
        order.append(last[chosen])
        chosen ^= 1 << last[chosen]
    return tuple(reversed(order))


def _improved_order(
    sizes: tuple[int, ...], owners: tuple[int, ...], slice_numel: int
) -> tuple[int, ...]:
    """The order by owner, in which one role at a time moves to where it brings most elements home,
    until no move helps."""
    order = sorted(range(len(sizes)), key=lambda i: (owners[i], i))

    def home(starts: Iterable[int], roles: Iterable[int]) -> list[int]:
        return [
            _home_numel(start, sizes[role], owners[role], slice_numel)
            for start, role in zip(starts, roles, strict=False)
        ]

    is_final = False
    while not is_final:
        is_final = True
        for role in range(len(sizes)):
            rest = [other for other in order if other != role]
            starts = list(accumulate((sizes[other] for other in rest), initial=0))
            # With the role at a place, the rest before it stays and the rest after it shifts.
            shifted = home((start + sizes[role] for start in starts), rest)
            before = list(accumulate(home(starts, rest), initial=0))
            after = list(accumulate(reversed(shifted), initial=0))[::-1]
            here = home(starts, [role] * len(starts))
            at_home = [sum(parts) for parts in zip(before, here, after, strict=True)]
            place = max(range(len(order)), key=at_home.__getitem__)
            if at_home[place] > at_home[order.index(role)]:
                order = [*rest[:place], role, *rest[place:]]
                is_final = False
    return tuple(order)
