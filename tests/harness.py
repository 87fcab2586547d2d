"""Run a test's code on several ranks, and end it when it hangs.

`run_ranks(fn, world_size, ...)` runs a module-level function on every rank of a gloo group, each
rank in a process of its own, and returns the results by rank. `run_ranks_expect_error` demands
that every rank raises. `run_torchrun` runs a real `torch.distributed.run`.

[Note: how a rank ends]
Ranks meet over a file, not over a port, so tests may run side by side. A rank leaves its outcome
in a file, written whole or not at all. A rank whose function raised then holds its connections
open until it is killed: closing them would turn the hang of a rank that still waits for it into a
connection error, and hide the hang. Three things end a rank: the barrier after success, a kill by
the parent (first failure or time limit), and the end of the parent, which each rank watches.

After the barrier and destroy_process_group, in which a crash counts, a rank leaves without
finalizing the interpreter. That could abort it: a thread of gloo holds on to a finished
collective's tensors for a moment longer than the caller waits, releasing the last reference to one
takes the GIL, and a thread that asks for the GIL while the interpreter finalizes is unwound by
force, which in C++ code means std::terminate (pytorch/pytorch#190489). destroy_process_group waits
for these threads only if nothing else refers to the group, as a module's mesh may. So no `atexit`
function of a rank runs.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Seconds. After the first failure the other ranks may report theirs; a process that is asked for
# its stacks, or to end, does so at once, but may have to wait for its turn on a busy machine; a
# poll of outcome files costs next to nothing.
_GRACE_AFTER_FAILURE = 3.0
_GRACE_FOR_TURN = 20.0
_POLL = 0.05
# The harness's limit comes first, so that the failure shows stacks instead of a gloo time-out.
_GROUP_TIMEOUT_MARGIN = 60.0
_OUTPUT_TAIL = 8_000  # characters

_RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    # gloo otherwise looks up the host's own name, which a sandbox may not resolve.
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class _Outcome:
    """What one rank's function did: its value, or the exception that it raised."""

    value: Any = None
    error_type: str | None = None
    error_message: str = ""
    error_traceback: str = ""

    @property
    def failed(self) -> bool:
        return self.error_type is not None


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `fn(*args)` on `world_size` gloo ranks; return the values by rank.

    `fn`, `args` and the values must be picklable. Inside `fn` the default process group exists and
    RANK, LOCAL_RANK and WORLD_SIZE are set. Warnings attributed to this project are errors there
    too.

    Raises:
        AssertionError: a rank raised, died or was still running after `timeout_s` seconds; the
            message has every rank's traceback, or the stack it was in, and its output.
    """
    with _Ranks(fn, world_size, args, timeout_s) as ranks:
        ranks.wait(stop_at_first_failure=True)
        if any(ranks.problem(rank) for rank in range(world_size)):
            raise AssertionError(ranks.report("run_ranks failed"))
        ranks.echo_output()
        return [ranks.outcomes[rank].value for rank in range(world_size)]


def run_ranks_expect_error(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[tuple[str, str]]:
    """Run `fn(*args)` as `run_ranks` does; return each rank's (exception type name, message).

    Raises:
        AssertionError: a rank returned, died or was still running after `timeout_s` seconds. A rank
            that waits for one which has raised counts as still running (see the note above).
    """
    with _Ranks(fn, world_size, args, timeout_s) as ranks:
        ranks.wait(stop_at_first_failure=False)
        errors = []
        for rank in range(world_size):
            outcome = ranks.outcomes.get(rank)
            if outcome is None or outcome.error_type is None:
                raise AssertionError(ranks.report("an error was expected on every rank"))
            errors.append((outcome.error_type, outcome.error_message))
        return errors


class _Ranks:
    """The processes of one run, from start to kill."""

    def __init__(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float
    ) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.timed_out = False
        self.outcomes: dict[int, _Outcome] = {}
        self._processes: list[BaseProcess] = []
        self._ended = [False] * world_size
        self._stacks: dict[int, str] = {}
        # Pickled here and unpickled late in the child, after it has set its environment: that
        # imports the test's module, which may read it.
        self._payload = pickle.dumps((fn, args))

    def __enter__(self) -> "_Ranks":
        with contextlib.ExitStack() as undo:
            self._dir = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="matrixfsdp-ranks-"))
            )
            undo.callback(self._kill)
            context = forking_context()
            for rank in range(self.world_size):
                shape = (rank, self.world_size, str(self._dir))
                process = context.Process(
                    target=_rank_main,
                    args=(*shape, self.timeout_s, dict(os.environ), self._payload),
                    name=f"rank{rank}",
                    # A rank may have a child, as asynchronous checkpoints have; a daemon may not.
                    daemon=False,
                )
                process.start()
                self._processes.append(process)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        if exc_type is not None and not issubclass(exc_type, AssertionError):
            # For instance the test's own time limit: say where the ranks were.
            self._dump_stacks()
            print(self.report("interrupted"), file=sys.stderr)
        self._undo.close()

    def wait(self, stop_at_first_failure: bool) -> None:
        """Until every rank is done, or one failed, or the time is up."""
        limit = deadline = time.monotonic() + self.timeout_s
        while True:
            # Before collecting, so that what a rank left before it ended is known by now.
            self._ended = [not process.is_alive() for process in self._processes]
            self._collect()
            if stop_at_first_failure and self._any_failed():
                deadline = min(limit, time.monotonic() + _GRACE_AFTER_FAILURE)
                stop_at_first_failure = False
            if all(self._is_done(rank) for rank in range(self.world_size)):
                return
            if time.monotonic() >= deadline:
                self.timed_out = deadline == limit
                self._dump_stacks()
                return
            sentinels = zip(self._processes, self._ended, strict=True)
            wait_for([process.sentinel for process, ended in sentinels if not ended], timeout=_POLL)

    def _any_failed(self) -> bool:
        if any(outcome.failed for outcome in self.outcomes.values()):
            return True
        # Ended without a word, or in the barrier after its function.
        return any(
            ended and (self._processes[rank].exitcode != 0 or rank not in self.outcomes)
            for rank, ended in enumerate(self._ended)
        )

    def _is_done(self, rank: int) -> bool:
        # A rank that succeeded still has its barrier to pass; one that failed waits to be killed.
        return self._ended[rank] or (rank in self.outcomes and self.outcomes[rank].failed)

    def problem(self, rank: int) -> str | None:
        """What went wrong on this rank, None if nothing did."""
        outcome = self.outcomes.get(rank)
        if outcome is not None and outcome.failed:
            return outcome.error_traceback
        exitcode = self._processes[rank].exitcode
        when = ", after its function returned" if outcome is not None else ""
        if rank in self._stacks:
            return f"still running{when}, in:\n{self._stacks[rank]}"
        if exitcode is not None and exitcode < 0:
            return f"died of {signal.Signals(-exitcode).name}{when}"
        if exitcode or (exitcode == 0 and outcome is None):
            return f"ended with exit code {exitcode}{when or ', no result and no exception'}"
        return None

    def report(self, headline: str) -> str:
        if self.timed_out:
            headline += f": time limit of {self.timeout_s:g} s"
        parts = [headline]
        for rank in range(self.world_size):
            outcome = self.outcomes.get(rank, _Outcome())
            text = self.problem(rank) or f"returned {outcome.value!r:.200}"
            parts.append(f"--- rank {rank} of {self.world_size}: {text.rstrip()}")
            if output := self._output(rank):
                parts.append(f"--- rank {rank} output:\n{output}")
        return "\n".join(parts)

    def echo_output(self) -> None:
        """Pass the ranks' output on; pytest shows it if the test fails later."""
        for rank in range(self.world_size):
            if output := self._output(rank):
                print(f"--- rank {rank} output:\n{output}")

    def _output(self, rank: int) -> str:
        path = self._dir / f"output{rank}"
        return _tail(path.read_text(errors="replace")).strip() if path.exists() else ""

    def _collect(self) -> None:
        for rank in range(self.world_size):
            path = self._dir / f"outcome{rank}"
            if rank not in self.outcomes and path.exists():
                self.outcomes[rank] = pickle.loads(path.read_bytes())

    def _dump_stacks(self) -> None:
        self._collect()
        # A rank that returned and waits in the last barrier is of interest only if none failed.
        waiting = set(self.outcomes) if self._any_failed() else set()
        busy = [
            rank
            for rank, process in enumerate(self._processes)
            if process.is_alive() and rank not in waiting
        ]
        paths = {rank: self._dir / f"stack{rank}" for rank in busy}
        asked = [rank for rank in busy if paths[rank].exists()]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        # The main thread comes last, and what called _rank_main is of no interest.
        _wait_until(
            lambda: all(
                f"in {_rank_main.__name__}\n" in paths[rank].read_text()
                or not self._processes[rank].is_alive()
                for rank in asked
            )
        )
        for rank in busy:
            stack = paths[rank].read_text() if rank in asked else "(starting up)"
            self._stacks[rank] = stack or "(it did not say)"

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()


