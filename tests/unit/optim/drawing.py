"""Random weights and gradients for the tests of single-device optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn


def draw_params(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, seed: int = 0
) -> list[nn.Parameter]:
    """A parameter of each shape; the same values, rounded, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def set_random_grads(*lists: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """Give the parameters of all lists the same gradients."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for params in zip(*lists, strict=True):
        grad = torch.randn(params[0].shape, generator=generator, dtype=torch.float64)
        for param in params:
            param.grad = (scale * grad).to(param.dtype)
