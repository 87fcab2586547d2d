"""The ranks of a benchmark: gloo processes of its own on this machine, or torchrun's."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_TIMEOUT = timedelta(minutes=5)
_OUTPUT_TAIL = 4_000  # characters


class RanksFailedError(RuntimeError):
    """A rank raised or died; the message has its traceback and output."""


def is_under_torchrun() -> bool:
    """Whether a launcher has made this process one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_world_size() -> int:
    """The launcher's number of ranks."""
    return int(os.environ["WORLD_SIZE"])


def is_reporter() -> bool:
    """Whether this process prints the report: it does unless it is a launcher's rank above 0."""
    return not is_under_torchrun() or os.environ["RANK"] == "0"


def rank_device() -> torch.device:
    """The device of this rank's tensors."""
    if torch.cuda.is_available() and is_under_torchrun():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def rank_mesh() -> DeviceMesh:
    """All ranks as one shard dimension."""
    return init_device_mesh(rank_device().type, (dist.get_world_size(),))


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object]) -> float:
    """What ``run`` takes on this rank, from a barrier on."""
    device = rank_device()
    synchronise(device)
    dist.barrier()
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def slowest(durations: Sequence[Sequence[float]]) -> list[list[float]]:
    """The slowest rank's durations, each of them; a collective."""
    maximum = torch.tensor(durations, dtype=torch.float64, device=rank_device())
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    values: list[list[float]] = maximum.tolist()
    return values


def leave(status: int) -> NoReturn:
    """End a rank's process at once.

    The interpreter's own end would race with gloo: torch 2.13 keeps the threads of a process group
    that FSDP2 has used even when the group is destroyed, and one that lets go of a tensor while the
    interpreter goes down aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Run the module-level ``fn(*args)`` on every rank of a default process group; return rank 0's
    value (None on the other ranks of a launcher).

    Raises:
        RanksFailedError: a rank of our own raised or died.
    """
    if is_under_torchrun():
        return _on_launched_rank(fn, args)
    with tempfile.TemporaryDirectory(prefix="matrixfsdp-bench-") as name, _rank_environment():
        try:
            mp.spawn(_own_rank, (world_size, name, fn, args), nprocs=world_size, daemon=True)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise RanksFailedError(f"{error}\n{_outputs(Path(name))}") from None
        return pickle.loads((Path(name) / "result").read_bytes())


@contextmanager
def _rank_environment() -> Iterator[None]:
    """What the ranks inherit; torch reads both when it is imported or starts gloo."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    # The ranks share the cores, whatever the caller's shell says.
    os.environ["OMP_NUM_THREADS"] = "1"
    # gloo otherwise looks up the host's own name, which a sandbox may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _on_launched_rank(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    device = rank_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    value = fn(*args)
    dist.barrier()
    dist.destroy_process_group()
    return value if is_reporter() else None


def _own_rank(
    rank: int, world_size: int, directory: str, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    where = Path(directory)
    # What a library prints must not get into the report.
    with (where / f"output{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(where / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    value = fn(*args)
    if rank == 0:
        (where / "result").write_bytes(pickle.dumps(value))
    # A rank that is done would close connections that others still use.
    dist.barrier()
    leave(0)


def _outputs(where: Path) -> str:
    parts = []
    for path in sorted(where.glob("output*")):
        if text := path.read_text(errors="replace").strip():
            parts.append(f"--- {path.name}:\n{text[-_OUTPUT_TAIL:]}")
    return "\n".join(parts)
