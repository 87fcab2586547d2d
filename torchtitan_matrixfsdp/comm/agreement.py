"""All ranks hold the same plan and move blocks in the same way, or all of them stop.

A rank with another plan or transport would send what nobody receives and hang the job minutes
later, far from the cause. Each check costs one small object all-gather, once, at start-up.
"""

from __future__ import annotations

import torch.distributed as dist

from torchtitan_matrixfsdp.layout import OwnerPlan


class PlanDisagreementError(RuntimeError):
    """Two ranks computed different owner plans, or chose different transports."""


def agree_on_choice(what: str, choice: str, group: dist.ProcessGroup | None = None) -> None:
    """Check on every rank of ``group`` (default: all) that ``choice`` is the same.

    ``what`` names it in the error, for instance ``"the transport of block layers.0"``.

    Raises:
        PlanDisagreementError: on every rank, with both values.
    """
    choices: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(choices, choice, group=group)
    other = next((r for r, c in enumerate(choices) if c != choices[0]), None)
    if other is not None:
        raise PlanDisagreementError(
            f"ranks disagree on {what}: rank 0 has {choices[0]}, rank {other} has "
            f"{choices[other]}. Start every rank with the same TOML file, command line and package "
            "versions."
        )


def agree_on_plan(plan: OwnerPlan, group: dist.ProcessGroup | None = None) -> None:
    """Check on every rank of ``group`` (default: all) that ``plan`` is the same.

    Raises:
        PlanDisagreementError: on every rank, naming both fingerprints and the first
            parameter that differs from a rank that disagrees.
    """
    world_size = dist.get_world_size(group)
    fingerprints: list[str] = [""] * world_size
    dist.all_gather_object(fingerprints, plan.fingerprint, group=group)
    other = next((r for r, f in enumerate(fingerprints) if f != fingerprints[0]), None)
    if other is None:
        return
    # Every rank sees the same list, so every rank takes this branch and joins this exchange.
    plans: list[str] = [""] * world_size
    dist.all_gather_object(plans, plan.to_json(), group=group)
    rank = dist.get_rank(group)
    reference = next(r for r, f in enumerate(fingerprints) if f != plan.fingerprint)
    raise PlanDisagreementError(
        f"ranks disagree on the owner plan: rank 0 has fingerprint {fingerprints[0]}, rank "
        f"{other} has {fingerprints[other]}; first difference from rank {reference}, seen on rank "
        f"{rank}: {plan.first_difference(plans[reference])}. Start every rank with the same TOML "
        "file, command line and package versions."
    )
