"""Run any single-device optimizer on the local tensors of distributed parameters.

An owner's local tensor is the whole matrix, so a single-device optimizer class is already right
for it; an elementwise optimizer is right for any shard. What the class must not see is the
DTensor: operators on DTensors may communicate, and AdamW refuses lists that mix them with plain
tensors. So the inner optimizer holds plain tensors over the same storage, and this wrapper
presents parameters, groups and state as the outside expects them:

- ``param_groups`` list the module's own parameters (checkpoints find their names by identity) and
  carry every option, so schedulers change the learning rate here; it is handed in before a step;
- ``state`` holds each state tensor as a DTensor beside its parameter, over the same storage, so
  checkpoints see global tensors. A matrix optimizer says which shapes those have ([Note: state of
  a matrix optimizer]); of any other, all state is elementwise and of the parameter's layout, but
  for ``step``. Counters stay plain;
- state exists from construction, on every rank, with the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan_matrixfsdp.optim.base import (
    MatrixOptimizerBase,
    as_groups,
    load_in_place,
    local_part,
)
from torchtitan_matrixfsdp.runtime import check_gradient, wrap_like

InnerFactory = Callable[[list[dict[str, Any]], Mapping[torch.Tensor, torch.Tensor]], Optimizer]
"""Makes the inner optimizer from groups of local tensors, and the parameter of each."""

_COUNTER = "step"


class LocalStepOptimizer(Optimizer):
    """An optimizer over distributed (or plain) parameters that steps on their local tensors.

    Args:
        params: parameters, or groups of them with options, as for any torch optimizer.
        factory: makes the inner optimizer; it must create its state eagerly (matrix optimizers
            here do, and :func:`create_adam_state` does it for Adam and AdamW).
        step_view: for a parameter that only some of the ranks which store it step, the DTensor that
            says which: over the parameter's own storage there, of numel 0 elsewhere. State has its
            layout.

    Raises:
        TypeError: the inner optimizer has state that can be shown in no layout.
        ValueError: a matrix optimizer that was not told the logical shapes.
    """

    def __init__(
        self,
        params: Any,
        factory: InnerFactory,
        step_view: Callable[[torch.Tensor], DTensor | None] = lambda param: None,
    ) -> None:
        groups = as_groups(params)
        every_param = [param for group in groups for param in group["params"]]
        self._layout: dict[torch.Tensor, torch.Tensor] = {
            param: _or_itself(step_view(param), param) for param in every_param
        }
        self._local: dict[torch.Tensor, torch.Tensor] = {
            param: _local_parameter(self._layout[param], param.requires_grad)
            for param in every_param
        }
        local_groups = [
            {**group, "params": [self._local[p] for p in group["params"]]} for group in groups
        ]
        of_local = {local: param for param, local in self._local.items()}
        self.inner = factory(local_groups, of_local)
        outer_groups = [
            {**options, "params": group["params"]}
            for options, group in zip(self.inner.param_groups, groups, strict=True)
        ]
        if isinstance(self.inner, MatrixOptimizerBase):
            _check_logical_shapes(self.inner, self._local)
        # What `state` shows, as the inner optimizer has it.
        self._shown: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._empty_gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._is_built = False
        super().__init__(outer_groups, {})
        self._is_built = True
        self._present_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is built: its local tensors and state are made once.

        Raises:
            NotImplementedError: after construction.
        """
        if self._is_built:
            raise NotImplementedError(
                "add_param_group on a built LocalStepOptimizer: pass all groups to the constructor"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the inner optimizer on local tensors; this class adds no collective.

        Raises:
            BufferStateError: the memory of a gradient was freed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand_options_in()
        for param, local in self._local.items():
            if local.numel() == 0:
                # Stepped elsewhere: an empty gradient, so that step counters agree.
                local.grad = None if param.grad is None else self._nothing(local)
                continue
            current = local_part(param)
            if current.data_ptr() != local.data_ptr():
                # `to_empty` and `param.data = ...` give a parameter another storage; follow it.
                local.data = current.detach()
            check_gradient(param)
            local.grad = None if param.grad is None else local_part(param.grad)
        self.inner.step()
        for local in self._local.values():
            local.grad = None  # the parameter alone decides how long a gradient lives
        for group, inner_group in self._group_pairs():
            group.update({k: v for k, v in inner_group.items() if k != "params"})
        self._present_state()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load as :func:`~torchtitan_matrixfsdp.optim.base.load_in_place` does.

        Raises:
            ValueError: the groups, the parameters, or the names or shapes of their state differ.
        """
        load_in_place(self, state_dict)
        self._hand_options_in()
        if isinstance(self.inner, MatrixOptimizerBase):
            self.inner.state_loaded()

    def _hand_options_in(self) -> None:
        for group, inner_group in self._group_pairs():
            inner_group.update({k: v for k, v in group.items() if k != "params"})

    def _nothing(self, local: torch.Tensor) -> torch.Tensor:
        """An empty gradient of ``local``, the same one in every step."""
        found = self._empty_gradients.get(local)
        if found is None:
            found = self._empty_gradients[local] = torch.zeros_like(local, requires_grad=False)
        return found

    def _group_pairs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        return zip(self.param_groups, self.inner.param_groups, strict=True)

    def _present_state(self) -> None:
        """Shows what is new since the last time: after the first, only what was replaced."""
        for param, local in self._local.items():
            for name, value in self.inner.state[local].items():
                if self._shown.get((param, name)) is not value:
                    self._shown[param, name] = value
                    self.state[param][name] = self._present(param, local, name, value)

    def _present(
        self, param: torch.Tensor, local: torch.Tensor, name: str, value: torch.Tensor
    ) -> torch.Tensor:
        layout = self._layout[param]
        if isinstance(self.inner, MatrixOptimizerBase):
            shape = self.inner.state_shapes(local).get(name)
            return value if shape is None else wrap_like(value, layout, shape)
        if name == _COUNTER:
            return value
        if not isinstance(value, torch.Tensor) or value.shape != local.shape:
            raise TypeError(
                f"{type(self.inner).__name__} keeps {name!r} of another shape than its parameter: "
                "only a matrix optimizer of optim.base, or optim.ForeignOptimizer around the "
                "class, can say which shape it has on every rank"
            )
        return wrap_like(value, layout)


def create_adam_state(optimizer: torch.optim.Adam | torch.optim.AdamW) -> None:
    """Give Adam or AdamW the state that its first step would create, without a step.

    ``step`` 0, ``exp_avg`` and ``exp_avg_sq`` zero, of each parameter's shape and dtype. The
    library's own way (a step with zero gradients) leaves the counter at 1.

    Raises:
        NotImplementedError: ``amsgrad``, whose extra state is not created here.
    """
    for group in optimizer.param_groups:
        if group["amsgrad"]:
            raise NotImplementedError("create_adam_state: amsgrad is not supported")
        on_device = group["capturable"] or group["fused"]
        for param in group["params"]:
            # The counter's dtype is torch's own choice: float32, or float64 where that is the
            # default dtype and the implementation is not fused.
            dtype = torch.float32 if group["fused"] else torch.get_default_dtype()
            dtype = dtype if dtype == torch.float64 else torch.float32
            device = param.device if on_device else torch.device("cpu")
            optimizer.state[param] = {
                _COUNTER: torch.zeros((), dtype=dtype, device=device),
                "exp_avg": torch.zeros_like(param, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
            }


def _check_logical_shapes(
    inner: MatrixOptimizerBase, local_of: Mapping[torch.Tensor, torch.Tensor]
) -> None:
    """A rank without a matrix would otherwise name its state by the shape of nothing."""
    for param, local in local_of.items():
        if inner.logical_shape(local) != tuple(param.shape):
            raise ValueError(
                f"{type(inner).__name__} takes a matrix of shape {tuple(param.shape)} for one of "
                f"{inner.logical_shape(local)}, the local part; the factory must pass "
                "logical_shapes=logical_shapes(of_local)"
            )


def _or_itself(view: torch.Tensor | None, param: torch.Tensor) -> torch.Tensor:
    return param if view is None else view


def _local_parameter(layout: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return local_part(layout).detach().requires_grad_(requires_grad)
