"""DCP storage writer: streams, checksums, and never over what is already there.

TorchTitan's default writer would do, but for three things that this one adds: a checkpoint that
exists at its path is moved aside instead of being written over file by file under its old index;
every stream is checksummed on its way to the disk; and the manifest is written. The files remain
those of DCP's own ``FileSystemWriter``: its reader loads them.

[Note: memory of a save]
A rank holds its own shards and one staging buffer: the largest single tensor that it stores, and
that only where the tensor is on a device, not contiguous, or part of a larger storage; otherwise
the file is written from the shard's own memory. The asynchronous modes first copy all shards of a
rank (DCP's stager): their staging buffer is the size of the shards.
"""

from __future__ import annotations

import hashlib
import io
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter

# What DCP's own reader looks for; there is no public way to name it.
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_matrixfsdp.checkpoint.background import end_with_parent
from torchtitan_matrixfsdp.checkpoint.checksums import (
    HashingStream,
    StoredItem,
    checksum_path,
    checksums_to_json,
)
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError, describe_os_error
from torchtitan_matrixfsdp.checkpoint.folder import move_aside, sync_folder, write_durably
from torchtitan_matrixfsdp.checkpoint.manifest import DATA_SUFFIX, MANIFEST, Manifest


@dataclass(frozen=True)
class RankFile:
    """What the coordinator tells a rank: how its files' names begin, and the id of the save."""

    prefix: str
    save_id: str


class OwnerStorageWriter(FileSystemWriter):
    """Writes one checkpoint folder; see the module's notes.

    Args:
        path: the checkpoint's folder, ``…/step-<n>``. Anything that is there is moved aside.
        manifest: what ``matrixfsdp.json`` shall say.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest) -> None:
        super().__init__(path)
        self._manifest = manifest
        self._process = os.getpid()
        self.moved_aside: Path | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As the base class, in the process that is to write; if that is DCP's background process,
        it is from now on bound to the one that made this writer."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if os.getpid() != self._process:
            end_with_parent(self._process)

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return Path(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing is written before the coordinator has made room."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank writes: move aside what is there."""
        try:
            self.moved_aside = move_aside(self.folder)
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot save: {describe_os_error(error)}") from error
        save_id = uuid.uuid4().hex
        self._manifest = replace(self._manifest, save_id=save_id)
        plans = super().prepare_global_plan(plans)
        return [replace(p, storage_data=RankFile(p.storage_data.prefix, save_id)) for p in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items to one file, and their checksums beside it."""
        results: list[WriteResult] = []
        if plan.items:
            # The folder may not be visible here yet where the file system is a network's.
            self.folder.mkdir(parents=True, exist_ok=True)
            place: RankFile = plan.storage_data
            path = self.folder / f"{place.prefix}0{DATA_SUFFIX}"
            try:
                results = self._write_file(path, plan, planner)
            except OSError as error:
                error.filename = error.filename or str(path)
                raise CheckpointError(
                    f"cannot save: {describe_os_error(error)} {self.folder} stays as it is, "
                    "incomplete; older checkpoints are untouched"
                ) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, path: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results: list[WriteResult] = []
        stored: dict[int, StoredItem] = {}
        # Bytes first, as DCP does it: what is small lies together.
        items = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)
        # "x": another run that writes the same folder is found out by one of the two.
        with path.open("xb") as raw:
            for item in items:
                offset = raw.tell()
                stream = HashingStream(raw)
                values_at = write_object(stream, planner.resolve_data(item))
                stored[offset] = StoredItem(stream.length, values_at, stream.pieces())
                info = _StorageInfo(path.name, offset, stream.length)
                results.append(WriteResult(item.index, stream.length, info))
            raw.flush()
            os.fsync(raw.fileno())
        save_id = plan.storage_data.save_id
        write_durably(checksum_path(path), checksums_to_json(stored, save_id))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after every rank has written: the manifest, then DCP's index."""
        self.fs = _ManifestFirst(self._manifest)
        try:
            super().finish(metadata, results)
            sync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(f"cannot save: {describe_os_error(error)}") from error


class _ManifestFirst(FileSystem):
    """Writes the manifest just before the rename that publishes DCP's index."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self._manifest = manifest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """As :meth:`FileSystem.rename`; the manifest first."""
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        manifest = replace(self._manifest, metadata_sha256=digest)
        write_durably(Path(path).with_name(MANIFEST), manifest.to_json())
        super().rename(path, new_path)


def write_object(stream: HashingStream, data: torch.Tensor | io.BytesIO) -> int | None:
    """Write one item; returns where a tensor's values lie in the stream."""
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
        return None
    # [Note: memory of a save]: each of these is the tensor itself where it can be.
    tensor = data.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() != size:
        tensor = tensor.clone()
    try:
        torch.save(tensor, cast(IO[bytes], stream))
    except RuntimeError as error:
        if stream.failure is not None:
            raise stream.failure from error
        raise
    at = stream.wrote(tensor.data_ptr(), size)
    # torch aligns values to 64 bytes of the stream, so that no piece ends within a value.
    return at if at is not None and at % tensor.element_size() == 0 else None
