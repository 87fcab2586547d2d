"""Owner shards inside FSDP2's lifecycle.

Imports ``layout`` and ``comm``. Private names of FSDP2 and DTensor are imported in
:mod:`~torchtitan_matrixfsdp.runtime.fsdp_compat` only, and checked in ``fsdp_check``.
"""

from torchtitan_matrixfsdp.runtime.buffers import BufferStateError, OwnerContext
from torchtitan_matrixfsdp.runtime.fsdp_compat import count_unused_parameters
from torchtitan_matrixfsdp.runtime.owner_dtensor import (
    OwnerDTensor,
    whole_tensor_random,
    wrap_like,
)
from torchtitan_matrixfsdp.runtime.owner_placement import Owner, owner_local_shape
from torchtitan_matrixfsdp.runtime.replicas import PartitionedReplicas
from torchtitan_matrixfsdp.runtime.shard import owner_shard, reset_iter_state

__all__ = [
    "BufferStateError",
    "Owner",
    "OwnerContext",
    "OwnerDTensor",
    "PartitionedReplicas",
    "count_unused_parameters",
    "owner_local_shape",
    "owner_shard",
    "reset_iter_state",
    "whole_tensor_random",
    "wrap_like",
]
