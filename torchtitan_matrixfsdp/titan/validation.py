"""Everything about a job that can be refused before the first collective.

The CPU entry point calls :func:`validate_job_config` right after parsing. Under the stock entry
point the first of our hooks that sees the configuration is the tokenizer builder: meshes exist
by then, but no model, and every rank computes the same verdict.
"""

from __future__ import annotations

import argparse
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols.model import BaseModelArgs

from torchtitan_matrixfsdp.titan import job_config
from torchtitan_matrixfsdp.titan.checkpoint_checks import check_checkpoint
from torchtitan_matrixfsdp.titan.checks import ConfigError, check_field_types, check_range
from torchtitan_matrixfsdp.titan.datasets import LOCAL_DATASET, local_files
from torchtitan_matrixfsdp.titan.job_config import JobConfig, MatrixOptimizer, OwnerFSDP
from torchtitan_matrixfsdp.titan.optimizer_checks import check_matrix_optimizer
from torchtitan_matrixfsdp.titan.stages import check_layers, compiles_blocks
from torchtitan_matrixfsdp.titan.tensor_parallel import check_tensor_parallel


def owner_fsdp_of(config: TitanJobConfig) -> OwnerFSDP:
    """The ``[owner_fsdp]`` section of a merged configuration."""
    return _section(config, "owner_fsdp", OwnerFSDP)


def matrix_optimizer_of(config: TitanJobConfig) -> MatrixOptimizer:
    """The ``[matrix_optimizer]`` section of a merged configuration."""
    return _section(config, "matrix_optimizer", MatrixOptimizer)


def _section(config: TitanJobConfig, name: str, cls: type[Any]) -> Any:
    found = vars(config).get(name)
    if not isinstance(found, cls):
        raise ConfigError(
            f"the configuration has no [{name}] section: set job.custom_config_module = "
            '"torchtitan_matrixfsdp.titan.job_config" in the TOML file.'
        )
    return found


def check_toml_file(arguments: list[str]) -> None:
    """Check the keys of the file that ``--job.config_file`` names, if it uses our sections.

    TorchTitan finds unknown keys too, and names them without the legal ones. A file that cannot be
    read is left to TorchTitan to report.

    Raises:
        ConfigError: see :func:`check_toml_keys`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--job.config_file", "--job.config-file", dest="path")
    path = parser.parse_known_args(arguments)[0].path
    try:
        toml = tomllib.loads(Path(path).read_text()) if path else {}
    except (OSError, tomllib.TOMLDecodeError):
        return
    if toml.get("job", {}).get("custom_config_module") == job_config.__name__:
        check_toml_keys(toml)


def check_toml_keys(toml: Mapping[str, Any]) -> None:
    """Check that every key of a parsed TOML file exists, in TorchTitan's sections or ours.

    Raises:
        ConfigError: naming the key, the legal ones and the closest of them.
    """
    sections = {f.name: f.type for cls in (TitanJobConfig, JobConfig) for f in fields(cls)}
    _check_keys("", toml, sections)


def _check_keys(prefix: str, table: Mapping[str, Any], legal: Mapping[str, Any]) -> None:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if name not in legal:
            close = difflib.get_close_matches(name, legal, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else "remove it."
            what = "section" if not prefix else "key"
            raise ConfigError(
                f"{key}: unknown {what}, received {value!r}; legal: {sorted(legal)}; {hint}"
            )
        inner = legal[name]
        if isinstance(value, Mapping) and is_dataclass(inner):
            _check_keys(f"{key}.", value, {f.name: f.type for f in fields(inner)})


def validate_job_config(
    config: TitanJobConfig,
    world_size: int,
    flavors: Mapping[str, BaseModelArgs] | None = None,
) -> None:
    """Check a whole merged configuration.

    Args:
        config: the merged configuration.
        world_size: number of processes of the job.
        flavors: the model's flavors, when they are known.

    Raises:
        ConfigError: on the first fault, with key, value, legal range and remedy.
    """
    owner_fsdp_of(config)
    matrix_optimizer_of(config)
    for section in fields(config):
        check_field_types(vars(config)[section.name], section.name)
    _check_ranges(config)
    _refuse_unsupported(config)
    check_mesh(config, world_size)
    check_tensor_parallel(config, owner_fsdp_of(config), world_size)
    check_matrix_optimizer(config, owner_fsdp_of(config), matrix_optimizer_of(config), world_size)
    if flavors is not None and config.model.flavor not in flavors:
        raise ConfigError(
            f"model.flavor: received {config.model.flavor!r}; legal for {config.model.name}: "
            f"{list(flavors)}. Mixture-of-experts flavors are not supported by this plugin."
        )
    if flavors is not None:
        check_layers(config, flavors[config.model.flavor])
    _check_data(config)
    check_checkpoint(config)


def _check_ranges(config: TitanJobConfig) -> None:
    """TorchTitan's own numbers: out of range they train wrongly, or fail in the loop."""
    if config.optimizer.name != "AdamW":
        raise ConfigError(
            f"optimizer.name: received {config.optimizer.name!r}; legal: 'AdamW' (for everything "
            'that is not on [matrix_optimizer]); set optimizer.name = "AdamW".'
        )
    optimizer, schedule, training = config.optimizer, config.lr_scheduler, config.training
    check_range("optimizer.lr", optimizer.lr, low=0)
    check_range("optimizer.weight_decay", optimizer.weight_decay, low=0)
    check_range("optimizer.beta1", optimizer.beta1, low=0, below=1)
    check_range("optimizer.beta2", optimizer.beta2, low=0, below=1)
    # Zero would divide zero by zero where a gradient is zero.
    check_range("optimizer.eps", optimizer.eps, above=0)
    check_range("lr_scheduler.warmup_steps", schedule.warmup_steps, low=0)
    check_range("lr_scheduler.min_lr_factor", schedule.min_lr_factor, low=0, high=1)
    # A negative norm would turn every gradient round.
    check_range("training.max_norm", training.max_norm, above=0)
    check_range("training.steps", training.steps, low=1)
    check_range("training.seq_len", training.seq_len, low=1)
    check_range("training.local_batch_size", training.local_batch_size, low=1)
    check_range("training.gc_freq", training.gc_freq, low=1)
    if training.global_batch_size != -1:
        check_range("training.global_batch_size", training.global_batch_size, low=1)
    check_range("metrics.log_freq", config.metrics.log_freq, low=1)
    check_range("checkpoint.interval", config.checkpoint.interval, low=1)
    if config.checkpoint.keep_latest_k == 1:
        raise ConfigError(
            "checkpoint.keep_latest_k: received 1; legal: 0 (keep all) or at least 2, since the "
            "newest may be incomplete."
        )


