"""What a checkpoint says of itself beside DCP's own metadata: plain JSON, nothing pickled.

[Note: files of a checkpoint]
A checkpoint is a folder that DCP's own reader understands, with two kinds of files more:

| file              | content                                                                  |
|-------------------|--------------------------------------------------------------------------|
| `__<r>_0.distcp`  | what rank r wrote: one `torch.save` stream after another                 |
| `__<r>_0.json`    | where each of these streams lies and the checksums of its pieces         |
| `matrixfsdp.json` | the manifest: format version, owner plan, step, job, hash of `.metadata` |
| `.metadata`       | DCP's index, pickled by DCP; written last, by a rename                   |

A folder without `.metadata` is partial, whatever else it has. Checksums are XXH3 (64 bits) of
pieces of 1 MiB, counted from the start of each stream, so that a rank which needs some rows of a
tensor can check what it reads without reading the rest. The manifest and the checksum files bear
the id of their save: files of two checkpoints that fit each other by chance are not mixed up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError

FORMAT = 1
"""The version of the manifest and of the checksum files that this package writes."""

MANIFEST = "matrixfsdp.json"
METADATA = ".metadata"
DATA_SUFFIX = ".distcp"
PIECE = 1 << 20
"""Bytes under one checksum."""

RESTORE = "restore the file from a copy, or load another step with checkpoint.load_step."


@dataclass(frozen=True)
class Manifest:
    """What ``matrixfsdp.json`` says.

    Attributes:
        job: what the run that saved it was: free of layout, for people and for error messages.
        plans: the owner plans, as ``OwnerPlan.to_json`` records; one per pipeline stage, none
            where nothing was owner-sharded.
        metadata_sha256: hash of ``.metadata``, hex; empty until the checkpoint is finished.
        save_id: what its checksum files have in common with it, and with those of no other save;
            empty until the save begins.
    """

    job: Mapping[str, Any] = field(default_factory=dict)
    plans: tuple[Mapping[str, Any], ...] = ()
    metadata_sha256: str = ""
    save_id: str = ""

    def to_json(self) -> str:
        """The file's text."""
        record = {
            "format": FORMAT,
            "job": dict(self.job),
            "plans": [dict(plan) for plan in self.plans],
            "metadata_sha256": self.metadata_sha256,
            "save_id": self.save_id,
        }
        return json.dumps(record, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; ``None`` where there is none (saved by stock TorchTitan).

    Raises:
        CheckpointError: it cannot be read, or is of a newer format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    record = read_json(path)
    try:
        return Manifest(
            dict(record["job"]),
            tuple(dict(plan) for plan in record["plans"]),
            str(record["metadata_sha256"]),
            str(record["save_id"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a manifest ({error!r}); {RESTORE}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of this package, its format checked.

    Raises:
        CheckpointError: no JSON, or a format that this version does not know.
    """
    try:
        record = json.loads(path.read_text())
        version = record["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); {RESTORE}") from error
    if not isinstance(version, int) or not 1 <= version <= FORMAT:
        raise CheckpointError(
            f"{path}: received format {version!r}; legal: 1 to {FORMAT}. It was saved by a newer "
            "version of torchtitan_matrixfsdp: install that one."
        )
    return record
