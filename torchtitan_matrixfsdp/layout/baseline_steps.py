"""What matrix optimizers on FSDP2's row shards send in a step, one formula for each way to come by
whole matrices.

The *updates* are what an optimizer orthogonalises (momentum and gradient, in the stored dtype), the
*results* what comes out of Newton-Schulz (in its own dtype, usually a narrower one). Volumes are
those of one rank, in the ring convention of ``volumes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from torchtitan_matrixfsdp.layout.exchange import (
    CutMatrix,
    all_to_all_volume,
    cut_matrices,
    held_numels,
    worked_numels,
)
from torchtitan_matrixfsdp.layout.volumes import Volume, ring_volume

_BFLOAT16 = 2
_NOTHING = Volume()

Shapes: TypeAlias = Sequence[tuple[int, ...]]
"""The logical shapes (rows, columns) of the matrices."""


@dataclass(frozen=True, slots=True)
class StepVolume:
    """What one rank sends in one optimizer step."""

    updates: Volume
    results: Volume = _NOTHING

    @property
    def messages(self) -> int:
        """Messages of both kinds."""
        return self.updates.messages + self.results.messages

    def nbytes(self, update_itemsize: int, result_itemsize: int) -> int:
        """Returns the bytes, given those of an element of each kind."""
        return self.updates.elements * update_itemsize + self.results.elements * result_itemsize


VolumeOfRank: TypeAlias = Callable[[int], StepVolume]


@dataclass(frozen=True, slots=True)
class BaselineStep:
    """How a matrix optimizer on row shards comes by whole matrices.

    Attributes:
        volume: what each rank sends, from the shapes of the matrices and W.
        label: for tables.
        itemsize: bytes per element both ways, where the source fixes the dtype.
    """

    volume: Callable[[Shapes, int], VolumeOfRank]
    label: str
    itemsize: int | None = None


def row_chunk_numel(shape: Sequence[int], world_size: int) -> int:
    """Returns the elements of one of the W equal chunks, in rows, that FSDP2 and DTensor pad a
    tensor of any number of dimensions to."""
    rows, *rest = shape or (1,)
    numel = -(-rows // world_size)
    for size in rest:
        numel *= size
    return numel


def exchange_volume(matrices: Sequence[CutMatrix], rank: int, ranks: int) -> StepVolume:
    """Returns what ``rank`` sends where fragments go to each matrix's worker, and the fragments of
    the results back."""
    return StepVolume(
        all_to_all_volume(held_numels(matrices, rank, ranks), rank),
        all_to_all_volume(worked_numels(matrices, rank, ranks), rank),
    )


def _gather(shapes: Shapes, world_size: int) -> VolumeOfRank:
    """Stock FSDP2-Muon: every rank gathers each matrix's update and orthogonalises all of them. One
    all-gather per matrix, of the rows padded to equal chunks (what ``DTensor.full_tensor`` does).
    """
    volumes = (ring_volume(row_chunk_numel(shape, world_size), world_size) for shape in shapes)
    sent = StepVolume(sum(volumes, Volume()))
    return lambda rank: sent


def _gather_once(shapes: Shapes, world_size: int) -> VolumeOfRank:
    """One packed all-gather of all updates, everything orthogonalised on every rank. A rank's rows
    are padded to as many elements as rank 0 has, whose chunks are all whole."""
    sent = StepVolume(_packed(shapes, world_size))
    return lambda rank: sent


def _gather_and_back(shapes: Shapes, world_size: int) -> VolumeOfRank:
    """One packed all-gather of all updates, Newton-Schulz on one rank per matrix, one packed
    all-gather of the results. Assumed in its favour: the results divide evenly over the ranks,
    whatever the sizes of the matrices."""
    results = -(-sum(row_chunk_numel(shape, 1) for shape in shapes) // world_size)
    sent = StepVolume(_packed(shapes, world_size), ring_volume(results, world_size))
    return lambda rank: sent


def _packed(shapes: Shapes, world_size: int) -> Volume:
    chunks = sum(row_chunk_numel(shape, world_size) for shape in shapes)
    return ring_volume(chunks, world_size)


def _all_to_all(shapes: Shapes, world_size: int) -> VolumeOfRank:
    """The row shards of each update go to the matrix's worker, and the rows of the result come
    back, in two uneven all-to-alls without padding. So does DistMuon (TorchTitan's flex_shard), in
    buckets and with the results in the stored dtype: Newton-Schulz on one bucket hides part of the
    next one's traffic, none of which is hidden behind forward or backward."""
    matrices = cut_matrices(shapes, [0] * len(shapes), world_size)
    return lambda rank: exchange_volume(matrices, rank, world_size)


def _padded_all_to_all(shapes: Shapes, world_size: int) -> VolumeOfRank:
    """dion's Muon: matrices of one shape make a batch, padded with zero matrices to a multiple of
    W; row shards are padded to ``ceil(rows / W)``. Each rank orthogonalises 1 / W of the batch,
    between two even all-to-alls in bfloat16."""
    sent = Volume()
    for shape, count in Counter(shapes).items():
        # To each peer: this rank's rows of the peer's matrices; and the same amount back.
        per_rank = -(-count // world_size)
        sent += ring_volume(per_rank * row_chunk_numel(shape, world_size), world_size)
    both_ways = StepVolume(sent, sent)
    return lambda rank: both_ways


BASELINE_STEPS: Mapping[str, BaselineStep] = MappingProxyType(
    {
        "gather": BaselineStep(_gather, "gather each matrix"),
        "gather_once": BaselineStep(_gather_once, "gather once"),
        "gather_and_back": BaselineStep(_gather_and_back, "gather once, results back"),
        "all_to_all": BaselineStep(_all_to_all, "all-to-all (as DistMuon)"),
        "padded_all_to_all": BaselineStep(
            _padded_all_to_all, "padded all-to-all, bf16 (dion)", _BFLOAT16
        ),
    }
)
