"""Put TorchTitan 0.2.2 on the CPU, explicitly and truthfully.

TorchTitan chooses its device when it is imported: ``torchtitan.tools.utils`` sets ``device_type``
and ``device_module``, and other modules copy the two names as they are imported. Without an
accelerator it falls back to ``torch.cuda``, which then fails. ``use_cpu_device()`` corrects that,
and is called by an entry point (``train.py``) before any other part of TorchTitan is imported.
Importing this module changes nothing.

It stands beside the entry points and not in ``titan``, because importing ``titan`` registers train
specs, which imports the parts of TorchTitan that copy the device.
"""

import logging
import math
import os
import platform
import re
import resource
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_DEVICE_NAMES = ("device_type", "device_module")


@dataclass(frozen=True)
class CpuProperties:
    """What ``torch.cuda.get_device_properties`` would say, as far as it means something here."""

    name: str
    total_memory: int
    """Memory this process may use, in bytes: physical memory or the cgroup limit if lower."""


class CpuDeviceModule:
    """Stands where TorchTitan expects ``torch.cuda``; every number is this process's own.

    Memory is the resident set. There is no caching allocator on CPU, so "active" and "reserved"
    are both what is resident. All amounts are in bytes.
    """

    def __init__(self) -> None:
        self._highest = 0  # bytes, the highest peak read since the last reset
        self._peak_can_be_reset = self.reset_peak_memory_stats()

    @property
    def peak_since(self) -> str:
        """Since when the peak is measured: ``"last reset"`` or ``"process start"``.

        The latter where the kernel does not let a process reset its own high-water mark.
        """
        return "last reset" if self._peak_can_be_reset else "process start"

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one CPU device, and it is always current."""

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        """Do nothing: CPU kernels have finished when their call returns."""

    def empty_cache(self) -> None:
        """Do nothing: PyTorch keeps no cache of freed CPU memory."""

    def get_device_name(self, device: Any = None) -> str:
        return cpu_model_name()

    def get_device_properties(self, device: Any = None) -> CpuProperties:
        return CpuProperties(name=cpu_model_name(), total_memory=usable_memory_bytes())

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Resident set in bytes, now and at its peak, under the keys of the CUDA allocator."""
        current, peak = resident_bytes()
        # The kernel sums a counter per core, each a little behind: without this, a peak could be
        # some 100 KiB lower than when it was read before.
        self._highest = max(self._highest, peak)
        return {
            "active_bytes.all.current": current,
            "active_bytes.all.peak": self._highest,
            "reserved_bytes.all.current": current,
            "reserved_bytes.all.peak": self._highest,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> bool:
        """Let the peak start again at what is resident now; False where the kernel refuses."""
        try:
            # "5" resets only the resident set's high-water mark (proc(5)), nothing else.
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        self._highest = 0
        return "VmHWM" in _status_bytes()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"TorchTitan asked the CPU for device_module.{name}, which only accelerators have; "
            "switch off the setting that needs it (profiling.enable_memory_snapshot, for one)"
        )


def cpu_model_name() -> str:
    """The CPU's model name, or its architecture where the kernel does not tell the model."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", info, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _status_bytes() -> dict[str, int]:
    """The ``Vm...`` lines of ``/proc/self/status``, in bytes; empty where there is no /proc."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    return {
        name: int(kib) * 1024
        for name, kib in re.findall(r"^(Vm\w+):\s*(\d+) kB$", text, re.MULTILINE)
    }


def resident_bytes() -> tuple[int, int]:
    """This process's resident set in bytes: now, and its highest since the peak was last reset."""
    status = _status_bytes()
    # A kernel without these two lines still counts the peak over the life of the process.
    lifetime_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    current = status.get("VmRSS", lifetime_peak)
    # The kernel refreshes its high-water mark lazily; what is resident now bounds it from below.
    return current, max(current, status.get("VmHWM", lifetime_peak))


