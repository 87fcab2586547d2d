"""One parameter of an owner group.

[Note: owner FSDP tensors]
FSDP2's own note names the tensors of a parameter; for an owner parameter they are:
- original parameter ``[*shape]``: what the module had when it was sharded (often on meta);
  under tensor parallelism a DTensor on the tp mesh, and ``[*shape]`` is its local fragment's;
- sharded parameter: an :class:`OwnerDTensor` of the logical shape, whose mesh is the FSDP mesh
  followed by the tp mesh; its local tensor is ``[*shape]`` on the owner and ``[0, *shape[1:]]``
  elsewhere, where it holds no storage;
- gather source: on the owner, the local tensor ``[numel]``; nothing elsewhere;
- unsharded parameter ``[*shape]``: in the gather dtype, a view into the block's flat buffer
  ([Note: block buffers] in ``buffers``), whose storage is resized in place, so that views saved
  by autograd stay valid. Under tensor parallelism again a DTensor on the tp mesh, over that view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchtitan_matrixfsdp.comm import view_segment
from torchtitan_matrixfsdp.layout import MatrixShard, Segment
from torchtitan_matrixfsdp.runtime.buffers import BlockBuffer
from torchtitan_matrixfsdp.runtime.fsdp_compat import (
    FSDPMeshInfo,
    FSDPParam,
    ShardedState,
    claim_original,
    concatenate_meshes,
    contiguous_strides,
    init_mesh_info,
    local_of,
    make_spec,
    set_local,
    spec_of,
)
from torchtitan_matrixfsdp.runtime.owner_dtensor import OwnerDTensor
from torchtitan_matrixfsdp.runtime.owner_placement import Owner

ShardLookup = Callable[[nn.Parameter], MatrixShard]


class OwnerParam(FSDPParam):
    """FSDP2's per-parameter state with the whole tensor on one rank.

    Attributes:
        shard: what the plan says of this parameter.
        is_owner: whether this rank stores it.
    """

    shard: MatrixShard
    is_owner: bool

    @torch.no_grad()
    def _init_sharded_param(  # type: ignore[override]
        self,
        param: nn.Parameter,
        device: torch.device,
        shard_placement_fn: ShardLookup,
        mesh_info: FSDPMeshInfo | None = None,
    ) -> None:
        """Replaces the even dim-0 chunking. The stock constructor hands its
        ``shard_placement_fn`` argument through unread, and owner groups pass the plan's
        lookup in that place."""
        self.shard = shard = shard_placement_fn(param)
        data: torch.Tensor = local_of(param) if isinstance(param, DTensor) else param
        if tuple(data.shape) != shard.shape or param.ndim == 0:
            raise ValueError(
                f"{shard.fqn}: the plan has shape {shard.shape}, the module's parameter "
                f"{tuple(data.shape)}; owner shards need the planned shape and at least 1D."
            )
        if param.device != device and param.device.type != "meta":
            raise ValueError(
                f"{shard.fqn}: parameter is on {param.device}, expected {device} or meta"
            )
        mesh_info = init_mesh_info(self, mesh_info)
        self.is_owner = mesh_info.shard_mesh_rank == shard.owner
        # Read by stock code that we keep (dtype and shape bookkeeping only; nothing is
        # chunked along this dimension).
        self.fsdp_placement = Shard(0)
        self._spmd_mesh = mesh_info.mesh
        self._spmd_placements = (
            *(Replicate(),) * (mesh_info.mesh.ndim - 1),
            Owner(shard.owner),
        )
        self.is_dtensor = isinstance(param, DTensor)  # gradients then come as DTensors too
        self._unsharded_dtensor_spec = None
        if isinstance(param, DTensor):
            self._unsharded_dtensor_spec = spec_of(param)
            self._spmd_mesh = concatenate_meshes(mesh_info.mesh, param.device_mesh)
            self._spmd_placements += tuple(param.placements)
        self._orig_param_uid = claim_original(param, shard.fqn)
        self._orig_size = data.size()
        self._contiguous_orig_stride = contiguous_strides(self._orig_size)
        self._sharding_spec = make_spec(
            self._spmd_mesh, self._spmd_placements, param.size(), param.dtype
        )
        self.sharded_size = data.size() if self.is_owner else torch.Size([0, *data.shape[1:]])
        self.contiguous_sharded_stride = contiguous_strides(self.sharded_size)
        self.padded_sharded_param_size = self.sharded_size
        if self.is_owner:
            # A copy: the original may alias others, and may be non-contiguous.
            local = data.detach().clone(memory_format=torch.contiguous_format)
        else:
            local = data.new_empty(self.sharded_size)
        local = self._offloaded(local)
        self._sharded_param_data = local.view(-1)
        self.sharded_param = nn.Parameter(
            self.to_sharded_dtensor(local), requires_grad=param.requires_grad
        )
        self._setattr_on_modules(self.sharded_param)
        self.sharded_state = ShardedState.SHARDED

    def _init_sharded_post_forward_param_metadata(self, param: torch.Tensor) -> None:
        """Nothing to prepare: resharding to a smaller mesh is refused by the entry point."""

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> DTensor:
        if tensor.shape != self.sharded_size:
            raise AssertionError(
                f"{self.shard.fqn}: expected local shape {tuple(self.sharded_size)}, got "
                f"{tuple(tensor.shape)}"
            )
        return OwnerDTensor.from_spec(tensor, self._sharding_spec)

    @property
    def gather_dtype(self) -> torch.dtype:
        """The unsharded parameter's dtype: mixed precision's parameter dtype, or its own."""
        return self.param_dtype or self.orig_dtype

    def attach(self, buffer: BlockBuffer, segment: Segment) -> None:
        """Say where the unsharded parameter lives: ``segment`` of the block's flat buffer."""
        self._buffer = buffer
        self.segment = segment
        self._is_made = False

    def wait_arrival(self) -> None:
        """Order the current stream behind an update that another replica is sending."""
        if isinstance(self.sharded_param, OwnerDTensor):
            self.sharded_param.wait_arrival()

    def gather_source(self) -> torch.Tensor:
        """What the owner contributes to a gather: 1D ``[numel]`` in the stored dtype, on the
        compute device. Waits for an update that is still on its way from another replica."""
        self.wait_arrival()
        data = self._sharded_param_data
        return data.to(self.device, non_blocking=True) if self.offload_to_cpu else data

    def init_all_gather_outputs(
        self,
        all_gather_input_numels: list[int],
        all_gather_input_dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        force_recreate: bool = False,  # torch 2.11 and 2.12: always False without compilation
    ) -> None:
        """The group has allocated the block buffer; this parameter's part is a view."""
        if not self.all_gather_outputs:
            self.all_gather_outputs = [view_segment(self._buffer.flat, self.segment)]

    def init_unsharded_param(self) -> None:
        """Make the unsharded parameter once; the storage under it comes and goes."""
        if self._is_made:
            return
        self._is_made = True
        self.init_all_gather_outputs([], [], 1, self.device)
        # ``data`` has a version counter of its own: a gather restores the values that autograd may
        # have saved, so its writes to the buffer must not count as changes to the parameter.
        view: torch.Tensor = self.all_gather_outputs[0].data.view(self._orig_size)
        if (spec := self._unsharded_dtensor_spec) is not None:
            spec = make_spec(spec.mesh, spec.placements, spec.shape, view.dtype)
            view = DTensor(view, spec, requires_grad=False)
        self._unsharded_param = nn.Parameter(view, requires_grad=self.sharded_param.requires_grad)

    def alloc_all_gather_outputs(self) -> None:
        """The group allocates the whole block at once."""

    def free_unsharded_param(self) -> None:
        """The group gives the whole block's memory back at once."""

    def _offloaded(self, local: torch.Tensor) -> torch.Tensor:
        """``local``, in (pinned) host memory where the policy offloads; as in FSDP2."""
        if not self.offload_to_cpu or local.is_meta:
            return local
        local = local.cpu()
        return local.pin_memory() if self.pin_memory and not local.is_pinned() else local

    def reset_sharded_param(self) -> None:
        """Pick up a local tensor that ``to_empty`` or ``load_state_dict`` has replaced."""
        module_info = self._module_info
        current: Any = module_info.module._parameters[module_info.param_name]
        if not isinstance(current, OwnerDTensor):
            raise TypeError(
                f"{self.shard.fqn}: expected an owner DTensor on the module, found "
                f"{type(current).__name__}. Load owner-shaped state with torch.distributed."
                "checkpoint, which reshards on load."
            )
        self.sharded_param = current  # type: ignore[assignment]
        local = local_of(current)
        if local.is_meta:
            return
        if local.shape != self.sharded_size:
            raise ValueError(
                f"{self.shard.fqn}: local shape {tuple(local.shape)} on rank "
                f"{self.mesh_info.shard_mesh_rank}, expected {tuple(self.sharded_size)}"
            )
        offloaded = self._offloaded(local)
        if offloaded is not local:
            set_local(current, offloaded)
        self._sharded_param_data = offloaded.view(-1)
        self._sharding_spec = spec_of(current)
        self._buffer.invalidate()  # on every rank, as this is called
