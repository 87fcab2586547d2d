"""Newton-Schulz against an independent copy, and what it must not depend on: scale and strides."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import oracle_newton_schulz
from torchtitan_matrixfsdp.optim import newton_schulz

SHAPES = ((48, 16), (16, 48), (24, 24), (1, 32), (32, 1))
DTYPES = (torch.float32, torch.bfloat16)

# A bfloat16 has 8 bits, so one rounding is 0.4 % at worst. The five iterations amplify the early
# ones by no more than their slope; relative to the exact result 1.2 to 1.6 % is seen.
BF16_NOISE = 0.04

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random_matrix(
    shape: tuple[int, int], dtype: torch.dtype = torch.float64, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


@every_shape
@pytest.mark.parametrize("steps", [1, 5])
def test_equals_the_oracle_in_float64(shape: tuple[int, int], steps: int) -> None:
    matrix = random_matrix(shape)
    found = newton_schulz(matrix, steps=steps, compute_dtype=torch.float64)
    expected = oracle_newton_schulz(matrix, steps, torch.float64)
    assert found.shape == shape
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@every_shape
def test_bfloat16_is_near_the_exact_result(shape: tuple[int, int]) -> None:
    matrix = random_matrix(shape, torch.float32)
    found = newton_schulz(matrix, steps=5, compute_dtype=torch.bfloat16)
    exact = newton_schulz(matrix, steps=5, compute_dtype=torch.float64)
    assert found.dtype == torch.bfloat16
    assert relative_difference(found, exact) < BF16_NOISE


def test_singular_values_go_to_one_and_singular_vectors_stay() -> None:
    left, _ = torch.linalg.qr(random_matrix((24, 24), seed=1))
    right, _ = torch.linalg.qr(random_matrix((40, 24), seed=2))
    values = torch.linspace(0.2, 1, 24, dtype=torch.float64)
    found = newton_schulz(left * values @ right.T, steps=5, compute_dtype=torch.float64)
    in_their_basis = left.T @ found @ right
    after = in_their_basis.diagonal()
    assert after.min() > 0.6 and after.max() < 1.3, after
    torch.testing.assert_close(in_their_basis, after.diag(), rtol=0, atol=1e-12)


@every_shape
@every_dtype
def test_a_power_of_two_changes_no_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Case 7: scaling by a power of two rounds nothing on the way in."""
    matrix = random_matrix(shape, torch.float32)
    expected = newton_schulz(matrix, steps=5, compute_dtype=dtype)
    for exponent in (-97, -40, 40, 97):  # 2^97 is 1.6e29
        scaled = newton_schulz(matrix * 2.0**exponent, steps=5, compute_dtype=dtype)
        assert torch.equal(scaled, expected), exponent


@every_shape
@every_dtype
def test_no_scale_from_1e_30_to_1e30_matters(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Case 7: what is left is the rounding of the scaled input itself."""
    # The input's float32 rounding is 6e-8, amplified: 1e-6 is seen. In bfloat16 it can
    # flip the rounding of a few elements, here of none.
    bound = 5e-6 if dtype == torch.float32 else BF16_NOISE / 4
    matrix = random_matrix(shape, torch.float32)
    expected = newton_schulz(matrix, steps=5, compute_dtype=dtype)
    for scale in (1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30):
        scaled = newton_schulz(matrix * scale, steps=5, compute_dtype=dtype)
        assert relative_difference(scaled, expected) < bound, scale


def test_tiny_gradients_are_orthogonalised_like_large_ones() -> None:
    """Case 7. torch.optim.Muon (2.13) clamps the norm at 1e-7: of this gradient it makes updates
    of norm 6.96, 4.32 and 0.047."""
    matrix = random_matrix((64, 64), torch.float32)
    matrix = matrix / matrix.norm()
    norms = [
        float(newton_schulz(matrix * norm, steps=5, compute_dtype=torch.bfloat16).float().norm())
        for norm in (1, 1e-8, 1e-10)
    ]
    assert norms == pytest.approx([6.958] * 3, rel=2e-3)


@every_shape
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_zero_stays_exactly_zero(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Case 8: not NaN."""
    for input_dtype in (torch.float32, torch.bfloat16):
        zero = torch.zeros(shape, dtype=input_dtype)
        found = newton_schulz(zero, steps=5, compute_dtype=dtype)
        assert torch.equal(found, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    "view",
    [
        random_matrix((16, 8)).T,
        random_matrix((8, 16)).T,
        random_matrix((40, 60))[::2, ::5],
        random_matrix((40, 60))[::5, ::2],
        random_matrix((40, 60))[:, 3:4],
        random_matrix((40, 60))[:, 3:4].T,
        random_matrix((8, 1)).expand(8, 16),
    ],
    ids=["16x8.T", "8x16.T", "tall steps", "wide steps", "column", "column.T", "expanded"],
)
def test_strides_do_not_matter(view: torch.Tensor) -> None:
    """Case 27: another memory layout may sum in another order, so a few units of 1e-16."""
    copy = view.contiguous()
    before = copy.clone()
    found = newton_schulz(view, steps=5, compute_dtype=torch.float64)
    expected = newton_schulz(copy, steps=5, compute_dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-15)
    assert torch.equal(view, before), "the input was written to"


@every_shape
def test_the_transpose_gives_the_transpose(shape: tuple[int, int]) -> None:
    """Case 27: both orientations are one computation."""
    matrix = random_matrix(shape)
    one = newton_schulz(matrix, steps=5, compute_dtype=torch.float64)
    other = newton_schulz(matrix.T, steps=5, compute_dtype=torch.float64)
    torch.testing.assert_close(other, one.T, rtol=0, atol=5e-15)


def test_the_coefficients_are_used() -> None:
    found = newton_schulz(
        random_matrix((4, 4)), steps=3, compute_dtype=torch.float64, coefficients=(2.0, 0.0, 0.0)
    )
    matrix = random_matrix((4, 4))
    torch.testing.assert_close(found, 8 * matrix / matrix.norm(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (8, 4, 3, 3)], ids=str)
def test_only_matrices_are_taken(shape: tuple[int, ...]) -> None:
    """Case 27: nothing is flattened silently."""
    with pytest.raises(ValueError, match="expected a 2D matrix") as raised:
        newton_schulz(torch.ones(shape), steps=5, compute_dtype=torch.float32)
    assert str(tuple(shape)) in str(raised.value)


@pytest.mark.parametrize("steps", [0, -1])
def test_at_least_one_step(steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps is {steps}; legal: >= 1"):
        newton_schulz(torch.ones(2, 2), steps=steps, compute_dtype=torch.float32)
