"""Which rank works on which matrix, how matrices are cut, and what moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_matrixfsdp.layout import (
    Volume,
    cut_matrices,
    exchange_volume,
    largest_first,
    muon_flops,
)

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


def test_the_most_expensive_matrix_comes_first() -> None:
    # FLOPs per step, 4 m^2 n + 2 m^3: 6000, 3072, 4374 and 4374.
    shapes = [(10, 10), (8, 8), (9, 9), (9, 9)]
    workers = [m.worker for m in cut_matrices(shapes, [0] * 4, 2)]
    # The first goes to rank 0, both nines to rank 1 (which has 4374 before the second), 8 to 0.
    assert workers == [0, 0, 1, 1]
    assert [m.worker for m in cut_matrices([(4, 4)] * 5, [0] * 5, 3)] == [0, 1, 2, 0, 1]


@given(SHAPES, st.integers(1, 5), st.integers(0, 1))
def test_no_worker_is_far_above_the_rest(shapes: list, ranks: int, dim: int) -> None:
    """Greedy placement: the largest load exceeds the smallest by one matrix at most."""
    matrices = cut_matrices(shapes, [dim] * len(shapes), ranks)
    load = [0] * ranks
    for matrix, shape in zip(matrices, shapes, strict=True):
        load[matrix.worker] += muon_flops(shape, 1)
    assert max(load) - min(load) <= max(muon_flops(shape, 1) for shape in shapes)


@given(SHAPES, st.integers(1, 5), st.integers(0, 1))
def test_the_cut_is_that_of_torch(shapes: list, ranks: int, dim: int) -> None:
    for matrix, shape in zip(cut_matrices(shapes, [dim] * len(shapes), ranks), shapes, strict=True):
        chunks = torch.empty(shape, device="meta").chunk(ranks, dim)
        expected = [tuple(chunk.shape) for chunk in chunks]
        empty = (0, shape[1]) if dim == 0 else (shape[0], 0)
        fragments = [matrix.fragment(rank) for rank in range(ranks)]
        assert fragments == expected + [empty] * (ranks - len(expected))
        assert sum(matrix.numel(rank) for rank in range(ranks)) == shape[0] * shape[1]


def test_a_fragment_that_stays_or_is_empty_is_no_message() -> None:
    """W=3: 4x5 in chunks of two rows, so that rank 2 has none of it; worker 0. 1x2: worker 1."""
    volumes = [
        exchange_volume(cut_matrices([(4, 5), (1, 2)], [0, 0], 3), rank, 3) for rank in range(3)
    ]
    assert [v.updates for v in volumes] == [Volume(2, 1), Volume(10, 1), Volume()]
    assert [v.results for v in volumes] == [Volume(10, 1), Volume(2, 1), Volume()]
    assert [v.messages for v in volumes] == [2, 2, 0]
    assert volumes[0].nbytes(4, 2) == 4 * 2 + 2 * 10


def test_work_is_shared_out_among_one_worker_at_least() -> None:
    assert largest_first([3, 1], 1) == (0, 0)
    assert largest_first([], 2) == ()
    with pytest.raises(ValueError, match="workers is 0; legal: >= 1"):
        largest_first([1], 0)
