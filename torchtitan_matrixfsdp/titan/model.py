"""TorchTitan's dense models, with weights that do not depend on the layout.

The subclasses add two things: the initialisation draws whole tensors (see [Note:
layout-independent weights] in ``runtime.owner_dtensor``), and what parallelisation decided
travels on the model to the optimizer builder, which TorchTitan gives no other way to learn it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.qwen3.model.model import Qwen3Model

from torchtitan_matrixfsdp.comm import TrafficCounter
from torchtitan_matrixfsdp.layout import OwnerPlan, Routing
from torchtitan_matrixfsdp.optim import Split
from torchtitan_matrixfsdp.runtime import OwnerContext, whole_tensor_random
from torchtitan_matrixfsdp.titan.job_config import MatrixOptimizer


@dataclass(frozen=True)
class OwnerSetup:
    """What parallelisation decided.

    Attributes:
        routing: which parameters go to which optimizer.
        plan: who owns what; ``None`` where blocks are not owner-sharded.
        context: what the blocks of this rank share, with the count of what it has sent.
        matrix_optimizer: the options of the matrix optimizer.
        steppers: the replica that steps each matrix, by FQN; empty where all of them do.
        splits: the matrices of the whole model that Muon cuts into blocks, by FQN.
        stock_step: how Muon steps row shards.
    """

    routing: Routing
    plan: OwnerPlan | None
    context: OwnerContext
    matrix_optimizer: MatrixOptimizer
    steppers: Mapping[str, int] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    stock_step: str = "gather"

    @property
    def counter(self) -> TrafficCounter:
        """What this rank's transports and optimizers have sent."""
        return self.context.counter


@dataclass(frozen=True)
class WholeModel:
    """What a pipeline stage must know of the model that it is a part of.

    Attributes:
        model: the whole model, on meta.
        seed: the seed that every rank would have without a pipeline.
    """

    model: nn.Module
    seed: int


class OwnerModelMixin(nn.Module):
    """Marks a model that this plugin parallelises.

    Attributes:
        owner_setup: what parallelisation decided; ``None`` before.
        whole: the model that this one is a stage of; ``None`` for a whole model.
    """

    owner_setup: OwnerSetup | None = None
    whole: WholeModel | None = None
    model_args: Any


class OwnerLlama3(OwnerModelMixin, Transformer):
    """TorchTitan's Llama 3."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialise as stock does; bit-equal for every world size and layout."""
        with whole_tensor_random(), drawn_as_whole(self, self.whole):
            super().init_weights(buffer_device)


class OwnerQwen3(OwnerModelMixin, Qwen3Model):
    """TorchTitan's dense Qwen3."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialise as stock does; bit-equal for every world size and layout."""
        with whole_tensor_random(), drawn_as_whole(self, self.whole):
            super().init_weights(buffer_device)


@contextmanager
def drawn_as_whole(stage: nn.Module, whole: WholeModel | None) -> Iterator[None]:
    """Context in which ``init_weights`` of a pipeline stage gives the whole model's weights.

    The generators start from the whole model's seed, and stand-ins take the places of what other
    stages hold: each draws what the real module would and drops it, one module at a time. Nothing
    is drawn after the last weight of the stage itself. Afterwards the generators are as before:
    TorchTitan wants those of different stages to differ.
    """
    if whole is None:
        yield
        return
    device = next(stage.parameters()).device
    absent = _stand_ins(stage, whole.model, device)
    own_layers = stage.get_submodule("layers")
    present = {f"layers.{name}": layer for name, layer in own_layers.named_children()} | absent
    names = [f"layers.{name}" for name, _ in whole.model.get_submodule("layers").named_children()]
    layers = {name.split(".")[1]: present[name] for name in names if name in present}
    outside = [name for name in absent if name not in names]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices):
        torch.manual_seed(whole.seed)
        try:
            for name in outside:
                setattr(stage, name, absent[name])
            stage.layers = nn.ModuleDict(layers)
            yield
        finally:
            for name in outside:
                setattr(stage, name, None)
            stage.layers = own_layers


def _stand_ins(stage: nn.Module, whole: nn.Module, device: torch.device) -> dict[str, _StandIn]:
    """One for each module of ``whole`` that ``stage`` lacks, but for those after its last own."""
    own = _units(stage)
    order = _units(whole)
    last = max(order.index(name) for name in own)
    absent = [name for name in order[:last] if name not in own]
    return {name: _StandIn(whole.get_submodule(name), device) for name in absent}


def _units(model: nn.Module) -> list[str]:
    """What a pipeline assigns to stages: each transformer block, and what is outside of them."""
    names: list[str] = []
    for name, child in model.named_children():
        is_stack = name == "layers"
        names += [f"layers.{key}" for key, _ in child.named_children()] if is_stack else [name]
    return names


class _StandIn(nn.Module):
    """Draws the random numbers of a module that another stage holds; keeps no storage."""

    def __init__(self, on_meta: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._of = (on_meta,)  # in a tuple: no submodule of this one
        self._device = device

    @property
    def weight(self) -> torch.Tensor:
        """A transient tensor for TorchTitan to fill, as it fills embedding and head."""
        weight = self._of[0].get_parameter("weight")
        return torch.empty_like(weight, device=self._device, requires_grad=False)

    def init_weights(self, *args: Any) -> None:
        """As a transformer block's."""
        block: Any = deepcopy(self._of[0]).to_empty(device=self._device)
        block.init_weights(*args)

    def reset_parameters(self) -> None:
        """As a norm's, which draws nothing."""
