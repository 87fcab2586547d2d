"""The checkpoint manager in a process group of one: which folders it loads, keeps and deletes."""

from __future__ import annotations

import logging
import queue
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.config import Checkpoint as CheckpointConfig

from torchtitan_matrixfsdp.checkpoint import (
    CheckpointError,
    OwnerStorageReader,
    read_metadata,
    step_folders,
)
from torchtitan_matrixfsdp.checkpoint.manifest import METADATA
from torchtitan_matrixfsdp.titan.checkpointing import OwnerCheckpointManager

pytestmark = pytest.mark.usefixtures("group_of_one")


class Part:
    """A stateful part of a job: one number."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.dp_world_size = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Job:
    """A model and its parts, all of them equal to the step they are at."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2, bias=False)
        self.parts = {name: Part(0) for name in ("optimizers", "lr_schedulers", "dataloader")}
        self.train_state = Part(0)
        self.set(0)

    def set(self, step: int) -> None:
        self.model.weight.data.fill_(step)
        for part in [*self.parts.values(), self.train_state]:
            part.value = step

    @property
    def step(self) -> int:
        (value,) = {part.value for part in [*self.parts.values(), self.train_state]}
        assert torch.equal(self.model.weight, torch.full((2, 3), float(value)))
        return value


@contextmanager
def _run(dump_folder: Path, **keys: Any) -> Iterator[tuple[Job, OwnerCheckpointManager]]:
    """A job with a manager; at the end it is closed, and what it deletes is deleted."""
    job = Job()
    manager = OwnerCheckpointManager(
        model_parts=[job.model],
        checkpoint_config=CheckpointConfig(**{"enable": True, "interval": 1, **keys}),
        describe=dict,
        plans=(),
        hf_files=dict,
        states={"train_state": job.train_state},
        sd_adapter=None,
        base_folder=str(dump_folder),
        **job.parts,
    )
    try:
        yield job, manager
    finally:
        manager.close()


def _save(run: tuple[Job, OwnerCheckpointManager], *steps: int, last: bool = False) -> None:
    job, manager = run
    for step in steps:
        job.set(step)
        manager.save(step, last_step=last)


def _crash(folder: Path, *steps: int) -> None:
    """As if the job had been killed while it saved these steps: everything but the index."""
    for step in steps:
        (folder / f"step-{step}" / METADATA).unlink()


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _resumed(dump_folder: Path, step: int = -1, **keys: Any) -> int:
    with _run(dump_folder, **keys) as (job, manager):
        assert manager.load(step)
        return job.step


def test_the_newest_complete_step_is_loaded_and_partial_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "checkpoint"
    with _run(tmp_path, keep_latest_k=0) as run:
        assert not run[1].load()
        _save(run, 2, 10, 9, 12)
    _crash(folder, 10, 12)
    (folder / "step-11").mkdir()
    before = _content(folder)
    assert _resumed(tmp_path) == 9
    named = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(named) == 3
    for step, message in zip((10, 11, 12), named, strict=True):
        assert f"{folder / f'step-{step}'} is incomplete" in message and "skipped" in message
    assert _content(folder) == before
    assert _resumed(tmp_path, step=2) == 2
    assert "has steps after 2: [9]" in caplog.text
    for step in (0, 10, 11, 13):
        with pytest.raises(CheckpointError) as caught:
            _resumed(tmp_path, step=step)
        said = str(caught.value)
        assert f"load_step: received {step}; legal: -1" in said and "[2, 9]" in said


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_step_in_the_way_is_moved_aside(tmp_path: Path, async_mode: str) -> None:
    folder = tmp_path / "checkpoint"
    with _run(tmp_path) as run:
        _save(run, 1, 2, 3)
    _crash(folder, 3)
    complete, partial = _content(folder / "step-2"), _content(folder / "step-3")
    with _run(tmp_path, async_mode=async_mode) as run:
        assert run[1].load(1)
        _save(run, 2, 3)
    assert _content(folder / "aside-1-step_2") == complete
    assert _content(folder / "aside-1-step_3") == partial
    assert _resumed(tmp_path) == 3
    assert [f.step for f in step_folders(folder)] == [1, 2, 3]


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_crashes_in_a_row_cost_no_complete_checkpoint(tmp_path: Path, async_mode: str) -> None:
    """keep_latest_k = 2: TorchTitan counts what is partial, and would delete all that is not."""
    folder = tmp_path / "checkpoint"
    keys = {"keep_latest_k": 2, "async_mode": async_mode}
    # An asynchronous save is not complete yet when it purges, and may not count.
    more = 0 if async_mode == "disabled" else 1
    with _run(tmp_path, **keys) as run:
        _save(run, 1, 2, 3)
    kept = [f.step for f in step_folders(folder)]
    assert kept[-2:] == [2, 3] and len(kept) <= 2 + more
    for crashed in (4, 5, 6):
        shutil.copytree(folder / "step-3", folder / f"step-{crashed}")
        _crash(folder, crashed)
        assert _resumed(tmp_path, **keys) == 3
    partial = {step: _content(folder / f"step-{step}") for step in (4, 5, 6)}
    with _run(tmp_path, **keys) as run:
        _save(run, 7)
    kept = [f.step for f in step_folders(folder) if f.is_complete]
    assert kept[-2:] == [3, 7] and len(kept) <= 2 + more
    assert {step: _content(folder / f"step-{step}") for step in (4, 5, 6)} == partial


