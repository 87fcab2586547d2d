"""Roots and bases of one factor: values, guarantees, and what happens when they fail."""

from __future__ import annotations

import math

import pytest
import torch

from torchtitan_matrixfsdp.optim.matrix_functions import (
    RETRY_EPSILON,
    DecompositionError,
    bounded,
    eigenbasis,
    inverse_root,
    next_basis,
)

N = 12


def rotation(n: int = N, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


def make_factor(values: torch.Tensor) -> torch.Tensor:
    vectors = rotation(len(values))
    return vectors @ torch.diag(values) @ vectors.T


SPREAD = torch.logspace(0, -3, N, dtype=torch.float64)


def fails_in(*dtypes: torch.dtype, how: str = "raise"):
    """An eigendecomposition that fails in these dtypes, by not converging or by NaN."""

    def eigh(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if matrix.dtype not in dtypes:
            return tuple(torch.linalg.eigh(matrix))
        if how == "raise":
            raise torch.linalg.LinAlgError("not converged")
        return matrix[0] * math.nan, matrix

    return eigh


@pytest.mark.parametrize("power", [1, 2, 4])
def test_a_root_to_its_power_inverts_the_damped_factor(power: int) -> None:
    factor, epsilon, weight = 3.0 * make_factor(SPREAD), 1e-2, 0.25
    root = inverse_root(factor, 1 / power, epsilon, torch.float64, weight)
    damped = (factor + epsilon * 3.0 * torch.eye(N, dtype=torch.float64)) / weight
    product = torch.linalg.matrix_power(root, power) @ damped
    # Condition 100: rounding of 1e-16, times 100, times N.
    torch.testing.assert_close(product, torch.eye(N, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(root, root.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e20, 1e36])
def test_epsilon_is_relative(scale: float) -> None:
    """A factor times c has the root times c^(-1/4), to float32's edges; 1e-5 is its rounding."""
    factor = make_factor(SPREAD).float()
    root = inverse_root(factor, 0.25, 1e-6, torch.float64)
    scaled = inverse_root(factor * scale, 0.25, 1e-6, torch.float64)
    torch.testing.assert_close(scaled * scale**0.25, root, rtol=1e-5, atol=1e-5)


def test_a_singular_factor_has_the_documented_condition() -> None:
    """Of rank 1 with condition (1 + 1/eps)^p, in float32 and for eigenvalues below zero too."""
    values = torch.zeros(N, dtype=torch.float64)
    values[0], values[1] = 1, -1e-9
    for dtype in (torch.float32, torch.float64):
        root = inverse_root(make_factor(values).float(), 0.25, 1e-4, dtype)
        spectrum = torch.linalg.eigvalsh(root.double())
        assert float(spectrum[0]) == pytest.approx(1.0001**-0.25, rel=1e-5)
        # Zero eigenvalues come out as noise of up to 1e-7: 1e-3 of the epsilon.
        assert float(spectrum[-1] / spectrum[0]) == pytest.approx(10001**0.25, rel=1e-3)


def test_a_factor_of_zeros() -> None:
    zero = torch.zeros(N, N)
    assert torch.equal(inverse_root(zero, 0.25, 1e-6, torch.float32), torch.eye(N))
    assert eigenbasis(zero) is None
    assert next_basis(zero, torch.eye(N)) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_factor_that_is_not_finite_is_refused(value: float) -> None:
    factor = torch.eye(N)
    factor[3, 2] = value
    with pytest.raises(FloatingPointError, match=r"shape \(12, 12\) holds (nan|inf)"):
        inverse_root(factor, 0.25, 1e-6, torch.float32)
    with pytest.raises(FloatingPointError, match="legal: finite"):
        eigenbasis(factor)
    with pytest.raises(FloatingPointError, match="legal: finite"):
        next_basis(factor, torch.eye(N))


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_the_second_attempt_is_in_float64_with_a_larger_epsilon(how: str) -> None:
    factor = make_factor(SPREAD).float()
    eigh = fails_in(torch.float32, how=how)
    root = inverse_root(factor, 0.25, 1e-6, torch.float32, eigh=eigh)
    expected = inverse_root(factor, 0.25, RETRY_EPSILON * 1e-6, torch.float64)
    assert root.dtype == torch.float32 and torch.equal(root, expected)
    found = eigenbasis(factor, eigh)
    expected_basis = eigenbasis(factor.double())
    assert found is not None and expected_basis is not None
    torch.testing.assert_close(found[0], expected_basis[0].float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_second_failure_is_an_error(how: str) -> None:
    factor = make_factor(SPREAD).float()
    eigh = fails_in(torch.float32, torch.float64, how=how)
    with pytest.raises(DecompositionError, match=r"\(12, 12\)"):
        inverse_root(factor, 0.25, 1e-6, torch.float32, eigh=eigh)
    with pytest.raises(DecompositionError, match=r"\(12, 12\)"):
        eigenbasis(factor, eigh)
    with pytest.raises(DecompositionError, match=r"\(12, 12\)"):
        next_basis(factor, torch.eye(N), qr=lambda matrix: (matrix * math.nan, matrix))


def test_a_root_beyond_its_dtype_is_a_failure() -> None:
    """(1e-40)^(-1) is not a float32, in whichever dtype it is computed."""
    with pytest.raises(DecompositionError):
        inverse_root(1e-40 * torch.eye(N), 1.0, 1e-6, torch.float32)


def test_an_eigenbasis_is_sorted_and_has_its_signs() -> None:
    factor = make_factor(SPREAD)
    found = eigenbasis(7 * factor)
    assert found is not None
    vectors, values = found
    rebuilt = vectors @ torch.diag(values) @ vectors.T
    torch.testing.assert_close(rebuilt * factor.abs().max(), factor, rtol=0, atol=1e-13)
    assert torch.equal(values, values.sort(descending=True).values)
    peaks = vectors.abs().argmax(dim=0)
    assert (vectors[peaks, range(N)] > 0).all()


def test_power_iteration_finds_the_eigenvectors() -> None:
    """From the identity; each step shrinks the error by the ratio of neighbouring eigenvalues, here
    0.28, so that 40 steps reach rounding."""
    factor = make_factor(torch.logspace(0, -6, N, dtype=torch.float64))
    exact = eigenbasis(factor)
    assert exact is not None
    basis = torch.eye(N, dtype=torch.float64)
    for _ in range(40):
        found = next_basis(factor, basis)
        assert found is not None
        basis, order = found
    assert torch.equal(order, torch.arange(N))
    overlap = (basis.T @ exact[0]).abs()
    # The smallest eigenvalue is 1e-6 of the largest, and so much larger is its vector's error.
    torch.testing.assert_close(overlap, torch.eye(N, dtype=torch.float64), rtol=0, atol=1e-9)


def test_power_iteration_sorts_columns_and_keeps_their_signs() -> None:
    factor = torch.diag(torch.tensor([1.0, 3.0, 2.0, 3.0]))
    basis = torch.eye(4) * torch.tensor([1.0, -1.0, 1.0, 1.0])
    found = next_basis(factor, basis)
    assert found is not None
    new, order = found
    assert order.tolist() == [1, 3, 2, 0]  # equal ones keep their order
    assert torch.equal(new, basis[:, order])


def test_bounded_leaves_ordinary_gradients_alone() -> None:
    grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for scale in (0.0, 1e-38, 1.0, 1e15):
        assert torch.equal(bounded(grad * scale, torch.float32), grad * scale)
    half = grad.bfloat16().T
    assert torch.equal(bounded(half, torch.float32), half.float())
    assert bounded(half, torch.float32).is_contiguous()


@pytest.mark.parametrize("scale", [1e17, 1e20, 1e37])
def test_bounded_keeps_factors_finite(scale: float) -> None:
    grad = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    kept = bounded(grad * scale, torch.float32)
    assert (kept @ kept.T).isfinite().all() and kept.square().sum().isfinite()
    torch.testing.assert_close(kept / kept.norm(), grad / grad.norm(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bounded_does_not_hide_what_is_not_finite(value: float) -> None:
    grad = torch.ones(3, 3)
    grad[1, 1] = value
    assert bounded(grad, torch.float32)[1, 1].isnan()
