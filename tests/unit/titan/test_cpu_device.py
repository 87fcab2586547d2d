"""The CPU stand-in tells the truth, comes in time or not at all, and mistakes end in one line."""

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT
from torchtitan_matrixfsdp import cpu_device
from torchtitan_matrixfsdp.checkpoint import CheckpointError
from torchtitan_matrixfsdp.cpu_device import CpuDeviceModule, cgroup_limit_bytes, resident_bytes
from torchtitan_matrixfsdp.train import _mistake

MIB = 2**20
IMPORT_LIMIT = 150  # seconds for a process that imports TorchTitan, on a busy machine


def python(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: TorchTitan's device is bound once per process."""
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=IMPORT_LIMIT,
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **(env or {})},
    )


BIND = """
import json, sys
from torchtitan_matrixfsdp.cpu_device import CpuDeviceModule, use_cpu_device

untouched = "torchtitan" not in sys.modules
use_cpu_device()
from torchtitan.tools import utils
first = utils.device_module
use_cpu_device()  # changes nothing
import torchtitan.train
from torchtitan.components import metrics
from torchtitan.distributed import parallel_dims, utils as dist_utils
from torchtitan.tools import profiling
use_cpu_device()  # still nothing: the CPU is what they bound

bound = (metrics, parallel_dims, dist_utils)
print(json.dumps({
    "untouched": untouched,
    "types": [utils.device_type, *(m.device_type for m in bound)],
    "one_module": all(m.device_module is first for m in (utils, metrics, dist_utils, profiling)),
    "stand_in": isinstance(first, CpuDeviceModule),
    "device_info": utils.get_device_info() == ("cpu", first),
    "peak_flops": utils.get_peak_flops("any"),
    "filters": sum(type(f).__name__ == "_DropPeakFlops" for f in torchtitan.train.logger.filters),
}))
"""


@pytest.fixture(scope="module")
def bound() -> tuple[dict[str, Any], str]:
    done = python("-c", BIND)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_every_module_of_torchtitan_is_on_the_cpu(bound: tuple[dict[str, Any], str]) -> None:
    facts, _ = bound
    assert facts["types"] == ["cpu"] * 4
    assert facts["one_module"] and facts["stand_in"] and facts["device_info"]


def test_importing_changes_nothing_and_calling_twice_no_more(
    bound: tuple[dict[str, Any], str],
) -> None:
    facts, _ = bound
    assert facts["untouched"]
    assert facts["filters"] == 1


def test_no_peak_flops_are_invented(bound: tuple[dict[str, Any], str]) -> None:
    facts, output = bound
    assert math.isnan(facts["peak_flops"])
    assert "lspci" not in output and "A100" not in output


def test_too_late_is_an_error_that_names_the_modules() -> None:
    done = python(
        "-c",
        "import torchtitan.train\n"
        "from torchtitan_matrixfsdp.cpu_device import use_cpu_device\n"
        "try:\n    use_cpu_device()\nexcept RuntimeError as error:\n    print(error)",
    )
    assert done.returncode == 0, done.stderr
    message = done.stdout
    assert "too late" in message and "before importing" in message
    for name in ("torchtitan.components.metrics", "torchtitan.distributed.utils"):
        assert name in message
    # Bound by the package itself, before anyone could have called us: no fault of the caller's.
    assert "parallel_dims" not in message


def test_resident_memory_is_what_proc_says() -> None:
    current, peak = resident_bytes()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert current == pytest.approx(pages * resource.getpagesize(), abs=8 * MIB)
    assert current <= peak <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 8 * MIB


def test_peak_only_grows_until_it_is_reset() -> None:
    device = CpuDeviceModule()
    size = 96 * MIB

    def peak() -> int:
        return device.memory_stats()["reserved_bytes.all.peak"]

    before = peak()
    block = torch.ones(size, dtype=torch.uint8)
    during = peak()
    assert during >= before + size - 8 * MIB
    del block
    after = peak()
    assert after >= during
    if device.peak_since == "last reset":
        device.reset_peak_memory_stats()
        assert peak() <= after - size + 16 * MIB
    else:
        assert device.peak_since == "process start"


