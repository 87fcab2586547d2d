"""A training job of two ranks that may be killed at any moment, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.harness import forking_context, processes_with_env
from tests.support import CorpusPaths

RANKS = 2
JOB = [
    "--model.flavor=tiny_1layer",
    "--training.seq_len=32",
    "--training.local_batch_size=1",
    "--activation_checkpoint.mode=none",
    "--matrix_optimizer.ns_dtype=float32",
    "--checkpoint.enable",
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=0",
]


@dataclass
class Job:
    """One start of the job: its ranks, until they end or are killed."""

    corpus: CorpusPaths
    folder: Path
    """Of the run: every start of it uses the same."""
    overrides: list[str]
    mark: str = field(default_factory=lambda: f"MATRIXFSDP_TEST_RUN={uuid.uuid4().hex}")
    """In the environment of what the ranks start."""
    logs: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="matrixfsdp-job-")))
    ranks: list[BaseProcess] = field(default_factory=list)

    def start(self) -> None:
        """Fork the ranks."""
        context = forking_context()
        for rank in range(RANKS):
            arguments = (rank, self.corpus, self.folder, self.overrides, self.mark, self.logs)
            # Not a daemon: those may have no child, and a rank has one that saves.
            process = context.Process(target=run_rank, args=arguments, daemon=False)
            process.start()
            self.ranks.append(process)

    def kill(self, *ranks: int, by: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to some ranks."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank].pid or 0, by)

    def wait(self, seconds: float) -> list[int | None]:
        """Wait for all ranks; their exit codes, None for one that did not end."""
        deadline = time.monotonic() + seconds
        for process in self.ranks:
            process.join(max(deadline - time.monotonic(), 0))
        return [process.exitcode for process in self.ranks]

    def survivors(self, seconds: float) -> list[int]:
        """Processes that the ranks had started and that have not ended after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (pids := list(processes_with_env(self.mark))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return pids

    def log(self, rank: int = 0) -> str:
        """What a rank printed."""
        path = self.logs / f"output{rank}"
        return path.read_text(errors="replace") if path.exists() else ""


@contextlib.contextmanager
def started(job: Job) -> Iterator[Job]:
    """Start a job, and end at last whatever is left of it."""
    try:
        job.start()
        yield job
    finally:
        job.kill(*range(len(job.ranks)))
        job.wait(20)
        for pid in processes_with_env(job.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run_rank(
    rank: int, corpus: CorpusPaths, folder: Path, overrides: list[str], mark: str, logs: Path
) -> None:
    """What one rank does: train, and put each step's loss on the disk before it goes on."""
    from torchtitan_matrixfsdp.checkpoint.background import end_with_parent

    end_with_parent(os.getppid())  # the fork server, which ends with the test
    with (logs / f"output{rank}").open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(output.fileno(), stream.fileno())
    name, _, value = mark.partition("=")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="localhost",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    os.environ[name] = value
    try:
        _train(rank, corpus, folder, overrides, logs)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _train(rank: int, corpus: CorpusPaths, folder: Path, overrides: list[str], logs: Path) -> None:
    import torch.distributed as dist

    from torchtitan_matrixfsdp.cpu_device import use_cpu_device

    use_cpu_device()
    from torchtitan.components.metrics import BaseLogger
    from torchtitan.tools.logging import init_logger

    from tests.distributed.trainer import build_trainer

    init_logger()
    # A file instead of a port, which another job could have taken.
    store = dist.FileStore(str(logs / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    trainer = build_trainer([*JOB, *overrides], corpus, folder)
    lines = (folder / f"losses{rank}").open("a")

    class Recorder(BaseLogger):
        def log(self, metrics: dict[str, Any], step: int) -> None:
            values = [metrics["loss_metrics/global_avg_loss"], metrics["grad_norm"]]
            lines.write(json.dumps([step, *(value.hex() for value in values)]) + "\n")
            lines.flush()
            os.fsync(lines.fileno())

    trainer.metrics_processor.logger = Recorder()
    trainer.train()
    trainer.close()


def losses(folder: Path, rank: int) -> list[tuple[int, str, str]]:
    """(step, loss, norm) of every step that a rank has trained, in the order of training; the
    numbers exact. A line that a kill has cut is left out."""
    found = []
    for line in (folder / f"losses{rank}").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            step, loss, norm = json.loads(line)
            found.append((step, loss, norm))
    return found