@functools.cache
def forking_context() -> ForkServerContext:
    """Ranks are forked from a process that has imported what most of them need, and nothing more:
    no thread runs in it, no group exists, no generator was drawn from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    # OpenMP's number of threads is read when torch is imported, in the server.
    before = {name: os.environ.get(name) for name in _RANK_ENV}
    os.environ.update(_RANK_ENV)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _rank_main(
    rank: int,
    world_size: int,
    directory: str,
    timeout_s: float,
    environment: dict[str, str],
    payload: bytes,
) -> None:
    """The child's side: run the function, leave the outcome in a file."""
    where = Path(directory)
    _end_with_parent()
    with (where / f"output{rank}").open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(output.fileno(), stream.fileno())
    faulthandler.enable()
    stack_path = where / f"stack{rank}.part"
    stack_file = stack_path.open("w")  # open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    stack_path.replace(stack_path.with_suffix(""))  # asks for the signal, which would have killed
    os.environ.clear()  # the server's, from when it was started
    os.environ.update(environment)
    os.environ.update(_RANK_ENV, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    warnings.filterwarnings("error", module=r"(torchtitan_matrixfsdp|tests)\b")

    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(where / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s + _GROUP_TIMEOUT_MARGIN),
        )
        fn, args = pickle.loads(payload)
        # Pickled inside the try: a value that cannot be is a failure of this rank.
        outcome = pickle.dumps(_Outcome(value=fn(*args)))
    except BaseException as error:
        outcome = pickle.dumps(
            _Outcome(
                error_type=type(error).__name__,
                error_message=str(error),
                error_traceback=traceback.format_exc(),
            )
        )
        _leave_outcome(where / f"outcome{rank}", outcome)
        while True:  # [Note: how a rank ends]
            time.sleep(3600)
    _leave_outcome(where / f"outcome{rank}", outcome)
    if dist.is_initialized():
        # Without it a rank that is done would close connections that others still use.
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # [Note: how a rank ends]


