"""Every key of [checkpoint] that can be refused before the first collective."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import JobConfig as TitanJobConfig

from torchtitan_matrixfsdp.titan.checkpoint_checks import check_checkpoint
from torchtitan_matrixfsdp.titan.checks import ConfigError


def _config(dump_folder: Path, **keys: Any) -> TitanJobConfig:
    config = TitanJobConfig()
    config.job.dump_folder = str(dump_folder)
    for key, value in {"enable": True, **keys}.items():
        assert hasattr(config.checkpoint, key)
        setattr(config.checkpoint, key, value)
    return config


def _step(folder: Path, name: str, *files: str) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    for file in files:
        (path / file).touch()
    return path


def _refused(config: TitanJobConfig, *fragments: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(config)
    for fragment in (*fragments, "received", "legal"):
        assert fragment in str(caught.value), str(caught.value)
    config.checkpoint.enable = False
    check_checkpoint(config)


def test_a_new_run_in_a_folder_to_be_made(tmp_path: Path) -> None:
    check_checkpoint(_config(tmp_path / "not" / "there"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", ["outputs", "outputs/run", "outputs/run/checkpoint"])
def test_a_file_where_a_folder_must_be(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    config = _config(tmp_path / "outputs" / "run")
    _refused(config, "checkpoint.folder", f"{path} is a file", "job.dump_folder", "load_only")
    check_checkpoint(_config(tmp_path / "outputs" / "run", load_only=True))


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    _refused(_config(tmp_path / "locked" / "run"), "checkpoint.folder", "not writable")


def test_load_step_must_be_complete(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    _step(folder, "step-2", ".metadata")
    _step(folder, "step-4", "__0_0.distcp")
    _step(folder, "step-6", "model.safetensors.index.json")
    check_checkpoint(_config(tmp_path, load_step=2))
    check_checkpoint(_config(tmp_path))
    for step in (0, 4, 6, 8):
        _refused(_config(tmp_path, load_step=step), "load_step", f"received {step}", "[2]")


def test_initial_load_path_must_be_a_checkpoint(tmp_path: Path) -> None:
    old, run = tmp_path / "old", tmp_path / "run"
    complete = _step(old, "step-2", ".metadata")
    partial = _step(old, "step-4", "__0_0.distcp")
    check_checkpoint(_config(run, initial_load_path=str(complete)))
    check_checkpoint(_config(run, initial_load_path=""))
    key = "checkpoint.initial_load_path"
    for wrong in (partial, tmp_path / "nowhere"):
        config = _config(run, initial_load_path=str(wrong))
        _refused(config, key, repr(str(wrong)), "no complete", ".metadata")
    # The folder of all steps is what people give first.
    _refused(_config(run, initial_load_path=str(old)), key, f"such as '{complete}'")
    # It is not used where the run has a checkpoint of its own.
    _step(run / "checkpoint", "step-1", ".metadata")
    check_checkpoint(_config(run, initial_load_path=str(partial)))


def test_hugging_face_weights_must_be_there(tmp_path: Path) -> None:
    empty = _step(tmp_path, "empty", "config.json")
    config = _config(tmp_path, initial_load_in_hf=True, initial_load_path=str(empty))
    _refused(config, "checkpoint.initial_load_path", repr(str(empty)), "*.safetensors")
    for name in ("model.safetensors.index.json", "model-00001-of-00001.safetensors"):
        good = _step(tmp_path, f"with_{name}", name)
        check_checkpoint(_config(tmp_path, initial_load_in_hf=True, initial_load_path=str(good)))
    config = _config(tmp_path, initial_load_in_hf=True)
    config.model.hf_assets_path = str(empty)
    _refused(config, "model.hf_assets_path", repr(str(empty)), "initial_load_in_hf")
    config = _config(tmp_path, initial_load_in_hf=True)
    config.model.hf_assets_path = str(good)
    check_checkpoint(config)


def test_what_the_hugging_face_format_cannot_hold(tmp_path: Path) -> None:
    config = _config(tmp_path, last_save_in_hf=True, last_save_model_only=False)
    _refused(config, "checkpoint.last_save_in_hf", "last_save_model_only = true")
    config = _config(tmp_path, initial_load_in_hf=True, initial_load_model_only=False)
    _refused(config, "checkpoint.initial_load_in_hf", "initial_load_model_only = true")
    config = _config(tmp_path, initial_load_in_hf_quantized=True)
    _refused(config, "checkpoint.initial_load_in_hf_quantized", "set it to false")
    check_checkpoint(_config(tmp_path, last_save_in_hf=True))


def test_only_parts_of_the_state_can_be_excluded(tmp_path: Path) -> None:
    parts = ["optimizer", "lr_scheduler", "dataloader", "train_state"]
    check_checkpoint(_config(tmp_path, exclude_from_loading=parts))
    for wrong in ("model", "optimiser", ""):
        config = _config(tmp_path, exclude_from_loading=["optimizer", wrong])
        _refused(config, "checkpoint.exclude_from_loading", repr(wrong), "lr_scheduler")
