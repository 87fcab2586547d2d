"""Which matrices refresh their roots or bases in which step, so that no step refreshes all.

A refresh costs eigendecompositions: seconds for a large matrix, and an owner has many. Done
together, every owner would stall in one step out of ``frequency``. So each matrix has a *phase*: in
its step t, counted from 1, it refreshes if ``(t - 1) % frequency == phase``. Phase 0 refreshes in
the first step.

Phases follow from the costs of all matrices, in order, and the frequency alone. Every rank's
optimizer lists all matrices with their logical shapes, those of other ranks included, so phases are
the same on every rank and for every world size: a run on many ranks refreshes exactly what a run on
one device does. The price: owners are not known, and which matrices an owner has is up to the
planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

# Planners place equal matrices in turn, so an owner tends to have every W-th of a kind.
_WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)


def refresh_phases(costs: Sequence[int], frequency: int) -> tuple[int, ...]:
    """Returns the phase, in ``range(frequency)``, of each matrix with these costs of a refresh.

    Longest processing time first: matrices by falling cost, ties by index, each to the phase with
    the least load so far, ties to the lowest phase. Load is what owners would have, for several
    world sizes W at a time: the k-th matrix of a cost is taken to belong to owner ``k % W``, and
    that owner's load of a phase counts W times, so that every W weighs the same. Load over all
    matrices alone (W = 1) would give every W-th matrix of a kind the same phase wherever W and the
    frequency share a factor, and one owner would refresh them together.

    Raises:
        ValueError: ``frequency`` below 1 or a negative cost.
    """
    if frequency < 1:
        raise ValueError(f"frequency: received {frequency}; legal: >= 1")
    if any(cost < 0 for cost in costs):
        raise ValueError(f"costs: received {min(costs)}; legal: >= 0")
    load = {size: [[0] * frequency for _ in range(size)] for size in _WORLD_SIZES}
    phases = [0] * len(costs)
    by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for cost, equal in groupby(by_cost, key=costs.__getitem__):
        for k, index in enumerate(equal):
            owners = [(size, load[size][k % size]) for size in _WORLD_SIZES]
            seen = [sum(size * at[p] for size, at in owners) for p in range(frequency)]
            phase = seen.index(min(seen))
            phases[index] = phase
            for _, at in owners:
                at[phase] += cost
    return tuple(phases)


def refresh_load(
    costs: Sequence[int], phases: Sequence[int], owners: Sequence[int], frequency: int
) -> tuple[int, ...]:
    """Returns, for each of ``frequency`` steps in a row, what the refreshes of the owner with most
    of them cost.

    ``owners[i]`` is the rank that steps matrix i. Owners wait for the slowest of them before the
    next forward, so this is what a step takes longer.

    Raises:
        ValueError: ``frequency`` below 1, a phase outside its range or arguments of other lengths.
    """
    if frequency < 1:
        raise ValueError(f"frequency: received {frequency}; legal: >= 1")
    if not all(0 <= phase < frequency for phase in phases):
        raise ValueError(f"phases: received {tuple(phases)}; legal: 0 to {frequency - 1}")
    worst = []
    for step in range(frequency):
        due: dict[int, int] = {}
        for cost, phase, owner in zip(costs, phases, owners, strict=True):
            if phase == step:
                due[owner] = due.get(owner, 0) + cost
        worst.append(max(due.values(), default=0))
    return tuple(worst)
