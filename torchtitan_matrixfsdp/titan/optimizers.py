"""TorchTitan's optimizer and scheduler containers over two optimizers per model part."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import LRScheduler as LRSchedulerConfig
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from torchtitan_matrixfsdp.layout import canonical_fqn
from torchtitan_matrixfsdp.optim import EXTRAS, Split
from torchtitan_matrixfsdp.runtime import OwnerContext, PartitionedReplicas
from torchtitan_matrixfsdp.titan.local_optimizers import (
    build_elementwise_optimizer,
    build_matrix_optimizer,
)
from torchtitan_matrixfsdp.titan.model import OwnerModelMixin, OwnerSetup
from torchtitan_matrixfsdp.titan.tensor_parallel import log_exchange

_STATE_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_PER_PART = 2  # optimizers of a model part: matrix, elementwise


class MatrixOptimizersContainer(OptimizersContainer):
    """One matrix and one elementwise optimizer per model part, as one optimizer.

    Iterates them in the order [matrix, elementwise] per part; schedulers follow that order.
    """

    def __init__(self, model_parts: list[nn.Module], optimizer_config: OptimizerConfig) -> None:
        self.model_parts = model_parts
        self._of_part: list[list[Optimizer]] = []
        self._partitions: list[PartitionedReplicas] = []
        self._contexts: list[OwnerContext] = []
        everything: list[nn.Parameter] = []
        for part in model_parts:
            setup = _setup_of(part)
            matrices, others = split_parameters(part, setup)
            everything += matrices + others
            if all(context is not setup.context for context in self._contexts):
                self._contexts.append(setup.context)
            partition = partition_replicas(part, setup)
            self._partitions.append(partition)
            self._of_part.append(
                [
                    build_matrix_optimizer(
                        matrices, setup, optimizer_config, partition, splits_of(part, setup)
                    ),
                    build_elementwise_optimizer(others, optimizer_config),
                ]
            )
        self.optimizers = [optimizer for part in self._of_part for optimizer in part]
        self._post_init(everything, {})

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step every optimizer, then start sending what only this replica has stepped, and to
        resident blocks what their owners have."""
        super().step(*args, **kwargs)
        for partition in self._partitions:
            partition.publish()
        for context in self._contexts:
            context.publish()

    def state_dict(self) -> dict[str, Any]:
        """Flat state by parameter name, of both optimizers; reading it changes nothing."""
        merged: dict[str, Any] = {}
        for part, optimizers in zip(self.model_parts, self._of_part, strict=True):
            stateful = _with_parameters(optimizers)
            merged |= get_optimizer_state_dict(part, stateful, options=_STATE_OPTIONS)
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gives.

        Raises:
            ValueError: a key is missing or extra. torch would skip it, and the optimizer would
                go on with state that is part loaded, part fresh.
        """
        expected = self.state_dict().keys()
        missing, extra = expected - state_dict.keys(), state_dict.keys() - expected
        if missing or extra:
            raise ValueError(
                f"optimizer state does not fit this job: missing {sorted(missing)[:3]} "
                f"({len(missing)} in all), extra {sorted(extra)[:3]} ({len(extra)} in all). Resume "
                "with the same model, matrix_optimizer.name and routing, or add optimizer to "
                "checkpoint.exclude_from_loading."
            )
        configured = [_options(optimizer) for optimizer in self.optimizers]
        for part, optimizers in zip(self.model_parts, self._of_part, strict=True):
            set_optimizer_state_dict(
                part,
                _with_parameters(optimizers),
                optim_state_dict=state_dict,
                options=_STATE_OPTIONS,
            )
        for optimizer, before in zip(self.optimizers, configured, strict=True):
            changed = {k: v for k, v in _options(optimizer).items() if v != before[k]}
            if changed:
                was = {key: before[key] for key in changed}
                logger.warning(
                    f"Checkpoint resumes optimizer options {changed}; configured: {was}. Add "
                    "optimizer to checkpoint.exclude_from_loading for fresh state and the "
                    "configured options."
                )


def _with_parameters(optimizers: list[Optimizer]) -> list[Optimizer]:
    """A pipeline's stage may hold no matrix, and torch cannot load an optimizer of nothing."""
    return [o for o in optimizers if any(group["params"] for group in o.param_groups)]


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """The options of the groups, but the learning rate, which is the scheduler's business, and what
    is state of a foreign class."""
    hidden = ("params", "lr", "initial_lr", EXTRAS)
    return {
        f"{key} (group {index})": value
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in hidden
    }


