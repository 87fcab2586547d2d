"""Hugging Face folders: conversion in both directions, and the other commands on them."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from tests.unit.checkpoint.stored_state import make_state, save_model, save_owner
from torchtitan_matrixfsdp.checkpoint.__main__ import main
from torchtitan_matrixfsdp.checkpoint.stored import CheckpointReader

MODELS = ["llama3_owner", "qwen3_owner"]
SINGLE = "model-00001-of-00001.safetensors"


def run(capsys, *arguments, status=0):
    assert main([str(argument) for argument in arguments]) == status
    return capsys.readouterr()


def options_of(model):
    return ["--model", model, "--flavor", "tiny"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("to", ["owner", "rows"])
def test_round_trip_is_bitwise(tmp_path, capsys, name, to):
    source, model = save_model(tmp_path / "source", name)
    options, hf, back = options_of(name), tmp_path / "hf", tmp_path / "back"
    printed = run(capsys, "convert", source, hf, "--to", "hf", *options)
    assert "config.json" in printed.out and "100%" in printed.err
    run(capsys, "convert", hf, back, "--to", to, "--world-size", "2", *options)
    run(capsys, "verify", back)
    run(capsys, "diff", source, back, "--model-only")
    one, two = CheckpointReader(source), CheckpointReader(back)
    assert two.tensors.keys() == model.state.keys()
    for key in two.tensors:
        a, b = one.tensor(key), two.tensor(key)
        assert a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))
    # What dcp.load unflattens with.
    assert FileSystemReader(back).read_metadata().planner_data["norm.weight"] == ("norm.weight",)
    assert (two.manifest.plans != ()) == (to == "owner")


@pytest.mark.parametrize("name", MODELS)
def test_files_are_the_adapters_conversion(tmp_path, capsys, name):
    source, model = save_model(tmp_path / "source", name)
    hf = tmp_path / "hf"
    run(capsys, "convert", source, hf, "--to", "hf", "--dtype", "bfloat16", *options_of(name))
    reader = CheckpointReader(source)
    state = {key: reader.tensor(key).bfloat16() for key in model.state}
    expected, found = model.adapter.to_hf(state), load_file(hf / SINGLE)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    config = json.loads((hf / "config.json").read_text())
    assert config["hidden_size"] == 64 and config["torch_dtype"] == "bfloat16"
    # The names of the model on both sides; rounding is within a tolerance.
    diff = ["diff", source, hf, "--model-only", *options_of(name)]
    run(capsys, *diff, status=1)
    run(capsys, *diff, "--tolerance", "0.02")
    assert "largest difference 0.0" in run(capsys, *diff, "--tolerance", "0.02").out


def test_manifest_says_model_and_sequence_length(tmp_path, capsys):
    _, model = save_model(tmp_path / "unused", "llama3_owner")
    weights = {key: torch.ones(tensor.shape) for key, tensor in model.state.items()}
    job = {"model": "llama3_owner", "flavor": "tiny", "seq_len": 96}
    source, hf, assets = (tmp_path / name for name in ("source", "hf", "assets"))
    save_owner(weights, source, **job)
    assets.mkdir()
    (assets / "tokenizer.json").write_text("{}")
    run(capsys, "convert", source, hf, "--to", "hf", "--hf-assets", assets)
    assert json.loads((hf / "config.json").read_text())["max_position_embeddings"] == 96
    assert (hf / "tokenizer.json").read_text() == "{}"
    run(capsys, "diff", source, hf)


def test_tied_head_that_differs_is_refused(tmp_path, capsys):
    source, _ = save_model(tmp_path / "source", "qwen3_owner", tied=False)
    target = tmp_path / "hf"
    arguments = ["convert", source, target, "--to", "hf", *options_of("qwen3_owner")]
    said = run(capsys, *arguments, status=2).err
    assert "output.weight differs from tok_embeddings.weight" in said
    assert not target.exists()


def test_other_model_is_refused(tmp_path, capsys):
    source = save_owner(make_state(), tmp_path / "source")
    arguments = ["convert", source, tmp_path / "hf", "--to", "hf"]
    said = run(capsys, *arguments, *options_of("llama3_owner"), status=2).err
    assert "legal: shape" in said and said.splitlines()[-1].startswith("error: ")
    hf = save_hf(tmp_path / "weights", {"model.norm.weight": torch.ones(3)})
    arguments = ["convert", hf, tmp_path / "dcp", "--to", "rows", "--world-size", "2"]
    said = run(capsys, *arguments, *options_of("llama3_owner"), status=2).err
    assert "lacks tensor" in said
    assert "received neither" in run(capsys, *arguments, status=2).err
    assert not (tmp_path / "dcp").exists() and not (tmp_path / "hf").exists()


def test_options_belong_to_their_targets(tmp_path, capsys):
    for options in (
        ["--to", "hf", "--world-size", "2"],
        ["--to", "hf", "--hf-assets", str(tmp_path / "none")],
        ["--to", "rows", "--world-size", "2", "--dtype", "bfloat16"],
    ):
        with pytest.raises(SystemExit) as raised:
            main(["convert", str(tmp_path), str(tmp_path / "target"), *options])
        assert raised.value.code == 2
    hf = save_hf(tmp_path / "weights", {"a": torch.ones(3)})
    said = run(capsys, "convert", hf, tmp_path / "target", "--to", "hf", status=2).err
    assert "holds Hugging Face weights already" in said


def save_hf(folder, weights):
    """Two files and their index, as save_pretrained writes them."""
    folder.mkdir()
    names = sorted(weights)
    files = {name: f"model-0000{1 + k % 2}-of-00002.safetensors" for k, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: weights[n] for n in names if files[n] == file}, folder / file)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def weights(tmp_path):
    values = {name: torch.arange(6.0).reshape(2, 3) + k for k, name in enumerate("abcd")}
    return save_hf(tmp_path / "weights", values)


def problems(folder, capsys):
    status = main(["verify", str(folder)])
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert status == (1 if found else 0)
    return found


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_whole_folder(weights, capsys):
    assert problems(weights, capsys) == []
    printed = run(capsys, "inspect", weights, "--tensors").out
    assert "Hugging Face weights" in printed and "float32: 24" in printed and "2x3" in printed
    summary = json.loads(run(capsys, "inspect", weights, "--json").out)
    assert summary["tensors"]["a"] == ["float32", [2, 3]] and len(summary["files"]) == 2


def test_damaged_folders(weights, capsys):
    first = weights / "model-00001-of-00002.safetensors"
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    assert "cut short" in problems(weights, capsys)[0]
    first.write_bytes(content + b"x")
    assert "too long" in problems(weights, capsys)[0]
    first.unlink()
    assert len(problems(weights, capsys)) == 1
    first.write_bytes(content)
    edit_index(weights, lambda index: index["weight_map"].update(e=first.name))
    assert problems(weights, capsys) == [
        f"problem: {first}: e is missing, which model.safetensors.index.json has"
    ]
    edit_index(weights, lambda index: [index["weight_map"].pop(name) for name in "ea"])
    assert problems(weights, capsys) == [
        f"problem: {first}: a is there, but not in model.safetensors.index.json"
    ]
    edit_index(weights, lambda index: index["weight_map"].update(a=first.name))
    edit_index(weights, lambda index: index["metadata"].update(total_size=1))
    assert "total_size is 1, but the tensors have 96 bytes" in problems(weights, capsys)[0]
    (weights / "model.safetensors.index.json").write_text("{")
    assert "cannot be read" in problems(weights, capsys)[0]


def test_not_finite(tmp_path, capsys):
    folder = save_hf(tmp_path / "w", {"a": torch.tensor([1.0, math.nan]), "b": torch.ones(2)})
    found = problems(folder, capsys)
    assert len(found) == 1 and "a: 1 of 2 values are NaN or infinite" in found[0]
    run(capsys, "verify", folder, "--no-finite")


def test_diff_of_two_folders(weights, tmp_path, capsys):
    values = {name: torch.arange(6.0).reshape(2, 3) + k for k, name in enumerate("abcd")}
    run(capsys, "diff", weights, save_hf(tmp_path / "same", values))
    values["c"][1, 1] += 0.25
    printed = run(capsys, "diff", weights, save_hf(tmp_path / "other", values), status=1).out
    assert "0.25" in printed and "1 tensors" in printed
