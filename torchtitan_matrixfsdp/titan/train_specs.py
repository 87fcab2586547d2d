"""Train specs: stock TorchTitan with this plugin's parallelisation, optimizers and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.models import llama3, qwen3
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec

from torchtitan_matrixfsdp.titan.loss import build_loss
from torchtitan_matrixfsdp.titan.metrics import build_metrics_processor
from torchtitan_matrixfsdp.titan.model import OwnerLlama3, OwnerQwen3
from torchtitan_matrixfsdp.titan.optimizers import build_optimizers, build_schedulers
from torchtitan_matrixfsdp.titan.parallelize import parallelize_owner_model
from torchtitan_matrixfsdp.titan.pipeline import pipeline_owner_model
from torchtitan_matrixfsdp.titan.validation import validate_job_config

LLAMA3 = "llama3_owner"
QWEN3 = "qwen3_owner"
MODEL_NAMES = (LLAMA3, QWEN3)


def dense_flavors(name: str) -> Mapping[str, BaseModelArgs]:
    """The flavors of one of our model names that TorchTitan ships without experts."""
    if name == LLAMA3:
        return llama3.llama3_args
    return {flavor: args for flavor, args in qwen3.qwen3_args.items() if not args.moe_enabled}


def _build_tokenizer(job_config: TitanJobConfig) -> BaseTokenizer:
    # The first of our hooks that TorchTitan's own entry point calls with the configuration.
    flavors = dense_flavors(job_config.model.name)
    validate_job_config(job_config, dist.get_world_size(), flavors)
    return build_hf_tokenizer(job_config)


def _owner_spec(stock: TrainSpec, model_cls: type[Any], name: str) -> TrainSpec:
    return replace(
        stock,
        model_cls=model_cls,
        model_args=dense_flavors(name),
        parallelize_fn=parallelize_owner_model,
        pipelining_fn=pipeline_owner_model,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_schedulers,
        build_tokenizer_fn=_build_tokenizer,
        build_loss_fn=build_loss,
        build_metrics_processor_fn=build_metrics_processor,
    )


def register_train_specs() -> None:
    """Register both models. A module is imported once, so this runs once; a second registration
    of a name raises in TorchTitan."""
    register_train_spec(LLAMA3, _owner_spec(get_train_spec("llama3"), OwnerLlama3, LLAMA3))
    register_train_spec(QWEN3, _owner_spec(get_train_spec("qwen3"), OwnerQwen3, QWEN3))
