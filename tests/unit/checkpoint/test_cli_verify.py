"""`verify` against real damage, one kind at a time."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from tests.unit.checkpoint.stored_state import make_state, save_owner, save_stock
from torchtitan_matrixfsdp.checkpoint.__main__ import main
from torchtitan_matrixfsdp.checkpoint.checksums import checksums_to_json, read_checksums
from torchtitan_matrixfsdp.checkpoint.reader import read_metadata
from torchtitan_matrixfsdp.checkpoint.stored import StoredTensor
from torchtitan_matrixfsdp.checkpoint.verification import count_not_finite, tiling_faults

BIG = "tok_embeddings.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint by each writer, of the same state."""
    folder = tmp_path_factory.mktemp("saved")
    return {
        "owner": save_owner(make_state(), folder / "owner" / "step-3", model="llama3_owner"),
        "stock": save_stock(make_state(), folder / "stock" / "step-3"),
    }


@pytest.fixture
def copy(saved, tmp_path):
    """A copy to damage."""

    def copied(kind="owner"):
        return shutil.copytree(saved[kind], tmp_path / kind / "step-3")

    return copied


def verify(path, capsys, *options):
    """Exit status, the problems and everything printed."""
    status = main(["verify", str(path), *options])
    printed = capsys.readouterr().out
    problems = [line for line in printed.splitlines() if line.startswith("problem: ")]
    assert status == (1 if problems else 0)
    return status, problems, printed


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def place_of(path, key):
    """Where the stream of a tensor begins and ends."""
    storage = read_metadata(path).storage_data
    info = next(info for index, info in storage.items() if index.fqn == key)
    return info.offset, info.offset + info.length


@pytest.mark.parametrize("kind", ["owner", "stock"])
def test_whole_checkpoint_has_no_problem(saved, capsys, kind):
    status, _, printed = verify(saved[kind], capsys)
    assert status == 0 and "complete and finite (15 tensors, 1 files" in printed, printed
    assert ("note: no checksums" in printed) == (kind == "stock")