def test_a_kernel_that_refuses_the_reset_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, text: str) -> int:
        raise PermissionError(str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    device = CpuDeviceModule()
    assert device.peak_since == "process start"
    assert device.reset_peak_memory_stats() is False


def test_a_kernel_without_a_high_water_mark_falls_back_to_rusage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_device, "_status_bytes", lambda: {"VmRSS": 3 * MIB})
    assert CpuDeviceModule().peak_since == "process start"
    current, peak = resident_bytes()
    assert current == 3 * MIB
    assert peak == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_stats_have_the_keys_that_torchtitan_reads() -> None:
    stats = CpuDeviceModule().memory_stats("cpu")
    assert stats["active_bytes.all.peak"] == stats["reserved_bytes.all.peak"] > 0
    assert stats["num_alloc_retries"] == stats["num_ooms"] == 0


def test_name_and_capacity_are_this_machine_s() -> None:
    device = CpuDeviceModule()
    name = device.get_device_name("cpu:1")
    assert name
    info = Path("/proc/cpuinfo").read_text()
    assert "model name" not in info or name in info
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < device.get_device_properties("cpu").total_memory <= total
    assert device.get_device_properties("cpu").total_memory <= cgroup_limit_bytes()


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"a/b/memory.max": "3000", "a/memory.max": "5000"}, 3000),
        ("0::/gone\n", {"memory.max": "7000"}, 7000),
        ("0::/\n", {}, math.inf),
        ("4:cpu,memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "900"}, 900),
        ("4:memory:/host/id\n", {"memory/memory.limit_in_bytes": "800"}, 800),
        ("4:cpu:/x\n", {"x/memory.max": "1"}, math.inf),
    ],
)
def test_lowest_cgroup_limit(
    tmp_path: Path, cgroup: str, limits: dict[str, str], expected: float
) -> None:
    mount = tmp_path / "cgroup"
    for name, text in limits.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text + "\n")
    (tmp_path / "self").write_text(cgroup)
    assert cgroup_limit_bytes(tmp_path / "self", mount) == expected


def test_without_proc_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit_bytes(tmp_path / "none", tmp_path) == math.inf


def test_what_the_cpu_cannot_do_is_named() -> None:
    with pytest.raises(AttributeError, match=r"device_module\.memory.*enable_memory_snapshot"):
        _ = CpuDeviceModule().memory


ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        ([], {}, "error: LOCAL_RANK is not set; start with torchrun"),
        (["--job.config_file", "nowhere.toml"], ALONE, "error: FileNotFoundError: "),
        (["--model.hf_assets_path", "no_tokenizer"], ALONE, "error: FileNotFoundError: "),
    ],
)
def test_a_mistake_ends_the_entry_point_in_one_line(
    args: list[str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    args = ["--job.dump_folder", str(tmp_path), *args]
    done = python("-m", "torchtitan_matrixfsdp.train", *args, env=env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1 and errors[0].startswith(f"[rank 0] {message}")


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_only_mistakes_lose_their_traceback() -> None:
    here = str(Path(__file__).with_name("train.py"))  # as if TorchTitan lay in this folder
    elsewhere = "/elsewhere/train.py"
    assert "ValueError: lr" in str(_mistake(raised(ValueError("lr")), elsewhere))
    assert _mistake(raised(RuntimeError("lr")), here) is None
    # A check of TorchTitan's own, shown with its source, against one of somebody else's.
    assert "raise error" in str(_mistake(raised(KeyError("flavor")), here))
    assert _mistake(raised(KeyError("flavor")), elsewhere) is None
    assert _mistake(raised(AssertionError()), elsewhere) is None


def test_an_error_in_training_keeps_its_traceback_unless_it_is_a_checkpoints() -> None:
    def train(error: Exception) -> None:
        raise error

    try:
        train(ValueError("in a step"))
    except ValueError as error:
        assert _mistake(error, __file__) is None
        assert _mistake(error, "/elsewhere/train.py") is not None
    try:
        train(CheckpointError("step-3: the disk is full"))
    except CheckpointError as error:
        assert _mistake(error, __file__) == "step-3: the disk is full"
