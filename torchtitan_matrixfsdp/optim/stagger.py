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
from itertools import accumulate


def refresh_phases(costs: Sequence[int], frequency: int) -> tuple[int, ...]:
    """Returns the phase, in ``range(frequency)``, of each matrix with these costs of a refresh.

    The list, as long as the sum of its costs, is cut into ``frequency`` equal stretches, and a
    matrix belongs to the stretch in which it begins. Planners deal neighbours out to different
    owners, so those of one stretch seldom meet on an owner, and an owner's own, which lie all along
    the list, come one after another. That holds for any number of owners. (Sorting by cost, each
    matrix to the least loaded phase, balances one device as well, but matrices of equal cost then
    go round the phases, and an owner's may all meet in one where W and the frequency share a
    factor.) ``python -m torchtitan_matrixfsdp.bench refresh`` prints what comes of it.

    Raises:
        ValueError: ``frequency`` below 1 or a negative cost.
    """
    if frequency < 1:
        raise ValueError(f"frequency: received {frequency}; legal: >= 1")
    if any(cost < 0 for cost in costs):
        raise ValueError(f"costs: received {min(costs)}; legal: >= 0")
    total = max(1, sum(costs))
    # A matrix without cost at the very end begins where the last stretch ends.
    begins = (end - cost for end, cost in zip(accumulate(costs), costs, strict=True))
    return tuple(min(begin * frequency // total, frequency - 1) for begin in begins)


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
