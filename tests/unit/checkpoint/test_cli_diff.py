"""`diff`: exit status, and every kind of difference."""

import math

import pytest
import torch

from tests.unit.checkpoint.stored_state import make_state, save_owner, save_stock
from torchtitan_matrixfsdp.checkpoint.__main__ import main
from torchtitan_matrixfsdp.checkpoint.difference import largest_difference, object_difference

NAN, INF = math.nan, math.inf


def diff(a, b, capsys, *options):
    status = main(["diff", str(a), str(b), *options])
    return status, capsys.readouterr().out


@pytest.fixture
def base(tmp_path):
    return save_owner(make_state(), tmp_path / "base" / "step-3")


def test_same_state_by_either_writer_is_equal(base, tmp_path, capsys):
    status, printed = diff(base, save_stock(make_state(), tmp_path / "stock"), capsys)
    assert status == 0 and printed.startswith("equal: 25 the same"), printed


def test_largest_difference_comes_first_and_tolerance_counts(base, tmp_path, capsys):
    state = make_state()
    state["output.weight"][2, 3] += 0.5
    state["layers.0.attention.wq.weight"][0, 0] += 2.0
    state["layers.0.attention.wq.weight"][1, 1] -= 1.0
    other = save_owner(state, tmp_path / "other")
    status, printed = diff(base, other, capsys)
    assert status == 1
    rows = [line.split() for line in printed.splitlines()[1:3]]
    assert [row[0] for row in rows] == ["layers.0.attention.wq.weight", "output.weight"]
    assert [round(float(row[1]), 5) for row in rows] == [2.0, 0.5]
    assert [row[2] for row in rows] == ["2", "1"]
    assert diff(base, other, capsys, "--tolerance", "1")[0] == 1
    status, printed = diff(base, other, capsys, "--tolerance", "2.001")
    assert status == 0 and "2 within the tolerance" in printed


def test_keys_on_one_side_and_model_only(base, tmp_path, capsys):
    state = make_state()
    del state["optimizer"], state["train_state"]["step"]
    other = save_owner(state, tmp_path / "other")
    status, printed = diff(base, other, capsys)
    assert status == 1
    assert f"only in {base}: train_state.step" in printed and "14 on one side only" in printed
    assert diff(other, base, capsys)[0] == 1
    assert diff(base, other, capsys, "--model-only")[0] == 0


def test_shapes_and_dtypes(base, tmp_path, capsys):
    state = make_state()
    state["output.weight"] = state["output.weight"].T.contiguous()
    status, printed = diff(base, save_owner(state, tmp_path / "shape"), capsys)
    assert status == 1 and "shape (17, 6) against (6, 17)" in printed
    state = make_state()
    state["output.weight"] = state["output.weight"].bfloat16()
    other = save_owner(state, tmp_path / "dtype")
    status, printed = diff(base, other, capsys)
    assert status == 1 and "float32 against bfloat16" in printed
    # With a tolerance it is the values that count.
    assert diff(base, other, capsys, "--tolerance", "0.05")[0] == 0
    state["output.weight"] = make_state()["output.weight"].double()
    assert diff(base, save_owner(state, tmp_path / "same_values"), capsys)[0] == 1


def test_objects_are_compared_by_value(base, tmp_path, capsys):
    state = make_state()
    state["optimizer"]["param_groups.output.weight.lr"] = 0.5
    state["dataloader"]["dp_rank_1"] = b"position 2"
    status, printed = diff(base, save_owner(state, tmp_path / "other"), capsys)
    assert status == 1
    assert "object optimizer.param_groups.output.weight.lr: 0.25 against 0.5" in printed
    assert "object dataloader.dp_rank_1: b'position 1' against b'position 2'" in printed


def test_object_against_tensor(base, tmp_path, capsys):
    state = make_state()
    state["train_state"]["step"] = 3
    status, printed = diff(base, save_owner(state, tmp_path / "other"), capsys)
    assert status == 1 and "object train_state.step: a tensor against an object" in printed


def test_damage_is_an_error_and_no_difference(base, tmp_path, capsys):
    other = save_owner(make_state(), tmp_path / "other")
    content = bytearray((other / "__0_0.distcp").read_bytes())
    content[1_000_000] ^= 1
    (other / "__0_0.distcp").write_bytes(content)
    assert main(["diff", str(base), str(other)]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("tolerance", ["-1", "nan", "inf"])
def test_illegal_tolerance(base, capsys, tolerance):
    with pytest.raises(SystemExit) as raised:
        main(["diff", str(base), str(base), f"--tolerance={tolerance}"])
    assert raised.value.code == 2 and "--tolerance: received" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, NAN, INF], [1.0, NAN, INF], (0.0, 0)),
        ([1.0, NAN], [1.0, 2.0], (INF, 1)),
        ([1.0, INF], [1.5, -INF], (INF, 2)),
        ([1.0, 0.0], [1.0, -0.0], (0.0, 0)),
    ],
)
def test_nan_and_infinities(a, b, expected):
    assert largest_difference(torch.tensor(a), torch.tensor(b)) == expected


def test_integers_are_compared_exactly():
    huge = torch.tensor([2**60, 5])
    assert largest_difference(huge, huge + torch.tensor([1, 0])) == (1.0, 1)
    assert largest_difference(torch.tensor([True, False]), torch.tensor([True, True])) == (1.0, 1)


def test_difference_beyond_the_first_part_of_a_tensor():
    a = torch.zeros(3_000_000)
    b = a.clone()
    b[2_999_999] = 2
    assert largest_difference(a, b) == (2.0, 1)
    b[0] = 3
    assert largest_difference(a, b) == (3.0, 2)


def test_bytes_that_are_no_plain_values():
    assert object_difference(b"same", b"same") is None
    assert "stored bytes differ (3 and 4)" in object_difference(b"one", b"four")
