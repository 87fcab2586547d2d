"""All transports on real gloo ranks: what arrives, what is summed, and what was sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.unit.layout.models import block_of
from torchtitan_matrixfsdp.comm import (
    TRANSPORTS,
    Traffic,
    TrafficCounter,
    Transport,
    view_segment,
)
from torchtitan_matrixfsdp.layout import BlockPlan

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ODD = (7 * 5, 1 * 9, 33 * 128, 13)
NAN = float("nan")


def blocks(world_size: int) -> dict[str, BlockPlan]:
    """Weights (numel, owner) and a tail, by what is special about them."""
    last, middle = world_size - 1, world_size // 2

    def owned(
        *weights: tuple[int, int], tail: tuple[int, ...] = (), tail_owner: int = 0
    ) -> BlockPlan:
        return block_of(world_size, weights, tail, tail_owner)

    return {
        "odd shapes": owned(*[(n, i % world_size) for i, n in enumerate(ODD)], tail=(1, 5)),
        "odd shapes, descending owners": owned(
            *[(n, -i % world_size) for i, n in enumerate(ODD)], tail=(3,), tail_owner=last
        ),
        "owners without anything": owned((35, 0), (4224, middle), tail=(13,)),
        "one owner for all": owned((4224, last), (35, last), tail=(5, 7), tail_owner=last),
        "one owner in the middle": owned((9, 0), (4224, middle), (9, last)),
        "one element": owned((1, last)),
        "zero-sized": owned((0, 0), (9, last), (0, middle), tail=(0,), tail_owner=middle),
        "no elements": owned((0, last), tail=(0,)),
        "no parameters": owned(),
        "balanced": owned(*[(256, rank) for rank in range(world_size)]),
        "balanced, two weights each": owned(
            *[(n, rank) for n in (40, 216) for rank in reversed(range(world_size))]
        ),
        # Too many roles for the exact order: several runs of a rank, some in one slice.
        "many roles": owned(
            *[(8 + 40 * (i * i % 7), i * 3 % world_size) for i in range(23)], tail=(6, 6, 6)
        ),
    }


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its rank in the shard group, and what no other group has."""

    group: dist.ProcessGroup
    rank: int
    mark: int


class Case:
    """One block under one transport in one dtype; every rank can compute every rank's values."""

    def __init__(self, name: str, block: BlockPlan, dtype: torch.dtype, place: Place) -> None:
        self.block, self.dtype, self.place = block, dtype, place
        self.counter = TrafficCounter()
        self.transport: Transport = TRANSPORTS[name](block, place.rank, self.counter)

    def values(self, rank: int) -> dict[str, torch.Tensor]:
        """Rank's own contribution, by FQN; as parameters, those of rank 0 serve."""
        seed = 100 * self.place.mark + rank
        generator = torch.Generator().manual_seed(seed)
        return {
            s.fqn: torch.randn(s.numel, generator=generator, dtype=torch.float64).to(self.dtype)
            for s in self.block.shards
        }

    def filled(self, values: dict[str, torch.Tensor], fqns: set[str]) -> torch.Tensor:
        """A block buffer with these parameters, NaN elsewhere."""
        buffer = torch.full((self.transport.layout.numel,), NAN, dtype=self.dtype)
        for fqn in fqns:
            view_segment(buffer, self.transport.layout.segments[fqn]).copy_(values[fqn])
        return buffer

    @property
    def own(self) -> set[str]:
        return {s.fqn for s in self.block.shards if s.owner == self.place.rank}

    def start_gather(self) -> tuple[torch.Tensor, list[dist.Work]]:
        buffer = self.filled(self.values(0), self.own)
        return buffer, self.transport.gather(buffer, self.place.group)

    def check_gathered(self, buffer: torch.Tensor) -> None:
        for fqn, expected in self.values(0).items():
            found = view_segment(buffer, self.transport.layout.segments[fqn])
            assert torch.equal(found, expected), fqn

    def reduced(self) -> dict[str, torch.Tensor]:
        """This rank's parameters out of one reduction."""
        layout, rank = self.transport.layout, self.place.rank
        buffer = self.filled(self.values(rank), {s.fqn for s in self.block.shards})
        total = self.transport.reduce(buffer, self.place.group)
        assert (total.shape, total.dtype) == ((layout.packed_numel(rank),), self.dtype)
        if total.numel():
            assert total.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        buffer.fill_(NAN)  # it belongs to the next block now
        return {
            fqn: total.narrow(
                0, layout.offset_in_runs(layout.segments[fqn], rank), layout.segments[fqn].numel
            )
            for fqn in self.own
        }

    def check_reduced(self, found: dict[str, torch.Tensor]) -> None:
        """Against the sum in float64, within what W - 1 roundings can do.

        A sum of W terms in any order is off by at most (W - 1) u sum|x| to first order, u = eps/2
        the unit roundoff. The factor two left covers the second order and, in float64, the
        reference's own roundings.
        """
        size = self.block.world_size
        contributions = [self.values(rank) for rank in range(size)]
        eps = torch.finfo(self.dtype).eps
        for fqn, total in found.items():
            terms = torch.stack([c[fqn].double() for c in contributions])
            error = (total.double() - terms.sum(0)).abs()
            assert (error <= (size - 1) * eps * terms.abs().sum(0)).all(), (fqn, error.max())
            # Two terms have one rounding, whatever the backend does.
            if self.transport.name == "p2p" or size <= 2:
                in_rank_order = contributions[0][fqn].clone()
                for contribution in contributions[1:]:
                    in_rank_order += contribution[fqn]
                assert torch.equal(total, in_rank_order), fqn

    def check_traffic(self, operation: str, times: int) -> None:
        predict = {
            "gather": self.transport.predict_gather,
            "reduce": self.transport.predict_reduce,
        }[operation]
        expected = sum([predict(self.dtype.itemsize)] * times, Traffic())
        assert self.counter.total(operation) == expected, operation


