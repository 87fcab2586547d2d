"""What a CPU run says on the console and in TensorBoard, and that accelerators keep stock."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import run_torchrun
from tests.support import ROOT, CorpusPaths

STEPS = 3
WARMUP = 2
BASE_RATES = {"lr/adamw_0": 3e-4, "lr/sgd_0": 0.02, "lr/sgd_1": 0.01}

# Stock Llama under stock DDP, with this package's metrics and two optimizers in the container.
PLUGIN = """
import dataclasses

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from torchtitan_matrixfsdp.titan.metrics import build_metrics_processor


class TwoOptimizers(OptimizersContainer):
    def __init__(self, model_parts):
        matrices = [p for m in model_parts for p in m.parameters() if p.ndim == 2]
        vectors = [p for m in model_parts for p in m.parameters() if p.ndim != 2]
        adamw = torch.optim.AdamW(vectors, lr=3e-4)
        groups = [{"params": matrices[:3]}, {"params": matrices[3:], "lr": 0.01}]
        self.model_parts = model_parts
        self.optimizers = [adamw, torch.optim.SGD(groups, lr=0.02)]
        self._post_init(matrices + vectors, {})


register_train_spec(
    "llama3_metrics",
    dataclasses.replace(
        get_train_spec("llama3"),
        build_optimizers_fn=lambda model_parts, config, parallel_dims: TwoOptimizers(model_parts),
        build_metrics_processor_fn=build_metrics_processor,
        state_dict_adapter=None,
    ),
)
"""


@dataclass(frozen=True)
class Run:
    console: str
    scalars: dict[str, dict[int, float]]
    """By tag and step."""

    def lines(self, text: str) -> list[str]:
        return [line for line in self.console.splitlines() if text in line]


@pytest.fixture(scope="module")
def run(corpus_dir: CorpusPaths, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps and two validations on two gloo ranks, through the entry point."""
    root = tmp_path_factory.mktemp("run")
    (root / "metrics_plugin.py").write_text(PLUGIN)
    settings = {
        "job.dump_folder": root,
        "experimental.custom_import": "metrics_plugin",
        "model.name": "llama3_metrics",
        "model.flavor": "debugmodel",
        "model.hf_assets_path": corpus_dir.tokenizer,
        "training.dataset": "c4_test",
        "training.dataset_path": corpus_dir.corpus,
        "training.local_batch_size": 1,
        "training.seq_len": 64,
        "training.steps": STEPS,
        "lr_scheduler.warmup_steps": WARMUP,
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": 1,
        "metrics.log_freq": 1,
        "metrics.save_tb_folder": "tb",
        "validation.dataset": "c4_test",
        "validation.dataset_path": corpus_dir.corpus,
        "validation.local_batch_size": 1,
        "validation.seq_len": 64,
        "validation.freq": 2,
        "validation.steps": 1,
    }
    flags = ["--metrics.enable_tensorboard", "--metrics.disable_color_printing"]
    flags += ["--validation.enable"]
    options = [item for key, value in settings.items() for item in (f"--{key}", str(value))]
    result = run_torchrun(
        ["-m", "torchtitan_matrixfsdp.train", *options, *flags],
        nproc=2,
        cwd=root,
        env={
            "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)]),
            "HF_HOME": str(root / "hf"),
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
        },
    )
    scalars: dict[str, dict[int, float]] = {}
    for folder in (root / "tb").iterdir():
        events = EventAccumulator(str(folder)).Reload()
        for tag in events.Tags()["scalars"]:
            scalars[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return Run(result.output, scalars)


def test_step_line(run: Run) -> None:
    lines = run.lines("INFO - step:")
    assert len(lines) == 2 * STEPS  # both ranks print
    pattern = (
        r"INFO - step: +\d+  loss: +\d+\.\d{5}  grad_norm: +\d+\.\d{4}  "
        r"memory: +\d+\.\d\dGiB\(\d+\.\d\d%\)  tps: [\d,]+$"
    )
    for line in lines:
        assert re.search(pattern, line), line


def test_console_claims_no_accelerator_and_warns_of_nothing(run: Run) -> None:
    for claim in ("mfu", "lspci", "A100", "Peak FLOPS", "-0.00GiB", "nan"):
        assert not run.lines(claim), claim
    for warning in ("Deprecat", "deprecat", "Warning", "WARNING"):
        assert not run.lines(warning), warning


def test_trainer_speaks_of_the_cpu(run: Run) -> None:
    assert len(run.lines("CPU capacity: ")) == 2
    used = [re.search(r"usage for model: (\S+)GiB", x) for x in run.lines("CPU memory usage")]
    assert len(used) == 2
    assert all(match and float(match[1]) > 0.1 for match in used)
    assert len(run.lines("Memory is the resident set of one process")) == 2
    assert len(run.lines("Setting the timeout of all process groups")) == 2


def test_validation_line(run: Run) -> None:
    lines = run.lines("validate step:")
    assert len(lines) == 2 * 2  # at steps 1 and 2, from both ranks
    assert all(re.search(r"memory: +0*[1-9.]+\d*GiB", line) for line in lines)


def test_scalars_are_stock_s_but_for_memory_and_mfu(run: Run) -> None:
    assert set(run.scalars) == {
        "loss_metrics/global_avg_loss",
        "loss_metrics/global_max_loss",
        "grad_norm",
        "throughput(tps)",
        "tflops",
        "time_metrics/end_to_end(s)",
        "time_metrics/data_loading(s)",
        "time_metrics/data_loading(%)",
        "memory/resident(GiB)",
        "memory/resident(%)",
        "memory/max_resident(GiB)",
        "memory/max_resident(%)",
        "n_tokens_seen",
        "lr",
        *BASE_RATES,
        "validation_metrics/loss",
        "validation_metrics/throughput(tps)",
        "validation_metrics/memory/resident(GiB)",
        "validation_metrics/memory/resident(%)",
        "validation_metrics/memory/max_resident(GiB)",
        "validation_metrics/memory/max_resident(%)",
    }
    for tag, by_step in run.scalars.items():
        assert set(by_step) == ({1, 2} if tag.startswith("validation") else {1, 2, 3}), tag
        assert all(math.isfinite(value) for value in by_step.values()), tag


def test_memory_is_plausible_and_below_its_peak(run: Run) -> None:
    for prefix in ("", "validation_metrics/"):
        for unit in ("GiB", "%"):
            now = run.scalars[f"{prefix}memory/resident({unit})"]
            peak = run.scalars[f"{prefix}memory/max_resident({unit})"]
            # Read one after the other, so that "now" may already be a little above.
            assert all(0 < now[step] <= peak[step] * 1.02 for step in now)
    # Python with torch alone holds some 0.2 GiB; this model and its states need far less than 4.
    assert all(0.1 < gib < 4 for gib in run.scalars["memory/max_resident(GiB)"].values())


def test_rates_are_those_the_step_used(run: Run) -> None:
    # The warm-up's first step already has half the rate; what follows it is the full rate.
    factors = {1: 1 / WARMUP, 2: 1.0}
    for tag, base in BASE_RATES.items():
        for step, factor in factors.items():
            assert run.scalars[tag][step] == pytest.approx(base * factor), (tag, step)
    # TorchTitan's own `lr` is that of the first group, taken before the step.
    assert run.scalars["lr/adamw_0"] == pytest.approx(run.scalars["lr"])


ACCELERATOR = """
import json
import types

import torch
from torchtitan.config import JobConfig
from torchtitan.tools import utils

# What TorchTitan asks of torch.cuda, so that no accelerator is needed.
utils.device_module = types.SimpleNamespace(
    get_device_name=lambda device: "NVIDIA H100",
    current_device=lambda: 0,
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=2**30),
    memory_stats=lambda device: {"reserved_bytes.all.peak": 2**29},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
from torchtitan.components import metrics as stock
from torchtitan_matrixfsdp.titan import metrics as ours


class Scalars(stock.BaseLogger):
    def log(self, metrics, step):
        self.metrics = metrics


def tags(build):
    processor = build(JobConfig(), types.SimpleNamespace(non_data_parallel_size=1))
    processor.logger, processor.num_flops_per_token = Scalars(), 1
    processor.data_loading_times.append(0.1)
    processor.log(1, 2.0, 2.0, 1.0, {"lr": 0.5})
    memory = processor.logger.metrics["memory/max_reserved(%)"]
    return type(processor).__name__, list(processor.logger.metrics), memory


print(json.dumps([tags(stock.build_metrics_processor), tags(ours.build_metrics_processor)]))
"""


def test_an_accelerator_keeps_stock_metrics() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ACCELERATOR],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    stock, ours = json.loads(done.stdout.splitlines()[-1])
    assert (stock[0], ours[0]) == ("MetricsProcessor", "MatrixMetricsProcessor")
    assert stock[1] == ours[1] and "mfu(%)" in ours[1]
    assert stock[2] == ours[2] == 50.0
