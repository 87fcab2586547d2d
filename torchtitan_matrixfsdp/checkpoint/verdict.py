"""All ranks go on, or all of them stop with the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError, describe_os_error

_T = TypeVar("_T")


def gather_or_raise(value: _T, fault: str | None) -> list[_T]:
    """Every rank's ``value``, by rank of the default group; ``[value]`` without a process group.

    Args:
        fault: what went wrong on this rank, with its remedy; ``None`` if nothing did.

    Raises:
        CheckpointError: on every rank, if one of them has a fault; it quotes the lowest such rank.
    """
    mine = (value, fault)
    answers = [mine]
    if dist.is_initialized():
        answers = [mine] * dist.get_world_size()
        dist.all_gather_object(answers, mine)
    for rank, (_, found) in enumerate(answers):
        if found is not None:
            raise CheckpointError(found if len(answers) == 1 else f"on rank {rank}: {found}")
    return [answer for answer, _ in answers]


def raise_together(fault: str | None) -> None:
    """Wait for every rank, and raise on all of them if one has a fault.

    Raises:
        CheckpointError: as :func:`gather_or_raise`.
    """
    gather_or_raise(None, fault)


def together(action: Callable[[], _T]) -> _T:
    """Run ``action`` on this rank; if it fails on any rank, every rank raises.

    A rank that raised alone would leave the others waiting in the next collective.

    Raises:
        CheckpointError: as :func:`gather_or_raise`, for a rank that raised one, or an OSError.
    """
    results: list[_T] = []
    fault: str | None = None
    try:
        results.append(action())
    except CheckpointError as error:
        fault = str(error)
    except OSError as error:
        fault = describe_os_error(error)
    raise_together(fault)
    return results[0]


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks; 0 and 1 without a process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()
