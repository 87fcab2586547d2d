"""The spawn harness itself: what it returns, what it reports, what it leaves behind."""

import os
import signal
import sys
import time
import uuid
import warnings

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
    """Mark every process that this test starts, and check that none outlives it."""
    name, value = "HARNESS_TEST", uuid.uuid4().hex
    monkeypatch.setenv(name, value)
    yield f"{name}={value}"
    # The resource tracker of multiprocessing belongs to this process and stays.
    left = [pid for pid in processes_with_env(f"{name}={value}") if not _is_tracker(pid)]
    assert left == []


def _is_tracker(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()


def _sum_of_ranks(offset):
    value = torch.tensor([dist.get_rank() + offset], dtype=torch.float64)
    dist.all_reduce(value)
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(dist.get_rank())
    assert os.environ["WORLD_SIZE"] == str(dist.get_world_size())
    assert torch.get_num_threads() == 1
    return dist.get_rank(), value


def test_results_come_in_rank_order(mark):
    results = run_ranks(_sum_of_ranks, 3, 10.0)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(value, torch.tensor([33.0]).double()) for _, value in results)


def _rank_one_raises():
    print("about to start")
    if dist.get_rank() == 1:
        raise ValueError("wrong shape on rank one")
    dist.barrier()


def test_a_rank_that_raises_fails_the_run_with_its_traceback(mark):
    began = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        run_ranks(_rank_one_raises, 2, timeout_s=60)
    message = str(failure.value)
    assert "ValueError: wrong shape on rank one" in message
    assert "in _rank_one_raises" in message
    # The other rank waits for it, and its stack says where; what was printed is there as well.
    assert "rank 0 of 2: still running" in message
    assert "about to start" in message
    assert time.monotonic() - began < 45


def _rank_zero_hangs():
    if dist.get_rank() == 0:
        _wait_for_nobody()


def _wait_for_nobody():
    dist.recv(torch.zeros(1), src=1)


def test_a_rank_that_hangs_is_killed_and_shows_its_stack(mark):
    with pytest.raises(AssertionError) as failure:
        run_ranks(_rank_zero_hangs, 2, timeout_s=20)
    message = str(failure.value)
    assert "time limit of 20 s" in message
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


def _every_rank_raises():
    raise KeyError(f"rank {dist.get_rank()}")


def test_expected_errors_come_in_rank_order(mark):
    errors = run_ranks_expect_error(_every_rank_raises, 2)
    assert errors == [("KeyError", "'rank 0'"), ("KeyError", "'rank 1'")]


def test_a_rank_stranded_by_an_error_elsewhere_is_not_taken_for_an_error(mark):
    with pytest.raises(AssertionError) as failure:
        run_ranks_expect_error(_rank_one_raises, 2, timeout_s=20)
    message = str(failure.value)
    assert "time limit of 20 s" in message
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
    result = run_torchrun(["hello.py", "arg"], 2, cwd=tmp_path, env={"EXTRA": "set"}, timeout_s=60)
    assert result.returncode == 0
    assert "hello from 0 set arg" in result.output
    assert "hello from 1 set arg" in result.output


def test_torchrun_failure_shows_the_output(mark, tmp_path):
    (tmp_path / "fails.py").write_text("raise ValueError('wrong from the start')")
    with pytest.raises(AssertionError, match="ValueError: wrong from the start"):
        run_torchrun(["fails.py"], 2, cwd=tmp_path, timeout_s=60)
    result = run_torchrun(["fails.py"], 2, cwd=tmp_path, timeout_s=60, check=False)
    assert result.returncode != 0


def test_torchrun_that_hangs_is_killed_and_shows_its_stacks(mark, tmp_path):
    (tmp_path / "hangs.py").write_text(
        "import time\ndef wait_for_nobody():\n    time.sleep(600)\nwait_for_nobody()"
    )
    with pytest.raises(AssertionError) as failure:
        # On two busy cores torchrun needs up to 20 s to start its workers.
        run_torchrun(["hangs.py"], 2, cwd=tmp_path, timeout_s=45)
    assert "time limit of 45 s" in str(failure.value)
    assert "in wait_for_nobody" in str(failure.value)


def test_ranks_end_with_the_process_that_started_them(mark, tmp_path, monkeypatch):
    """A killed pytest leaves no rank behind; `mark` checks it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what a killed process leaves, pytest removes
    pid = os.spawnv(
        os.P_NOWAIT,
        sys.executable,
        [sys.executable, "-c", "import tests.unit.test_harness as t; t.start_ranks_that_hang()"],
    )
    deadline = time.monotonic() + 60
    while len([p for p in processes_with_env(mark) if not _is_tracker(p)]) < 3:
        assert time.monotonic() < deadline, "the ranks never started"
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while any(not _is_tracker(p) for p in processes_with_env(mark)):
        assert time.monotonic() < deadline, "the ranks outlived their parent"
        time.sleep(0.1)


def start_ranks_that_hang():
    run_ranks(_rank_zero_hangs, 2, timeout_s=300)
