"""What the matrix optimizers of this package have in common.

[Note: state of a matrix optimizer]
A matrix optimizer steps plain tensors: the whole matrix on the rank that owns it, numel 0 on every
other. Its state is made for checkpoints:

- ``state[param]`` holds tensors only, under fixed names, from construction on, on every rank;
- the names in :meth:`MatrixOptimizerBase.state_shapes` belong to whoever has the matrix: of that
  shape there, of shape ``(0, *shape[1:])`` on a rank whose parameter is empty. The shape depends on
  the parameter's logical shape alone, so every rank knows it;
- all other names are 0-dim counters, equal on every rank.

So :class:`~torchtitan_matrixfsdp.optim.LocalStepOptimizer` can show each tensor as a distributed
one without asking another rank, and a checkpoint has the same keys whoever writes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

PendingUpdate: TypeAlias = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""A parameter, its gradient and its group."""


class MatrixOptimizerBase(Optimizer):
    """An optimizer of 2D parameters whose state follows [Note: state of a matrix optimizer].

    Args:
        params: 2D parameters or groups of them, the same list on every rank; those that another
            rank owns have numel 0.
        defaults: group options.
        logical_shapes: the shape (rows, columns) of each parameter whose own shape does not say
            it, because another rank owns it or because it is a part of the matrix.

    Raises:
        ValueError: a parameter is not 2D.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        logical_shapes: Mapping[torch.Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        self._logical_shapes = dict(logical_shapes or {})
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and create its state."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            shape = self.logical_shape(param)
            if len(shape) != 2:
                raise ValueError(f"{type(self).__name__} takes 2D parameters, got shape {shape}")
        self._create_state(group)

    def logical_shape(self, param: torch.Tensor) -> tuple[int, ...]:
        """The shape of the whole matrix: (rows, columns)."""
        return self._logical_shapes.get(param, tuple(param.shape))

    @abstractmethod
    def state_shapes(self, param: torch.Tensor) -> Mapping[str, tuple[int, ...]]:
        """The shape, on the rank that has the matrix, of each state tensor that it alone has."""

    @abstractmethod
    def _create_state(self, group: dict[str, Any]) -> None:
        """Fill ``state`` for each parameter of a group."""

    @abstractmethod
    def _update(self, pending: Sequence[PendingUpdate]) -> None:
        """One update of the parameters that have a gradient, numel 0 included, in order."""

    def state_loaded(self) -> None:
        """Called after values were copied into the state tensors."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(
            [
                (param, param.grad, group)
                for group in self.param_groups
                for param in group["params"]
                if param.grad is not None
            ]
        )
        return loss

    def _state_tensor(
        self, param: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Zeros of ``shape`` where the matrix is, numel 0 elsewhere."""
        here = shape if param.numel() > 0 else (0, *shape[1:])
        return torch.zeros(here, dtype=dtype or param.dtype, device=param.device)


def logical_shapes(
    of_local: Mapping[torch.Tensor, torch.Tensor],
) -> dict[torch.Tensor, tuple[int, ...]]:
    """The shape of the whole parameter of each local tensor, for ``logical_shapes``."""
    return {local: tuple(param.shape) for local, param in of_local.items()}
