"""Who owns which parameter, and what moving a block costs: plain data, no torch.

The packages depend on each other in one direction only:

    layout -> comm -> runtime -> {optim, checkpoint} -> titan

``layout`` is the first room and imports nothing outside the standard library, so a plan can be
computed, printed and tested anywhere: on a laptop, in a job that previews a run, or on every rank
before the first collective. It turns parameter metadata (``params``) and the user's patterns
(``routing``) into roles (``roles``), places every role on one rank (``planners``, ``costs``),
freezes the result (``block_plan``, ``plan``), arranges each block's flat buffer (``buffer``), lists
the transfers that follow (``schedule``), counts them (``volumes``) and adds up a training step
(``account``), beside those of optimizers on row shards (``exchange``, ``baseline_steps``).

Vocabulary. A *block* is one FSDP unit. A *role* is the atom of ownership: one whole weight, or the
block's *tail* (everything that needs no rank of its own). An *owner* is a rank of the shard group,
counted from 0 within that group and never a global rank. W is the size of that group.
"""

from __future__ import annotations

from torchtitan_matrixfsdp.layout.account import (
    StepAccount,
    StepShape,
    fsdp_accounts,
    fsdp_gather_bytes,
    fsdp_slice_numel,
    fsdp_volume,
    owner_accounts,
    owner_gather_bytes,
)
from torchtitan_matrixfsdp.layout.baseline_steps import (
    BASELINE_STEPS,
    BaselineStep,
    StepVolume,
    exchange_volume,
    row_chunk_numel,
)
from torchtitan_matrixfsdp.layout.block_plan import BlockPlan, MatrixShard, PlanError
from torchtitan_matrixfsdp.layout.buffer import (
    ALIGNMENT,
    BufferLayout,
    Segment,
    aligned,
    arrange_by_owner,
    arrange_in_slices,
)
from torchtitan_matrixfsdp.layout.costs import (
    block_sides,
    gamma,
    muon_flops,
    newton_schulz_flops,
    shampoo_root_flops,
    soap_basis_flops,
)
from torchtitan_matrixfsdp.layout.exchange import (
    CutMatrix,
    all_to_all_volume,
    cut_matrices,
    held_numels,
    worked_numels,
)
from torchtitan_matrixfsdp.layout.greedy import largest_first
from torchtitan_matrixfsdp.layout.params import BlockMeta, ParamMeta, canonical_fqn
from torchtitan_matrixfsdp.layout.plan import OwnerPlan
from torchtitan_matrixfsdp.layout.planners import PLANNERS, Assignment, Planner, make_plan
from torchtitan_matrixfsdp.layout.replicas import assign_replicas
from torchtitan_matrixfsdp.layout.roles import Role, RoleKind, build_roles
from torchtitan_matrixfsdp.layout.routing import Routing, RoutingError, route
from torchtitan_matrixfsdp.layout.schedule import (
    Transfer,
    overflow_gather_of,
    overflow_reduce_of,
    p2p_gather_of,
    p2p_reduce_of,
    sent_elements,
    sent_messages,
)
from torchtitan_matrixfsdp.layout.volumes import (
    TRANSPORT_MODELS,
    LinkModel,
    TransportModel,
    Volume,
    broadcast_volume,
    choose_transport,
    reduce_volume,
    ring_volume,
    transfer_volume,
    transport_seconds,
)

__all__ = [
    "ALIGNMENT",
    "BASELINE_STEPS",
    "PLANNERS",
    "TRANSPORT_MODELS",
    "Assignment",
    "BaselineStep",
    "BlockMeta",
    "BlockPlan",
    "BufferLayout",
    "CutMatrix",
    "LinkModel",
    "MatrixShard",
    "OwnerPlan",
    "ParamMeta",
    "PlanError",
    "Planner",
    "Role",
    "RoleKind",
    "Routing",
    "RoutingError",
    "Segment",
    "StepAccount",
    "StepShape",
    "StepVolume",
    "Transfer",
    "TransportModel",
    "Volume",
    "aligned",
    "all_to_all_volume",
    "arrange_by_owner",
    "arrange_in_slices",
    "assign_replicas",
    "block_sides",
    "broadcast_volume",
    "build_roles",
    "canonical_fqn",
    "choose_transport",
    "cut_matrices",
    "exchange_volume",
    "fsdp_accounts",
    "fsdp_gather_bytes",
    "fsdp_slice_numel",
    "fsdp_volume",
    "gamma",
    "held_numels",
    "largest_first",
    "make_plan",
    "muon_flops",
    "newton_schulz_flops",
    "overflow_gather_of",
    "overflow_reduce_of",
    "owner_accounts",
    "owner_gather_bytes",
    "p2p_gather_of",
    "p2p_reduce_of",
    "reduce_volume",
    "ring_volume",
    "route",
    "row_chunk_numel",
    "sent_elements",
    "sent_messages",
    "shampoo_root_flops",
    "soap_basis_flops",
    "transfer_volume",
    "transport_seconds",
    "worked_numels",
]
