"""Muon on the fragments that tensor parallelism leaves of an owned matrix.

[Note: the step's one exchange]
Under tensor parallelism an owner is a column of tp ranks, and each of them holds a fragment of
every matrix of the column. Momentum, weight decay and the update itself are elementwise and stay
on fragments; Newton-Schulz needs the whole matrix. So in each step

1. every rank sends its fragments of the momentum-updated gradients to the rank of the column that
   orthogonalises the matrix, its *worker* (one all-to-all for all matrices);
2. every worker orthogonalises its matrices, each whole;
3. the workers send the fragments of the results back (a second all-to-all).

Workers are chosen once, by the FLOPs of Newton-Schulz: the most expensive matrix first, each to
the worker with the least so far. The order of everything is that of the parameters, the same on
all ranks of a column, so the exchange is deterministic, and a result is that of Newton-Schulz on
one device to the bit. A matrix that tensor parallelism replicates is not exchanged: every rank of
the column has it whole and computes the same.

This is the one case in which an owner's step communicates. Updates travel in the parameter's
dtype, results in the dtype of Newton-Schulz; both count under the operation ``tp_step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from torchtitan_matrixfsdp.comm import Traffic, TrafficCounter
from torchtitan_matrixfsdp.layout import muon_flops
from torchtitan_matrixfsdp.optim.base import PendingUpdate
from torchtitan_matrixfsdp.optim.muon import Muon
from torchtitan_matrixfsdp.runtime import OwnerDTensor

TP_STEP = "tp_step"
"""The name of the exchange in a :class:`TrafficCounter`."""


@dataclass(frozen=True)
class CutMatrix:
    """A matrix in fragments.

    Attributes:
        dim: the dimension that is cut, 0 or 1.
        worker: the rank of the column that orthogonalises it.
        fragments: each rank's part (rows, columns), by rank of the column.
    """

    dim: int
    worker: int
    fragments: tuple[tuple[int, int], ...]

    def numel(self, rank: int) -> int:
        """Elements of the fragment of ``rank``."""
        rows, cols = self.fragments[rank]
        return rows * cols


def cut_matrices(
    shapes: Sequence[tuple[int, ...]], dims: Sequence[int], ranks: int
) -> tuple[CutMatrix, ...]:
    """The fragments and workers of matrices of logical ``shapes``, each cut along one of ``dims``.

    The cut is that of ``Shard``: parts of ``ceil(length / ranks)``, the last shorter or empty.
    """
    load = [0] * ranks
    workers = [0] * len(shapes)
    costs = [muon_flops(shape, steps=1) for shape in shapes]
    for index in sorted(range(len(shapes)), key=lambda i: (-costs[i], i)):
        workers[index] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[workers[index]] += costs[index]
    return tuple(
        CutMatrix(dim, worker, _fragments(shape, dim, ranks))
        for shape, dim, worker in zip(shapes, dims, workers, strict=True)
    )


def _fragments(shape: tuple[int, ...], dim: int, ranks: int) -> tuple[tuple[int, int], ...]:
    lengths = [Shard.local_shard_size_and_offset(shape[dim], ranks, r)[0] for r in range(ranks)]
    return tuple((n, shape[1]) if dim == 0 else (shape[0], n) for n in lengths)


class FragmentExchange:
    """Applies a function to whole matrices of which every rank of a group holds fragments.

    Args:
        matrices: the matrices of the group, in the same order on all its ranks.
        group: the column of tp ranks.
        counter: counts what this rank sends to the others.
    """

    def __init__(
        self, matrices: Sequence[CutMatrix], group: dist.ProcessGroup, counter: TrafficCounter
    ) -> None:
        self._matrices = matrices
        self._group = group
        self._counter = counter
        self._rank = group.rank()
        self._ranks = range(group.size())

    def apply(
        self,
        fragments: Mapping[int, torch.Tensor],
        function: Callable[[int, torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
    ) -> dict[int, torch.Tensor]:
        """This rank's fragments of ``function(index, whole)``, by index of the matrix.

        A collective of the group. ``fragments`` holds this rank's part of some matrices, the same
        on all ranks, all tensors in one dtype. ``function`` runs on each matrix's worker and
        returns a tensor of the whole's shape in ``dtype``.
        """
        indices = sorted(fragments)
        if not indices:
            return {}
        mine = self._of(indices, self._rank)
        by_worker = [index for worker in self._ranks for index in self._of(indices, worker)]
        held, worked = self._counts(indices)
        like = fragments[indices[0]]
        gathered = self._all_to_all((fragments[i] for i in by_worker), held, worked, like)
        # Received by rank, then by matrix.
        parts = [self._matrices[i].fragments[rank] for rank in self._ranks for i in mine]
        pieces = _split(gathered, parts)
        results: list[tuple[torch.Tensor, ...]] = []
        for position, index in enumerate(mine):
            matrix = self._matrices[index]
            whole = torch.cat(pieces[position :: len(mine)], dim=matrix.dim)
            lengths = [fragment[matrix.dim] for fragment in matrix.fragments]
            results.append(function(index, whole).split(lengths, dim=matrix.dim))
        outgoing = (result[rank] for rank in self._ranks for result in results)
        scattered = self._all_to_all(outgoing, worked, held, like.new_empty(0, dtype=dtype))
        own = [self._matrices[i].fragments[self._rank] for i in by_worker]
        return dict(zip(by_worker, _split(scattered, own), strict=True))

    def predict(self, update_itemsize: int, result_itemsize: int) -> Traffic:
        """Exactly what this rank sends in an :meth:`apply` in which every matrix takes part."""
        held, worked = self._counts(range(len(self._matrices)))
        return self._sent(held, update_itemsize) + self._sent(worked, result_itemsize)

    def _of(self, indices: Iterable[int], worker: int) -> list[int]:
        return [index for index in indices if self._matrices[index].worker == worker]

    def _counts(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Elements that this rank holds for each worker, and that it works on for each rank."""
        numel, rank = self._numel, self._rank
        held = [numel(self._of(indices, worker), rank) for worker in self._ranks]
        worked = [numel(self._of(indices, rank), other) for other in self._ranks]
        return held, worked

    def _numel(self, indices: Iterable[int], rank: int) -> int:
        return sum(self._matrices[index].numel(rank) for index in indices)

    def _all_to_all(
        self,
        tensors: Iterable[torch.Tensor],
        sent: list[int],
        received: list[int],
        like: torch.Tensor,
    ) -> torch.Tensor:
        """Sends ``sent[r]`` elements to each rank, the tensors' content in order; returns what
        comes from all ranks, 1D and in rank order, in the dtype and on the device of ``like``."""
        outgoing = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])
        incoming = like.new_empty(sum(received))
        dist.all_to_all_single(incoming, outgoing, received, sent, group=self._group)
        self._counter.record(TP_STEP, self._sent(sent, outgoing.itemsize))
        return incoming

    def _sent(self, counts: Sequence[int], itemsize: int) -> Traffic:
        others = [n for rank, n in enumerate(counts) if rank != self._rank and n > 0]
        return Traffic(sum(others) * itemsize, len(others))


