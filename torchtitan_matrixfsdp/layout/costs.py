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


# FLOPs over n^3 of dense routines on an n x n matrix, one multiply-add being two FLOPs.
# Symmetric eigendecomposition with vectors: Golub & Van Loan, Matrix Computations, section 8.3.
_EIGH = 9
# Householder QR with the orthogonal factor formed: 4/3 for R and 4/3 for Q (section 5.2).
_QR_THIRDS = 8
_MATMUL = 2


def block_sides(length: int, max_side: int) -> tuple[int, ...]:
    """Returns how a dimension is cut into the fewest parts of at most ``max_side``.

    Parts differ by at most 1, the longer ones first: a cut into full parts and a remainder would
    cost more, because the cost of a part grows with its cube. One part of 0 for an empty dimension.

    Raises:
        ValueError: a negative length or ``max_side`` below 1.
    """
    if length < 0 or max_side < 1:
        raise ValueError(f"length={length}, max_side={max_side}; legal: >= 0, >= 1")
    parts = max(1, -(-length // max_side))
    return tuple(length // parts + (part < length % parts) for part in range(parts))


def shampoo_root_flops(shape: Sequence[int], max_dim: int) -> int:
    """Returns the FLOPs of one refresh of Shampoo's inverse roots for a weight of logical shape.

    The weight is a grid of blocks with sides of at most ``max_dim``. Each block has two factors,
    and a factor of side n takes an eigendecomposition (9 n^3) and one product (2 n^3). Work of
    order n^2 is left out. The constants are those of the dense algorithms; how fast a device runs
    them is another matter, but it is that for all matrices alike.

    Raises:
        ValueError: the shape is not 2D or negative, or ``max_dim`` is below 1.
    """
    rows, cols = (block_sides(length, max_dim) for length in _matrix_shape("Shampoo", shape))
    cubes = len(cols) * sum(n**3 for n in rows) + len(rows) * sum(n**3 for n in cols)
    return (_EIGH + _MATMUL) * cubes


def soap_basis_flops(shape: Sequence[int], max_dim: int, is_first: bool = False) -> int:
    """Returns the FLOPs of one refresh of SOAP's bases for a weight of logical shape.

    Only a side n of at most ``max_dim`` has a basis. Its refresh is a power iteration, F Q (2 n^3),
    and a QR decomposition (8/3 n^3, rounded down); the first one is an eigendecomposition (9 n^3).
    The first moment follows: the change of basis (2 n^3, not the first time) is applied to it
    (2 n times its elements).

    Raises:
        ValueError: the shape is not 2D or negative, or ``max_dim`` is negative.
    """
    rows, cols = _matrix_shape("SOAP", shape)
    if max_dim < 0:
        raise ValueError(f"max_dim={max_dim}; legal: >= 0")
    flops = 0
    for n in (rows, cols):
        if n <= max_dim:
            later = 2 * _MATMUL * n**3 + _QR_THIRDS * n**3 // 3
            flops += (_EIGH * n**3 if is_first else later) + _MATMUL * n * rows * cols
    return flops


def _matrix_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"{name} needs a 2D shape, got {tuple(shape)}")
    if min(shape) < 0:
        raise ValueError(f"{name}: shape {tuple(shape)} is negative; legal: all >= 0")
    return shape[0], shape[1]


def gamma(world_size: int, owned: Sequence[int], total: int) -> float:
    """Returns gamma = W * max_r L_r / P: how far the largest rank is from an even split.

    1.0 is perfect, W is one owner for everything, and an empty block (``total`` 0) counts as
    perfect. Any unit serves (elements, bytes) if ``owned`` and ``total`` share it. ``owned`` holds
    L_r in any order; ranks that own nothing may be left out, since they cannot be the maximum.
    """
    if total == 0:
        return 1.0
    return world_size * max(owned, default=0) / total