def _refuse_unsupported(config: TitanJobConfig) -> None:
    parallelism, training = config.parallelism, config.training
    is_sharded = (
        parallelism.data_parallel_shard_degree != 1 or parallelism.context_parallel_degree != 1
    )
    has_accelerator = torch.accelerator.is_available()
    unsupported: list[tuple[str, Any, bool, str]] = [
        (
            "parallelism.expert_parallel_degree",
            parallelism.expert_parallel_degree,
            parallelism.expert_parallel_degree != 1,
            "set it to 1",
        ),
        (
            "model.converters (float8, mx)",
            config.model.converters,
            bool(config.model.converters),
            "set it to []",
        ),
        (
            "optimizer.early_step_in_backward",
            config.optimizer.early_step_in_backward,
            config.optimizer.early_step_in_backward,
            "set it to false",
        ),
        (
            "fault_tolerance.enable",
            config.fault_tolerance.enable,
            config.fault_tolerance.enable,
            "set it to false",
        ),
    ]
    if owner_fsdp_of(config).mode == "zero1" and is_sharded:
        _refuse_with_zero1(config)
    # What TorchTitan 0.2.2 or torch cannot do either: its own model names are no way out.
    impossible: list[tuple[str, Any, bool, str]] = [
        (
            "parallelism.context_parallel_degree",
            parallelism.context_parallel_degree,
            parallelism.context_parallel_degree != 1 and not has_accelerator,
            "set it to 1 on CPU (torch has no context-parallel attention there)",
        ),
        (
            "training.enable_cpu_offload",
            training.enable_cpu_offload,
            training.enable_cpu_offload and not has_accelerator,
            "set it to false on CPU (there is nothing to offload from)",
        ),
        (
            "activation_checkpoint.mode",
            config.activation_checkpoint.mode,
            config.activation_checkpoint.mode == "memory_budget" and not compiles_blocks(config),
            "it is a setting of the compiler: set compile.enable = true with the component "
            '"model", or "none", "selective" or "full"',
        ),
        (
            "profiling.enable_profiling",
            config.profiling.enable_profiling,
            config.profiling.enable_profiling and not has_accelerator,
            "set it to false (TorchTitan 0.2.2 cannot profile on CPU)",
        ),
        (
            "profiling.enable_memory_snapshot",
            config.profiling.enable_memory_snapshot,
            config.profiling.enable_memory_snapshot and not has_accelerator,
            "set it to false (there is no device memory to record)",
        ),
    ]
    for key, value, is_refused, remedy in unsupported:
        if is_refused:
            raise ConfigError(
                f"{key}: received {value!r}; this plugin does not support it yet; {remedy}, or use "
                "a stock TorchTitan model name."
            )
    for key, value, is_refused, remedy in impossible:
        if is_refused:
            raise ConfigError(f"{key}: received {value!r}; it cannot work here; {remedy}.")