def cgroup_limit_bytes(
    proc_cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float:
    """The lowest memory limit among this process's cgroups, in bytes; infinity without one."""
    limit = math.inf
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return limit
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one hierarchy
            root, file_name = mount, "memory.max"
        elif "memory" in controllers.split(","):  # version 1: a hierarchy for each controller
            root, file_name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Limits add up along the way to the root. Inside a container the path may be the host's;
        # what exists of it is read, and the mount's root, which is then the container's own.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                text = (folder / file_name).read_text().strip()
            except OSError:
                text = "max"
            if text != "max":
                limit = min(limit, int(text))
            if folder == root:
                break
    return limit


def usable_memory_bytes() -> int:
    """Physical memory in bytes, or the cgroup limit where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(physical, cgroup_limit_bytes()))


def _unknown_peak_flops(device_name: str) -> float:
    """Not a number: TorchTitan knows no CPU's peak and would assume an A100's after `lspci`."""
    return math.nan


def _set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """TorchTitan's function of this name, for gloo, whose barrier refuses device ids."""
    logging.getLogger().info(f"Setting the timeout of all process groups to {timeout}")
    dist.barrier()  # no rank may shorten its timeout while another still needs the long one
    groups = [mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()]
    for group in [*groups, dist.group.WORLD]:
        # TorchTitan gives some dimensions of size 1 the backend "fake", which has no timeout.
        if dist.get_backend(group) == dist.Backend.GLOO:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
    ep_enabled: bool = False,
) -> torch.Tensor:
    """TorchTitan's function of this name with norms accumulated in float64.

    torch's CPU kernel adds squares one after another in float32: the norm of half a million
    elements is off by 5e-6, and by 1e-4 where most of them are tiny, as in an embedding's
    gradient. The error depends on how a tensor is cut into shards, so the clipping of the same
    gradient would depend on the layout. A GPU's tree reduction has no such error.

    Raises:
        NotImplementedError: expert parallelism, which does not run on CPU.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    if ep_enabled:
        raise NotImplementedError("parallelism.expert_parallel_degree > 1 does not run on CPU")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in grads]
    # A pipeline stage without gradients still adds its nothing, in the dtype of the others.
    nothing = torch.zeros((), dtype=torch.float64)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else nothing
    if isinstance(total, DTensor):
        total = total.full_tensor()  # adds up over the ranks that hold shards
    if pp_mesh is not None:
        is_max = math.isinf(norm_type)
        power = total if is_max else total**norm_type
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        dist.all_reduce(power, op=op, group=pp_mesh.get_group())
        total = power if is_max else power ** (1.0 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the total gradient norm of order {norm_type} is {total.item()}")
    total = total.float()
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
    return total


class _DropPeakFlops(logging.Filter):
    """Drops the line in which the trainer names the peak FLOPS behind its MFU.

    On CPU there is neither, and the trainer offers no way to leave the line out.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Peak FLOPS used for computing MFU")


def _silence_known_warnings() -> None:
    """Silence what every CPU run would print, each by its text and the module it is charged to."""
    # torchdata 0.11 calls a function that torch 2.13 deprecates, on every device.
    warnings.filterwarnings(
        "ignore", message="'set_vital' is deprecated", module=r"torchdata\.stateful_dataloader"
    )
    # Without FSDP TorchTitan enters autocast whatever the dtype; for float32 torch says that this
    # does nothing, which is what training.mixed_precision_param = "float32" asks for.
    warnings.filterwarnings(
        "ignore",
        message="In CPU autocast, but the target dtype is not supported",
        module=r"torchtitan\.distributed\.utils",
    )
    # DTensor has no generator of its own for the CPU. Our models don't rely on it: they draw their
    # initial weights at full size (the runtime's initialisation says how).
    warnings.filterwarnings(
        "ignore",
        message=r"DTensor (random operators|manual_seed\(\)) may not have complete support on cpu",
        module=r"torch\.distributed\.tensor\._(random|dispatch)|torchtitan\.distributed\.utils",
    )
    # torchrun sets this for NCCL and TorchTitan warns that it overrides it; gloo never reads it.
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)


def use_cpu_device() -> None:
    """Make TorchTitan use the CPU; call it before importing anything of TorchTitan but this.

    A second call changes nothing.

    Raises:
        RuntimeError: modules that have copied another device are imported already.
    """
    # The package `torchtitan` imports `parallel_dims` itself, hence before anyone can intervene: it
    # is the one copy that has to be corrected in place. It reads the name only in its functions.
    from torchtitan.distributed import parallel_dims
    from torchtitan.tools import utils

    if isinstance(utils.device_module, CpuDeviceModule):
        return
    too_early = sorted(
        name
        for name, module in sys.modules.items()
        if name.startswith("torchtitan")
        and name not in (utils.__name__, parallel_dims.__name__)
        and any(device_name in vars(module) for device_name in _DEVICE_NAMES)
    )
    if too_early:
        raise RuntimeError(
            f"use_cpu_device() comes too late: {', '.join(too_early)} already bound the device "
            f"type {utils.device_type!r}; call it before importing them"
        )

    device_module = CpuDeviceModule()
    utils.get_device_info = lambda: ("cpu", device_module)
    utils.device_type, utils.device_module = utils.get_device_info()
    utils.get_peak_flops = _unknown_peak_flops
    parallel_dims.device_type = "cpu"

    from torchtitan.distributed import utils as dist_utils  # binds the device only now
    from torchtitan.tools.logging import logger

    dist_utils.set_pg_timeouts = _set_pg_timeouts
    dist_utils.clip_grad_norm_ = clip_grad_norm_
    logger.addFilter(_DropPeakFlops())
    _silence_known_warnings()
