"""Checksums of what a checkpoint stores; see [Note: files of a checkpoint]."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.manifest import FORMAT, PIECE, read_json


@dataclass(frozen=True)
class StoredItem:
    """One ``torch.save`` stream of a data file.

    Attributes:
        length: bytes of the stream.
        values_at: where, from the stream's start, a tensor's values lie as one row-major array, at
            a multiple of their size; ``None`` where they do not, or for what is no tensor.
        pieces: the checksum of each ``PIECE`` bytes; the last may be shorter.
    """

    length: int
    values_at: int | None
    pieces: tuple[int, ...]


def checksum_path(data_file: Path) -> Path:
    """The file with the checksums of ``data_file``."""
    return data_file.with_suffix(".json")


def checksums_to_json(items: Mapping[int, StoredItem]) -> str:
    """The text of a checksum file, from the items by their offset in the data file."""
    record = {
        "format": FORMAT,
        "piece": PIECE,
        "items": {
            str(offset): [item.length, item.values_at, [f"{piece:016x}" for piece in item.pieces]]
            for offset, item in items.items()
        },
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def read_checksums(data_file: Path) -> dict[int, StoredItem] | None:
    """The items of ``data_file`` by offset; ``None`` where it has no checksum file.

    Raises:
        CheckpointError: the checksum file is damaged or of a newer format.
    """
    path = checksum_path(data_file)
    if not path.is_file():
        return None
    record = read_json(path)
    try:
        if record["piece"] != PIECE:
            raise ValueError(f"pieces of {record['piece']} bytes; legal: {PIECE}")
        return {
            int(offset): StoredItem(length, values_at, tuple(int(piece, 16) for piece in pieces))
            for offset, (length, values_at, pieces) in record["items"].items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); restore it from a copy") from error


class HashingStream(RawIOBase):
    """A stream that writes to ``raw`` and checksums what passes, in pieces.

    Closing it leaves ``raw`` open.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__()
        self.length = 0
        self._raw = raw
        self._finished: list[int] = []
        self._current = xxhash.xxh3_64()
        self._writes: dict[tuple[int, int], int] = {}

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        if view.nbytes == 0:
            return 0
        self._writes[_address(view), view.nbytes] = self.length
        start = 0
        while start < view.nbytes:
            part = view[start : start + PIECE - self.length % PIECE]
            self._current.update(part)
            self._raw.write(part)
            self.length += part.nbytes
            start += part.nbytes
            if self.length % PIECE == 0:
                self._finished.append(self._current.intdigest())
                self._current = xxhash.xxh3_64()
        return view.nbytes

    def wrote(self, address: int, size: int) -> int | None:
        """The position at which the ``size`` bytes of memory at ``address`` were written, if one
        call wrote them: that is where a tensor's values lie. Sizes of zero were written nowhere."""
        return self._writes.get((address, size))

    def pieces(self) -> tuple[int, ...]:
        """The checksums of all pieces, the unfinished one included."""
        unfinished = [self._current.intdigest()] if self.length % PIECE else []
        return (*self._finished, *unfinished)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
