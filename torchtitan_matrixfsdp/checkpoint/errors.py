"""Errors about checkpoints."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint cannot be saved or loaded, for a reason that its user can mend."""


def describe_os_error(error: OSError) -> str:
    """One line with the file, what the system said, and what to do."""
    where = error.filename if error.filename is not None else "a checkpoint file"
    return (
        f"{where}: {error.strerror or error}. Check that the folder exists, is writable for this "
        "user and has space left; checkpoint.folder and job.dump_folder say where it is."
    )