def _leave_outcome(path: Path, content: bytes) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


def _end_with_parent() -> None:
    """End this process when its parent has ended, however the parent ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GRACE_FOR_TURN
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL)


def _tail(text: str) -> str:
    return text if len(text) <= _OUTPUT_TAIL else "[...]" + text[-_OUTPUT_TAIL:]


@dataclass(frozen=True)
class TorchrunResult:
    returncode: int
    output: str
    """What torchrun printed, then what each rank printed, all of it: no line is torn."""


def run_torchrun(
    args: Sequence[str],
    nproc: int,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
    check: bool = True,
) -> TorchrunResult:
    """Run `python -m torch.distributed.run --standalone --nproc-per-node NPROC ARGS`.

    Args:
        args: what follows torchrun's own options: `["-m", "some.module", "--key", "value"]`.
        cwd: the working directory; None is the current one.
        env: variables to set on top of this process's own.
        timeout_s: when it has passed, every process prints its Python stacks and is killed.
        check: raise unless torchrun exits with 0.

    Raises:
        AssertionError: with the end of each output, on a time-out or (if `check`) a failure.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc)]
    # torchrun starts every worker in a session of its own, so killing its process group would
    # leave the workers. All its descendants inherit this mark.
    mark = f"MATRIXFSDP_TEST_RUN={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    full_env = {**os.environ, **_RANK_ENV, **(env or {}), name: value, "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryDirectory(prefix="matrixfsdp-torchrun-") as directory:
        folder = Path(directory)
        # A file for each rank: in one file, ranks that print at the same time tear each other's
        # lines to pieces.
        command += ["--redirects", "3", "--log-dir", str(folder / "ranks"), *args]
        timed_out = False
        try:
            with (folder / "torchrun.log").open("w") as output:
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=full_env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                timed_out = True
                _show_stacks(process, mark)
        finally:
            _kill_marked(mark)
        returncode = process.wait()
        outputs = {"torchrun": (folder / "torchrun.log").read_text(errors="replace")}
        for path in sorted(folder.glob("ranks/*/attempt_*/[0-9]*/std*.log")):
            outputs[f"rank {path.parent.name} {path.stem}"] = path.read_text(errors="replace")
    if timed_out or (check and returncode != 0):
        what = f"time limit of {timeout_s:g} s" if timed_out else f"exit code {returncode}"
        parts = [f"{what}: {' '.join(command)}"]
        parts += [f"--- {who}:\n{_tail(text).strip()}" for who, text in outputs.items() if text]
        raise AssertionError("\n".join(parts))
    return TorchrunResult(returncode, "\n".join(outputs.values()))


def _show_stacks(torchrun: "subprocess.Popen[bytes]", mark: str) -> None:
    """Have every process print its stacks and end; the fault handler does so on SIGABRT."""
    # torchrun stands still meanwhile: once it saw one worker end it would end the others, which may
    # not have had their turn yet.
    torchrun.send_signal(signal.SIGSTOP)
    workers = set(processes_with_env(mark)) - {torchrun.pid}
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    _wait_until(lambda: workers.isdisjoint(processes_with_env(mark)))
    torchrun.send_signal(signal.SIGABRT)
    torchrun.send_signal(signal.SIGCONT)
    _wait_until(lambda: torchrun.poll() is not None)


def _kill_marked(mark: str) -> None:
    def none_left() -> bool:
        pids = list(processes_with_env(mark))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    _wait_until(none_left)  # a killed process is there until it has its turn to go


def processes_with_env(entry: str) -> Iterator[int]:
    """The ids of the processes whose environment had `NAME=value` when they were started."""
    wanted = entry.encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone by now, or another user's
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