def _refuse_with_zero1(config: TitanJobConfig) -> None:
    parallelism = config.parallelism
    refused = {
        # Not tried.
        "parallelism.pipeline_parallel_degree": (parallelism.pipeline_parallel_degree, 1),
        "parallelism.tensor_parallel_degree": (parallelism.tensor_parallel_degree, 1),
        # Resident parameters stay on the compute device.
        "training.enable_cpu_offload": (config.training.enable_cpu_offload, False),
    }
    for key, (value, legal) in refused.items():
        if value != legal:
            raise ConfigError(
                f'{key}: received {value!r} with owner_fsdp.mode = "zero1"; legal: {legal!r}; '
                'change it, or set owner_fsdp.mode = "zero3".'
            )


def check_mesh(config: TitanJobConfig, world_size: int) -> None:
    """Check that the degrees multiply to ``world_size``, and batch and sequence divide by them.

    Raises:
        ConfigError: naming the degrees and what they should be.
    """
    parallelism = config.parallelism
    replicate = parallelism.data_parallel_replicate_degree
    shard = parallelism.data_parallel_shard_degree
    others = {
        "context_parallel_degree": parallelism.context_parallel_degree,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
    }
    for name, degree in {"data_parallel_replicate_degree": replicate, **others}.items():
        check_range(f"parallelism.{name}", degree, low=1)
    if shard != -1:
        check_range("parallelism.data_parallel_shard_degree", shard, low=1)
    model_ranks = math.prod(others.values())
    given = replicate * model_ranks * max(shard, 1)
    fits = world_size % given == 0 if shard == -1 else world_size == given
    if not fits:
        more = "".join(f", {name} = {degree}" for name, degree in others.items() if degree > 1)
        raise ConfigError(
            f"the job has {world_size} processes, but parallelism.data_parallel_replicate_degree = "
            f"{replicate} and data_parallel_shard_degree = {shard} (-1: what is left){more} do not "
            "multiply to that. Change a degree, or start a matching number of processes."
        )
    training = config.training
    # The ranks of a pipeline and of a context-parallel group share their samples.
    step = training.local_batch_size * (world_size // model_ranks)
    if training.global_batch_size > 0 and training.global_batch_size % step:
        raise ConfigError(
            f"training.global_batch_size: received {training.global_batch_size}; legal: a multiple "
            f"of local_batch_size x data-parallel degree = {step}, or -1 for {step}."
        )
    context = parallelism.context_parallel_degree
    if context > 1 and training.seq_len % (2 * context):
        raise ConfigError(
            f"training.seq_len: received {training.seq_len}; legal: a multiple of 2 x "
            f"parallelism.context_parallel_degree = {2 * context}, since a rank holds two chunks "
            "of each sequence. Change one of them."
        )
    shards = world_size // (replicate * model_ranks) * context
    if parallelism.pipeline_parallel_degree > 1 and replicate > 1 and shards == 1:
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree: received {replicate} with "
            f"pipeline_parallel_degree = {parallelism.pipeline_parallel_degree} and nothing "
            "sharded; legal: 1, since TorchTitan has no DDP within a pipeline; use "
            "data_parallel_shard_degree instead."
        )


def _check_data(config: TitanJobConfig) -> None:
    assets = Path(config.model.hf_assets_path)
    names = ("tokenizer.json", "vocab.json", "vocab.txt")
    if not any((assets / name).is_file() for name in names):
        raise ConfigError(
            f"model.hf_assets_path: received {str(assets)!r}, where none of {list(names)} exists. "
            "Point it at a Hugging Face tokenizer folder, or build the default one: "
            "python scripts/build_corpus.py"
        )
    _check_dataset("training", config.training.dataset, config.training.dataset_path)
    if config.validation.enable:
        _check_dataset("validation", config.validation.dataset, config.validation.dataset_path)


def _check_dataset(section: str, name: str, path: str | None) -> None:
    if name.lower() not in DATASETS:
        raise ConfigError(
            f"{section}.dataset: received {name!r}; legal: {sorted(DATASETS)}; use "
            f'"{LOCAL_DATASET}" for files of your own.'
        )
    if name.lower() == LOCAL_DATASET:
        local_files(f"{section}.dataset_path", path)
    elif path and path.startswith((".", "/", "~")) and not Path(path).exists():
        raise ConfigError(
            f"{section}.dataset_path: received {path!r}, which does not exist; legal: a local path "
            "or the name of a Hugging Face dataset."
        )
