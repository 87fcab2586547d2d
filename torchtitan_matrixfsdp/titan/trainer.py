"""TorchTitan's trainer, which refuses a wrong configuration before the first collective."""

from __future__ import annotations

import os

from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.train import Trainer

from torchtitan_matrixfsdp.titan.train_specs import MODEL_NAMES, dense_flavors
from torchtitan_matrixfsdp.titan.validation import validate_job_config


class OwnerTrainer(Trainer):
    """``torchtitan.train.Trainer``; jobs of this plugin's models are checked first."""

    def __init__(self, job_config: TitanJobConfig) -> None:
        name = job_config.model.name
        if name in MODEL_NAMES:
            world_size = int(os.environ["WORLD_SIZE"])
            validate_job_config(job_config, world_size, list(dense_flavors(name)))
        super().__init__(job_config)