def test_going_back_does_not_delete_what_replaces_the_old_steps(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    with _run(tmp_path, keep_latest_k=0) as run:
        _save(run, 1, 2, 8, 9)
    with _run(tmp_path, keep_latest_k=2) as run:
        assert run[1].load(1)
        _save(run, 2, 3, 4)
    assert [f.step for f in step_folders(folder)] == [3, 4, 8, 9]


def test_what_is_half_deleted_is_no_checkpoint(tmp_path: Path) -> None:
    """A run that is killed while it purges; the thread that deletes never comes to it."""
    folder = tmp_path / "checkpoint"
    with _run(tmp_path, keep_latest_k=2) as run:
        dead: queue.Queue[Any] = queue.Queue()
        alive, run[1].purge_queue = run[1].purge_queue, dead
        _save(run, 1, 2, 3)
        run[1].purge_queue = alive
    assert (folder / "deleting-step_1" / METADATA).is_file()
    assert [f.step for f in step_folders(folder)] == [2, 3]
    with _run(tmp_path, keep_latest_k=2) as run:
        _save(run, 1)  # gone back by hand: it is deleted once more
        _save(run, 4)
    assert sorted(path.name for path in folder.glob("*step*")) == ["step-3", "step-4"]


def test_the_last_step_alone_does_not_resume(tmp_path: Path) -> None:
    with _run(tmp_path) as run:
        _save(run, 1)
        _save(run, 2, last=True)
    with pytest.raises(CheckpointError) as caught:
        _resumed(tmp_path)
    for fragment in ("step-2", "dataloader", "optimizer", "train_state", "load_step"):
        assert fragment in str(caught.value)
    assert _resumed(tmp_path, step=1) == 1


def test_initial_load_starts_a_run_of_its_own(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with _run(old) as run:
        _save(run, 5)
    before = _content(old)
    path = str(old / "checkpoint" / "step-5")
    with _run(new, initial_load_path=path) as (job, manager):
        assert manager.load()
        assert torch.equal(job.model.weight, torch.full((2, 3), 5.0))
        assert job.train_state.value == 0
    assert _resumed(new, initial_load_path=path, initial_load_model_only=False) == 5
    assert _content(old) == before
    for wrong in (old, old / "checkpoint", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            _resumed(new, initial_load_path=str(wrong))


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_save_that_fails_is_reported_and_costs_nothing(tmp_path: Path, async_mode: str) -> None:
    """A file where the run's folder was: root too cannot write below it."""
    folder = tmp_path / "checkpoint"
    with _run(tmp_path, async_mode=async_mode) as run:
        _save(run, 1)
        while not any(entry.is_complete for entry in step_folders(folder)):
            time.sleep(0.01)  # or this save would be what fails
        folder.rename(tmp_path / "kept")
        folder.write_text("in the way")
        with pytest.raises(CheckpointError) as caught:
            _save(run, 2, 3)
        folder.unlink()
        (tmp_path / "kept").rename(folder)
    for fragment in ("cannot save", str(folder), "checkpoint.folder"):
        assert fragment in str(caught.value)
    assert _resumed(tmp_path) == 1


def test_the_last_step_is_converted_as_it_is_written(tmp_path: Path) -> None:
    """``export_dtype``, as TorchTitan's ``tensor.to``; the job's own weights stay."""
    with _run(tmp_path, export_dtype="bfloat16") as run:
        job, manager = run
        values = torch.randn(2, 3)
        job.model.weight.data.copy_(values)
        manager.save(7, last_step=True)
        assert torch.equal(job.model.weight, values)
    folder = tmp_path / "checkpoint" / "step-7"
    metadata = read_metadata(folder)
    assert list(metadata.state_dict_metadata) == ["weight"]
    assert metadata.state_dict_metadata["weight"].properties.dtype == torch.bfloat16
    for reader in (OwnerStorageReader(folder), FileSystemReader(folder)):
        loaded = {"weight": torch.zeros(2, 3, dtype=torch.bfloat16)}
        dcp.load(loaded, storage_reader=reader)
        assert torch.equal(loaded["weight"], values.to(torch.bfloat16))
    # Read into float32, by the manager and by hand: the rounded values.
    with _run(tmp_path / "new", initial_load_path=str(folder)) as (job, manager):
        assert manager.load()
        assert torch.equal(job.model.weight, values.to(torch.bfloat16).float())


def test_keys_that_say_when_to_save(tmp_path: Path) -> None:
    """``interval``, ``enable_first_step_checkpoint``, ``load_only``, ``enable``."""
    folder = tmp_path / "checkpoint"
    with _run(tmp_path, interval=3, enable_first_step_checkpoint=True, keep_latest_k=0) as run:
        _save(run, *range(1, 8))
    assert [f.step for f in step_folders(folder)] == [1, 3, 6]
    before = _content(folder)
    with _run(tmp_path, load_only=True) as run:
        assert run[1].load()
        assert run[0].step == 6
        _save(run, 7, last=True)
    with _run(tmp_path, enable=False) as run:
        assert not run[1].load()
        _save(run, 8, last=True)
    assert _content(folder) == before


def test_parts_that_are_not_loaded_stay_as_they_are(tmp_path: Path) -> None:
    """``exclude_from_loading``; what is named must be a part of the state."""
    with _run(tmp_path) as run:
        _save(run, 4)
    excluded = ["dataloader", "lr_scheduler"]
    with _run(tmp_path, exclude_from_loading=excluded) as (job, manager):
        job.set(9)
        assert manager.load()
        assert torch.equal(job.model.weight, torch.full((2, 3), 4.0))
        found = {name: part.value for name, part in job.parts.items()}
        assert found == {"optimizers": 4, "lr_schedulers": 9, "dataloader": 9}
        assert job.train_state.value == 4
