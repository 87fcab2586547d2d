"""Owner shards inside FSDP2's lifecycle.

Imports ``layout`` and ``comm``. Private names of FSDP2 and DTensor are imported in
:mod:`~torchtitan_matrixfsdp.runtime.fsdp_compat` only.
"""

from torchtitan_matrixfsdp.runtime.buffers import (
    BufferStateError,
    OwnerContext,
    check_gradient,
)
from torchtitan_matrixfsdp.runtime.owner_dtensor import (
    Owner,
    OwnerDTensor,
    whole_tensor_random,
    wrap_like,
)
from torchtitan_matrixfsdp.runtime.shard import owner_shard, reset_iter_state

__all__ = [
    "BufferStateError",
    "Owner",
    "OwnerContext",
    "OwnerDTensor",
    "check_gradient",
    "owner_shard",
    "reset_iter_state",
    "whole_tensor_random",
    "wrap_like",
]
