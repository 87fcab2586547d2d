"""Run any single-device optimizer on the local tensors of distributed parameters.

An owner's local tensor is the whole matrix, so a single-device optimizer class is already right
for it; an elementwise optimizer is right for any shard. What the class must not see is the
DTensor: operators on DTensors may communicate, and AdamW refuses lists that mix them with plain
tensors. So the inner optimizer holds plain tensors over the same storage, and this wrapper
presents parameters, groups and state as the outside expects them:

- ``param_groups`` list the module's own parameters (checkpoints find their names by identity) and
  carry every option, so schedulers change the learning rate here; it is handed in before a step;
- ``state`` holds each state tensor of the local shape as a DTensor of the parameter's layout, over
  the same storage, so checkpoints see global tensors; other state (a step counter) stays plain;
- state exists from construction, on every rank, with the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan_matrixfsdp.runtime import check_gradient, wrap_like

InnerFactory = Callable[[list[dict[str, Any]], Mapping[torch.Tensor, torch.Tensor]], Optimizer]
"""Makes the inner optimizer from groups of local tensors, and the parameter of each."""


class LocalStepOptimizer(Optimizer):
    """An optimizer over distributed (or plain) parameters that steps on their local tensors.

    Args:
        params: parameters, or groups of them with options, as for any torch optimizer.
        factory: makes the inner optimizer; it must create its state eagerly (Muon here does,
            and :func:`create_adam_state` does it for Adam and AdamW).
        step_view: for a parameter that only some of the ranks which store it step, the DTensor that
            says which: over the parameter's own storage there, of numel 0 elsewhere. State has its
            layout.
    """

    def __init__(
        self,
        params: Any,
        factory: InnerFactory,
        step_view: Callable[[torch.Tensor], DTensor | None] = lambda param: None,
    ) -> None:
        entries = list(params)
        groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
        groups = [{**group, "params": list(group["params"])} for group in groups]
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
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update({k: v for k, v in group.items() if k != "params"})
        for param, local in self._local.items():
            if _is_empty_part(param, local):
                # Stepped elsewhere: an empty gradient, so that step counters agree.
                local.grad = None if param.grad is None else torch.zeros_like(local)
                continue
            _follow_storage(param, local)
            check_gradient(param)
            local.grad = None if param.grad is None else _plain(param.grad)
        self.inner.step()
        for local in self._local.values():
            local.grad = None  # the parameter alone decides how long a gradient lives
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({k: v for k, v in inner_group.items() if k != "params"})
        self._present_state()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state (DTensors of this layout, or plain tensors), then use it for the next step."""
        super().load_state_dict(state_dict)
        for param, local in self._local.items():
            self.inner.state[local] = {k: _plain(v) for k, v in self.state[param].items()}

    def _present_state(self) -> None:
        for param, local in self._local.items():
            shown = self.state[param]
            for name, value in self.inner.state[local].items():
                if name not in shown or _plain(shown[name]) is not value:
                    shown[name] = _present(value, self._layout[param], local)


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
                "step": torch.zeros((), dtype=dtype, device=device),
                "exp_avg": torch.zeros_like(param, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
            }


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.to_local()
    return value


def _or_itself(view: torch.Tensor | None, param: torch.Tensor) -> torch.Tensor:
    return param if view is None else view


def _local_parameter(layout: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return _plain(layout).detach().requires_grad_(requires_grad)


def _is_empty_part(param: torch.Tensor, local: torch.Tensor) -> bool:
    return local.numel() == 0 and _plain(param).numel() > 0


def _follow_storage(param: torch.Tensor, local: torch.Tensor) -> None:
    """``to_empty`` and ``param.data = ...`` give a parameter another storage; follow it."""
    current = _plain(param)
    if current.data_ptr() != local.data_ptr():
        local.data = current.detach()


def _present(value: Any, layout: torch.Tensor, local: torch.Tensor) -> Any:
    is_shard = isinstance(value, torch.Tensor) and value.shape == local.shape
    return wrap_like(value, layout) if is_shard else value
