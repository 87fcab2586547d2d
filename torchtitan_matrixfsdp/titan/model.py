"""TorchTitan's dense models, with weights that do not depend on the layout.

The subclasses add two things: the initialisation draws whole tensors (see [Note:
layout-independent weights] in ``runtime.owner_dtensor``), and what parallelisation decided
travels on the model to the optimizer builder, which TorchTitan gives no other way to learn it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.qwen3.model.model import Qwen3Model

from torchtitan_matrixfsdp.comm import TrafficCounter
from torchtitan_matrixfsdp.layout import OwnerPlan, Routing
from torchtitan_matrixfsdp.runtime import whole_tensor_random
from torchtitan_matrixfsdp.titan.job_config import MatrixOptimizer


@dataclass(frozen=True)
class OwnerSetup:
    """What parallelisation decided.

    Attributes:
        routing: which parameters go to which optimizer.
        plan: who owns what; ``None`` where blocks are not owner-sharded.
        counter: what this rank's transports have sent.
        matrix_optimizer: the options of the matrix optimizer.
        steppers: the replica that steps each matrix, by FQN; empty where all of them do.
    """

    routing: Routing
    plan: OwnerPlan | None
    counter: TrafficCounter
    matrix_optimizer: MatrixOptimizer
    steppers: Mapping[str, int] = field(default_factory=dict)


class OwnerModelMixin:
    """Marks a model that this plugin parallelises."""

    owner_setup: OwnerSetup | None = None


class OwnerLlama3(OwnerModelMixin, Transformer):
    """TorchTitan's Llama 3."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialise as stock does; bit-equal for every world size and layout."""
        with whole_tensor_random():
            super().init_weights(buffer_device)


class OwnerQwen3(OwnerModelMixin, Qwen3Model):
    """TorchTitan's dense Qwen3."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialise as stock does; bit-equal for every world size and layout."""
        with whole_tensor_random():
            super().init_weights(buffer_device)