def _check(case: Case) -> None:
    for _ in range(2):
        buffer, works = case.start_gather()
        for work in works:
            work.wait()
        case.check_gathered(buffer)
    case.check_traffic("gather", 2)
    first, second = case.reduced(), case.reduced()
    case.check_reduced(first)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[fqn], second[fqn]) for fqn in first), "not reproducible"
    case.check_traffic("reduce", 2)


def _check_interleaved(cases: list[Case]) -> None:
    """All gathers in flight, a reduction of each meanwhile, and the gathers awaited backwards."""
    gathers = [case.start_gather() for case in cases]
    for case in cases:
        case.check_reduced(case.reduced())
    for case, (buffer, works) in reversed(list(zip(cases, gathers, strict=True))):
        for work in works:
            work.wait()
        case.check_gathered(buffer)


def _all_cases(place: Place) -> dict[str, int]:
    """Checks all that there is; returns the number of cases by transport."""
    done: Counter[str] = Counter()
    in_flight = []
    for label, block in blocks(dist.get_world_size(place.group)).items():
        for name in TRANSPORTS:
            for dtype in DTYPES:
                try:
                    _check(Case(name, block, dtype, place))
                except AssertionError as error:
                    raise AssertionError(f"{label}, {name}, {dtype}") from error
                done[name] += 1
            in_flight.append(Case(name, block, torch.float32, place))
    _check_interleaved(in_flight)
    return dict(done)


def _every_group() -> list[dict[str, int]]:
    """The whole world as one shard group and, of four ranks, two groups side by side."""
    assert dist.group.WORLD is not None
    done = [_all_cases(Place(dist.group.WORLD, dist.get_rank(), 0))]
    if dist.get_world_size() == 4:
        # Ranks 1 and 3 are ranks 0 and 1 of the second group, and 2 is rank 1 of the first.
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        which = dist.get_rank() % 2
        done.append(_all_cases(Place(groups[which], dist.get_rank(groups[which]), 1 + which)))
    return done


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_transport_on_every_kind_of_block(world_size: int) -> None:
    """Gathers are exact, sums correct and reproducible, traffic as predicted.

    Case 24: at W = 4 also in two groups whose ranks are not global ranks.
    """
    groups = [world_size, 2] if world_size == 4 else [world_size]
    expected = [dict.fromkeys(TRANSPORTS, len(blocks(g)) * len(DTYPES)) for g in groups]
    assert run_ranks(_every_group, world_size) == [expected] * world_size
