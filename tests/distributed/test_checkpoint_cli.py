"""Conversions against what jobs of two ranks save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.distributed.checkpoints import SAVING, erase, load, whole_state
from tests.distributed.trainer import add_tiny_flavors, build_trainer
from tests.harness import run_ranks
from tests.support import CorpusPaths
from torchtitan_matrixfsdp.checkpoint.__main__ import main

JOB = [
    *SAVING,
    "--training.seq_len=64",
    "--training.local_batch_size=1",
    "--matrix_optimizer.ns_dtype=float32",
    "--activation_checkpoint.mode=none",
]
JOBS = {"zero3": [], "stock": ["--owner_fsdp.mode=stock"]}


def _save(corpus: CorpusPaths, tmp: Path) -> dict[str, dict[str, Any]]:
    saved = {}
    for name, options in JOBS.items():
        trainer = build_trainer([*JOB, *options], corpus, tmp / name)
        trainer.train()
        saved[name] = whole_state(trainer)
        trainer.close()
    return saved


def _load(corpus: CorpusPaths, tmp: Path, converted: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What a job holds after loading what was converted for it."""
    found = {}
    for name, folder in converted.items():
        trainer = build_trainer([*JOB, *JOBS[name]], corpus, tmp / f"load {name}")
        erase(trainer)
        load(trainer, folder)
        found[name] = whole_state(trainer)
        trainer.close()
    return found


def places(path: Path) -> dict[tuple[str, tuple[int, ...]], Any]:
    """Size and file of every chunk of a tensor; of scalars any rank may keep the copy."""
    metadata = FileSystemReader(path).read_metadata()
    found = {}
    for index, info in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata) and entry.size:
            assert index.offset is not None
            chunk = next(c for c in entry.chunks if c.offsets == index.offset)
            found[index.fqn, tuple(index.offset)] = (tuple(chunk.sizes), info.relative_path)
    return found


def test_conversions_are_what_jobs_save_and_load(
    corpus_dir: CorpusPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_tiny_flavors()  # here too: a conversion without a plan to go by builds the model
    expected = run_ranks(_save, 2, corpus_dir, tmp_path, timeout_s=280)[0]
    owner, stock = (tmp_path / name / "checkpoint" / "step-2" for name in JOBS)
    rows, wide, again = (tmp_path / name for name in ("rows", "wide", "again"))
    for arguments in (
        ["verify", owner],
        ["convert", owner, rows, "--to", "rows", "--world-size", "2"],
        ["convert", rows, wide, "--to", "rows", "--world-size", "5"],
        ["convert", wide, again, "--to", "owner", "--world-size", "2"],
        ["diff", owner, wide],
        ["diff", again, owner],
        ["verify", again],
    ):
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr()
    assert places(rows) == places(stock)
    assert places(again) == places(owner)
    assert places(owner) != places(stock)
    capsys.readouterr()
    assert main(["inspect", str(owner)]) == 0
    printed = capsys.readouterr().out
    assert "over 2 ranks" in printed and "__1_0.distcp" in printed and "llama3_owner" in printed
    # Each job takes up what the other one saved.
    converted = {"zero3": again, "stock": rows}
    for found in run_ranks(_load, 2, corpus_dir, tmp_path, converted, timeout_s=280):
        assert found == {name: expected["zero3"] for name in JOBS}
