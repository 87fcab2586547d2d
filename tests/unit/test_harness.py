"""The harness itself: what it returns, what it reports, what it leaves behind."""

import atexit
import os
import signal
import sys
import time
import uuid
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import (
    processes_with_env,
    run_ranks,
    run_ranks_expect_error,
    run_torchrun,
)


@pytest.fixture
def mark(monkeypatch):
    """Mark every process that this test starts, and check that none outlives it, nor a rank."""
    run_ranks(int, 1)  # the server that forks ranks stays, so it must not bear the mark
    name, value = "HARNESS_TEST", uuid.uuid4().hex
    monkeypatch.setenv(name, value)
    yield f"{name}={value}"
    assert _running(f"{name}={value}") == []
    assert _forked_ranks() == []


def _running(mark):
    return [pid for pid in processes_with_env(mark) if not _is_tracker(pid)]


def _forked_ranks():
    """The ranks that this process has started and that still run: children of its server."""
    processes = [_status(path) for path in Path("/proc").glob("[0-9]*")]
    servers = [pid for pid, parent, line in processes if parent == os.getpid() and _FORKS in line]
    assert len(servers) == 1
    return [pid for pid, parent, _ in processes if parent == servers[0]]


_FORKS = b"multiprocessing.forkserver"


def _status(path):
    """Of a process: its id, its parent's, its command line; zeros of one that has ended."""
    try:
        state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        line = (path / "cmdline").read_bytes()
    except OSError:
        return 0, 0, b""
    return (0, 0, b"") if state == "Z" else (int(path.name), int(parent), line)


def _is_tracker(pid):
    """Whether this is multiprocessing's resource tracker, which belongs to pytest and stays."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # gone by now
        return True


# Seconds. At the limit, what hangs must have got to the place where it hangs. If it has not, the
# machine is slow just now, and the next limit is tried.
_LIMITS = (15, 150)


def _arrive(folder, rank):
    (Path(folder) / str(rank)).touch()


def _failure_at_limit(folder, run):
    """What `run(limit)` says once the limit has left both ranks the time to `_arrive(folder)`."""
    for limit in _LIMITS:
        with pytest.raises(AssertionError) as failure:
            run(limit)
        if len(list(folder.iterdir())) == 2:
            break
    message = str(failure.value)
    assert f"time limit of {limit} s" in message
    return message


def _sum_of_ranks(offset):
    value = torch.tensor([dist.get_rank() + offset], dtype=torch.float64)
    dist.all_reduce(value)
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(dist.get_rank())
    assert os.environ["WORLD_SIZE"] == str(dist.get_world_size())
    assert torch.get_num_threads() == 1
    atexit.register(os.abort)  # does nothing: [Note: how a rank ends]
    return dist.get_rank(), value


def test_results_come_in_rank_order(mark):
    results = run_ranks(_sum_of_ranks, 3, 10.0)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(value, torch.tensor([33.0]).double()) for _, value in results)


def _rank_one_raises(folder):
    print("about to start")
    _arrive(folder, dist.get_rank())
    if dist.get_rank() == 1:
        raise ValueError("wrong shape on rank one")
    dist.barrier()


def test_a_rank_that_raises_fails_the_run_with_its_traceback(mark, tmp_path):
    with pytest.raises(AssertionError) as failure:
        run_ranks(_rank_one_raises, 2, tmp_path, timeout_s=250)
    message = str(failure.value)
    assert "time limit" not in message  # the failure ended it
    assert "ValueError: wrong shape on rank one" in message
    assert "in _rank_one_raises" in message
    # The other rank waits for it, and its stack says where; what was printed is there as well.
    assert "rank 0 of 2: still running" in message
    assert "about to start" in message


def _rank_zero_hangs(folder):
    if dist.get_rank() == 0:
        _wait_for_nobody(folder)
    _arrive(folder, 1)


def _wait_for_nobody(folder):
    _arrive(folder, 0)
    dist.recv(torch.zeros(1), src=1)


def test_a_rank_that_hangs_is_killed_and_shows_its_stack(mark, tmp_path):
    message = _failure_at_limit(
        tmp_path, lambda limit: run_ranks(_rank_zero_hangs, 2, tmp_path, timeout_s=limit)
    )
    assert "in _wait_for_nobody" in message
    assert "rank 1 of 2: still running, after its function returned" in message


def _rank_zero_dies(how):
    if dist.get_rank() == 0:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    # Not in a collective, which would notice.
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "said"), [("signal", "died of SIGKILL"), ("exit", "no result and no exception")]
)
def test_a_rank_that_dies_silently_fails_the_run(mark, how, said):
    with pytest.raises(AssertionError, match=f"rank 0 of 2: .*{said}"):
        run_ranks(_rank_zero_dies, 2, how, timeout_s=500)  # the failure must end it


def _rank_zero_dies_after_its_function(where):
    if where == "destroy_process_group" and dist.get_rank() == 0:
        dist.destroy_process_group = os.abort
    if where == "barrier" and dist.get_rank() == 1:
        dist.destroy_process_group()  # rank 0 will miss it


@pytest.mark.parametrize(
    ("where", "said", "printed"),
    [
        ("barrier", "ended with exit code 1", "in barrier"),
        ("destroy_process_group", "died of SIGABRT", "Fatal Python error: Aborted"),
    ],
)
def test_a_rank_that_dies_after_its_function_fails_the_run(mark, where, said, printed):
    """Its value is there by then, and doesn't hide it."""
    with pytest.raises(AssertionError) as failure:
        run_ranks(_rank_zero_dies_after_its_function, 2, where, timeout_s=250)
    message = str(failure.value)
    assert f"rank 0 of 2: {said}, after its function returned" in message
    assert "rank 1 of 2: returned None" in message
    assert printed in message
    assert "time limit" not in message


