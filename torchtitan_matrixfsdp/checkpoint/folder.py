"""A run's folder of checkpoints: what is in it, who uses it, and how files get there safely.

Nothing that is there is ever overwritten or silently deleted: a checkpoint in the way of a new one
is moved aside, under a name that no reader takes for a step.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.manifest import METADATA

HF_INDEX = "model.safetensors.index.json"
"""Marks a complete Hugging Face export, as for TorchTitan."""

LOCK = ".lock"

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class StepFolder:
    """One ``step-<n>`` folder.

    Attributes:
        step: n.
        path: the folder.
        is_complete: it has DCP's index, so that every file of it was written before.
        is_export: it is a finished Hugging Face export: weights alone.
    """

    step: int
    path: Path
    is_complete: bool
    is_export: bool


def step_folders(folder: Path) -> list[StepFolder]:
    """The steps in ``folder``, oldest first; none where it does not exist."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            is_complete = (path / METADATA).is_file()
            is_export = not is_complete and (path / HF_INDEX).is_file()
            found.append(StepFolder(int(match.group(1)), path, is_complete, is_export))
    return sorted(found, key=lambda entry: entry.step)


def move_aside(path: Path) -> Path | None:
    """Rename what is at ``path``, if anything, to a name beside it; returns the new path."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"aside-{number}-{path.name.replace('-', '_')}")).exists():
        number += 1
    path.rename(aside)
    return aside


def write_durably(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all, and wait until it is on the disk."""
    part = path.with_name(path.name + ".tmp")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder``, and its own name, are on the disk."""
    for path in (folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class FolderLock:
    """Keeps a second run from saving into the same folder, as long as this process lives.

    A POSIX record lock: the kernel (or an NFS server) drops it when the process ends, however it
    ends, and children that the process forks do not keep it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Take the lock; ``False`` where the file system has no locks.

        Raises:
            CheckpointError: another process has it.
            OSError: the folder cannot be made or written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise CheckpointError(
                f"{self._path}: another run saves its checkpoints to this folder: {holder}. Wait "
                "for it to end, or give this one a folder of its own with job.dump_folder or "
                "checkpoint.folder."
            ) from error
        except OSError:
            file.close()
            return False
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}) + "\n")
        file.flush()
        self._file = file
        return True

    def release(self) -> None:
        """Give it back; nothing happens if it is not held."""
        if self._file is not None:
            self._file.close()
            self._file = None
