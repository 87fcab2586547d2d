"""Matrices that every rank of a group holds a fragment of, and that one of them works on whole.

The fragments are the cut that ``torch.chunk`` makes along one dimension: parts of
``ceil(length / ranks)``, the last shorter or empty. So they are FSDP2's row shards (dimension 0) as
well as what tensor parallelism leaves of a matrix (either dimension).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan_matrixfsdp.layout.costs import muon_flops
from torchtitan_matrixfsdp.layout.greedy import largest_first
from torchtitan_matrixfsdp.layout.volumes import Volume


@dataclass(frozen=True, slots=True)
class CutMatrix:
    """A matrix in fragments.

    Attributes:
        shape: of the whole, (rows, columns).
        dim: the dimension that is cut, 0 or 1.
        ranks: how many hold a fragment.
        worker: the rank that works on the whole.
    """

    shape: tuple[int, int]
    dim: int
    ranks: int
    worker: int

    @property
    def chunk(self) -> int:
        """The length of the first and longest fragment along ``dim``."""
        return -(-self.shape[self.dim] // self.ranks)

    def fragment(self, rank: int) -> tuple[int, int]:
        """Returns the shape of the part that ``rank`` holds."""
        rows, cols = self.shape
        length = max(0, min(self.shape[self.dim] - rank * self.chunk, self.chunk))
        return (length, cols) if self.dim == 0 else (rows, length)

    def numel(self, rank: int) -> int:
        """Returns the elements of the part that ``rank`` holds."""
        rows, cols = self.fragment(rank)
        return rows * cols


def cut_matrices(
    shapes: Sequence[tuple[int, ...]], dims: Sequence[int], ranks: int
) -> tuple[CutMatrix, ...]:
    """Returns the matrices of logical ``shapes``, each cut along one of ``dims``.

    Workers are chosen by the FLOPs of Newton-Schulz: the most expensive matrix first, each to the
    rank with the least so far.

    Raises:
        ValueError: a shape that is not 2D, or fewer than one rank.
    """
    workers = largest_first([muon_flops(shape, steps=1) for shape in shapes], ranks)
    return tuple(
        CutMatrix((shape[0], shape[1]), dim, ranks, worker)
        for shape, dim, worker in zip(shapes, dims, workers, strict=True)
    )


def held_numels(matrices: Iterable[CutMatrix], rank: int, ranks: int) -> list[int]:
    """Returns the elements that ``rank`` holds of each worker's matrices, by worker."""
    held = [0] * ranks
    for matrix in matrices:
        held[matrix.worker] += matrix.numel(rank)
    return held


def worked_numels(matrices: Iterable[CutMatrix], rank: int, ranks: int) -> list[int]:
    """Returns the elements that each rank holds of the matrices that ``rank`` works on."""
    mine = [matrix for matrix in matrices if matrix.worker == rank]
    return [sum(matrix.numel(other) for matrix in mine) for other in range(ranks)]


def all_to_all_volume(numels: Sequence[int], rank: int) -> Volume:
    """Returns what ``rank`` sends in an all-to-all of ``numels`` elements, by receiver: what it
    keeps is not sent, and nothing is no message."""
    others = [numel for other, numel in enumerate(numels) if other != rank and numel > 0]
    return Volume(sum(others), len(others))
