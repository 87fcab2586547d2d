"""One replica steps a matrix, the others receive it: HSDP's optimizer work, divided.

[Note: partitioned replicas]
On a (replicate, shard) mesh every replica's owner holds the same matrix and, after the all-reduce,
the same gradient. Partitioned, one of them steps it and broadcasts the new weight in the replicate
group. The broadcasts are started right after the step, in the order in which forward will need
them, and each block waits for its own before it is gathered: from the second block on they have
the forward of the blocks before to hide behind. Whoever else touches such a parameter before that
(a checkpoint, ``full_tensor``, an operator) waits as well, by :meth:`OwnerDTensor.wait_arrival`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_matrixfsdp.comm import Traffic, TrafficCounter
from torchtitan_matrixfsdp.layout import broadcast_volume
from torchtitan_matrixfsdp.runtime.fsdp_compat import local_of
from torchtitan_matrixfsdp.runtime.owner_dtensor import OwnerDTensor
from torchtitan_matrixfsdp.runtime.owner_placement import Owner


class PartitionedReplicas:
    """The matrices of one model part that a single replica steps.

    Args:
        stepper: the replica of each parameter. Order matters: the blocks' order in forward, the
            same on every rank.
        counter: totals what this rank sends, under ``"update"``.

    Raises:
        ValueError: a parameter does not live on a (replicate, shard) mesh.
    """

    def __init__(self, stepper: Mapping[nn.Parameter, int], counter: TrafficCounter) -> None:
        self._counter = counter
        self._stepper: dict[OwnerDTensor, int] = {}
        for param, replica in stepper.items():
            if not isinstance(param, OwnerDTensor) or not param.placements[0].is_replicate():
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} cannot be stepped on one replica: "
                    "expected an owner shard on a mesh whose first dimension replicates"
                )
            self._stepper[param] = replica

    def step_view(self, param: torch.Tensor) -> OwnerDTensor | None:
        """``param`` as its optimizer sees it: on the stepping replica's owner the same storage,
        numel 0 on every other rank; ``None`` if all replicas step it."""
        if not isinstance(param, OwnerDTensor) or param not in self._stepper:
            return None
        mesh, local = param.device_mesh, local_of(param).detach()
        placements = (Owner(self._stepper[param]), *param.placements[1:])
        if mesh.get_local_rank(0) != self._stepper[param]:
            local = local.new_empty((0, *local.shape[1:]))
        return OwnerDTensor.wrap(local, mesh, placements, param.shape)

    @torch.no_grad()
    def publish(self) -> None:
        """Start sending what was stepped; call it on every rank right after the optimizer."""
        for param, replica in self._stepper.items():
            param.wait_arrival()  # of the step before, if no forward came between
            if param.is_owner:  # so are the same ranks of all replicas
                self._send(param, replica)

    def _send(self, param: OwnerDTensor, replica: int) -> None:
        local = local_of(param)
        group = replicate_group(param.device_mesh)
        volume = broadcast_volume(local.numel(), replica, group.rank(), group.size())
        sent = Traffic(volume.elements * local.element_size(), volume.messages)
        self._counter.record("update", sent)
        work = dist.broadcast(local, group=group, group_src=replica, async_op=True)
        assert work is not None
        param.arrives_with(work)


def replicate_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of a (replicate, shard, ...) mesh's first dimension."""
    return mesh.get_group(0)
