r"""Newton-Schulz orthogonalisation: the only copy in the project.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). With
:math:`X_0 = G / \lVert G \rVert_F` and coefficients :math:`(a, b, c)`, each step computes

.. math::  A = X X^T, \qquad X \leftarrow a X + (b A + c A^2) X,

which drives the singular values of X towards 1 without an SVD. With the quintic coefficients they
end between about 0.7 and 1.2 after five steps; the singular vectors are kept exactly.
"""

from __future__ import annotations

import torch

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients (a, b, c): the steepest slope at zero that still stays bounded."""


def newton_schulz(
    matrix: torch.Tensor,
    *,
    steps: int,
    compute_dtype: torch.dtype,
    coefficients: tuple[float, float, float] = QUINTIC,
) -> torch.Tensor:
    """Orthogonalise ``matrix``.

    The input is normalised before it is cast down: first by its largest magnitude, then by its
    Frobenius norm, in float32 (float64 for a float64 input or computation). So the result does
    not depend on the scale of the input, from 1e-30 to 1e30, and is exactly zero for zero.

    Args:
        matrix: ``[m, n]``, any strides, any floating dtype.
        steps: number of iterations, at least 1.
        compute_dtype: dtype of the matrix products and of the result.
        coefficients: the polynomial (a, b, c).

    Returns:
        ``[m, n]`` in ``compute_dtype``.

    Raises:
        ValueError: ``matrix`` is not 2D or ``steps`` is below 1.
    """
    if matrix.ndim != 2:
        raise ValueError(f"newton_schulz: expected a 2D matrix, got shape {tuple(matrix.shape)}")
    if steps < 1:
        raise ValueError(f"newton_schulz: steps is {steps}; legal: >= 1")
    a, b, c = coefficients
    # The Gram matrix is taken on the short side: m^2 n instead of n^2 m products.
    tall = matrix.size(0) > matrix.size(1)
    x = _normalise(matrix.T if tall else matrix, compute_dtype)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def _normalise(matrix: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 in (matrix.dtype, compute_dtype)
    x = matrix.to(torch.float64 if wide else torch.float32)
    # Two divisions: the square of a tiny or huge entry would leave the exponent range. The
    # guards act on zero alone (no epsilon, which would damp small gradients), and stay on the
    # device (no host synchronisation).
    largest = x.abs().amax()
    x = x / torch.where(largest > 0, largest, 1)
    norm = torch.linalg.vector_norm(x)
    return (x / torch.where(norm > 0, norm, 1)).to(compute_dtype)
