"""The writer, against the safetensors library; the reader's checks, on damaged folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.folder import HF_INDEX
from torchtitan_matrixfsdp.checkpoint.safetensors import (
    DTYPE_NAMES,
    SafetensorsWriter,
    TensorMeta,
    plan_export,
    refuse_existing,
)
from torchtitan_matrixfsdp.checkpoint.safetensors_reader import Reader, read_header, read_weight_map

SINGLE = "model-00001-of-00001.safetensors"
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 4)]


def tensors_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One tensor of each shape, with bit patterns that include NaN and infinities."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for shape in SHAPES:
        bytes_ = torch.randint(
            256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8
        )
        if dtype == torch.bool:
            bytes_ = bytes_ % 2
        name = "x" + ".".join(str(size) for size in shape) + 'é"'
        found[name] = bytes_.reshape(-1).view(dtype).reshape(shape)
    return found


def write(folder: Path, tensors: dict[str, torch.Tensor], max_file_bytes: int = 10**9) -> None:
    metas = [TensorMeta(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    writer = SafetensorsWriter(folder, plan_export(metas, max_file_bytes))
    writer.create()
    for name, tensor in reversed(tensors.items()):
        writer.write(name, tensor)
    writer.sync()
    writer.publish({})


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_file_is_the_librarys_byte_for_byte(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = tensors_of(dtype)
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / SINGLE).read_bytes() == (tmp_path / "theirs").read_bytes()


def test_mixed_dtypes_in_several_files(tmp_path: Path) -> None:
    tensors = {
        f"{name}.{index}": tensor
        for index, dtype in enumerate(DTYPE_NAMES)
        for name, tensor in tensors_of(dtype).items()
    }
    limit = 200
    write(tmp_path, tensors, limit)
    index = json.loads((tmp_path / HF_INDEX).read_bytes())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 5
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == {file.name for file in files}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        loaded = load_file(file)
        assert sum(tensor.nbytes for tensor in loaded.values()) <= max(limit, 24 * 8)
        for name, tensor in loaded.items():
            assert index["weight_map"][name] == file.name
            assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
            assert bits(tensor) == bits(tensors[name])
        header = file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")]
        start = 8 + len(header)
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                position = start + entry["data_offsets"][0]
                assert position % tensors[name].element_size() == 0


def test_a_tensor_larger_than_a_file_has_one_alone() -> None:
    metas = [
        TensorMeta(name, torch.float32, (size,))
        for name, size in zip("abcd", [1, 9, 1, 1], strict=True)
    ]
    plan = plan_export(metas, 8)
    assert [list(file.offsets) for file in plan.files] == [["a"], ["b"], ["c", "d"]]


def test_a_transposed_tensor_is_written_in_row_major_order(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    write(tmp_path, {"t": tensor})
    assert torch.equal(load_file(tmp_path / SINGLE)["t"], tensor)


@pytest.mark.parametrize(
    ("metas", "limit", "said"),
    [
        ([TensorMeta("a", torch.float32, ())] * 2, 1, "must differ"),
        ([TensorMeta("__metadata__", torch.float32, ())], 1, "must differ"),
        ([TensorMeta("a", torch.complex64, ())], 1, "a: torch.complex64 cannot be written"),
        ([], 0, "max_file_bytes is 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(metas: list[TensorMeta], limit: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_export(metas, limit)


def test_another_tensor_than_planned_is_refused(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, plan_export([TensorMeta("a", torch.float32, (2,))]))
    writer.create()
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"a: .* was to be written, but"):
            writer.write("a", wrong)
    writer.close()


def test_an_export_appears_at_once_and_replaces_only_unfinished_ones(tmp_path: Path) -> None:
    metas = [TensorMeta("a", torch.float32, (2,))]
    many = SafetensorsWriter(tmp_path, plan_export([*metas, TensorMeta("b", torch.int8, ())], 8))
    many.create()
    many.write("a", torch.ones(2))
    many.sync()
    # As a crash would leave it: nothing has the name of weights.
    assert {path.suffix for path in tmp_path.iterdir()} == {".partial"}
    (tmp_path / "other.partial").write_bytes(b"not ours")
    refuse_existing(tmp_path)
    write(tmp_path, {"a": torch.zeros(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        SINGLE,
        HF_INDEX,
        "other.partial",
    ]


@pytest.mark.parametrize(
    "name", [HF_INDEX, "model.safetensors", "model-00001-of-00002.safetensors"]
)
def test_a_folder_with_weights_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"")
    refuse_existing(tmp_path)
    refuse_existing(tmp_path / "missing")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{tmp_path} already holds {name}.*another folder"):
        refuse_existing(tmp_path)


def test_the_reader_reads_parts(tmp_path: Path) -> None:
    tensors = {"m": torch.arange(24.0).reshape(4, 6), "s": torch.tensor(3.0)}
    write(tmp_path, tensors, 96)
    reader = Reader(tmp_path)
    assert torch.equal(reader.read("m", (slice(1, 3), slice(2, 5))), tensors["m"][1:3, 2:5])
    assert torch.equal(reader.read("s", ()), tensors["s"])
    assert reader.meta("m") == TensorMeta("m", torch.float32, (4, 6))
    # A published folder of one file may have no index.
    single = tmp_path / "single"
    single.mkdir()
    save_file(tensors, single / "model.safetensors")
    assert set(read_weight_map(single)) == {"m", "s"}


def test_equality_is_of_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_matrixfsdp.checkpoint.safetensors_reader._COMPARED_BYTES", 16)
    one = torch.arange(20.0).reshape(5, 4)
    last = one.clone()
    last[4, 3] = -1
    write(tmp_path, {"one": one, "same": one.clone(), "last": last, "cut": one[:4]})
    reader = Reader(tmp_path)
    assert reader.are_equal("one", "same")
    assert not reader.are_equal("one", "last")
    assert not reader.are_equal("one", "cut") and not reader.are_equal("cut", "one")


def _damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    match how:
        case "missing":
            path.unlink()
        case "one byte short":
            path.write_bytes(content[:-1])
        case "one byte long":
            path.write_bytes(content + b"x")
        case "in the header":
            path.write_bytes(content[: 8 + length // 2])
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 9)
        case "dtype":
            header["a"]["dtype"] = "F8_E4M3"
            text = json.dumps(header).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "cannot be read: No such file"),
        ("one byte short", r"is cut short: it has \d+ bytes, its header says \d+"),
        ("one byte long", "is too long: it has"),
        ("in the header", r"is cut short: it has \d+ bytes, its header alone \d+"),
        ("empty", "is cut short: it has 0 bytes"),
        ("text", "is no safetensors file"),
        ("dtype", "tensor a has dtype F8_E4M3, expected one of F64"),
    ],
)
def test_a_damaged_file_is_named(how: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(8)})
    path = tmp_path / SINGLE
    _damage(path, how)
    with pytest.raises(CheckpointError, match=f"{path}:? {said}"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"weight_map": 3}', b"\xff"])
def test_a_damaged_index_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / HF_INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{tmp_path / HF_INDEX} cannot be read"):
        read_weight_map(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds neither"):
        read_weight_map(tmp_path)