def _every_rank_raises():
    raise KeyError(f"rank {dist.get_rank()}")


def test_expected_errors_come_in_rank_order(mark):
    errors = run_ranks_expect_error(_every_rank_raises, 2)
    assert errors == [("KeyError", "'rank 0'"), ("KeyError", "'rank 1'")]


def test_a_rank_stranded_by_an_error_elsewhere_is_not_taken_for_an_error(mark, tmp_path):
    message = _failure_at_limit(
        tmp_path,
        lambda limit: run_ranks_expect_error(_rank_one_raises, 2, tmp_path, timeout_s=limit),
    )
    assert "rank 0 of 2: still running" in message


def _our_code_warns():
    warnings.warn("careless", stacklevel=1)


def _unpicklable_value():
    return lambda: None


def test_a_warning_or_an_unpicklable_value_is_an_error(mark):
    assert run_ranks_expect_error(_our_code_warns, 1) == [("UserWarning", "careless")]
    with pytest.raises(AssertionError, match="pickle"):
        run_ranks(_unpicklable_value, 1)


def test_torchrun_returns_what_was_printed(mark, tmp_path):
    (tmp_path / "hello.py").write_text(
        "import os, sys\nprint('hello from', os.environ['RANK'], os.environ['EXTRA'], sys.argv[1])"
    )
    result = run_torchrun(["hello.py", "arg"], 2, cwd=tmp_path, env={"EXTRA": "set"})
    assert result.returncode == 0
    assert "hello from 0 set arg" in result.output
    assert "hello from 1 set arg" in result.output


def test_torchrun_failure_shows_the_output(mark, tmp_path):
    (tmp_path / "fails.py").write_text("raise ValueError('wrong from the start')")
    with pytest.raises(AssertionError, match="ValueError: wrong from the start"):
        run_torchrun(["fails.py"], 2, cwd=tmp_path, timeout_s=120)
    result = run_torchrun(["fails.py"], 2, cwd=tmp_path, timeout_s=120, check=False)
    assert result.returncode != 0


def test_torchrun_that_hangs_is_killed_and_shows_its_stacks(mark, tmp_path):
    folder = tmp_path / "arrived"
    folder.mkdir()
    (tmp_path / "hangs.py").write_text(
        "import os, time\n"
        "def wait_for_nobody():\n"
        "    open('arrived/' + os.environ['RANK'], 'w').close()\n"
        "    time.sleep(600)\n"
        "wait_for_nobody()"
    )
    message = _failure_at_limit(
        folder, lambda limit: run_torchrun(["hangs.py"], 2, cwd=tmp_path, timeout_s=limit)
    )
    assert message.count("in wait_for_nobody") == 2


def test_ranks_end_with_the_process_that_started_them(mark, tmp_path, monkeypatch):
    """A killed pytest leaves no rank behind; `mark` checks it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what a killed process leaves, pytest removes
    folder = tmp_path / "arrived"
    folder.mkdir()
    code = f"import tests.unit.test_harness as t; t.start_ranks_that_hang({str(folder)!r})"
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < deadline, "the ranks never started"
        time.sleep(0.1)
    assert len(_running(mark)) == 4  # that process, its server, and two ranks
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 120
    while _running(mark):
        assert time.monotonic() < deadline, "the ranks outlived their parent"
        time.sleep(0.1)


def start_ranks_that_hang(folder):
    run_ranks(_rank_zero_hangs, 2, folder, timeout_s=300)
