"""The baseline: Muon on ordinary FSDP2 row shards.

Each rank keeps a row shard of the momentum. At the step every matrix is gathered, every rank
orthogonalises the whole of it, and keeps its rows: the gather is weight-sized, is paid for every
matrix and overlaps with nothing. This is what owner shards are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_matrixfsdp.optim.base import PendingUpdate
from torchtitan_matrixfsdp.optim.muon import Muon
from torchtitan_matrixfsdp.runtime import wrap_like


class GatherMuon(Muon):
    """Muon whose parameters are the local parts of DTensors: rows, or under tensor parallelism
    rows of a fragment.

    Args:
        params: groups of local tensors.
        of_local: the DTensor parameter of each local tensor. Plain parameters are stepped as
            they are.
        options: as for :class:`Muon`.
    """

    def __init__(
        self, params: Any, of_local: Mapping[torch.Tensor, torch.Tensor], **options: Any
    ) -> None:
        self._of_local = of_local
        shapes = {local: tuple(whole.shape) for local, whole in of_local.items()}
        super().__init__(params, logical_shapes=shapes, **options)

    def _update(self, pending: Sequence[PendingUpdate]) -> None:
        # One matrix after another: each is gathered whole, and a single one is alive at a time.
        for entry in pending:
            super()._update([entry])

    def _orthogonalise(
        self, params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor], steps: int
    ) -> list[torch.Tensor]:
        return [
            self._orthogonalise_one(param, update, steps)
            for param, update in zip(params, updates, strict=True)
        ]

    def _orthogonalise_one(
        self, param: torch.Tensor, update: torch.Tensor, steps: int
    ) -> torch.Tensor:
        whole_param = self._of_local[param]
        if not isinstance(whole_param, DTensor):
            return super()._orthogonalise([param], [update], steps)[0]
        rows = wrap_like(update, whole_param)
        assert isinstance(rows, DTensor)
        (whole,) = super()._orthogonalise([param], [rows.full_tensor()], steps)
        # src_data_rank=None: every rank has the whole result and slices its own rows.
        mine = distribute_tensor(
            whole, whole_param.device_mesh, whole_param.placements, src_data_rank=None
        )
        return mine.to_local()