def _split(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    pieces = flat.split([rows * cols for rows, cols in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class TensorParallelMuon(Muon):
    """Muon whose parameters are local fragments of owner DTensors; see [Note: the step's one
    exchange].

    Args:
        params: groups of local tensors.
        of_local: the owner DTensor of each local tensor.
        counter: counts what this rank sends at the step.
        options: as for :class:`Muon`.

    Raises:
        ValueError: as :class:`Muon`, or the fragments have several dtypes.
    """

    def __init__(
        self,
        params: Any,
        of_local: Mapping[torch.Tensor, torch.Tensor],
        counter: TrafficCounter,
        **options: Any,
    ) -> None:
        self._of_local = of_local
        shapes = {local: tuple(whole.shape) for local, whole in of_local.items()}
        super().__init__(params, logical_shapes=shapes, **options)
        self._index: dict[torch.Tensor, int] = {}
        dims: list[int] = []
        for param in (p for group in self.param_groups for p in group["params"]):
            owned = of_local[param]
            cut = tensor_parallel_cut(owned)
            if cut is not None and isinstance(owned, OwnerDTensor) and owned.is_owner:
                self._index[param] = len(dims)
                mesh_dim, dim = cut
                dims.append(dim)
                column = owned.device_mesh.get_group(mesh_dim)
        dtypes = {param.dtype for param in self._index}
        if len(dtypes) > 1:
            raise ValueError(
                f"TensorParallelMuon: fragments of several dtypes {sorted(map(str, dtypes))}; "
                "legal: one, since they travel in one buffer. Use one training.dtype."
            )
        self.exchange: FragmentExchange | None = None
        if self._index:
            whole = [self.logical_shape(param) for param in self._index]
            self.exchange = FragmentExchange(
                cut_matrices(whole, dims, column.size()), column, counter
            )

    def predict(self) -> Traffic:
        """Exactly what this rank sends in one step."""
        if self.exchange is None:
            return Traffic()
        param = next(iter(self._index))
        return self.exchange.predict(param.itemsize, self._ns_dtype.itemsize)

    def _update(self, pending: Sequence[PendingUpdate]) -> None:
        cut = {self._index[p]: (p, g, group) for p, g, group in pending if p in self._index}
        super()._update([entry for entry in pending if entry[0] not in self._index])
        if self.exchange is None:
            return

        def orthogonalise(index: int, whole: torch.Tensor) -> torch.Tensor:
            param, _, group = cut[index]
            return self._orthogonalise([param], [whole], group["ns_steps"])[0]

        updates = {index: self._average(*entry) for index, entry in cut.items()}
        directions = self.exchange.apply(updates, orthogonalise, self._ns_dtype)
        for index, (param, _, group) in cut.items():
            self._apply(param, directions[index], group)


def tensor_parallel_cut(param: torch.Tensor) -> tuple[int, int] | None:
    """Where an owner DTensor is cut into fragments: (mesh dimension, tensor dimension), or ``None``
    if every rank that stores it has the whole."""
    if not isinstance(param, OwnerDTensor):
        return None
    cuts = [(d, p.dim) for d, p in enumerate(param.placements) if isinstance(p, Shard)]
    return cuts[0] if cuts else None
