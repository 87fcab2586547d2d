"""DCP storage reader that reads what a rank needs, and checks every byte of it.

Of a checkpoint that :class:`~torchtitan_matrixfsdp.checkpoint.writer.OwnerStorageWriter` wrote,
a rank reads the pieces that hold its rows of each tensor, through one buffer of 256 KiB. Other
checkpoints (of stock TorchTitan) have no checksums and are read as DCP reads them: one stored
tensor at a time, whole.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan_matrixfsdp.checkpoint.checksums import StoredItem, read_checksums
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    PIECE,
    RESTORE,
    read_manifest,
)

BUFFER = 256 << 10
"""Bytes read at once; divides a piece."""

_REMEDY = (
    "Load another step with checkpoint.load_step, or restore the file from a copy; `python -m "
    "torchtitan_matrixfsdp.checkpoint verify` names everything that is damaged."
)


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, short, or not what was saved.

    Attributes:
        path: the file.
        what: what is wrong with it, without the remedy.
    """

    def __init__(self, path: Path, what: str) -> None:
        # All arguments: the exceptions of ranks are pickled on their way to the others.
        super().__init__(path, what)
        self.path = path
        self.what = what

    def __str__(self) -> str:
        """One line with the remedy."""
        return f"{self.path}: {self.what}. {_REMEDY}"


class OwnerStorageReader(FileSystemReader):
    """Reads one checkpoint folder; see the module's notes.

    Attributes:
        bytes_read: of data files, so far.

    Raises:
        CheckpointError: on reading, for a file that is missing, short or not what was saved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.bytes_read = 0
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's index, once it is the one that was saved with this checkpoint."""
        return read_metadata(Path(self.path))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """As the base class; keeps the index."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of ``plan``, file by file in the order of their offsets."""
        manifest = read_manifest(Path(self.path))
        save_id = manifest.save_id if manifest is not None else None
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        buffer = bytearray(BUFFER)
        for name, items in by_file.items():
            with DataFile(Path(self.path) / name, save_id, buffer) as file:
                for item in sorted(items, key=self._offset):
                    self._read_item(file, item, planner)
                self.bytes_read += file.bytes_read
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _offset(self, item: ReadItem) -> int:
        return int(self.storage_data[item.storage_index].offset)

    def _read_item(self, file: DataFile, item: ReadItem, planner: LoadPlanner) -> None:
        assert self._metadata is not None
        info = self.storage_data[item.storage_index]
        stream = file.stream(info.offset, info.length, item.storage_index.fqn)
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(stream.whole()))
            return
        chunk = stored_chunk(self._metadata, item.storage_index)
        target = planner.resolve_tensor(item).detach()
        if stream.has_values and target.is_contiguous() and _is_rows(item, chunk.sizes):
            row = math.prod(chunk.sizes[1:])
            start = item.storage_offsets[0] * row if item.storage_offsets else 0
            stream.copy_values(target.view(-1), chunk.dtype, start)
        else:
            tensor = stream.tensor()
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                tensor = tensor.narrow(dim, start, length)
            target.copy_(tensor)
        planner.commit_tensor(item, target)


def _is_rows(item: ReadItem, sizes: tuple[int, ...]) -> bool:
    """Whether ``item`` wants whole rows of what is stored: one range of its values."""
    return tuple(item.lengths[1:]) == sizes[1:]


