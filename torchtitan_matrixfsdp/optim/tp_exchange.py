"""Muon on the fragments that tensor parallelism leaves of an owned matrix.

[Note: the step's one exchange]
Under tensor parallelism an owner is a column of tp ranks, and each of them holds a fragment of
every matrix of the column. Momentum, weight decay and the update itself are elementwise and stay
on fragments; Newton-Schulz needs the whole matrix, and gets it by [Note: the two-way exchange]
within the column. A matrix that tensor parallelism replicates is not exchanged: every rank of the
column has it whole and computes the same.

This is the one case in which an owner's step communicates. Updates travel in the parameter's
dtype, results in the dtype of Newton-Schulz; both count under the operation ``tp_step``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from torchtitan_matrixfsdp.comm import Traffic, TrafficCounter
from torchtitan_matrixfsdp.layout import cut_matrices
from torchtitan_matrixfsdp.optim.base import PendingUpdate, logical_shapes
from torchtitan_matrixfsdp.optim.exchange import (
    FragmentExchange,
    require_one_dtype,
)
from torchtitan_matrixfsdp.optim.muon import Muon
from torchtitan_matrixfsdp.runtime import OwnerDTensor

TP_STEP = "tp_step"
"""The name of the exchange in a :class:`TrafficCounter`."""


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
        super().__init__(params, logical_shapes=logical_shapes(of_local), **options)
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
        require_one_dtype(self._index, "TensorParallelMuon")
        self.exchange: FragmentExchange | None = None
        if self._index:
            whole = [self.logical_shape(param) for param in self._index]
            self.exchange = FragmentExchange(
                cut_matrices(whole, dims, column.size()), column, counter, TP_STEP
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

        def orthogonalise(
            indices: Sequence[int], wholes: Sequence[torch.Tensor]
        ) -> Sequence[torch.Tensor]:
            return self._orthogonalise_wholes([cut[i] for i in indices], wholes)

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
