"""Errors about checkpoints, and raising them on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(Exception):
    """A checkpoint cannot be saved or loaded, for a reason that its user can mend."""


def raise_together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on this rank; if it fails on any rank of ``group``, every rank raises.

    A rank that raised alone would leave the others waiting in the next collective. One small
    all-gather of objects where there is a process group; without one just the call.

    Raises:
        CheckpointError: a rank raised one, or an OSError; the message names the first such rank.
    """
    result: T | None = None
    problem: str | None = None
    try:
        result = action()
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = describe_os_error(error)
    if dist.is_initialized():
        problems: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        failed = [(rank, p) for rank, p in enumerate(problems) if p is not None]
        if failed:
            rank, problem = failed[0]
            more = f" (seen on {len(failed)} ranks)" if len(failed) > 1 else f" (rank {rank})"
            raise CheckpointError(problem + more)
    elif problem is not None:
        raise CheckpointError(problem)
    return result  # type: ignore[return-value]


def describe_os_error(error: OSError) -> str:
    """One line with the file, what the system said, and what to do."""
    where = error.filename if error.filename is not None else "a checkpoint file"
    return (
        f"{where}: {error.strerror or error}. Check that the folder exists, is writable for this "
        "user and has space left; checkpoint.folder and job.dump_folder say where it is."
    )
