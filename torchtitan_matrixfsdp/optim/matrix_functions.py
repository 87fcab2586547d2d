"""Functions of the symmetric positive semidefinite factors of Shampoo and SOAP.

All work on one factor of shape [n, n], on its device. Each scales the factor by its largest entry
first, so that squares of tiny or huge gradients neither vanish nor overflow on the way; that entry
is read by the host, which is the one synchronisation, and a factor that is not finite is refused
there. Where a decomposition fails or gives something that is not finite, it is done once more in
float64; if that fails too, ``DecompositionError`` says so, and the caller keeps what it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

Eigh: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Eigenvalues [n], ascending, and eigenvectors [n, n], in columns, of a symmetric matrix."""

Qr: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The factors Q and R of a square matrix."""

RETRY_EPSILON = 1000.0
"""How much larger the relative epsilon of the second attempt at a root is."""


class DecompositionError(ArithmeticError):
    """A decomposition of a finite factor failed, in float64 too."""


def bounded(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient in ``dtype``, contiguous, small enough that factors of it are finite.

    A gradient with an entry beyond sqrt(max of dtype / numel) / 2 (in float32 2e15 for 4096 x
    4096) is scaled down to it as a whole, keeping its direction. Below, nothing changes. Infinite
    entries become NaN, so they are not hidden.
    """
    grad = grad.to(dtype).contiguous()
    limit = math.sqrt(torch.finfo(dtype).max / max(1, grad.numel())) / 2
    largest = torch.linalg.vector_norm(grad, math.inf)
    # inf: limit / inf = 0, and 0 * inf is NaN. On the device: no host synchronisation.
    return grad * (limit / largest.clamp(min=limit))


def direction(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix scaled to Frobenius norm 1; zero stays zero. On the device, without overflow."""
    # Two divisions: the square of a tiny or huge entry would leave the exponent range.
    largest = torch.linalg.vector_norm(matrix, math.inf)
    matrix = matrix / torch.where(largest > 0, largest, 1)
    norm = torch.linalg.vector_norm(matrix)
    return matrix / torch.where(norm > 0, norm, 1)


def inverse_root(
    factor: torch.Tensor,
    exponent: float,
    epsilon: float,
    dtype: torch.dtype,
    weight: float = 1.0,
    eigh: Eigh = torch.linalg.eigh,
) -> torch.Tensor:
    r"""(factor / weight + damping)^(-exponent), by eigendecomposition in ``dtype``.

    With the factor's eigenvalues :math:`\lambda` and eigenvectors V,

    .. math::
        V \operatorname{diag}((\max(\lambda, 0) + \epsilon \lambda_{\max}) / w)^{-p} V^T

    The epsilon is relative: the damped factor has a condition number of at most
    :math:`1 + 1/\epsilon` whatever the gradients' scale, and the root of a factor times c is the
    root times :math:`c^{-p}`. Choose it above the rounding of the factor (1e-7 in float32): smaller
    eigenvalues are noise. The root of a zero factor is the identity.

    Args:
        factor: [n, n], symmetric; its lower triangle is read.
        exponent: p, > 0.
        epsilon: > 0.
        dtype: of the decomposition; the root comes back in the factor's.
        weight: the total weight of an average that started from zero: 1 - beta^t.
        eigh: the eigendecomposition.

    Returns:
        [n, n] in the factor's dtype.

    Raises:
        FloatingPointError: the factor is not finite.
        DecompositionError: ``dtype``, and then float64 with 1000 times the epsilon, failed.
    """
    largest = _largest(factor)
    if largest == 0:
        return torch.eye(factor.size(0), dtype=factor.dtype, device=factor.device)
    for attempt, used in ((dtype, epsilon), (torch.float64, RETRY_EPSILON * epsilon)):
        eigen = _try_eigh(factor.to(attempt) / largest, eigh)
        if eigen is None:
            continue
        values, vectors = eigen
        values = values.clamp(min=0)
        powers = (values + used * values[-1]).pow(-exponent)
        root = ((vectors * powers) @ vectors.mT) * (largest / weight) ** -exponent
        root = root.to(factor.dtype)
        if _is_finite(root):
            return root
    raise DecompositionError(f"no inverse root of a factor of shape {tuple(factor.shape)}")


def eigenbasis(
    factor: torch.Tensor, eigh: Eigh = torch.linalg.eigh
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The eigenvectors of a factor in columns [n, n], by falling eigenvalue, and the eigenvalues.

    Eigenvalues [n] are relative to the factor's largest entry and not negative. Signs are
    deterministic: the entry of largest magnitude in each column is positive, the first of equals.

    Returns:
        (vectors, values) in the factor's dtype; ``None`` if the factor is zero, which has no
        basis of its own.

    Raises:
        FloatingPointError: the factor is not finite.
        DecompositionError: the factor's dtype, and then float64, failed.
    """
    largest = _largest(factor)
    if largest == 0:
        return None
    for attempt in (factor.dtype, torch.float64):
        eigen = _try_eigh(factor.to(attempt) / largest, eigh)
        if eigen is not None:
            values, vectors = (part.flip(-1).to(factor.dtype) for part in eigen)
            peaks = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
            return vectors * torch.where(peaks < 0, -1, 1), values.clamp(min=0)
    raise DecompositionError(f"no eigenvectors of a factor of shape {tuple(factor.shape)}")


def next_basis(
    factor: torch.Tensor, basis: torch.Tensor, qr: Qr = torch.linalg.qr
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One step of power iteration from ``basis`` towards the eigenvectors of ``factor``.

    Columns are sorted by falling q^T F q (stable: equal ones keep their order), multiplied by the
    factor and orthogonalised by a QR decomposition whose R has no negative diagonal entry, so that
    signs are deterministic and follow the old columns'.

    Args:
        factor: [n, n].
        basis: [n, n], orthogonal, eigenvectors of an earlier factor in columns.
        qr: the QR decomposition.

    Returns:
        The new basis [n, n] and which old column each new one comes from [n]; ``None`` if the
        factor is zero.

    Raises:
        FloatingPointError: the factor is not finite.
        DecompositionError: the factor's dtype, and then float64, failed.
    """
    largest = _largest(factor)
    if largest == 0:
        return None
    for attempt in (factor.dtype, torch.float64):
        old = basis.to(attempt)
        product = (factor.to(attempt) / largest) @ old
        order = (old * product).sum(dim=0).argsort(descending=True, stable=True)
        q, r = qr(product.index_select(1, order))
        new = (q * torch.where(r.diagonal() < 0, -1, 1)).to(factor.dtype)
        if _is_finite(new):
            return new, order
    raise DecompositionError(f"no basis of a factor of shape {tuple(factor.shape)}")


def _try_eigh(matrix: torch.Tensor, eigh: Eigh) -> tuple[torch.Tensor, torch.Tensor] | None:
    try:
        values, vectors = eigh(matrix)
    except torch.linalg.LinAlgError:  # it has not converged
        return None
    return (values, vectors) if _is_finite(values) and _is_finite(vectors) else None


def _largest(factor: torch.Tensor) -> float:
    largest = float(torch.linalg.vector_norm(factor, math.inf))
    if not math.isfinite(largest):
        raise FloatingPointError(
            f"a factor of shape {tuple(factor.shape)} holds {largest}; legal: finite values"
        )
    return largest


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())