def _setup_of(part: nn.Module) -> OwnerSetup:
    if not isinstance(part, OwnerModelMixin) or part.owner_setup is None:
        raise TypeError(
            f"{type(part).__name__} was not parallelised by this plugin: use model.name "
            '"llama3_owner" or "qwen3_owner".'
        )
    return part.owner_setup


def split_parameters(
    part: nn.Module, setup: OwnerSetup
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters of ``part``: (matrices, elementwise), in model order."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in part.named_parameters():
        if param.requires_grad:
            is_matrix = setup.routing.is_matrix(canonical_fqn(name))
            (matrices if is_matrix else others).append(param)
    return matrices, others


def splits_of(part: nn.Module, setup: OwnerSetup) -> dict[torch.Tensor, Split]:
    """The parameters of ``part`` that Muon cuts into blocks."""
    named = ((canonical_fqn(name), param) for name, param in part.named_parameters())
    return {param: setup.splits[fqn] for fqn, param in named if fqn in setup.splits}


def partition_replicas(part: nn.Module, setup: OwnerSetup) -> PartitionedReplicas:
    """Which matrices of ``part`` a single replica steps; none where ``setup`` names no stepper."""
    params = {canonical_fqn(name): param for name, param in part.named_parameters()}
    # A pipeline rank's parts share one setup.
    steppers = {params[fqn]: r for fqn, r in setup.steppers.items() if fqn in params}
    return PartitionedReplicas(steppers, setup.counter)


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: Any = None,
) -> MatrixOptimizersContainer:
    """TorchTitan's ``build_optimizers_fn``."""
    optimizers = MatrixOptimizersContainer(model_parts, optimizer_config)
    log_exchange(optimizers)
    return optimizers


class MatrixLRSchedulersContainer(LRSchedulersContainer):
    """One schedule, several learning rates.

    The stock container saves the first scheduler, base learning rates included, and loads it into
    all of them: the matrix optimizer's rate would overwrite AdamW's. Here the position in the
    schedule is saved once and each group's base rate by its index. Parts of a pipeline rank share
    their rates, so those of the first part are saved: a checkpoint serves any number of parts.
    """

    def __init__(self, stock: LRSchedulersContainer) -> None:
        # The stock builder owns the schedule's shape; take its schedulers as they are.
        self.schedulers = stock.schedulers

    def state_dict(self) -> dict[str, Any]:
        """``last_epoch`` (steps taken) and ``base_lr.<scheduler>.<group>``, scheduler 0 being the
        matrix optimizer's and 1 the elementwise one's."""
        state: dict[str, Any] = {"last_epoch": self.schedulers[0].last_epoch}
        for index, scheduler in enumerate(self.schedulers[:_PER_PART]):
            for group, base in enumerate(scheduler.base_lrs):
                state[f"base_lr.{index}.{group}"] = base
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the saved schedule was, with each group's saved base rate.

        Raises:
            KeyError: the saved schedule has no rate for one of this job's groups.
        """
        steps = state_dict["last_epoch"]
        for index, scheduler in enumerate(self.schedulers):
            saved = f"base_lr.{index % _PER_PART}"
            bases = [state_dict[f"{saved}.{group}"] for group in range(len(scheduler.base_lrs))]
            if bases != scheduler.base_lrs:
                logger.warning(
                    f"Checkpoint resumes learning rates {bases}; the configuration says "
                    f"{scheduler.base_lrs}. Add lr_scheduler and optimizer to "
                    "checkpoint.exclude_from_loading to start with the configuration's."
                )
            rates = [
                base * factor(steps)
                for base, factor in zip(bases, scheduler.lr_lambdas, strict=True)
            ]
            state = scheduler.state_dict()
            state |= {"last_epoch": steps, "_step_count": steps + 1}
            state |= {"base_lrs": bases, "_last_lr": rates}
            scheduler.load_state_dict(state)
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def build_schedulers(
    optimizers: OptimizersContainer, config: LRSchedulerConfig, training_steps: int
) -> MatrixLRSchedulersContainer:
    """TorchTitan's ``build_lr_schedulers_fn``: its schedule, in our container."""
    return MatrixLRSchedulersContainer(build_lr_schedulers(optimizers, config, training_steps))
