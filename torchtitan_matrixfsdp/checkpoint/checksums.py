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
from torchtitan_matrixfsdp.checkpoint.manifest import FORMAT, MANIFEST, PIECE, RESTORE, read_json


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


def checksums_to_json(items: Mapping[int, StoredItem], save_id: str = "") -> str:
    """The text of a checksum file, from the items by their offset in the data file."""
    content = {
        str(offset): [item.length, item.values_at, [f"{piece:016x}" for piece in item.pieces]]
        for offset, item in items.items()
    }
    record = {
        "format": FORMAT,
        "save_id": save_id,
        "piece": PIECE,
        "items": content,
        "items_checksum": _checksum_of(content),
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def read_checksums(data_file: Path, save_id: str | None = None) -> dict[int, StoredItem] | None:
    """The items of ``data_file`` by offset; ``None`` where it has no checksum file.

    Args:
        data_file: its path.
        save_id: of the manifest beside it, if there is one: then there must be checksums, and of
            the same save.

    Raises:
        CheckpointError: the checksum file is damaged, of a newer format or of another save, or is
            missing though there is a manifest.
    """
    path = checksum_path(data_file)
    if not path.is_file():
        if save_id is not None:
            raise CheckpointError(f"{path}: missing, but {MANIFEST} is there; {RESTORE}")
        return None
    record = read_json(path)
    try:
        if record["piece"] != PIECE:
            raise ValueError(f"pieces of {record['piece']} bytes; legal: {PIECE}")
        content, theirs = record["items"], record["save_id"]
        # A wrong position of values, for one, would read other bytes that are intact.
        if _checksum_of(content) != record["items_checksum"]:
            raise ValueError("it is not what was written")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); {RESTORE}") from error
    if save_id is not None and theirs != save_id:
        raise CheckpointError(f"{path}: of another checkpoint than {MANIFEST} beside it; {RESTORE}")
    return {
        int(offset): StoredItem(length, values_at, tuple(int(piece, 16) for piece in pieces))
        for offset, (length, values_at, pieces) in content.items()
    }


def _checksum_of(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"))
    return f"{checksum(text.encode()):016x}"


def checksum(data: Any) -> int:
    """XXH3 of a buffer, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


class HashingStream(RawIOBase):
    """A stream that writes to ``raw`` and checksums what passes, in pieces.

    Closing it leaves ``raw`` open.

    Attributes:
        length: bytes written so far.
        failure: what ``raw`` raised, if it did; ``torch.save`` hides that behind its own error.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__()
        self.length = 0
        self.failure: OSError | None = None
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
            try:
                self._raw.write(part)
            except OSError as error:
                self.failure = error
                raise
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
