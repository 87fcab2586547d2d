"""A checkpoint written and read in one process: exchange with stock DCP, ranges, damage."""

from __future__ import annotations

import itertools
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtitan_matrixfsdp.checkpoint import (
    CheckpointError,
    Manifest,
    OwnerStorageReader,
    OwnerStorageWriter,
    StrictLoadPlanner,
    read_metadata,
)
from torchtitan_matrixfsdp.checkpoint.checksums import read_checksums
from torchtitan_matrixfsdp.checkpoint.manifest import MANIFEST, METADATA, PIECE
from torchtitan_matrixfsdp.checkpoint.reader import BUFFER, DataFile

pytestmark = pytest.mark.usefixtures("group_of_one")

State = dict[str, Any]
Change = Callable[[State], None]

ROWS, COLUMNS = 2053, 1031  # float32: 8.07 MiB in three pieces, none of them at a row's edge
PARTS = {"optimizer", "train_state"}


def _state(seed: int = 0) -> State:
    draw = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(ROWS, COLUMNS, generator=draw),
        "half": torch.randn(33, 7, generator=draw).bfloat16(),
        "one": torch.tensor(float(seed)),
        "none": torch.zeros(0, 4),
        "view": torch.randn(8, 6, generator=draw)[2:5].t(),
        "optimizer": {"momentum": torch.randn(5, generator=draw), "step": seed, "lr": 0.5},
        "train_state": {"step": seed},
    }


def _save(folder: Path, state: State, writer: type[FileSystemWriter] | None = None) -> Path:
    made = OwnerStorageWriter(folder, Manifest()) if writer is None else writer(folder)
    dcp.save(state, storage_writer=made)
    return folder


def _load(folder: Path, reader: type[FileSystemReader] = OwnerStorageReader) -> State:
    state = _state(seed=77)
    planner = StrictLoadPlanner(str(folder), ignored=())
    dcp.load(state, storage_reader=reader(folder), planner=planner)
    return state


def _error(folder: Path, state: State | None = None) -> str:
    """The error of loading, which must have changed nothing."""
    try:
        read_metadata(folder)  # as a run does; DCP would hide the error in an AssertionError
    except CheckpointError as error:
        return str(error)
    state = _state(seed=77) if state is None else state
    before = pickle.dumps(state)
    planner = StrictLoadPlanner(str(folder), ignored=())
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=OwnerStorageReader(folder), planner=planner)
    (cause, _) = caught.value.failures[0]
    assert isinstance(cause, CheckpointError), caught.value
    if str(folder / "__0_0") not in str(cause):  # found in the data: some may have been copied
        assert pickle.dumps(state) == before
    return str(cause)


