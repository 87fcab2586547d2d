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
from torch.distributed.tensor import DTensor
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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As :func:`load_in_place`."""
        load_in_place(self, state_dict)
        self.state_loaded()

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


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Groups of their own, from what a torch optimizer takes: parameters, or groups of them."""
    entries = list(params)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    return [{**group, "params": list(group["params"])} for group in groups]


def load_in_place(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Copy what ``state_dict`` holds into the state tensors that ``optimizer`` has, and take the
    groups' options. Values are DTensors of the same layout, or plain tensors of the local shapes.

    Unlike torch's own, which replaces state and casts all but ``step`` to the parameter's dtype: a
    float32 preconditioner of a bfloat16 weight would come back as bfloat16. Hooks of
    ``register_load_state_dict_*_hook`` are not called.

    Raises:
        ValueError: other groups, names or shapes than this optimizer's; nothing was changed.
    """
    saved_groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(f"parameters per group: received {saved_sizes}; legal: {sizes}")
    pairs = [
        (key, optimizer.state[param], state_dict["state"].get(key, {}))
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=True)
        for param, key in zip(group["params"], saved["params"], strict=True)
    ]
    for key, state, values in pairs:
        shapes, saved_shapes = _local_shapes(state), _local_shapes(values)
        if shapes != saved_shapes:
            raise ValueError(
                f"state of parameter {key}: received {saved_shapes}; legal: {shapes}. Load with "
                "the options of the run that saved it."
            )
    with torch.no_grad():
        for _, state, values in pairs:
            for name, value in values.items():
                # A checkpoint that was read in place hands back the very tensor.
                if state[name] is not value:
                    local_part(state[name]).copy_(torch.as_tensor(local_part(value)))
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})


def local_part(value: Any) -> Any:
    """The local tensor of a DTensor; anything else as it is."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.to_local()
    return value


def _local_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(torch.as_tensor(local_part(v)).shape) for name, v in state.items()}


def logical_shapes(
    of_local: Mapping[torch.Tensor, torch.Tensor],
) -> dict[torch.Tensor, tuple[int, ...]]:
    """The shape of the whole parameter of each local tensor, for ``logical_shapes``."""
    return {local: tuple(param.shape) for local, param in of_local.items()}
