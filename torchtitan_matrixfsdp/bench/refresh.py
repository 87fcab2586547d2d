"""What Shampoo and SOAP cost an owner, by formula: refreshes of roots or bases in the worst step,
all together and staggered, and bytes of state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from torchtitan_matrixfsdp.bench.blocks import MODELS, PLANNER, model_blocks, plan_blocks
from torchtitan_matrixfsdp.bench.results import SCHEMA
from torchtitan_matrixfsdp.layout import RoleKind, shampoo_root_flops, soap_basis_flops
from torchtitan_matrixfsdp.optim import SOAP, Shampoo, refresh_load, refresh_phases


@dataclass(frozen=True)
class Refreshed:
    """An optimizer with something to refresh, and its defaults."""

    kind: type[Shampoo] | type[SOAP]
    flops: Callable[[Sequence[int], int], int]
    max_dim: int
    frequency: int


REFRESHED: Mapping[str, Refreshed] = MappingProxyType(
    {
        "Shampoo": Refreshed(Shampoo, shampoo_root_flops, 2048, 50),
        "SOAP": Refreshed(SOAP, soap_basis_flops, 10000, 10),
    }
)


@dataclass(frozen=True)
class RefreshAccount:
    """FLOPs of refreshes and bytes of state under one plan.

    Attributes:
        optimizer: a key of ``REFRESHED``.
        world_size: W.
        frequency: steps between two refreshes of a matrix.
        largest_matrix: one refresh of the costliest matrix: no step can do less in every cycle.
        busiest_owner: one refresh of all matrices of the owner with the most of it. This is the
            worst step when all refresh together; divided by ``frequency``, the owner's mean step.
        staggered: the worst step of the worst owner when staggered.
        state_bytes: of the owner with most, for weights of any dtype but float64.
    """

    optimizer: str
    world_size: int
    frequency: int
    largest_matrix: int
    busiest_owner: int
    staggered: int
    state_bytes: int


@dataclass(frozen=True)
class RefreshReport:
    """What ``refresh`` reports."""

    schema: int
    command: str
    model: str
    planner: str
    accounts: tuple[RefreshAccount, ...]


def refresh_report(
    model: str, world_sizes: Sequence[int], frequency: int | None = None
) -> RefreshReport:
    """What ``refresh`` reports of ``model``; ``frequency`` replaces the optimizers' own."""
    accounts = tuple(
        refresh_account(model, name, world_size, frequency)
        for world_size in world_sizes
        for name in REFRESHED
    )
    return RefreshReport(SCHEMA, "refresh", model, PLANNER, accounts)


def refresh_account(
    model: str, optimizer: str, world_size: int, frequency: int | None = None
) -> RefreshAccount:
    """The account of one optimizer on the blocks of ``model`` (a key of ``MODELS``), by the default
    planner."""
    refreshed = REFRESHED[optimizer]
    frequency = frequency or refreshed.frequency
    plan = plan_blocks(model_blocks(MODELS[model]), world_size)
    matrices = [s for block in plan.blocks for s in block.shards if s.kind is RoleKind.MATRIX]
    costs = [refreshed.flops(matrix.shape, refreshed.max_dim) for matrix in matrices]
    owners = [matrix.owner for matrix in matrices]
    bytes_of = {shape: _state_bytes(refreshed.kind, shape) for shape in {m.shape for m in matrices}}
    owned: Counter[int] = Counter()
    stored: Counter[int] = Counter()
    for matrix, cost in zip(matrices, costs, strict=True):
        owned[matrix.owner] += cost
        stored[matrix.owner] += bytes_of[matrix.shape]
    phases = refresh_phases(costs, frequency)
    return RefreshAccount(
        optimizer,
        world_size,
        frequency,
        max(costs),
        max(owned.values()),
        max(refresh_load(costs, phases, owners, frequency)),
        max(stored.values()),
    )


def _state_bytes(kind: type[Shampoo] | type[SOAP], shape: tuple[int, ...]) -> int:
    """What an optimizer keeps of one matrix, counters left out."""
    param = torch.nn.Parameter(torch.empty(shape, device="meta"))
    return sum(tensor.nbytes for tensor in kind([param]).state[param].values() if tensor.dim() > 0)
