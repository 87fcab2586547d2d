"""Streams checksummed in pieces, and the files that hold the sums."""

from __future__ import annotations

import errno
import io
import json
import random
from pathlib import Path

import pytest
import torch

from torchtitan_matrixfsdp.checkpoint import CheckpointError
from torchtitan_matrixfsdp.checkpoint.checksums import (
    HashingStream,
    StoredItem,
    checksum,
    checksum_path,
    checksums_to_json,
    read_checksums,
)
from torchtitan_matrixfsdp.checkpoint.manifest import FORMAT, PIECE


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [PIECE],
        [PIECE - 1, 1, 1],
        [PIECE + 1],
        [7, 3 * PIECE, 5],
        [PIECE, 0, PIECE],
    ],
)
def test_pieces_do_not_depend_on_how_they_were_written(sizes: list[int]) -> None:
    content = random.Random(len(sizes)).randbytes(sum(sizes))
    raw = io.BytesIO()
    stream = HashingStream(raw)
    start = 0
    for size in sizes:
        assert stream.write(content[start : start + size]) == size
        start += size
    assert raw.getvalue() == content and stream.length == len(content)
    cut = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
    assert stream.pieces() == tuple(checksum(piece) for piece in cut)


def test_the_place_of_values_is_known_if_one_write_had_them() -> None:
    stream = HashingStream(io.BytesIO())
    stream.write(b"header")
    values = torch.arange(PIECE // 8 + 3)
    stream.write(memoryview(values.numpy()))
    size = values.nbytes
    assert stream.wrote(values.data_ptr(), size) == len(b"header")
    assert stream.wrote(values.data_ptr(), size - 8) is None
    assert stream.wrote(values.data_ptr() + 8, size - 8) is None


def test_a_stream_of_torch_save_is_that_of_a_plain_file() -> None:
    tensor = torch.randn(3, 5)
    plain, raw = io.BytesIO(), io.BytesIO()
    torch.save(tensor, plain)
    torch.save(tensor, HashingStream(raw))
    assert raw.getvalue() == plain.getvalue()


def test_checksum_files_say_what_they_were_told(tmp_path: Path) -> None:
    data_file = tmp_path / "__3_0.distcp"
    assert read_checksums(data_file) is None
    items = {0: StoredItem(9, None, (1,)), 9: StoredItem(PIECE + 1, 64, (2**64 - 1, 0))}
    checksum_path(data_file).write_text(checksums_to_json(items))
    assert checksum_path(data_file).name == "__3_0.json"
    assert read_checksums(data_file) == items


def test_checksums_belong_to_one_save(tmp_path: Path) -> None:
    data_file = tmp_path / "__0_0.distcp"
    with pytest.raises(CheckpointError, match=r"__0_0\.json: missing, but matrixfsdp\.json"):
        read_checksums(data_file, "a")
    checksum_path(data_file).write_text(checksums_to_json({}, "a"))
    assert read_checksums(data_file, "a") == {}
    with pytest.raises(CheckpointError, match=r"__0_0\.json: of another checkpoint"):
        read_checksums(data_file, "b")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": FORMAT + 1}, f"received format {FORMAT + 1}"),
        ({"format": "1"}, "received format '1'"),
        ({"piece": 2 * PIECE}, f"pieces of {2 * PIECE} bytes; legal: {PIECE}"),
        ({"items": {"0": [1, 64, ["0000000000000005"]]}}, "damaged"),
        ({"items": {"1": [1, None, ["0000000000000005"]]}}, "damaged"),
        ({"items_checksum": "0" * 16}, "damaged"),
        ({"items": []}, "damaged"),
        ({"items": None}, "damaged"),
    ],
)
def test_a_damaged_checksum_file_is_named(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    data_file = tmp_path / "__0_0.distcp"
    path = checksum_path(data_file)
    record = json.loads(checksums_to_json({0: StoredItem(1, None, (5,))}))
    path.write_text(json.dumps(record | change))
    with pytest.raises(CheckpointError) as caught:
        read_checksums(data_file)
    assert str(path) in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\x01", '{"piece": 1}'])
def test_a_checksum_file_that_is_no_record(tmp_path: Path, text: str) -> None:
    data_file = tmp_path / "__0_0.distcp"
    checksum_path(data_file).write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        read_checksums(data_file)


def test_a_checksum_file_of_arbitrary_bytes(tmp_path: Path) -> None:
    data_file = tmp_path / "__0_0.distcp"
    checksum_path(data_file).write_bytes(bytes(range(128, 256)))
    with pytest.raises(CheckpointError, match="damaged"):
        read_checksums(data_file)


def test_a_full_disk_is_not_hidden_by_torch_save() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    stream = HashingStream(Full())
    with pytest.raises((OSError, RuntimeError)):
        torch.save(torch.zeros(3), stream)
    assert stream.failure is not None and stream.failure.errno == errno.ENOSPC
