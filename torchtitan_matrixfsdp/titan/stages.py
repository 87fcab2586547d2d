"""Checks that need to know the model: pipeline stages, and attention under context parallelism.

TorchTitan finds most of these faults itself, but as it builds the stages, or in the first step.
"""

from __future__ import annotations

import math

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols.model import BaseModelArgs

from torchtitan_matrixfsdp.titan.checks import ConfigError, check_choice, check_range

_WHOLE_BACKWARD = ("1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS")
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_SCHEDULE = "parallelism.pipeline_parallel_schedule"


def compiles_blocks(config: TitanJobConfig) -> bool:
    """Whether ``[compile]`` asks for compiled transformer blocks."""
    return config.compile.enable and "model" in config.compile.components


def check_layers(config: TitanJobConfig, model_args: BaseModelArgs) -> None:
    """Check what pipeline and context parallelism ask of a model.

    Raises:
        ConfigError: naming key, value, what is legal and the remedy.
    """
    if not isinstance(model_args, (TransformerModelArgs, Qwen3ModelArgs)):
        raise TypeError(f"expected a dense model of TorchTitan's, got {type(model_args).__name__}")
    degree = config.parallelism.context_parallel_degree
    # As in TorchTitan: Qwen3 has no other, and variable-length attention has none at all.
    legal = ("sdpa", "flex") if isinstance(model_args, TransformerModelArgs) else ("sdpa",)
    if degree > 1 and model_args.attn_type not in legal:
        raise ConfigError(
            f"parallelism.context_parallel_degree: received {degree} with flavor "
            f"{config.model.flavor!r}, whose attention is {model_args.attn_type!r}; legal: 1, or a "
            f"flavor with attention of {list(legal)}. Change one of them."
        )
    if config.parallelism.pipeline_parallel_degree > 1:
        tied = isinstance(model_args, Qwen3ModelArgs) and model_args.enable_weight_tying
        _check_schedule(config)
        _check_stages(config, model_args.n_layers, tied)


def _check_schedule(config: TitanJobConfig) -> None:
    parallelism, training = config.parallelism, config.training
    schedule = parallelism.pipeline_parallel_schedule
    check_choice(_SCHEDULE, schedule, (*_WHOLE_BACKWARD, *_SPLIT_BACKWARD))
    if parallelism.pipeline_parallel_schedule_csv:
        raise ConfigError(
            "parallelism.pipeline_parallel_schedule_csv: received "
            f"{parallelism.pipeline_parallel_schedule_csv!r}; this plugin does not support it yet; "
            f"remove it and name a schedule in {_SCHEDULE}."
        )
    batch, microbatch = training.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    check_range("parallelism.pipeline_parallel_microbatch_size", microbatch, low=1)
    if batch % microbatch:
        raise ConfigError(
            f"training.local_batch_size: received {batch}; legal: a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size = {microbatch}. Change one of them."
        )
    if schedule in _SPLIT_BACKWARD:
        _check_split_backward(config, schedule)


def _check_split_backward(config: TitanJobConfig, schedule: str) -> None:
    """These schedules ask for weight gradients later, of the parameters the module then shows."""
    whole = f'or set {_SCHEDULE} = "{_WHOLE_BACKWARD[1]}"'
    reshard = config.parallelism.fsdp_reshard_after_forward
    if reshard == "always":
        # Torch looks for the weights' gradients under the sharded parameters, and finds none: stock
        # FSDP2 then trains on without them.
        raise ConfigError(
            f"parallelism.fsdp_reshard_after_forward: received {reshard!r} with the schedule "
            f"{schedule!r}, which computes weight gradients later and would lose them; legal: "
            f"'default' or 'never'. Change it, {whole}."
        )
    checkpointing = config.activation_checkpoint
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        raise ConfigError(
            "activation_checkpoint.selective_ac_option: received 'op' with the schedule "
            f"{schedule!r}, which runs a backward in two halves; torch recomputes such a region "
            f"once; legal: a number of layers. Change it, {whole}."
        )
    if compiles_blocks(config):
        raise ConfigError(
            f"compile.enable: received True with the schedule {schedule!r}; torch cannot split the "
            f"backward of a compiled module; legal: false. Change it, {whole}."
        )
    if schedule == "DualPipeV" and config.parallelism.pipeline_parallel_expert_parallel_overlap:
        raise ConfigError(
            "parallelism.pipeline_parallel_expert_parallel_overlap: received True with the "
            "schedule 'DualPipeV'; legal: false, since a dense model has no experts to overlap."
        )


def _check_stages(config: TitanJobConfig, num_layers: int, tied: bool) -> None:
    parallelism = config.parallelism
    degree = parallelism.pipeline_parallel_degree
    key = "parallelism.pipeline_parallel_degree"
    if tied:
        raise ConfigError(
            f"{key}: received {degree} with flavor {config.model.flavor!r}, whose embedding and "
            "head are one weight, needed by the first and the last stage; legal: 1, or a flavor "
            "without tied weights. Change one of them."
        )
    given = parallelism.module_fqns_per_model_part
    if given is not None:
        key = "parallelism.module_fqns_per_model_part"
        _check_given_stages(key, given, num_layers)
        num_stages = len(given)
    else:
        first = parallelism.pipeline_parallel_first_stage_less_layers
        last = parallelism.pipeline_parallel_last_stage_less_layers
        check_range("parallelism.pipeline_parallel_first_stage_less_layers", first, low=0)
        check_range("parallelism.pipeline_parallel_last_stage_less_layers", last, low=0)
        per_stage = parallelism.pipeline_parallel_layers_per_stage
        if per_stage is None:
            num_stages = degree * (1 if _has_single_stages(config) else 2)
        else:
            key = "parallelism.pipeline_parallel_layers_per_stage"
            check_range(key, per_stage, low=1)
            num_stages = math.ceil((num_layers + first + last) / per_stage)
        try:
            generate_llm_fqn_per_model_part(num_stages, num_layers, first, last)
        except ValueError as error:
            raise ConfigError(
                f"{key}: the {num_layers} layers of flavor {config.model.flavor!r} do not make "
                f"{num_stages} stages ({error}). Lower the degree, or take a schedule with one "
                "stage per rank."
            ) from None
    per_rank, rest = divmod(num_stages, degree)
    schedule = parallelism.pipeline_parallel_schedule
    fits, legal = per_rank >= 2, "at least 2"
    if _has_single_stages(config):
        fits, legal = per_rank == 1, "1"
    elif schedule in _V_SHAPED:
        fits, legal = per_rank == 2, "2"
    if rest or not fits:
        raise ConfigError(
            f"{key}: gives {num_stages} stages to {degree} pipeline ranks; legal for the schedule "
            f"{schedule!r}: {legal} on each rank. Change the number of stages, or {_SCHEDULE}."
        )


def _has_single_stages(config: TitanJobConfig) -> bool:
    schedule = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
    return issubclass(schedule, PipelineScheduleSingle)


def _check_given_stages(key: str, given: list[list[str]], num_layers: int) -> None:
    """Each module in one stage, in the model's order: TorchTitan drops in silence what no stage
    names, and a stage runs its modules in the model's order."""
    whole = ["tok_embeddings", *(f"layers.{i}" for i in range(num_layers)), "norm", "output"]
    named = [name for stage in given for name in stage]
    if named != whole or not all(given):
        raise ConfigError(
            f"{key}: received {given}; legal: stages that hold {whole}, each once and in this "
            "order, none empty. Correct the lists, or remove the key."
        )
