"""Independent single-process references: the maths written out, nothing shared with the package."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def oracle_newton_schulz(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """The quintic iteration as torch.optim.Muon runs it, in any dtype."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(dtype)
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    norm = x.norm()
    x = x / norm if norm > 0 else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class OracleMuon:
    """torch.optim.Muon's update with Newton-Schulz in a chosen dtype."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool = True,
        steps: int = 5,
        dtype: torch.dtype = torch.float64,
        adjust_lr: str = "match_rms_adamw",
    ) -> None:
        self.params = list(params)
        self.lr, self.weight_decay, self.momentum = lr, weight_decay, momentum
        self.nesterov, self.steps, self.dtype, self.adjust_lr = nesterov, steps, dtype, adjust_lr
        self.buffers = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self) -> None:
        for param, buffer in zip(self.params, self.buffers, strict=True):
            grad = param.grad
            assert grad is not None
            buffer.copy_(self.momentum * buffer + (1 - self.momentum) * grad)
            update = buffer
            if self.nesterov:
                update = (1 - self.momentum) * grad + self.momentum * buffer
            rows, cols = param.shape
            if self.adjust_lr == "original":
                scale = math.sqrt(max(1, rows / cols))
            else:
                scale = 0.2 * math.sqrt(max(rows, cols))
            direction = oracle_newton_schulz(update, self.steps, self.dtype).to(param.dtype)
            param.mul_(1 - self.lr * self.weight_decay)
            param.sub_(self.lr * scale * direction)
