"""TorchTitan's metrics, with one learning rate per parameter group, and truthful on CPU.

Everything that is true on any device (loss, gradient norm, tokens per second, times) stays stock.
On CPU three things change:

* memory is the process's resident set, in GiB and in percent of the memory it may use; the console
  shows the peak, TensorBoard both what is resident now and the peak;
* nothing is said of an allocator's retries, because there is none;
* model FLOPS utilisation is left out, because nobody states a CPU's peak. The model FLOP/s reached
  (``tflops``) are true, and stay in TensorBoard; two decimals on the console would show 0.00.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan.components.metrics import BaseLogger, DeviceMemoryMonitor, MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger


class MatrixMetricsProcessor(MetricsProcessor):
    """Stock metrics and, where there are several parameter groups, each one's learning rate.

    TorchTitan logs one ``lr``: that of the first group of the first optimizer. Here each group also
    has ``lr/<optimizer class>_<index>``, for instance ``lr/muon_0`` and ``lr/adamw_0``.
    """

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None
    ) -> None:
        self._rates: dict[str, float] = {}
        super().__init__(job_config, parallel_dims, tag)

    @property
    def optimizers(self) -> OptimizersContainer | None:
        """The trainer's optimizers; None until the trainer has built and assigned them."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: OptimizersContainer | None) -> None:
        self._optimizers = optimizers
        if optimizers is not None:
            # The trainer logs after it has advanced the scheduler, when the groups hold the next
            # step's rates. Read them as the step begins, as the trainer does for its own `lr`.
            optimizers.register_step_pre_hook(self._remember_rates)

    def _remember_rates(self, optimizers: OptimizersContainer, args: Any, kwargs: Any) -> None:
        rates: dict[str, float] = {}
        groups_of_class: dict[str, int] = {}
        for optimizer in optimizers:
            name = type(optimizer).__name__.lower()
            for group in optimizer.param_groups:
                # Counted over all optimizers of the class: each pipeline stage has its own.
                index = groups_of_class.get(name, 0)
                groups_of_class[name] = index + 1
                rates[f"lr/{name}_{index}"] = float(group["lr"])
        self._rates = rates if len(rates) > 1 else {}

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one training step; see the stock method. ``extra_metrics`` win over our own."""
        super().log(
            step,
            global_avg_loss,
            global_max_loss,
            grad_norm,
            extra_metrics={**self._rates, **(extra_metrics or {})},
        )


class CpuMetricsProcessor(MatrixMetricsProcessor):
    """The same metrics for a run whose device is the CPU; the module's text says what differs.

    ``use_cpu_device()`` must have put TorchTitan on the CPU: its stand-in for ``torch.cuda`` is
    what measures the resident set.
    """

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None
    ) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self.logger: BaseLogger = _ResidentMemoryScalars(self.logger, self.device_memory_monitor)
        logger.info(
            "Memory is the resident set of one process; its peak is that since the "
            f"{utils.device_module.peak_since}"
        )

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one training step without the figures that compare with an accelerator."""
        with _filtered(_CutLine(before=f"  {self.color.cyan}tflops:", end=self.color.reset)):
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)


class _ResidentMemoryScalars(BaseLogger):
    """Hands metrics on to a logger, with memory named and measured as what it is on CPU.

    Stock metrics know a peak of "active" and of "reserved" memory. Both are the resident set's peak
    here, so ``max_reserved`` becomes ``max_resident`` and ``max_active`` gives its place to
    ``resident``, what is resident now. Training and validation share the names after a prefix.
    """

    def __init__(self, wrapped: BaseLogger, monitor: DeviceMemoryMonitor) -> None:
        self._wrapped = wrapped
        self._monitor = monitor

    def log(self, metrics: dict[str, Any], step: int) -> None:
        resident = utils.device_module.memory_stats()["reserved_bytes.all.current"]
        now = {
            "resident(GiB)": self._monitor._to_gib(resident),
            "resident(%)": self._monitor._to_pct(resident),
        }
        truthful: dict[str, Any] = {}
        for name, value in metrics.items():
            prefix, memory, quantity = name.rpartition("memory/")
            if not memory:
                if name != "mfu(%)":
                    truthful[name] = value
            elif quantity.startswith("max_active"):
                quantity = quantity.replace("max_active", "resident")
                truthful[f"{prefix}{memory}{quantity}"] = now[quantity]
            elif quantity.startswith("max_reserved"):
                quantity = quantity.replace("max_reserved", "max_resident")
                truthful[f"{prefix}{memory}{quantity}"] = value
        self._wrapped.log(truthful, step)

    def close(self) -> None:
        self._wrapped.close()


class _CutLine(logging.Filter):
    """Cuts a log line where ``before`` begins and closes it with ``end``."""

    def __init__(self, before: str, end: str) -> None:
        super().__init__()
        self._before = before
        self._end = end

    def filter(self, record: logging.LogRecord) -> bool:
        kept, found, _ = str(record.msg).partition(self._before)
        if found:
            record.msg = kept + self._end
        return True


@contextmanager
def _filtered(line_filter: logging.Filter) -> Iterator[None]:
    """Apply a filter to TorchTitan's logger, and to nothing logged before or after."""
    logger.addFilter(line_filter)
    try:
        yield
    finally:
        logger.removeFilter(line_filter)


def build_metrics_processor(
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    model_args: Any = None,
    tag: str | None = None,
) -> MetricsProcessor:
    """``TrainSpec.build_metrics_processor_fn``; ``tag`` prefixes every name in TensorBoard."""
    processor = CpuMetricsProcessor if utils.device_type == "cpu" else MatrixMetricsProcessor
    return processor(job_config, parallel_dims, tag)
