"""A job killed at any moment goes on from its newest complete checkpoint, bit for bit."""

from __future__ import annotations

import collections
import hashlib
import random
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.kill_job import RANKS, Job, losses, started
from tests.support import CorpusPaths
from torchtitan_matrixfsdp.checkpoint import StepFolder, step_folders
from torchtitan_matrixfsdp.checkpoint.manifest import METADATA

MODES = ("disabled", "async", "async_with_pinned_mem")
# Seconds that a job may take to come to a save, or to end, on a busy machine.
PATIENCE = 120.0


def _contents(folder: Path) -> dict[str, str]:
    """One hash for each checkpoint in the folder, partial and moved ones included, by name."""
    found = {}
    for path in folder.glob("*step*"):
        digest = hashlib.sha256()
        for file in sorted(path.iterdir()):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        found[path.name] = digest.hexdigest()
    return found


def _save_seconds(folder: Path, steps: int) -> float:
    """The median time from a step's folder to its index, in a run that was not killed."""
    times = []
    for step in range(1, steps + 1):
        path = folder / f"step-{step}"
        first = min(file.stat().st_ctime for file in path.glob("*.distcp"))
        # The data file is changed until it is complete: the index comes after that.
        times.append((path / METADATA).stat().st_mtime - first)
    return max(sorted(times)[len(times) // 2], 0.02)


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def _watch(path: Path, old: int | None, job: Job) -> None:
    """Until there is a folder at ``path`` that is not the one with inode ``old``."""
    deadline = time.monotonic() + PATIENCE
    while _inode(path) in (None, old):
        ended = [process.exitcode for process in job.ranks]
        assert ended == [None] * RANKS, f"{ended}\n{job.log(0)}\n{job.log(1)}"
        assert time.monotonic() < deadline, job.log(0)
        time.sleep(0.001)


class Run:
    """One run, started again after each kill, and what is known of it."""

    def __init__(self, corpus: CorpusPaths, folder: Path, steps: int, seed: int) -> None:
        self.corpus = corpus
        self.folder = folder
        self.steps = steps
        self.random = random.Random(seed)
        self.landed: collections.Counter[str] = collections.Counter()
        folder.mkdir()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoint"

    def job(self, mode: str) -> Job:
        overrides = [f"--training.steps={self.steps}", f"--checkpoint.async_mode={mode}"]
        overrides += [f"--lr_scheduler.total_steps={self.steps}"]
        return Job(self.corpus, self.folder, overrides)

    def kill_once(self, mode: str, save_seconds: float) -> None:
        """Start, kill somewhere about a save, and check what is left."""
        before = _contents(self.checkpoints)
        found = step_folders(self.checkpoints)
        newest = max((entry.step for entry in found if entry.is_complete), default=0)
        target = newest + self.random.randint(1, 2)
        # Somewhere in the save; now and then after it, where the next step is trained.
        wait = self.random.uniform(0, 1.0 if self.random.random() < 0.8 else 3.0) * save_seconds
        everyone = self.random.random() < 0.5
        first = self.random.randrange(RANKS)
        # The launcher needs a moment to see that a rank is gone.
        gap = self.random.uniform(0, 0.3)
        path = self.checkpoints / f"step-{target}"
        old = _inode(path)  # a partial one, of an earlier start
        with started(self.job(mode)) as job:
            _watch(path, old, job)
            time.sleep(wait)
            if everyone:
                job.kill(*range(RANKS))
            else:
                job.kill(first)
                time.sleep(gap)
                job.kill(1 - first, by=signal.SIGTERM)
            codes = job.wait(30)
            assert codes[first] == -signal.SIGKILL and None not in codes, codes
            assert job.survivors(10) == [], "a process of the killed job lives on"
            self.check_start(job, found)
        now = _contents(self.checkpoints)
        partial = [e.path.name for e in step_folders(self.checkpoints) if not e.is_complete]
        inside = any(now[name] != before.get(name) for name in partial)
        self.landed["inside a save" if inside else "between saves"] += 1
        self.check_kept(before)

    def check_start(self, job: Job, found: list[StepFolder]) -> None:
        """It began from the newest complete step and named the partial ones."""
        log = job.log(0)
        complete = [entry for entry in found if entry.is_complete]
        if complete:
            assert f"Loaded {complete[-1].path}\n" in log, log
        else:
            assert "Loaded" not in log
        for entry in found:
            assert (f"{entry.path} is incomplete" in log) == (not entry.is_complete), log

    def check_kept(self, before: dict[str, str]) -> None:
        """Whatever was there is there, in its place or moved aside."""
        now = _contents(self.checkpoints)
        for name, digest in before.items():
            assert digest in now.values(), f"{name} was changed or deleted: {sorted(now)}"

    def finish(self, mode: str) -> Job:
        """Start it and let it end."""
        before = _contents(self.checkpoints) if self.checkpoints.exists() else {}
        found = step_folders(self.checkpoints)
        with started(self.job(mode)) as job:
            codes = job.wait(PATIENCE)
            assert codes == [0] * RANKS, f"{codes}\n{job.log(0)}\n{job.log(1)}"
            self.check_start(job, found)
            assert job.survivors(10) == []
        if before:
            self.check_kept(before)
        return job


def _kills(corpus: CorpusPaths, tmp: Path, seed: int, modes: list[str]) -> collections.Counter[str]:
    """A run that is killed once for each of ``modes``; where the kills landed."""
    steps = 2 * len(modes) + 2
    whole = Run(corpus, tmp / "whole", steps, seed)
    whole.finish("disabled")
    save_seconds = _save_seconds(whole.checkpoints, steps)
    expected = [{line[0]: line for line in losses(whole.folder, rank)} for rank in range(RANKS)]
    assert all(list(lines) == list(range(1, steps + 1)) for lines in expected)
    run = Run(corpus, tmp / "killed", steps, seed)
    for mode in modes:
        run.kill_once(mode, save_seconds)
    run.finish("disabled")
    for rank in range(RANKS):
        trained = losses(run.folder, rank)
        assert {line[0] for line in trained} == set(range(1, steps + 1))
        for line in trained:
            assert line == expected[rank][line[0]], f"rank {rank}, seed {seed}"
    names = sorted(_contents(run.checkpoints))
    partial = [entry.path.name for entry in step_folders(run.checkpoints) if not entry.is_complete]
    aside = [name for name in names if name.startswith("aside-")]
    print(
        f"seed {seed}: {len(modes)} kills landed {dict(run.landed)} (a save takes "
        f"{save_seconds:.3f} s); moved aside: {aside}; partial at the end: {partial}"
    )
    run.landed["moved aside"] = len(aside)
    return run.landed


def test_five_kills(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    modes = ["disabled", "async", "async_with_pinned_mem", "disabled", "async"]
    _kills(corpus_dir, tmp_path, 1, modes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thirty_kills(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    total: collections.Counter[str] = collections.Counter()
    for seed, mode in enumerate(MODES):
        folder = tmp_path / mode
        folder.mkdir()
        total += _kills(corpus_dir, folder, 100 + seed, [mode] * 10)
    print(f"30 kills: {dict(total)}")
    # Kills between saves alone would prove little.
    assert total["inside a save"] >= 5