@dataclass(frozen=True)
class StoredChunk:
    """A stored part of a tensor: its shape and dtype."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


def stored_chunk(metadata: Metadata, index: MetadataIndex) -> StoredChunk:
    """The chunk that ``index`` names."""
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    chunk = next(c for c in entry.chunks if index.offset is None or c.offsets == index.offset)
    return StoredChunk(tuple(chunk.sizes), entry.properties.dtype)


def read_metadata(folder: Path) -> Metadata:
    """DCP's index of a checkpoint.

    Raises:
        CheckpointError: there is none, it cannot be read, or the manifest knows another one.
    """
    manifest = read_manifest(folder)
    return parse_metadata(folder, None if manifest is None else manifest.metadata_sha256)


def parse_metadata(folder: Path, sha256: str | None) -> Metadata:
    """DCP's index, once its hash is ``sha256`` (hex; ``None``: any).

    Raises:
        CheckpointError: as :func:`read_metadata`.
    """
    path = folder / METADATA
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}. {folder} holds no complete checkpoint: legal: a folder "
            f"step-<n> with a file {METADATA}."
        ) from error
    if sha256 is None and any(folder.glob("__*_*.json")):
        raise CheckpointError(f"{folder / MANIFEST}: missing, but checksums are there; {RESTORE}")
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedError(
            path, "damaged, or of another checkpoint: its hash is not the one in the manifest"
        )
    try:
        metadata = pickle.loads(content)
    # Damaged pickles raise whatever their bytes happen to say.
    except Exception as error:
        raise DamagedError(path, f"damaged ({error!r})") from error
    if not isinstance(metadata, Metadata):
        raise DamagedError(path, f"holds a {type(metadata).__name__}, no index")
    return metadata


class DataFile:
    """One data file, with its checksums if there are any; a context manager, for the open file.

    Args:
        path: the file.
        save_id: as for ``read_checksums``.
        buffer: of ``BUFFER`` bytes; may be shared by files that are read one after another.

    Attributes:
        items: the streams that the checksum file knows, by offset; ``None`` where there is no such
            file.
        size: bytes of the file, once it is open.
    """

    def __init__(
        self, path: Path, save_id: str | None = None, buffer: bytearray | None = None
    ) -> None:
        self.path = path
        self.bytes_read = 0
        self.items = read_checksums(path, save_id)
        self.size = 0
        self.buffer = bytearray()
        self._shared = buffer
        self._file: FileIO | None = None

    def __enter__(self) -> DataFile:
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise DamagedError(self.path, f"{error.strerror}") from error
        self.size = os.fstat(self.file.fileno()).st_size
        self.buffer = bytearray(BUFFER) if self._shared is None else self._shared
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()
        self.buffer = bytearray()

    @property
    def file(self) -> FileIO:
        """The open file."""
        assert self._file is not None
        return self._file

    def read_into(self, part: memoryview, position: int, key: str) -> None:
        """Fill ``part`` with the bytes from ``position`` on, which are of ``key``.

        Raises:
            CheckpointError: the file ends before.
        """
        self.file.seek(position)
        got = 0
        while got < len(part):
            count = self.file.readinto(part[got:])
            if not count:
                raise DamagedError(self.path, f"ended while {key} was read")
            got += count
        self.bytes_read += got

    def stream(self, offset: int, length: int, key: str) -> StoredStream:
        """The stream at ``offset``, which is that of ``key``.

        Raises:
            CheckpointError: the file is too short, or its checksum file knows another stream.
        """
        if offset + length > self.size:
            raise DamagedError(
                self.path,
                f"truncated: {self.size:,} bytes, where {key} ends at {offset + length:,}",
            )
        item = None
        if self.items is not None:
            item = self.items.get(offset)
            if item is None or item.length != length:
                raise DamagedError(
                    self.path,
                    f"its checksum file knows no {length:,} bytes at {offset:,} ({key})",
                )
        return StoredStream(self, offset, length, key, item)


@dataclass(frozen=True)
class StoredStream:
    """One stored object: ``length`` bytes of a file from ``offset``."""

    data_file: DataFile
    offset: int
    length: int
    key: str
    item: StoredItem | None

    @property
    def has_values(self) -> bool:
        """Whether it is known where the values of a tensor lie."""
        return self.item is not None and self.item.values_at is not None

    def whole(self) -> bytearray:
        """All bytes, checked."""
        content = bytearray(self.length)
        for at, part in self._parts(0, self.length):
            content[at : at + len(part)] = part
        return content

    def faults(self) -> Iterator[DamagedError]:
        """What is wrong with each piece that is not what was saved; reads all of them."""
        for number in range(-(-self.length // PIECE)):
            try:
                for _ in self._parts_of_piece(number):
                    pass
            except DamagedError as error:
                yield error

    def view(self) -> BinaryIO:
        """The stream as a file of its own, not checked."""
        return BufferedReader(_View(self.data_file.file, self.offset, self.length))

    def tensor(self) -> torch.Tensor:
        """The whole stored tensor, on CPU, checked."""
        if self.item is not None:
            for fault in self.faults():
                raise fault
        try:
            # Read from the file: a copy of the stream would double the memory.
            loaded: torch.Tensor = torch.load(self.view(), map_location="cpu", weights_only=True)
        # Without a checksum a damaged stream shows here, in whatever way.
        except Exception as error:
            raise DamagedError(self.data_file.path, f"{self.key} is damaged ({error})") from error
        return loaded

    def copy_values(self, target: torch.Tensor, dtype: torch.dtype, start: int) -> None:
        """Copy ``target.numel()`` values from number ``start`` on into ``target`` (1D), converted
        from ``dtype``; only the pieces that hold them are read."""
        assert self.item is not None and self.item.values_at is not None
        width = dtype.itemsize
        begin = self.item.values_at + start * width  # in the stream
        end = begin + target.numel() * width
        for at, part in self._parts(begin, end):
            low, high = max(begin, at), min(end, at + len(part))
            if low < high:
                # No value is cut: see `values_at`.
                count, done = (high - low) // width, (low - begin) // width
                values = torch.frombuffer(part, dtype=dtype, offset=low - at, count=count)
                target[done : done + count].copy_(values)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """The pieces that hold bytes ``begin`` to ``end``, in parts of at most a buffer, each with
        its position in the stream. A piece is checked when its last part has been used: what was
        made of a damaged one is never seen, since reading it raises."""
        for number in range(begin // PIECE, -(-end // PIECE)):
            yield from self._parts_of_piece(number)

    def _parts_of_piece(self, number: int) -> Iterator[tuple[int, memoryview]]:
        file, buffer = self.data_file, memoryview(self.data_file.buffer)
        first, last = number * PIECE, min((number + 1) * PIECE, self.length)
        hasher = xxhash.xxh3_64()
        for at in range(first, last, BUFFER):
            part = buffer[: min(BUFFER, last - at)]
            file.read_into(part, self.offset + at, self.key)
            hasher.update(part)
            yield at, part
        if self.item is not None and hasher.intdigest() != self.item.pieces[number]:
            raise DamagedError(
                file.path,
                f"bytes {self.offset + first:,} to {self.offset + last:,} ({self.key}) are not "
                "those that were saved: the checksum differs",
            )


class _View(RawIOBase):
    """``length`` bytes of ``file`` from ``offset`` on; closing it leaves ``file`` open."""

    def __init__(self, file: FileIO, offset: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As every file's."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, into: Any) -> int:
        """Read from the position on, no further than to the end."""
        view = memoryview(into).cast("B")[: max(self._length - self._position, 0)]
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(view) or 0
        self._position += count
        return count
