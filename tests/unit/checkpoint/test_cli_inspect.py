"""`inspect`, and the errors that all commands share."""

import json

import pytest

from tests.unit.checkpoint.stored_state import make_state, save_owner, save_stock
from torchtitan_matrixfsdp.checkpoint.__main__ import main
from torchtitan_matrixfsdp.checkpoint.stored import split_state_key
from torchtitan_matrixfsdp.checkpoint.text import size_text, table


def inspect(path, capsys, *options):
    assert main(["inspect", str(path), *options]) == 0
    return capsys.readouterr().out


def test_run_folder(tmp_path, capsys):
    save_owner(make_state(), tmp_path / "step-3")
    save_owner(make_state(), tmp_path / "step-20")
    (tmp_path / "step-100").mkdir()
    (tmp_path / "step-100" / "__0_0.distcp").write_bytes(b"cut")
    (tmp_path / "aside-1-step_20").mkdir()
    (tmp_path / "deleting-step_1").mkdir()
    (tmp_path / "step-30").mkdir()
    (tmp_path / "step-30" / "model.safetensors.index.json").write_text("{}")
    run = json.loads(inspect(tmp_path, capsys, "--json"))
    assert [(s["name"], s["state"]) for s in run["steps"]] == [
        ("step-3", "complete"),
        ("step-20", "complete"),
        ("step-30", "export"),
        ("step-100", "incomplete"),
        ("aside-1-step_20", "moved aside"),
        ("deleting-step_1", "half deleted"),
    ]
    assert run["newest"] == 20 and run["steps"][3]["bytes"] == 3
    printed = inspect(tmp_path, capsys)
    assert "newest complete: step 20" in printed and "half deleted" in printed


@pytest.mark.parametrize("save", [save_owner, save_stock])
def test_checkpoint(tmp_path, capsys, save):
    path = save(make_state(), tmp_path / "step-3")
    is_ours = save is save_owner
    summary = json.loads(inspect(path, capsys, "--json"))
    assert (summary["has_manifest"], summary["has_checksums"]) == (is_ours, is_ours)
    elements = 1100 * 2048 + 2 * (42 + 6) + 102
    assert (summary["parameters"], summary["elements"]) == (6, elements)
    assert summary["dtypes"] == {"float32": elements} and summary["layouts"] == {"whole": 6}
    assert [(s["name"], s["tensors"], s["bytes"]) for s in summary["states"]] == [
        ("momentum", 6, 4 * elements),
        ("step", 1, 4),
    ]
    assert summary["data_parallel_degree"] == 2
    assert sum(summary["part_bytes"].values()) == (path / "__0_0.distcp").stat().st_size
    assert [f["name"] for f in summary["files"]] == ["__0_0.distcp"]


def test_text_fits_in_100_columns(tmp_path, capsys):
    state = make_state()
    state["a" * 150] = state["output.weight"]
    path = save_owner(state, tmp_path / "step-3", model="llama3_owner", note="x" * 200)
    for options in ((), ("--tensors",)):
        printed = inspect(path, capsys, *options)
        assert max(map(len, printed.splitlines()[1:])) <= 100
    assert "llama3_owner" in printed and "optimizer.state.output.weight.momentum" in printed


def test_model_alone(tmp_path, capsys):
    model = {key: value for key, value in make_state().items() if "weight" in key}
    printed = inspect(save_owner(model, tmp_path / "step-3"), capsys)
    assert "no data state" in printed and "optimizer state" not in printed


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_paths_that_are_no_checkpoint(tmp_path, capsys, command):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, said in [
        ("none", "does not exist"),
        ("file", "is a file"),
        ("empty", "no checkpoint"),
    ]:
        assert main([command, str(tmp_path / name)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("error: ") and said in printed.err
        assert printed.err.count("\n") == 1


def test_newer_format_is_refused(tmp_path, capsys):
    path = save_owner(make_state(), tmp_path / "step-3")
    text = (path / "matrixfsdp.json").read_text().replace('"format": 1', '"format": 2')
    (path / "matrixfsdp.json").write_text(text)
    assert main(["inspect", str(path)]) == 2
    assert "received format 2" in capsys.readouterr().err
    assert main(["verify", str(path)]) == 1
    assert "received format 2" in capsys.readouterr().out


def test_run_folder_is_refused_where_one_checkpoint_is_meant(tmp_path, capsys):
    path = save_owner(make_state(), tmp_path / "step-3")
    for arguments in (["verify", str(tmp_path)], ["diff", str(tmp_path), str(path)]):
        assert main(arguments) == 2
        assert str(path) in capsys.readouterr().err


def test_usage_errors_exit_with_2(capsys):
    for arguments in ([], ["inspect"], ["diff", "one"], ["unknown"]):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == 2
        capsys.readouterr()


def test_names_of_states_may_have_dots():
    parameters = {"a.weight": 0, "a.weight.b": 0}
    assert split_state_key("optimizer.state.a.weight.b.0.x", parameters) == ("a.weight.b", "0.x")
    assert split_state_key("optimizer.state.a.weight.exp_avg", parameters) == (
        "a.weight",
        "exp_avg",
    )
    assert split_state_key("optimizer.param_groups.a.weight.lr", parameters) is None
    assert split_state_key("optimizer.state.c.exp_avg", parameters) is None


def test_sizes_and_tables():
    assert [size_text(n) for n in (0, 1023, 1024, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "3.00 TiB",
    ]
    lines = table(("name", "size"), [("a" * 200, "1"), ("b", "22")])
    assert {len(line) for line in lines[1:]} == {100}
