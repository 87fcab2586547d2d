"""The baselines: Muon on ordinary FSDP2 row shards. Owner shards are compared with these.

Each rank keeps a row shard of every momentum, but Newton-Schulz needs whole matrices. The steps
differ in how they come by them (``layout.baseline_steps`` has their bytes, each formula once):

- ``gather``: each matrix is gathered, every rank orthogonalises it and keeps its rows; one matrix
  after another. What ``DTensor.full_tensor`` invites one to write.
- ``gather_once``: the same with one all-gather for all matrices, and one batched Newton-Schulz.
- ``all_to_all``: each matrix goes to one rank, which orthogonalises it, and its rows come back
  ([Note: the two-way exchange]). What dion and TorchTitan's DistMuon do.

All of it is weight-sized, is paid in every step and overlaps with neither forward nor backward.
Updates travel in the parameter's dtype; results, which ``all_to_all`` alone sends, in that of
Newton-Schulz. All count under the operation ``stock_step``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_matrixfsdp.comm import Traffic, TrafficCounter
from torchtitan_matrixfsdp.comm.transport import all_gather_single
from torchtitan_matrixfsdp.layout import (
    BASELINE_STEPS,
    CutMatrix,
    Volume,
    cut_matrices,
    ring_volume,
    row_chunk_numel,
)
from torchtitan_matrixfsdp.optim.base import PendingUpdate, logical_shapes
from torchtitan_matrixfsdp.optim.exchange import (
    FragmentExchange,
    require_one_dtype,
    split_flat,
)
from torchtitan_matrixfsdp.optim.muon import Muon
from torchtitan_matrixfsdp.runtime import wrap_like

STOCK_STEP = "stock_step"
"""The name of a step's traffic in a :class:`TrafficCounter`."""


class RowShardMuon(Muon):
    """Muon whose parameters are the local parts of row-sharded DTensors.

    Args:
        params: groups of local tensors.
        of_local: the DTensor parameter of each local tensor. Plain parameters are stepped as
            they are.
        counter: counts what this rank sends at the step.
        options: as for :class:`Muon`.
    """

    step_name: str
    """A key of ``layout.BASELINE_STEPS``."""

    def __init__(
        self,
        params: Any,
        of_local: Mapping[torch.Tensor, torch.Tensor],
        counter: TrafficCounter | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, logical_shapes=logical_shapes(of_local), **options)
        self._counter = counter or TrafficCounter()
        every_param = [p for group in self.param_groups for p in group["params"]]
        self._sharded = {p: w for p in every_param if isinstance(w := of_local[p], DTensor)}

    def predict(self) -> Traffic:
        """Exactly what this rank sends in one step.

        Raises:
            ValueError: under tensor parallelism, where DTensor chooses the collectives.
        """
        group = self._one_group()
        if group is None:
            return Traffic()
        shapes = [self.logical_shape(param) for param in self._sharded]
        volume = BASELINE_STEPS[self.step_name].volume(shapes, group.size())(group.rank())
        itemsize = next(iter(self._sharded)).itemsize
        return Traffic(volume.nbytes(itemsize, self._ns_dtype.itemsize), volume.messages)

    def _one_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the rows of the matrices: one replica's, under HSDP. None where no
        matrix is sharded.

        Raises:
            ValueError: they are not sharded by rows alone, or not all over the same ranks.
        """
        groups: dict[str, dist.ProcessGroup] = {}
        for whole in self._sharded.values():
            group = row_group(whole)
            if group is None:
                raise ValueError(
                    f'stock step "{self.step_name}": a matrix of shape {tuple(whole.shape)} has '
                    f"placements {whole.placements}; legal: Shard(0) on one dimension of the mesh, "
                    'Replicate() on the others. Use "gather" with tensor parallelism.'
                )
            groups[group.group_name] = group
        if len(groups) > 1:
            raise ValueError(
                f'stock step "{self.step_name}": matrices are sharded over {len(groups)} groups of '
                'ranks; legal: one. Use "gather", or one optimizer per group.'
            )
        return next(iter(groups.values()), None)

    def _update(self, pending: Sequence[PendingUpdate]) -> None:
        super()._update([entry for entry in pending if entry[0] not in self._sharded])
        rows = [entry for entry in pending if entry[0] in self._sharded]
        if rows:
            self._update_rows(rows)

    @abstractmethod
    def _update_rows(self, pending: Sequence[PendingUpdate]) -> None:
        """One update of row shards, empty ones included; the same matrices on every rank."""

    def _record(self, volume: Volume, itemsize: int) -> None:
        self._counter.record(STOCK_STEP, Traffic(volume.elements * itemsize, volume.messages))


class GatherMuon(RowShardMuon):
    """Gathers each matrix, also one that tensor parallelism cuts (which is not counted)."""

    step_name = "gather"

    def _update_rows(self, pending: Sequence[PendingUpdate]) -> None:
        # One matrix after another: a single whole one is alive at a time.
        for param, grad, group in pending:
            whole_param = self._sharded[param]
            rows = wrap_like(self._average(param, grad, group), whole_param)
            assert isinstance(rows, DTensor)
            entry = (param, grad, group)
            (whole,) = self._orthogonalise_wholes([entry], [rows.full_tensor()])
            ranks = row_group(whole_param)
            if ranks is not None:
                chunk = row_chunk_numel(whole_param.shape, ranks.size())
                self._record(ring_volume(chunk, ranks.size()), param.itemsize)
            # src_data_rank=None: every rank has the whole result and slices its own rows.
            mine = distribute_tensor(
                whole, whole_param.device_mesh, whole_param.placements, src_data_rank=None
            )
            self._apply(param, mine.to_local(), group)


class PackedMuon(RowShardMuon):
    """What moves all matrices in one buffer: rows alone, of one dtype, over one group of ranks.

    Raises:
        ValueError: other parameters.
    """

    def __init__(
        self,
        params: Any,
        of_local: Mapping[torch.Tensor, torch.Tensor],
        counter: TrafficCounter | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, of_local, counter, **options)
        require_one_dtype(self._sharded, f'stock step "{self.step_name}"')
        self._group = self._one_group()
        shapes = [self.logical_shape(param) for param in self._sharded]
        ranks = 1 if self._group is None else self._group.size()
        self._matrices = cut_matrices(shapes, [0] * len(shapes), ranks)
        self._index = {param: index for index, param in enumerate(self._sharded)}


class GatherOnceMuon(PackedMuon):
    """Gathers all matrices at once; every rank orthogonalises all of them and keeps its rows."""

    step_name = "gather_once"

    def _update_rows(self, pending: Sequence[PendingUpdate]) -> None:
        assert self._group is not None
        updates = [self._average(*entry) for entry in pending]
        matrices = [self._matrices[self._index[param]] for param, _, _ in pending]
        wholes = self._gather(updates, matrices, self._group)
        results = self._orthogonalise_wholes(pending, wholes)
        rank = self._group.rank()
        for (param, _, group), matrix, result in zip(pending, matrices, results, strict=True):
            rows = result[rank * matrix.chunk : (rank + 1) * matrix.chunk]
            self._apply(param, rows, group)

    def _gather(
        self,
        updates: Sequence[torch.Tensor],
        matrices: Sequence[CutMatrix],
        group: dist.ProcessGroup,
    ) -> list[torch.Tensor]:
        """The whole matrices, from every rank's rows of them."""
        rank, ranks = group.rank(), range(group.size())
        # An all-gather has equal slices: as long as rank 0's, whose chunks are all whole.
        slice_numel = sum(matrix.numel(0) for matrix in matrices)
        flat = updates[0].new_empty(len(ranks) * slice_numel)
        slices = flat.split(slice_numel) if slice_numel else [flat for _ in ranks]
        held = sum(matrix.numel(rank) for matrix in matrices)
        torch.cat([update.reshape(-1) for update in updates], out=slices[rank][:held])
        all_gather_single(flat, slices[rank], group=group)
        self._record(ring_volume(slice_numel, len(ranks)), flat.itemsize)
        by_rank = []
        for other, part in zip(ranks, slices, strict=True):
            shapes = [matrix.fragment(other) for matrix in matrices]
            by_rank.append(split_flat(part[: sum(r * c for r, c in shapes)], shapes))
        return [torch.cat(pieces) for pieces in zip(*by_rank, strict=True)]


