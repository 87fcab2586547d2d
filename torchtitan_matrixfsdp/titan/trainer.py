"""TorchTitan's trainer, which refuses a wrong configuration before the first collective."""

from __future__ import annotations

import os

import torch
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.train import Trainer

from torchtitan_matrixfsdp.titan import job_config as our_sections
from torchtitan_matrixfsdp.titan.checkpointing import build_checkpoint_manager
from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.parallelize import route_model
from torchtitan_matrixfsdp.titan.tensor_parallel import check_model_cut
from torchtitan_matrixfsdp.titan.train_specs import MODEL_NAMES, dense_flavors
from torchtitan_matrixfsdp.titan.validation import matrix_optimizer_of, validate_job_config


class OwnerTrainer(Trainer):
    """``torchtitan.train.Trainer``; jobs that use this plugin are checked first, routing included.

    Raises:
        ConfigError, RoutingError: before a process group exists.
    """

    def __init__(self, job_config: TitanJobConfig) -> None:
        name = job_config.model.name
        if name in MODEL_NAMES:
            flavors = dense_flavors(name)
            validate_job_config(job_config, int(os.environ["WORLD_SIZE"]), flavors)
            args = flavors[job_config.model.flavor]
            check_model_cut(job_config, args)
            with torch.device("meta"):
                model = get_train_spec(name).model_cls(args)
            route_model(model, matrix_optimizer_of(job_config))
        elif job_config.job.custom_config_module == our_sections.__name__:
            raise ConfigError(
                f"model.name: received {name!r}, which ignores [owner_fsdp] and "
                f"[matrix_optimizer]; legal: {list(MODEL_NAMES)}. For stock TorchTitan "
                "remove job.custom_config_module."
            )
        super().__init__(job_config)
        if name in MODEL_NAMES:
            # TorchTitan builds its own, and gives no way to choose another class.
            self.checkpointer = build_checkpoint_manager(self)
