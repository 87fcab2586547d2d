"""Tensor parallelism under owner shards: TorchTitan's own plan, checked and applied.

The plan makes every parameter a DTensor on the mesh "tp"; FSDP and owner shards then act on each
rank's fragment. What the optimizer step does about fragments is in ``optim.tp_exchange``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn as nn
from torch.optim import Optimizer
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import apply_tp
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.qwen3.infra.parallelize import apply_non_moe_tp
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.logging import logger

from torchtitan_matrixfsdp.optim import LocalStepOptimizer, TensorParallelMuon
from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.job_config import OwnerFSDP
from torchtitan_matrixfsdp.titan.model import OwnerLlama3, OwnerQwen3
from torchtitan_matrixfsdp.titan.optimizer_checks import shard_degree

_KEY = "parallelism.tensor_parallel_degree"


def check_tensor_parallel(config: TitanJobConfig, owner_fsdp: OwnerFSDP, world_size: int) -> None:
    """Check what a job asks of tensor parallelism, but for the model's own numbers.

    The degrees must fit ``world_size``.

    Raises:
        ConfigError: naming the key.
    """
    parallelism = config.parallelism
    degree = parallelism.tensor_parallel_degree
    if degree == 1:
        return
    is_owned = owner_fsdp.mode == "zero3"
    if is_owned and owner_fsdp.tensor_parallel == "refuse":
        raise ConfigError(
            f'{_KEY}: received {degree} with owner_fsdp.mode = "zero3" and '
            'owner_fsdp.tensor_parallel = "refuse"; legal: 1. A tensor-parallel rank holds only a '
            "fragment of each matrix, so the step would communicate. Set "
            'owner_fsdp.tensor_parallel = "gather" to let it (the log says how many bytes), or set '
            f"{_KEY} to 1."
        )
    others = {
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
        "context_parallel_degree": parallelism.context_parallel_degree,
    }
    for name, other in others.items():
        if other != 1:
            raise ConfigError(
                f"parallelism.{name}: received {other} with {_KEY} = {degree}; legal: 1 with "
                f"tensor parallelism; set one of the two to 1."
            )
    replicate = parallelism.data_parallel_replicate_degree
    if shard_degree(config, world_size) == 1:
        raise ConfigError(
            f"{_KEY}: received {degree} with a shard degree of 1; legal: 1, or a shard degree of "
            "2 or more. Raise parallelism.data_parallel_shard_degree, start more processes, or set "
            f"{_KEY} to 1."
        )
    if is_owned and owner_fsdp.replicas == "partitioned" and replicate > 1:
        raise ConfigError(
            f"owner_fsdp.replicas: received 'partitioned' with {_KEY} = {degree}; legal: "
            f"'redundant' with tensor parallelism; change it, or set {_KEY} to 1."
        )
    if parallelism.enable_async_tensor_parallel:
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel: received True; this plugin does not support "
            "it; set it to false."
        )
    # The sequence is cut by the degree; TorchTitan asks for a factor of two more.
    if config.training.seq_len % (2 * degree):
        raise ConfigError(
            f"training.seq_len: received {config.training.seq_len}; legal with {_KEY} = {degree}: "
            f"a multiple of {2 * degree}; change training.seq_len."
        )


def check_model_cut(config: TitanJobConfig, args: BaseModelArgs) -> None:
    """Check that tensor parallelism can cut this model, its heads and its vocabulary evenly.

    Raises:
        ConfigError: naming the key, the degree and the number that it does not divide.
    """
    degree = config.parallelism.tensor_parallel_degree
    if degree == 1:
        return
    if isinstance(args, Qwen3ModelArgs) and not torch.accelerator.is_available():
        # Its attention works on DTensors, for which torch has no attention on CPU.
        raise ConfigError(
            f"{_KEY}: received {degree} with model.name = {config.model.name!r} on CPU; legal: 1 "
            f'there. Set {_KEY} to 1, or train "llama3_owner".'
        )
    if not isinstance(args, TransformerModelArgs | Qwen3ModelArgs):
        raise TypeError(f"expected the arguments of Llama 3 or Qwen3, got {type(args).__name__}")
    numbers = {
        "attention heads": args.n_heads,
        "key and value heads": args.n_kv_heads or args.n_heads,
        "tokens in the vocabulary": args.vocab_size,
    }
    for what, number in numbers.items():
        if number % degree:
            raise ConfigError(
                f"{_KEY}: received {degree}; legal: a divisor of the {number} {what} of "
                f"model.flavor {config.model.flavor!r}; change the degree or the flavor."
            )


def apply_tensor_parallel(
    model: nn.Module, parallel_dims: ParallelDims, job_config: TitanJobConfig
) -> None:
    """Apply TorchTitan's tensor-parallel plan of the model's family, sequence and loss parallel
    included, where the degree is above 1. To be called before anything else is applied.

    Raises:
        TypeError: not a model of this plugin.
    """
    if not parallel_dims.tp_enabled:
        return
    embedding, output = (model.get_submodule(name) for name in ("tok_embeddings", "output"))
    tied = output.get_parameter("weight") is embedding.get_parameter("weight")
    mesh = parallel_dims.get_mesh("tp")
    loss_parallel = not job_config.parallelism.disable_loss_parallel
    if isinstance(model, OwnerLlama3):
        apply_tp(model, mesh, loss_parallel, enable_float8_tensorwise_tp=False)
    elif isinstance(model, OwnerQwen3):
        apply_non_moe_tp(
            model,
            mesh,
            loss_parallel,
            enable_float8_tensorwise_tp=False,
            enable_async_tp=False,
            cp_enabled=False,
        )
    else:
        raise TypeError(f"no tensor-parallel plan for {type(model).__name__}")
    if tied:
        # The plan cuts the embedding and the head alike, but each from the whole weight.
        output.register_parameter("weight", embedding.get_parameter("weight"))


def log_exchange(optimizers: Iterable[Optimizer]) -> None:
    """Say once that the step communicates, and how much this rank sends."""
    for optimizer in optimizers:
        if isinstance(optimizer, LocalStepOptimizer):
            inner = optimizer.inner
            if isinstance(inner, TensorParallelMuon):
                sent = inner.predict()
                logger.info(
                    'owner_fsdp.tensor_parallel is "gather": matrices are gathered over the '
                    "tensor-parallel ranks of their owner at every step, the one exception to a "
                    f"step without communication. This rank sends {sent.sent_bytes:,} bytes in "
                    f"{sent.messages} messages per step"
                )
