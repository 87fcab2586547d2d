"""Pipeline parallelism: TorchTitan's own, with one plan per pipeline rank.

[Note: owner shards in a pipeline]
TorchTitan copies the whole model for each stage of a rank and deletes what other stages hold;
FQNs stay those of the whole model, so checkpoints of all stages fit together. Three things are
different here from what TorchTitan does stage by stage:

- *Routing* is judged on the whole model, before the first collective.
- *The plan* covers all stages of a rank (interleaved schedules give it several), so that load is
  carried from one to the next; its ranks are the shard group of that pipeline rank.
- *Initial weights* are those of the whole model. TorchTitan gives each pipeline rank a seed of its
  own and each stage draws only its own weights; see :func:`drawn_as_whole`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.model import BaseModelArgs

from torchtitan_matrixfsdp.titan.model import OwnerModelMixin, WholeModel
from torchtitan_matrixfsdp.titan.parallelize import parallelize_parts, route_model, split_model
from torchtitan_matrixfsdp.titan.validation import matrix_optimizer_of, validate_job_config


def pipeline_owner_model(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: TitanJobConfig,
    device: torch.device,
    model_args: BaseModelArgs,
    parallelize_fn: Any,
    loss_fn: Any,
) -> tuple[Any, list[nn.Module], bool, bool]:
    """TorchTitan's ``pipelining_fn``: ``pipeline_llm``, then this rank's stages parallelised
    together. ``parallelize_fn`` is not called: it would see one stage at a time.

    Returns:
        The schedule, this rank's model parts, whether it has the first stage, and the last.

    Raises:
        ConfigError, RoutingError: as for ``parallelize_owner_model``.
        PlanDisagreementError: ranks of a stage computed different plans.
    """
    validate_job_config(job_config, parallel_dims.world_size)
    routing = route_model(model, matrix_optimizer_of(job_config))
    splits = split_model(model, routing, matrix_optimizer_of(job_config))
    schedule, parts, has_first, has_last = pipeline_llm(
        model, parallel_dims, job_config, device, model_args, _leave_alone, loss_fn
    )
    parallelize_parts(parts, routing, splits, parallel_dims, job_config)
    # The first pipeline rank has the seed that all ranks have without a pipeline.
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, group=parallel_dims.get_mesh("pp").get_group(), group_src=0)
    for part in parts:
        assert isinstance(part, OwnerModelMixin)
        part.whole = WholeModel(model, seed[0])
    return schedule, parts, has_first, has_last


def _leave_alone(
    part: nn.Module, parallel_dims: ParallelDims, job_config: TitanJobConfig
) -> nn.Module:
    return part