@pytest.mark.parametrize("kind", ["owner", "stock"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_flipped_value_is_found(copy, capsys, kind, where):
    path = copy(kind)
    begin, end = place_of(path, BIG)
    # Well inside the values: the stream's header and index are some hundred bytes.
    flip(path / "__0_0.distcp", begin + 5000 if where == "first" else end - 5000)
    _, problems, _ = verify(path, capsys)
    assert len(problems) == 1 and BIG in problems[0] and "__0_0.distcp" in problems[0]


def test_flipped_header_of_a_stream_is_found(copy, capsys):
    path = copy()
    flip(path / "__0_0.distcp", place_of(path, "output.weight")[0] + 1)
    _, problems, _ = verify(path, capsys)
    assert len(problems) == 1 and "output.weight" in problems[0] and "checksum" in problems[0]


def test_all_problems_are_listed(copy, capsys):
    path = copy()
    begin, end = place_of(path, BIG)
    for at in (begin + 100, end - 100, place_of(path, "output.weight")[0] + 100):
        flip(path / "__0_0.distcp", at)
    _, problems, printed = verify(path, capsys)
    assert [BIG in p for p in problems].count(True) == 2 and len(problems) == 3
    assert "3 problems" in printed.splitlines()[-1]


@pytest.mark.parametrize("kind", ["owner", "stock"])
def test_truncated_file_names_every_tensor_it_lost(copy, capsys, kind):
    path = copy(kind)
    file = path / "__0_0.distcp"
    last = sorted(
        (place_of(path, key)[0], key) for key in ("output.weight", BIG, "train_state.step")
    )
    with file.open("rb+") as stream:
        stream.truncate(last[-1][0] + 1)
    _, problems, _ = verify(path, capsys)
    assert any(": truncated: " in p and last[-1][1] in p for p in problems)
    assert not any(last[0][1] in p for p in problems)


@pytest.mark.parametrize("kind", ["owner", "stock"])
def test_file_that_is_too_long_is_found(copy, capsys, kind):
    path = copy(kind)
    with (path / "__0_0.distcp").open("ab") as stream:
        stream.write(b"more")
    _, problems, _ = verify(path, capsys)
    assert len(problems) == 1 and "4 bytes too long" in problems[0]


@pytest.mark.parametrize("kind", ["owner", "stock"])
def test_missing_data_file_is_one_problem(copy, capsys, kind):
    path = copy(kind)
    (path / "__0_0.distcp").unlink()
    _, problems, _ = verify(path, capsys)
    assert len(problems) == 1 and "__0_0.distcp: missing: it holds" in problems[0]
    assert "and 22 more" in problems[0]


@pytest.mark.parametrize("name", ["__0_0.json", "matrixfsdp.json"])
def test_missing_companion_file_is_found(copy, capsys, name):
    path = copy()
    (path / name).unlink()
    _, problems, _ = verify(path, capsys)
    assert len(problems) == 1 and f"{name}: missing" in problems[0]


def test_other_metadata_is_found_and_files_are_still_checked(copy, capsys, tmp_path):
    path = copy()
    other = save_owner(make_state(seed=5, layers=1), tmp_path / "other" / "step-3")
    shutil.copy(other / ".metadata", path / ".metadata")
    flip(path / "__0_0.distcp", 200_000)
    _, problems, _ = verify(path, capsys)
    assert len(problems) == 2
    assert ".metadata: damaged, or of another checkpoint" in problems[0]
    assert "checksum differs" in problems[1]


@pytest.mark.parametrize("kind", ["owner", "stock"])
def test_checkpoint_without_metadata_is_a_problem(copy, capsys, kind):
    path = copy(kind)
    (path / ".metadata").unlink()
    _, problems, _ = verify(path, capsys)
    assert "holds no complete checkpoint" in problems[0]


def test_checksum_file_of_another_layout_is_found(copy, capsys):
    path = copy()
    sums = path / "__0_0.json"
    items = read_checksums(path / "__0_0.distcp")
    last = max(items)
    items[last] = replace(items[last], length=items[last].length - 1)
    sums.write_text(checksums_to_json(items, json.loads(sums.read_text())["save_id"]))
    _, problems, _ = verify(path, capsys)
    assert any("__0_0.json: it knows" in problem for problem in problems)


@pytest.mark.parametrize("save", [save_owner, save_stock])
def test_values_that_are_not_finite_are_counted(tmp_path, capsys, save):
    state = make_state()
    state["output.weight"][3, :4] = torch.tensor([float("nan"), 1, float("inf"), -float("inf")])
    state["optimizer"]["state.output.weight.momentum"][0, 0] = float("nan")
    path = save(state, tmp_path / "step-3")
    _, problems, _ = verify(path, capsys)
    assert len(problems) == 2
    assert "output.weight: 3 of 102 values" in " ".join(problems)
    assert "optimizer.state.output.weight.momentum: 1 of 102 values" in " ".join(problems)
    assert verify(path, capsys, "--no-finite")[0] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_not_finite_in_every_dtype(dtype):
    values = torch.tensor([1.0, float("nan"), 2.0]).to(dtype)
    assert count_not_finite(values) == 1
    assert count_not_finite(torch.tensor([1, 2])) == 0


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], ""),
        ([((0, 0), (2, 3))], "a hole: the chunks hold 6 of 12"),
        ([((0, 0), (3, 3)), ((2, 0), (2, 3))], "overlap"),
        ([((0, 0), (2, 3)), ((2, 0), (3, 3))], "does not lie in"),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], ""),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], "overlap"),
        # As many elements as the tensor has, but one part twice.
        ([((0, 0), (2, 3)), ((0, 0), (1, 3)), ((2, 0), (1, 3))], "overlap"),
        ([((0, 0), (1, 3)), ((1, 0), (0, 3)), ((1, 0), (3, 3))], ""),
    ],
)
def test_chunks_must_tile_their_tensor(chunks, said):
    faults = list(tiling_faults(StoredTensor("w", (4, 3), torch.float32, tuple(sorted(chunks)))))
    if said:
        assert any(said in fault for fault in faults), faults
    else:
        assert faults == []


def test_scalars_and_empty_tensors_tile():
    assert list(tiling_faults(StoredTensor("w", (), torch.float32, (((), ()),)))) == []
    assert list(tiling_faults(StoredTensor("w", (0,), torch.float32, ()))) == []
    assert list(tiling_faults(StoredTensor("w", (), torch.float32, ()))) != []
