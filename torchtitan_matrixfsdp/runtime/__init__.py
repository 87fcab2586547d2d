"""Owner shards inside FSDP2's lifecycle.

Imports ``layout`` and ``comm``. Private names of FSDP2 and DTensor are imported in
:mod:`~torchtitan_matrixfsdp.runtime.fsdp_compat` only, checked in ``fsdp_check``, and used
for older versions of torch in ``fsdp_older``.
"""

from torchtitan_matrixfsdp.runtime.buffers import (
    BufferStateError,
    OwnerContext,
    check_gradient,
)
from torchtitan_matrixfsdp.runtime.fsdp_older import count_unused_parameters
from torchtitan_matrixfsdp.runtime.owner_dtensor import (
    OwnerDTensor,
    wrap_like,
)
from torchtitan_matrixfsdp.runtime.owner_placement import Owner, owner_local_shape
from torchtitan_matrixfsdp.runtime.replicas import PartitionedReplicas
from torchtitan_matrixfsdp.runtime.resident import STEP_GATHER
from torchtitan_matrixfsdp.runtime.shard import owner_shard, reset_iter_state, sum_gradients
from torchtitan_matrixfsdp.runtime.whole_random import whole_tensor_random

__all__ = [
    "STEP_GATHER",
    "BufferStateError",
    "Owner",
    "OwnerContext",
    "OwnerDTensor",
    "PartitionedReplicas",
    "check_gradient",
    "count_unused_parameters",
    "owner_local_shape",
    "owner_shard",
    "reset_iter_state",
    "sum_gradients",
    "whole_tensor_random",
    "wrap_like",
]
