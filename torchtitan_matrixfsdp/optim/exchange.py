"""Whole matrices for a function, where every rank of a group holds fragments of them.

[Note: the two-way exchange]
Each matrix has a *worker*, the rank of the group that works on the whole of it. In an exchange

1. every rank sends its fragment of each matrix to the matrix's worker (one all-to-all for all);
2. every worker applies the function to its matrices, all of them at once;
3. the workers send the fragments of the results back (a second all-to-all).

Both all-to-alls are uneven, without padding. Workers are chosen once, by the FLOPs of Newton-Schulz
(``layout.cut_matrices``). The order of everything is that of the matrices, the same on all ranks,
so the exchange is deterministic, and a result is the function's own on one device, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from torchtitan_matrixfsdp.comm import Traffic, TrafficCounter
from torchtitan_matrixfsdp.layout import (
    CutMatrix,
    all_to_all_volume,
    exchange_volume,
    held_numels,
    worked_numels,
)
from torchtitan_matrixfsdp.optim.base import PendingUpdate
from torchtitan_matrixfsdp.optim.muon import Muon
from torchtitan_matrixfsdp.optim.newton_schulz import newton_schulz

WholeFunction = Callable[[Sequence[int], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""From the indices of some matrices and the matrices, whole, to as many of the same shapes."""


class FragmentExchange:
    """Applies a function to whole matrices of which every rank of a group holds fragments.

    Args:
        matrices: the matrices of the group, in the same order on all its ranks.
        group: the ranks that hold the fragments.
        counter: counts what this rank sends to the others.
        operation: under which name.
    """

    def __init__(
        self,
        matrices: Sequence[CutMatrix],
        group: dist.ProcessGroup,
        counter: TrafficCounter,
        operation: str,
    ) -> None:
        self._matrices = matrices
        self._group = group
        self._counter = counter
        self._operation = operation
        self._rank = group.rank()
        self._ranks = range(group.size())

    def apply(
        self, fragments: Mapping[int, torch.Tensor], function: WholeFunction, dtype: torch.dtype
    ) -> dict[int, torch.Tensor]:
        """This rank's fragments of ``function``'s results, by index of the matrix.

        A collective of the group. ``fragments`` holds this rank's part of some matrices, the same
        on all ranks, all tensors in one dtype. ``function`` is called once, on the matrices that
        this rank works on (none, perhaps), and returns tensors of their shapes in ``dtype``.
        """
        indices = sorted(fragments)
        if not indices:
            return {}
        mine = self._of(indices, self._rank)
        by_worker = [index for worker in self._ranks for index in self._of(indices, worker)]
        matrices = [self._matrices[index] for index in indices]
        held = held_numels(matrices, self._rank, len(self._ranks))
        worked = worked_numels(matrices, self._rank, len(self._ranks))
        like = fragments[indices[0]]
        gathered = self._all_to_all((fragments[i] for i in by_worker), held, worked, like)
        # Received by rank, then by matrix.
        parts = [self._matrices[i].fragment(rank) for rank in self._ranks for i in mine]
        pieces = split_flat(gathered, parts)
        wholes = [
            torch.cat(pieces[position :: len(mine)], dim=self._matrices[index].dim)
            for position, index in enumerate(mine)
        ]
        results = [
            self._cut(self._matrices[index], result)
            for index, result in zip(mine, function(mine, wholes), strict=True)
        ]
        outgoing = (result[rank] for rank in self._ranks for result in results)
        scattered = self._all_to_all(outgoing, worked, held, like.new_empty(0, dtype=dtype))
        own = [self._matrices[i].fragment(self._rank) for i in by_worker]
        return dict(zip(by_worker, split_flat(scattered, own), strict=True))

    def predict(self, update_itemsize: int, result_itemsize: int) -> Traffic:
        """Exactly what this rank sends in an :meth:`apply` in which every matrix takes part."""
        volume = exchange_volume(self._matrices, self._rank, len(self._ranks))
        return Traffic(volume.nbytes(update_itemsize, result_itemsize), volume.messages)

    def _of(self, indices: Iterable[int], worker: int) -> list[int]:
        return [index for index in indices if self._matrices[index].worker == worker]

    def _cut(self, matrix: CutMatrix, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lengths = [matrix.fragment(rank)[matrix.dim] for rank in self._ranks]
        return whole.split(lengths, dim=matrix.dim)

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
        volume = all_to_all_volume(sent, self._rank)
        traffic = Traffic(volume.elements * outgoing.itemsize, volume.messages)
        self._counter.record(self._operation, traffic)
        return incoming


def split_flat(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The consecutive matrices of ``shapes`` that make up ``flat`` (1D), as views."""
    pieces = flat.split([rows * cols for rows, cols in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def require_one_dtype(tensors: Iterable[torch.Tensor], who: str) -> None:
    """What is packed into one buffer has one dtype.

    Raises:
        ValueError: several.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(
            f"{who}: parameters of several dtypes {sorted(map(str, dtypes))}; legal: one, since "
            "they travel in one buffer. Use one training.dtype."
        )


def orthogonalise_wholes(
    muon: Muon, entries: Sequence[PendingUpdate], wholes: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """``muon``'s orthogonalisation of the whole matrix of each entry."""
    return [
        newton_schulz(whole, steps=group["ns_steps"], compute_dtype=muon._ns_dtype)
        for (_, _, group), whole in zip(entries, wholes, strict=True)
    ]
