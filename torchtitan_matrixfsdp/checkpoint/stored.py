"""A stored checkpoint, read without a job: which tensors and objects it has, and each one alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torchtitan_matrixfsdp.checkpoint.checksums import read_checksums
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.folder import HF_INDEX, step_folders
from torchtitan_matrixfsdp.checkpoint.manifest import (
    DATA_SUFFIX,
    MANIFEST,
    METADATA,
    Manifest,
    read_manifest,
)
from torchtitan_matrixfsdp.checkpoint.reader import BUFFER, DamagedError, DataFile, read_metadata

MODEL = "model"
OPTIMIZER = "optimizer"
PARTS = (OPTIMIZER, "lr_scheduler", "dataloader", "train_state")
"""The parts of a TorchTitan run's state beside the model, by the first part of their keys."""

OPTIMIZER_STATE = f"{OPTIMIZER}.state."
DATA_RANK = "dataloader.dp_rank_"


class Kind(StrEnum):
    """What a folder is."""

    RUN = "run"
    """A run's folder of checkpoints."""
    DCP = "dcp"
    """One checkpoint in DCP's format, complete or not."""
    HF = "hf"
    """Weights in Hugging Face's format."""


def kind_of(folder: Path) -> Kind:
    """What ``folder`` is.

    Raises:
        CheckpointError: none of these.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder}: {what}; legal: {_LEGAL}.")
    names = [path.name for path in folder.iterdir()]
    if METADATA in names or MANIFEST in names or any(n.endswith(DATA_SUFFIX) for n in names):
        return Kind.DCP
    if HF_INDEX in names or any(n.endswith(".safetensors") for n in names):
        return Kind.HF
    if step_folders(folder):
        return Kind.RUN
    raise CheckpointError(f"{folder}: holds no checkpoint; legal: {_LEGAL}.")


_LEGAL = (
    "a checkpoint's folder (step-<n>), a run's folder of them, or a folder of Hugging Face weights"
)


def checkpoint_kind(folder: Path) -> Kind:
    """As :func:`kind_of`, of what must be one checkpoint.

    Raises:
        CheckpointError: it is a run's folder, or no checkpoint at all.
    """
    kind = kind_of(folder)
    if kind is Kind.RUN:
        steps = step_folders(folder)
        newest = next((s for s in reversed(steps) if s.is_complete), steps[-1])
        raise CheckpointError(
            f"{folder}: a run's folder of {len(steps)} steps; legal: one of them, such as "
            f"{newest.path}."
        )
    return kind


@dataclass(frozen=True)
class StoredTensor:
    """What a checkpoint's index says of a tensor.

    Attributes:
        shape: of the whole tensor.
        chunks: ``(offsets, sizes)`` of each stored part, in the order of their offsets.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def layout(self) -> str:
        """How it is cut: "whole", "3 row chunks" or "4 chunks"."""
        if len(self.chunks) == 1 and self.chunks[0][1] == self.shape:
            return "whole"
        is_rows = all(sizes[1:] == self.shape[1:] for _, sizes in self.chunks)
        return f"{len(self.chunks)} {'row chunks' if is_rows else 'chunks'}"


class Source(Protocol):
    """Tensors and objects that can be read one at a time."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by key."""

    @property
    def objects(self) -> Sequence[str]:
        """The keys of everything else."""

    def tensor(self, key: str) -> torch.Tensor:
        """One tensor, whole, on CPU."""

    def object_bytes(self, key: str) -> bytes:
        """The stored bytes of one object."""


