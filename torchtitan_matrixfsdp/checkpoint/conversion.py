"""Checkpoints in another layout: tensor by tensor, in one process.

One tensor of the source is in memory at a time, and a copy of the piece that is written. Keys,
values, dtypes and everything beside the tensors stay as they are.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# What DCP's own reader looks for; there is no public way to name it.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan_matrixfsdp.checkpoint.checksums import (
    HashingStream,
    StoredItem,
    checksum_path,
    checksums_to_json,
)
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.folder import write_durably
from torchtitan_matrixfsdp.checkpoint.manifest import DATA_SUFFIX, Manifest
from torchtitan_matrixfsdp.checkpoint.placement import Piece, Placement
from torchtitan_matrixfsdp.checkpoint.stored import Source, StoredTensor, to_chunk
from torchtitan_matrixfsdp.checkpoint.verification import Progress
from torchtitan_matrixfsdp.checkpoint.writer import OwnerStorageWriter, write_object


def convert_to_dcp(
    source: Source,
    target: Path,
    placement: Placement,
    manifest: Manifest,
    planner_data: Any,
    progress: Progress,
) -> None:
    """Write ``source`` to the new folder ``target`` as the ranks of ``placement`` would have.

    Args:
        planner_data: of DCP's index: the path of each key in the nested state.
        progress: called with the bytes of each tensor that is written.

    Raises:
        CheckpointError: ``target`` exists, or the source is damaged; ``target`` is then not made.
    """
    files = {r: _TargetFile(target / f"__{r}_0{DATA_SUFFIX}") for r in range(placement.world_size)}
    metadata = Metadata({}, planner_data=planner_data)
    results: list[WriteResult] = []
    with new_folder(target):
        # Objects first, as DCP has it: what is small lies together.
        for key in source.objects:
            file = files[placement.rank_of_object(key)]
            content = io.BytesIO(source.object_bytes(key))
            results.append(file.append(MetadataIndex(key), content))
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
        for key, tensor in source.tensors.items():
            pieces = placement.pieces(tensor)
            whole = source.tensor(key)
            for number, piece in enumerate(pieces):
                part = whole
                for dim, (start, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                    part = part.narrow(dim, start, size)
                index = MetadataIndex(key, piece.offsets, number)
                results.append(files[piece.rank].append(index, part))
            metadata.state_dict_metadata[key] = _entry(tensor, pieces)
            progress(tensor.nbytes)
        for file in files.values():
            file.finish()
        OwnerStorageWriter(target, manifest).finish(metadata, [results])


def _entry(tensor: StoredTensor, pieces: list[Piece]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=tensor.dtype),
        torch.Size(tensor.shape),
        [to_chunk(piece.offsets, piece.sizes) for piece in pieces],
    )


class _TargetFile:
    """The data file of one rank, made by its first item. It is open only while one is written: a
    checkpoint may have more files than a process may open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._items: dict[int, StoredItem] = {}

    def append(self, index: MetadataIndex, data: torch.Tensor | io.BytesIO) -> WriteResult:
        """Write one item behind those that are there."""
        with self._path.open("ab") as raw:
            stream = HashingStream(raw)
            values_at = write_object(stream, data)
        self._items[self._size] = StoredItem(stream.length, values_at, stream.pieces())
        info = _StorageInfo(self._path.name, self._size, stream.length)
        self._size += stream.length
        return WriteResult(index, stream.length, info)

    def finish(self) -> None:
        """Wait until the file is on the disk, and write its checksums."""
        if self._items:
            with self._path.open("rb") as raw:
                os.fsync(raw.fileno())
            write_durably(checksum_path(self._path), checksums_to_json(self._items))


@contextmanager
def new_folder(target: Path) -> Iterator[None]:
    """Context in which ``target`` is filled; it did not exist before, and does not after an error.

    Raises:
        CheckpointError: it exists.
    """
    try:
        target.mkdir(parents=True)
    except FileExistsError as error:
        raise CheckpointError(
            f"{target}: exists; legal: a new folder. A conversion replaces nothing: choose another "
            "one, or move it away."
        ) from error
    try:
        yield
    except BaseException:
        # Nothing but what was written here since it was made.
        shutil.rmtree(target)
        raise