def _assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            _assert_same(left[key], right[key])
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    else:
        assert left == right


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, group_of_one: None) -> Path:
    """Written once, never changed."""
    return _save(tmp_path_factory.mktemp("saved") / "step-3", _state(3))


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """To be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "step-3"))


def test_our_reader_and_that_of_dcp_agree(saved: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in saved.iterdir())
    assert names == [METADATA, "__0_0.distcp", "__0_0.json", MANIFEST]
    _assert_same(_load(saved), _state(3))
    _assert_same(_load(saved, FileSystemReader), _state(3))
    dcp_to_torch_save(saved, tmp_path / "whole.pt")
    _assert_same(torch.load(tmp_path / "whole.pt", weights_only=False), _state(3))


def test_what_stock_dcp_wrote_is_read(tmp_path: Path) -> None:
    folder = _save(tmp_path / "step-3", _state(3), FileSystemWriter)
    _assert_same(_load(folder), _state(3))
    # No checksums, but still an error of one line where torch's own parser notices.
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: 1 << 20] + bytes(data.stat().st_size - (1 << 20)))
    assert "damaged" in _error(folder)


ALL = -(-ROWS * COLUMNS * 4 // PIECE)


@pytest.mark.parametrize(
    ("after_cut", "rows", "pieces"),
    [
        (None, ROWS, ALL),
        (None, 1, 1),
        (-1, 1, 1),
        (-1, 2, 2),
        (0, 1, 2),  # the row that the boundary cuts
        (0, 5, 2),
        (1, 5, 1),
    ],
)
def test_rows_are_read_with_the_pieces_that_hold_them(
    saved: Path, after_cut: int | None, rows: int, pieces: int
) -> None:
    """``after_cut``: the first row, counted from the row that lies in two pieces; None: row 0."""
    reader = OwnerStorageReader(saved)
    index = next(i for i in reader.read_metadata().storage_data if i.fqn == "wide")
    info = reader.read_metadata().storage_data[index]
    target = torch.full((rows, COLUMNS), torch.nan)
    path = saved / info.relative_path
    with DataFile(path, read_checksums(path), bytearray(BUFFER)) as file:
        stream = file.stream(info.offset, info.length, "wide")
        assert stream.item is not None and stream.item.values_at is not None
        cut, inside = divmod(PIECE - stream.item.values_at, COLUMNS * 4)
        assert inside, "no row is cut"
        first = 0 if after_cut is None else cut + after_cut
        stream.copy_values(target.view(-1), torch.float32, first * COLUMNS)
        read = file.bytes_read
        assert (read + PIECE - 1) // PIECE == pieces
        assert torch.equal(target, _state(3)["wide"][first : first + rows])
        # Converted on the way, as into another dtype's parameter.
        double = torch.zeros(rows * COLUMNS, dtype=torch.float64)
        stream.copy_values(double, torch.float32, first * COLUMNS)
        assert torch.equal(double, target.view(-1).double())


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def _offset(folder: Path, fqn: str) -> tuple[int, int]:
    storage = read_metadata(folder).storage_data
    info = next(info for index, info in storage.items() if index.fqn == fqn)
    return info.offset, info.length


@pytest.mark.parametrize("key", ["wide", "half", "one", "optimizer.momentum", "optimizer.lr"])
def test_a_flipped_bit_is_found_and_placed(copy: Path, key: str) -> None:
    offset, length = _offset(copy, key)
    _flip(copy / "__0_0.distcp", offset + length // 2)
    said = _error(copy)
    for fragment in ("__0_0.distcp", f"({key})", "checksum differs", "checkpoint.load_step"):
        assert fragment in said


def test_every_byte_is_covered(copy: Path) -> None:
    """One bit anywhere, between the streams as well as in them."""
    data = copy / "__0_0.distcp"
    whole = data.read_bytes()
    streams = sorted(_offset(copy, index.fqn) for index in read_metadata(copy).storage_data)
    assert streams[0][0] == 0 and sum(length for _, length in streams) == len(whole)
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(streams))


@pytest.mark.parametrize("left", [0, 100, 0.5, -1])
def test_a_truncated_data_file(copy: Path, left: float) -> None:
    data = copy / "__0_0.distcp"
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(size - 1 if left < 0 else int(left * size) if left < 1 else int(left))
    said = _error(copy)
    assert "__0_0.distcp: truncated" in said and "checkpoint.load_step" in said


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_0.json", MANIFEST, METADATA])
def test_a_missing_file(copy: Path, name: str) -> None:
    (copy / name).unlink()
    said = _error(copy)
    assert str(copy / name) in said
    assert "No such file" in said or "missing" in said


@pytest.mark.parametrize("name", ["__0_0.json", MANIFEST, METADATA])
@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04garbage", b'{"format": 1}'])
def test_a_garbled_file(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    assert f"{name}: " in _error(copy)


def test_an_index_without_a_manifest_that_is_no_index(tmp_path: Path) -> None:
    folder = _save(tmp_path / "step-3", _state(3), FileSystemWriter)
    for content, said in (
        (b"", "damaged"),
        (b"garbage", "damaged"),
        (pickle.dumps({"a": 1}), "holds a dict"),
    ):
        (folder / METADATA).write_bytes(content)
        assert f"{METADATA}: {said}" in _error(folder)


def test_files_of_two_checkpoints_are_not_mixed(copy: Path, tmp_path: Path) -> None:
    """Of the same state's shape, so that offsets and lengths agree."""
    other = _save(tmp_path / "step-4", _state(4))
    for names, said in (
        ((METADATA,), f"{METADATA}: damaged, or of another checkpoint"),
        (("__0_0.distcp",), "checksum differs"),
        (("__0_0.json",), "__0_0.json: of another checkpoint"),
        (("__0_0.distcp", "__0_0.json"), "__0_0.json: of another checkpoint"),
        ((MANIFEST,), "of another checkpoint"),
    ):
        mixed = tmp_path / "mixed"
        shutil.copytree(copy, mixed)
        for name in names:
            shutil.copy(other / name, mixed / name)
        assert said in _error(mixed)
        shutil.rmtree(mixed)


def _without(key: str) -> Change:
    return lambda state: state.pop(key)


def _with(key: str, value: Any) -> Change:
    return lambda state: state.update({key: value})


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (_with("deep", torch.zeros(2)), ["missing in the checkpoint: deep", "model.flavor"]),
        (_without("half"), ["does not have: half", "model.flavor"]),
        (
            _with("half", torch.zeros(7, 33)),
            ["half: received (33, 7); legal: (7, 33)", "model.flavor"],
        ),
        (_with("one", 3.0), ["plain object", "one"]),
        (
            _with("optimizer", {"momentum": torch.zeros(5), "step": 0, "lr": 0.0, "second": 0}),
            ["missing in the checkpoint: optimizer.second", "exclude_from_loading"],
        ),
        (
            _with("optimizer", {"momentum": torch.zeros(5), "step": 0}),
            ["does not have: optimizer.lr", "exclude_from_loading"],
        ),
    ],
)
def test_a_job_that_asks_for_something_else(
    saved: Path, change: Change, fragments: list[str]
) -> None:
    state = _state(9)
    change(state)
    said = _error(saved, state)
    for fragment in (str(saved), *fragments):
        assert fragment in said


def test_weights_alone_are_no_run(tmp_path: Path) -> None:
    model = {k: v for k, v in _state(3).items() if k not in PARTS}
    said = _error(_save(tmp_path / "step-3", model))
    for fragment in ("holds no optimizer, train_state", "last_save_model_only", "load_step"):
        assert fragment in said
    # What is left out on purpose is not missed, and not too much.
    planner = StrictLoadPlanner("", ignored=PARTS)
    folder = _save(tmp_path / "step-4", _state(4))
    reader = OwnerStorageReader(folder)
    dcp.load(model, storage_reader=reader, planner=planner)
    _assert_same(model, {k: v for k, v in _state(4).items() if k not in PARTS})


def test_a_save_moves_aside_what_is_there(copy: Path) -> None:
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    writer = OwnerStorageWriter(copy, Manifest())
    dcp.save(_state(4), storage_writer=writer)
    aside = copy.with_name("aside-1-step_3")
    assert writer.moved_aside == aside
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    _assert_same(_load(aside), _state(3))
    _assert_same(_load(copy), _state(4))