class CheckpointReader:
    """A :class:`Source` over a checkpoint in DCP's format; what it reads is checked.

    Attributes:
        manifest: ``None`` where this package did not save it.

    Raises:
        CheckpointError: the folder holds no complete checkpoint, or its index is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest | None = read_manifest(folder)
        self.metadata: Metadata = read_metadata(folder)
        self.tensors = stored_tensors(self.metadata)
        self.objects = [k for k in self.metadata.state_dict_metadata if k not in self.tensors]
        # Closed while it is not read: a checkpoint may have more files than a process may open.
        self._files: dict[str, DataFile] = {}
        self._buffer = bytearray(BUFFER)

    def tensor(self, key: str) -> torch.Tensor:
        """One tensor, whole, on CPU; beside it one chunk at most is in memory.

        Raises:
            CheckpointError: a file of it is missing, short or damaged, or its chunks leave a hole.
        """
        entry = self.tensors[key]
        if sum(math.prod(sizes) for _, sizes in entry.chunks) < entry.numel:
            raise DamagedError(self.folder / METADATA, f"the chunks of {key} leave a hole")
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for offsets, sizes in entry.chunks:
            part = whole
            for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, start, length)
            self._read_chunk(MetadataIndex(key, offsets), entry, part)
        return whole

    def _read_chunk(self, index: MetadataIndex, entry: StoredTensor, into: torch.Tensor) -> None:
        info = location_of(self.folder, self.metadata, index)
        with self._file(info.relative_path) as file:
            stream = file.stream(info.offset, info.length, index.fqn)
            if stream.has_values and into.is_contiguous():
                stream.copy_values(into.view(-1), entry.dtype, 0)
                return
            found = stream.tensor()
        if found.shape != into.shape:
            raise DamagedError(
                file.path,
                f"{index.fqn} has shape {tuple(found.shape)} where the index has "
                f"{tuple(into.shape)}",
            )
        into.copy_(found)

    def object_bytes(self, key: str) -> bytes:
        """The stored bytes of one object.

        Raises:
            CheckpointError: the file is missing, short or damaged.
        """
        info = location_of(self.folder, self.metadata, MetadataIndex(key))
        with self._file(info.relative_path) as file:
            return bytes(file.stream(info.offset, info.length, key).whole())

    def _file(self, name: str) -> DataFile:
        if name not in self._files:
            path = self.folder / name
            save_id = self.manifest.save_id if self.manifest is not None else None
            self._files[name] = DataFile(path, read_checksums(path, save_id), self._buffer)
        return self._files[name]


@dataclass(frozen=True)
class Location:
    """Where a stream lies: bytes of a data file."""

    relative_path: str
    offset: int
    length: int


def location_of(folder: Path, metadata: Metadata, index: MetadataIndex) -> Location:
    """Where the index places a chunk or an object.

    Raises:
        CheckpointError: nowhere, or in a transformed stream, as DCP's extensions write them.
    """
    info = metadata.storage_data.get(index)
    if info is None:
        raise DamagedError(folder / METADATA, f"it places {index.fqn} in no file")
    if info.transform_descriptors:
        raise CheckpointError(
            f"{folder}: {index.fqn} is stored through {info.transform_descriptors}; legal: streams "
            "as DCP writes them without extensions. Load it with the job that saved it."
        )
    return Location(str(info.relative_path), int(info.offset), int(info.length))


def stored_tensors(metadata: Metadata) -> dict[str, StoredTensor]:
    """The tensors of an index by key, in its order."""
    return {
        key: StoredTensor(
            key,
            tuple(entry.size),
            entry.properties.dtype,
            tuple(sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)),
        )
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def to_chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    """A chunk as DCP's index has it."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def part_of(key: str) -> str:
    """The part of a run's state that ``key`` belongs to: "model" or one of ``PARTS``."""
    first = key.partition(".")[0]
    return first if first in PARTS else MODEL


def data_degree(metadata: Metadata) -> int:
    """The data-parallel ranks whose positions in the data are stored; 0 without any."""
    return sum(key.startswith(DATA_RANK) for key in metadata.state_dict_metadata)


def split_state_key(key: str, parameters: Mapping[str, object]) -> tuple[str, str] | None:
    """``(fqn, name)`` of a parameter's state in the optimizer; ``None`` for any other key.

    Names may have dots of their own, so the FQN is the one in ``parameters``.
    """
    if not key.startswith(OPTIMIZER_STATE):
        return None
    rest = key.removeprefix(OPTIMIZER_STATE)
    end = len(rest)
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in parameters:
            return rest[:end], rest[end + 1 :]
    return None
