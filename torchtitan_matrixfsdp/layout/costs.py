"""The formulas of cost: optimizer FLOPs and a block's imbalance. Each stands here only."""

from __future__ import annotations

from collections.abc import Sequence


def newton_schulz_flops(rows: int, cols: int, steps: int) -> int:
    """Returns the matmul FLOPs of the quintic Newton-Schulz iteration on a [rows, cols] matrix.

    With m the short side and n the long one (the iteration runs on the wide orientation), a step
    multiplies X X^T (2 m^2 n), A A (2 m^3) and B X (2 m^2 n). One multiply-add is two FLOPs;
    elementwise work, of order m n, is left out.

    Raises:
        ValueError: a negative argument.
    """
    if rows < 0 or cols < 0 or steps < 0:
        raise ValueError(f"rows={rows}, cols={cols}, steps={steps}; legal: all >= 0")
    m, n = min(rows, cols), max(rows, cols)
    gram = 2 * m * m * n
    square = 2 * m**3
    update = 2 * m * m * n
    return steps * (gram + square + update)


def muon_flops(shape: Sequence[int], steps: int) -> int:
    """Returns the matmul FLOPs of one Muon step on a weight of the given logical 2D shape.

    Raises:
        ValueError: the shape is not 2D; Muon has no meaning there.
    """
    if len(shape) != 2:
        raise ValueError(f"Muon needs a 2D shape, got {tuple(shape)}")
    return newton_schulz_flops(shape[0], shape[1], steps)


def gamma(world_size: int, owned: Sequence[int], total: int) -> float:
    """Returns gamma = W * max_r L_r / P: how far the largest rank is from an even split.

    1.0 is perfect, W is one owner for everything, and an empty block (``total`` 0) counts as
    perfect. Any unit serves (elements, bytes) if ``owned`` and ``total`` share it. ``owned`` holds
    L_r in any order; ranks that own nothing may be left out, since they cannot be the maximum.
    """
    if total == 0:
        return 1.0
    return world_size * max(owned, default=0) / total
