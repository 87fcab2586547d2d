"""A job killed at any moment goes on from its newest complete checkpoint, bit for bit."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.kill_job import RANKS, Job, losses, started
from tests.distributed.trainer import CONFIG
from tests.harness import processes_with_env
from tests.support import ROOT, CorpusPaths
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


def _until(done: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
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

    def measure(self) -> float:
        """Train it from the start to the end; the median of seconds from a step's folder to its
        index."""
        times = []
        with started(self.job("disabled")) as job:
            for step in range(1, self.steps + 1):
                path = self.checkpoints / f"step-{step}"
                _watch(path, None, job)
                start = time.monotonic()
                _until((path / METADATA).exists, job.log(0))
                times.append(time.monotonic() - start)
            codes = job.wait(PATIENCE)
            assert codes == [0] * RANKS, f"{codes}\n{job.log(0)}\n{job.log(1)}"
        return sorted(times)[len(times) // 2]

    def finish(self, mode: str) -> None:
        """Start it and let it end."""
        before = _contents(self.checkpoints)
        found = step_folders(self.checkpoints)
        with started(self.job(mode)) as job:
            codes = job.wait(PATIENCE)
            assert codes == [0] * RANKS, f"{codes}\n{job.log(0)}\n{job.log(1)}"
            self.check_start(job, found)
            assert job.survivors(10) == []
        self.check_kept(before)


def _kills(corpus: CorpusPaths, tmp: Path, seed: int, modes: list[str]) -> collections.Counter[str]:
    """A run that is killed once for each of ``modes``; where the kills landed."""
    steps = 2 * len(modes) + 2
    whole = Run(corpus, tmp / "whole", steps, seed)
    save_seconds = whole.measure()
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


def _entry_point(
    corpus: CorpusPaths, folder: Path, mark: str, name: str, *overrides: str
) -> list[subprocess.Popen[bytes]]:
    """The ranks of a job through the entry point, without a launcher that would end one rank when
    it sees another one end."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    variable, _, value = mark.partition("=")
    ranks = []
    for rank in range(RANKS):
        env = {
            **os.environ,
            variable: value,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "torchtitan_matrixfsdp.train"]
        command += [
            "--metrics.no-enable-tensorboard",
            "--job.config_file",
            str(CONFIG),
            "--job.dump_folder",
            str(folder),
        ]
        command += ["--training.dataset_path", str(corpus.corpus)]
        command += ["--model.hf_assets_path", str(corpus.tokenizer), "--training.seq_len=32"]
        with (folder / f"{name}{rank}").open("w") as output:
            ranks.append(
                subprocess.Popen(
                    [*command, *overrides], env=env, stdout=output, stderr=output, cwd=ROOT
                )
            )
    return ranks


def _savers(mark: str) -> list[int]:
    """The background processes that are there."""
    found = []
    for pid in processes_with_env(mark):
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _kill_at_once(ranks: list[subprocess.Popen[bytes]], mark: str) -> None:
    """Kill the ranks; whatever they have started must end by itself."""
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait(30)
    # Only what they have imported so far lets them see it: that may still take a while.
    start = time.monotonic()
    _until(lambda: not list(processes_with_env(mark)), "a background process lives on", seconds=60)
    print(f"the last process ended after {time.monotonic() - start:.1f} s")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_run_is_refused_and_no_orphan_stays(
    corpus_dir: CorpusPaths, tmp_path: Path
) -> None:
    """A second job cannot save to the folder of the first: one line, exit status 2, both ranks."""
    mark = f"MATRIXFSDP_TEST_RUN={uuid.uuid4().hex}"
    job = ["--checkpoint.interval=1", "--checkpoint.async_mode=async_with_pinned_mem"]
    job += ["--training.steps=1000000", "--training.local_batch_size=1"]
    # The debug model: one step of the iteration, since what it learns does not matter.
    job += ["--matrix_optimizer.ns_steps=1", "--activation_checkpoint.mode=none"]
    try:
        first = _entry_point(corpus_dir, tmp_path, mark, "first", *job)
        _until(lambda: (tmp_path / "checkpoint" / "step-1" / METADATA).exists(), "no save")
        second = _entry_point(corpus_dir, tmp_path, mark, "second", *job)
        assert [process.wait(PATIENCE) for process in second] == [2, 2]
        for rank in range(RANKS):
            said = (tmp_path / f"second{rank}").read_text()
            lines = [line for line in said.splitlines() if f"[rank {rank}] error: " in line]
            assert len(lines) == 1 and ".lock: another run saves" in lines[0], said
            assert f'"process": {first[0].pid}' in lines[0] and "Traceback" not in said
        assert [process.poll() for process in first] == [None, None]
        _kill_at_once(first, mark)
        # Once more while the background processes start: one of the two is killed as well, so that
        # the other one waits for it.
        third = _entry_point(corpus_dir, tmp_path, mark, "third", *job)
        _until(lambda: len(_savers(mark)) == RANKS, "no background processes")
        os.kill(_savers(mark)[0], signal.SIGKILL)
        _kill_at_once(third, mark)
    finally:
        for pid in processes_with_env(mark):
            os.kill(pid, signal.SIGKILL)