class AllToAllMuon(PackedMuon):
    """Deals the matrices to the ranks for the step, and returns the results' rows."""

    step_name = "all_to_all"

    def _update_rows(self, pending: Sequence[PendingUpdate]) -> None:
        assert self._group is not None
        exchange = FragmentExchange(self._matrices, self._group, self._counter, STOCK_STEP)
        entries = {self._index[entry[0]]: entry for entry in pending}

        def orthogonalise(
            indices: Sequence[int], wholes: Sequence[torch.Tensor]
        ) -> Sequence[torch.Tensor]:
            return self._orthogonalise_wholes([entries[i] for i in indices], wholes)

        updates = {index: self._average(*entry) for index, entry in entries.items()}
        directions = exchange.apply(updates, orthogonalise, self._ns_dtype)
        for index, (param, _, group) in entries.items():
            self._apply(param, directions[index], group)


_STEPS = {cls.step_name: cls for cls in (GatherMuon, GatherOnceMuon, AllToAllMuon)}
STOCK_STEPS = tuple(_STEPS)
"""The steps that :func:`stock_muon` knows."""


def stock_muon(
    stock_step: str,
    params: Any,
    of_local: Mapping[torch.Tensor, torch.Tensor],
    counter: TrafficCounter,
    **options: Any,
) -> RowShardMuon:
    """Muon on row shards with the step ``stock_step``; the arguments are :class:`RowShardMuon`'s.

    Raises:
        ValueError: an unknown step, or parameters that it cannot step (see its class).
    """
    if stock_step not in _STEPS:
        raise ValueError(f"stock_step: received {stock_step!r}; legal: {list(STOCK_STEPS)}")
    return _STEPS[stock_step](params, of_local, counter, **options)


def row_group(param: DTensor) -> dist.ProcessGroup | None:
    """The ranks that share the rows of ``param``, if it is cut by rows along one mesh dimension and
    whole along the others; otherwise None."""
    cuts = [d for d, p in enumerate(param.placements) if not p.is_replicate()]
    if len(cuts) != 1 or not param.placements[cuts[0]].is_shard(0):
        return None
    return param.device_mesh.get_group(cuts[0])
