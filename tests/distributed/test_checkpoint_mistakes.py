"""What can be wrong with a checkpoint: one clear error, the same on every rank, nothing changed.

Real trainers on two ranks. What needs no second rank is in tests/unit/checkpoint and
tests/unit/titan/test_checkpointing.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.trainer import build_trainer, digest, record_metrics
from tests.harness import run_ranks
from tests.support import ROOT, CorpusPaths

JOB = [
    "--model.flavor=tiny_1layer",
    "--training.seq_len=32",
    "--training.local_batch_size=1",
    "--activation_checkpoint.mode=none",
    "--lr_scheduler.warmup_steps=1",
    "--lr_scheduler.total_steps=9",
    "--training.steps=2",
    "--checkpoint.enable",
    "--checkpoint.interval=1",
]
DEEP = "--model.flavor=tiny_2k"  # three layers of the same shapes
NARROW = "--model.flavor=tiny"  # three layers with half as many keys and values
SOAP = "--matrix_optimizer.name=SOAP"
ADAMW = "--matrix_optimizer.name=AdamW"
# One data-parallel rank: the two ranks are stages.
PIPELINE = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2", DEEP]


def _first(action: Callable[[], Any]) -> None:
    """On rank 0, while the others wait."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def _content(folder: Path) -> dict[str, str]:
    """A hash of every file but the lock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


class Cases:
    """Jobs of one pair of ranks, and the errors that they ended with."""

    def __init__(self, corpus: CorpusPaths, tmp: Path) -> None:
        self.corpus = corpus
        self.tmp = tmp
        self.errors: dict[str, str] = {}

    def train(self, name: str, *overrides: str) -> list[float]:
        """Train a job in the folder ``name``; its losses."""
        trainer = build_trainer([*JOB, *overrides], self.corpus, self.tmp / name)
        record = record_metrics(trainer)
        try:
            trainer.train()
        finally:
            trainer.close()
        return record.losses

    def steps(self, name: str) -> Path:
        return self.tmp / name / "checkpoint"

    def note(self, name: str, action: Callable[[], Any]) -> None:
        """Note the error that ``action`` ends with."""
        try:
            action()
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {error}"
        else:
            raise AssertionError(f"{name}: nothing was refused")

    def resume(self, name: str, source: str, *overrides: str) -> None:
        """Note how a new job fails that goes on from step 1 of the job ``source``."""
        path = self.steps(source) / "step-1"
        load = [f"--checkpoint.initial_load_path={path}", "--checkpoint.no-initial-load-model-only"]
        self.note(name, lambda: self.train("new", *load, *overrides))


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def _flip_in(key: str, kind: str) -> Callable[[Path], None]:
    """Flip a bit in the middle of what rank 1 stores of ``key``."""

    def flip(folder: Path) -> None:
        from torchtitan_matrixfsdp.checkpoint import read_metadata

        storage = read_metadata(folder).storage_data
        info = next(
            info
            for index, info in storage.items()
            if index.fqn.startswith(key) and info.relative_path == f"__{kind}_0.distcp"
        )
        _flip(folder / info.relative_path, info.offset + info.length // 2)

    return flip


def _cut(name: str, share: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return cut


def _newer(folder: Path) -> None:
    path = folder / "matrixfsdp.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 7}))


# name: (what happens to a copy of step 1, fragments of the message)
DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a truncated data file": (
        _cut("__1_0.distcp", 0.5),
        ["__1_0.distcp: truncated", "checkpoint.load_step", "(rank 1)"],
    ),
    "an empty data file": (_cut("__0_0.distcp", 0), ["__0_0.distcp: truncated", "load_step"]),
    "a bit of a weight": (
        _flip_in("layers.0.", "1"),
        ["__1_0.distcp: bytes", "(layers.0.", "checksum", "checkpoint.load_step"],
    ),
    "a bit of the data's position": (
        _flip_in("dataloader.dp_rank_1", "1"),
        ["__1_0.distcp: bytes", "(dataloader.dp_rank_1)", "checksum", "checkpoint.load_step"],
    ),
    "a missing data file": (
        lambda folder: (folder / "__1_0.distcp").unlink(),
        ["__1_0.distcp: No such file", "checkpoint.load_step"],
    ),
    "a missing checksum file": (
        lambda folder: (folder / "__1_0.json").unlink(),
        ["__1_0.json: missing", "checkpoint.load_step"],
    ),
    "a damaged checksum file": (
        _cut("__1_0.json", 0.5),
        ["__1_0.json: damaged", "checkpoint.load_step"],
    ),
    "a bit of a checksum file": (
        lambda folder: _flip(folder / "__1_0.json", 100),
        ["__1_0.json: damaged", "checkpoint.load_step"],
    ),
    "a truncated manifest": (
        _cut("matrixfsdp.json", 0.5),
        ["matrixfsdp.json: damaged", "checkpoint.load_step"],
    ),
    "a manifest of a newer format": (
        _newer,
        ["matrixfsdp.json: received format 7", "legal: 1 to 1", "install"],
    ),
    "a missing manifest": (
        lambda folder: (folder / "matrixfsdp.json").unlink(),
        ["matrixfsdp.json: missing", "checkpoint.load_step"],
    ),
    "garbage for an index": (
        lambda folder: (folder / ".metadata").write_bytes(b"garbage"),
        [".metadata: damaged", "checkpoint.load_step"],
    ),
    "the index of another step": (
        lambda folder: shutil.copy(folder.parent / "base" / ".metadata", folder),
        [".metadata: damaged, or of another checkpoint", "checkpoint.load_step"],
    ),
    "the index of another model": (
        lambda folder: shutil.copy(folder.parent / "deep" / ".metadata", folder),
        [".metadata: damaged, or of another checkpoint", "checkpoint.load_step"],
    ),
    "a data file of another step": (
        lambda folder: shutil.copy(folder.parent / "base" / "__1_0.distcp", folder),
        ["__1_0.distcp: bytes", "checksum", "checkpoint.load_step"],
    ),
    "a data file and its checksums of another step": (
        lambda folder: [
            shutil.copy(folder.parent / "base" / f"__1_0.{end}", folder)
            for end in ("distcp", "json")
        ],
        ["__1_0.json: of another checkpoint", "checkpoint.load_step"],
    ),
}


def _damage(cases: Cases) -> None:
    """Load damaged copies of step 1 into one job, and the good step at last."""
    copies = cases.tmp / "copies"
    first = cases.steps("base") / "step-1"

    def prepare() -> None:
        shutil.copytree(cases.steps("base") / "step-2", copies / "base")
        shutil.copytree(cases.steps("deep") / "step-1", copies / "deep")
        for name, (damage, _) in DAMAGE.items():
            damage(Path(shutil.copytree(first, copies / name)))

    _first(prepare)
    trainer = build_trainer(JOB, cases.corpus, cases.tmp / "damaged")
    manager = trainer.checkpointer
    manager.initial_load_model_only = False
    before = _content(copies)
    for name in DAMAGE:
        manager.initial_load_path = str(copies / name)
        cases.note(name, manager.load)
        assert trainer.step == 0
    assert _content(copies) == before
    manager.initial_load_path = str(first)
    assert manager.load() and trainer.step == 1
    trainer.close()


# name: fragments of the message
OTHERS: dict[str, list[str]] = {
    "a missing parameter": [
        "CheckpointError: ",
        "base/checkpoint/step-1: missing in the checkpoint: layers.1.",
        "model.flavor",
    ],
    "a deeper model's": ["deep/checkpoint/step-1: it holds", "layers.1.", "model.flavor"],
    "another shape": [
        "deep/checkpoint/step-1: of another model",
        "layers.0.attention.wk.weight: received (64, 64); legal: (32, 64)",
        "model.flavor",
    ],
    "Muon's state for SOAP": [
        "base/checkpoint/step-1: ",
        "missing in the checkpoint: optimizer.",
        "checkpoint.exclude_from_loading",
    ],
    "SOAP's state for Muon": [
        "soap/checkpoint/step-1: ",
        "optimizer.",
        "checkpoint.exclude_from_loading",
    ],
    "Muon's state for AdamW": [
        "base/checkpoint/step-1: ",
        "missing in the checkpoint: optimizer.",
        "checkpoint.exclude_from_loading",
    ],
    "AdamW's state for Muon": [
        "adamw/checkpoint/step-1: ",
        "optimizer.",
        "checkpoint.exclude_from_loading",
    ],
    "the model alone": [
        "model/checkpoint/step-2: it holds no dataloader, lr_scheduler, optimizer, train_state",
        "checkpoint.last_save_model_only",
        "checkpoint.load_step",
    ],
    "an empty step": ["checkpoint.load_step: received 3", "legal: -1", "[1, 2]"],
    "an empty step, while running": ["checkpoint.load_step: received 3", "legal: -1", "[1, 2]"],
    "no such step": ["ConfigError: checkpoint.load_step: received 99", "legal: -1", "[1, 2]"],
    "no such initial checkpoint": [
        "ConfigError: checkpoint.initial_load_path: received '/nowhere/step-1'",
        ".metadata",
    ],
    "an empty initial checkpoint": [
        "ConfigError: checkpoint.initial_load_path: received ",
        "gaps/checkpoint/step-3",
        ".metadata",
    ],
    "a file for a folder": ["ConfigError: checkpoint.folder: ", "checkpoint is a file"],
    "a folder in use": [
        "CheckpointError: ",
        "used/checkpoint/.lock: another run saves",
        '"process": ',
        "job.dump_folder",
    ],
    "another data-parallel degree": [
        "pipeline/checkpoint/step-1: saved by 1 data-parallel ranks; this job has 2",
        "adding dataloader to checkpoint.exclude_from_loading",
        "the 64 tokens it had read are read again",
    ],
}


@contextmanager
def _warnings() -> Any:
    """Collect what is logged as a warning on this rank."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(handler)


