r"""Muon on plain tensors.

The maths are those of ``torch.optim.Muon`` (and its conventions, which differ between libraries).
With gradient :math:`g`, momentum buffer :math:`B`, :math:`\mu` = ``momentum``, learning rate
:math:`\gamma`, decay :math:`\lambda` and a weight of logical shape (out, in):

.. math::
    B &\leftarrow \mu B + (1 - \mu) g \\
    u &= (1 - \mu) g + \mu B \ \text{ if nesterov, else } B \\
    O &= \mathrm{NewtonSchulz}(u) \\
    W &\leftarrow (1 - \gamma \lambda) W - \gamma \, s(\text{out}, \text{in}) \, O

The decay uses the base learning rate, not the adjusted one. :math:`s` is ``adjust_lr``:

- ``original`` (Jordan): :math:`\sqrt{\max(1, \text{out}/\text{in})}`;
- ``match_rms_adamw`` (Moonlight, arXiv 2502.16982): :math:`0.2\sqrt{\max(\text{out}, \text{in})}`.
  The update then has the RMS of a typical AdamW step, and AdamW's rate and decay carry over.

The one difference from ``torch.optim.Muon``: the orthogonalisation is scale-invariant down to
1e-30 (see :mod:`~torchtitan_matrixfsdp.optim.newton_schulz`), and its dtype can be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtitan_matrixfsdp.optim.base import MatrixOptimizerBase, PendingUpdate
from torchtitan_matrixfsdp.optim.newton_schulz import newton_schulz

ADJUST_LR = ("original", "match_rms_adamw")


def lr_scale(adjust_lr: str, shape: tuple[int, ...]) -> float:
    """The factor s(out, in) on the learning rate (dimensionless).

    Raises:
        ValueError: ``adjust_lr`` is unknown.
    """
    # Nothing of an empty matrix is scaled; its width must only not be divided by.
    rows, cols = shape[0], shape[1] or 1
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / cols))
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    raise ValueError(f"adjust_lr: received {adjust_lr!r}; legal: {list(ADJUST_LR)}")


class Muon(MatrixOptimizerBase):
    """Muon for 2D parameters, one matrix at a time.

    Parameters with numel 0 (matrices that another rank owns) keep their empty state and are not
    orthogonalised. State is created with the optimizer: ``momentum_buffer``, of the parameter's
    shape and dtype.

    Args:
        params: 2D parameters or groups of them.
        lr: learning rate, >= 0.
        weight_decay: decoupled decay, >= 0.
        momentum: in [0, 1).
        nesterov: look ahead by one momentum step.
        ns_steps: Newton-Schulz iterations, >= 1.
        ns_dtype: dtype of Newton-Schulz.
        adjust_lr: one of ``ADJUST_LR``.
        logical_shapes: as for :class:`MatrixOptimizerBase`.

    Raises:
        ValueError: a hyperparameter out of range, or a parameter that is not 2D.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 0.02,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        adjust_lr: str = "match_rms_adamw",
        logical_shapes: Mapping[torch.Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        if not lr >= 0:  # NaN too
            raise ValueError(f"lr: received {lr}; legal: >= 0")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay: received {weight_decay}; legal: >= 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum: received {momentum}; legal: 0 <= momentum < 1")
        if ns_steps < 1:
            raise ValueError(f"ns_steps: received {ns_steps}; legal: >= 1")
        lr_scale(adjust_lr, (1, 1))  # raises on an unknown name
        # Not a group option: checkpoints save those, and a dtype is how to compute, not state.
        self._ns_dtype = ns_dtype
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
        }
        super().__init__(params, defaults, logical_shapes)

    def state_shapes(self, param: torch.Tensor) -> Mapping[str, tuple[int, ...]]:
        """``momentum_buffer``, of the matrix's shape."""
        return {"momentum_buffer": self.logical_shape(param)}

    def _create_state(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(
                param, requires_grad=False, memory_format=torch.preserve_format
            )

    def _update(self, pending: Sequence[PendingUpdate]) -> None:
        # One matrix after another: a single update is alive at a time.
        for param, grad, group in pending:
            update = self._average(param, grad, group)
            self._apply(param, self._orthogonalise(param, update, group["ns_steps"]), group)

    def _average(
        self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        """Moves the momentum buffer; returns what is to be orthogonalised, of ``grad``'s shape."""
        momentum = group["momentum"]
        buffer = self.state[param]["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if group["nesterov"] else buffer

    def _apply(self, param: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]) -> None:
        lr = group["lr"]
        scale = lr_scale(group["adjust_lr"], self.logical_shape(param))
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(direction, alpha=-lr * scale)

    def _orthogonalise(self, param: torch.Tensor, update: torch.Tensor, steps: int) -> torch.Tensor:
        """This rank's part of the orthogonalised ``update``, of its shape."""
        if update.numel() == 0:
            return update
        return newton_schulz(update, steps=steps, compute_dtype=self._ns_dtype)