HOLD = """
import sys, time
from pathlib import Path
from torchtitan_matrixfsdp.checkpoint import FolderLock
lock = FolderLock(Path(sys.argv[1]))  # a name keeps it
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def _folder_in_use(cases: Cases) -> None:
    """Another process has the folder, then it is killed."""
    holder: list[subprocess.Popen[str]] = []

    def hold() -> None:
        command = [sys.executable, "-c", HOLD, str(cases.steps("used"))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        holder.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"

    _first(hold)
    try:
        cases.note("a folder in use", lambda: cases.train("used"))
    finally:
        for process in holder:
            process.kill()
            process.communicate()
    dist.barrier()
    build_trainer(JOB, cases.corpus, cases.tmp / "used").close()


def _mistakes(corpus: CorpusPaths, tmp: Path) -> dict[str, str]:
    cases = Cases(corpus, tmp)
    one = "--training.steps=1"
    whole = cases.train("base")
    cases.train("deep", DEEP, one)
    cases.train("soap", SOAP, one)
    cases.train("adamw", ADAMW, one)
    cases.train("model", "--checkpoint.last-save-model-only")
    cases.train("pipeline", *PIPELINE, one)
    saved = _content(tmp)

    cases.resume("a missing parameter", "base", DEEP)
    cases.resume("a deeper model's", "deep")
    cases.resume("another shape", "deep", NARROW)
    cases.resume("Muon's state for SOAP", "base", SOAP)
    cases.resume("SOAP's state for Muon", "soap")
    cases.resume("Muon's state for AdamW", "base", ADAMW)
    cases.resume("AdamW's state for Muon", "adamw")
    cases.note("the model alone", lambda: cases.train("model", "--training.steps=3"))
    cases.resume("another data-parallel degree", "pipeline", DEEP)
    # What its message says.
    position = "--checkpoint.exclude_from_loading=dataloader"
    source = cases.steps("pipeline") / "step-1"
    load = [f"--checkpoint.initial_load_path={source}", "--checkpoint.no-initial-load-model-only"]
    assert len(cases.train("reread", DEEP, position, *load)) == 1, "only step 2 is trained"

    _first(lambda: shutil.copytree(tmp / "base", tmp / "gaps"))
    _first(lambda: (cases.steps("gaps") / "step-3").mkdir())
    with _warnings() as warned:
        trainer = build_trainer(JOB, corpus, tmp / "gaps")
        cases.note("an empty step, while running", lambda: trainer.checkpointer.load(3))
        assert trainer.checkpointer.load() and trainer.step == 2
        trainer.close()
    if dist.get_rank() == 0:
        assert sum("gaps/checkpoint/step-3 is incomplete" in line for line in warned) == 2
    cases.note("an empty step", lambda: cases.train("gaps", "--checkpoint.load_step=3"))
    cases.note("no such step", lambda: cases.train("base", "--checkpoint.load_step=99"))
    for name, path in (
        ("no such initial checkpoint", Path("/nowhere/step-1")),
        ("an empty initial checkpoint", cases.steps("gaps") / "step-3"),
    ):
        override = f"--checkpoint.initial_load_path={path}"
        cases.note(name, lambda override=override: cases.train("new", override))
    _first(lambda: (tmp / "blocked").mkdir())
    _first(lambda: (tmp / "blocked" / "checkpoint").touch())
    cases.note("a file for a folder", lambda: cases.train("blocked"))
    _folder_in_use(cases)
    _damage(cases)

    now = _content(tmp)
    assert {path: now.get(path) for path in saved} == saved, "a checkpoint was changed"
    assert not any(path.startswith("new/") and "step-" in path for path in now)
    # After all this the first job still goes on from its first step.
    again = cases.train("base", "--checkpoint.load_step=1")
    assert again == whole[1:]
    return cases.errors


def test_every_fault_is_one_error_on_every_rank(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    first, second = run_ranks(_mistakes, 2, corpus_dir, tmp_path, timeout_s=240)
    assert first == second
    expected = {name: fragments for name, (_, fragments) in DAMAGE.items()} | OTHERS
    assert first.keys() == expected.keys()
    absent = [
        f"{name}: {fragment!r} not in {first[name]!r}"
        for name, fragments in expected.items()
        for fragment in fragments
        if fragment not in first[name]
    ]
    assert not absent, "\n".join(absent)
    assert not any("\n" in message for message in first.values())


def _full_disk(corpus: CorpusPaths, tmp: Path, disk: Path, async_mode: str) -> list[str]:
    """Fill the disk after step 1 was saved; the errors of the save and of a new job's start."""
    job = [*JOB, f"--checkpoint.async_mode={async_mode}"]
    folder = disk / async_mode / "checkpoint"
    trainer = build_trainer([*job, "--training.steps=1"], corpus, disk / async_mode)
    trainer.train()
    weights = digest(trainer.model_parts[0].tok_embeddings.weight.full_tensor())
    trainer.close()
    before = _content(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*"))
    filler = disk / "filler"

    def fill() -> None:
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - size // 2))

    _first(fill)
    trainer = build_trainer([*job, "--training.steps=4"], corpus, disk / async_mode)
    try:
        trainer.train()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("there was room")
    trainer.close()
    dist.barrier()
    assert {path: now for path, now in _content(folder).items() if path in before} == before
    assert (folder / "step-2").is_dir() and not (folder / "step-2" / ".metadata").exists()
    partial = _content(folder / "step-2")
    dist.barrier()
    _first(filler.unlink)
    with _warnings() as warned:
        trainer = build_trainer([*job, "--training.steps=1"], corpus, disk / async_mode)
        assert trainer.checkpointer.load() and trainer.step == 1
        assert digest(trainer.model_parts[0].tok_embeddings.weight.full_tensor()) == weights
        trainer.close()
    assert (dist.get_rank() > 0) or any("step-2 is incomplete" in line for line in warned)
    assert _content(folder / "step-2") == partial
    return [said]


def _disks(corpus: CorpusPaths, tmp: Path, disk: Path) -> list[str]:
    said = []
    for async_mode in ("disabled", "async"):
        said += _full_disk(corpus, tmp, disk, async_mode)
    dist.barrier()
    # Whoever holds a file open for writing would keep it from becoming read-only.
    _first(lambda: subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True))
    try:
        build_trainer(JOB, corpus, disk / "new")
    except ValueError as error:
        said.append(str(error))
    return said


def test_full_and_read_only_disks(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """A file system of 64 MiB in memory, because permissions do not bind root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.strip()}")
    try:
        first, second = run_ranks(_disks, 2, corpus_dir, tmp_path, disk, timeout_s=120)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert first == second and len(first) == 3
    for said in first[:2]:
        for fragment in ("CheckpointError", "No space left", "step-2", "older checkpoints"):
            assert fragment in said
    assert "checkpoint.folder" in first[2] and "not writable" in first[2]
