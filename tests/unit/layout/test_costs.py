from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.models import SMALL
from torchtitan_matrixfsdp.layout import (
    block_sides,
    gamma,
    muon_flops,
    newton_schulz_flops,
    shampoo_root_flops,
    soap_basis_flops,
)


def test_newton_schulz_flops_by_hand():
    # m=2, n=3: X X^T costs 2*2*2*3 = 24, A A 2*2*2*2 = 16, B X 2*2*2*3 = 24.
    assert newton_schulz_flops(2, 3, steps=1) == 64
    assert newton_schulz_flops(3, 2, steps=5) == 320
    assert newton_schulz_flops(2, 3, steps=0) == 0
    assert newton_schulz_flops(1, 16, steps=1) == 2 * 16 + 2 + 2 * 16
    assert muon_flops((3, 2), steps=5) == 320


@pytest.mark.parametrize("arguments", [(-1, 2, 5), (2, -1, 5), (2, 2, -5)])
def test_newton_schulz_flops_refuses_negative_arguments(arguments):
    with pytest.raises(ValueError, match="all >= 0"):
        newton_schulz_flops(*arguments)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)])
def test_muon_flops_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match="2D"):
        muon_flops(shape, 5)


def test_gamma_by_hand():
    assert gamma(4, [3, 3, 3, 3], 12) == 1.0
    assert gamma(4, [6, 2, 2, 2], 12) == 2.0
    assert gamma(4, [12], 12) == 4.0  # idle ranks may be left out
    assert gamma(4, [], 0) == 1.0


@SMALL
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=64))
def test_gamma_lies_between_one_and_the_world_size(owned):
    # The smallest distance from 1 that integers up to 64000 can have is far above 1e-9.
    assert 1.0 - 1e-9 <= gamma(len(owned), owned, sum(owned)) <= len(owned) + 1e-9


def test_block_sides_by_hand():
    assert block_sides(7, 7) == (7,)
    assert block_sides(8, 7) == (4, 4)
    assert block_sides(15, 7) == (5, 5, 5)
    assert block_sides(16, 7) == (6, 5, 5)
    assert block_sides(0, 7) == (0,)
    assert block_sides(3, 1) == (1, 1, 1)


@SMALL
@given(st.integers(0, 500), st.integers(1, 60))
def test_block_sides_are_few_and_equal(length, max_side):
    sides = block_sides(length, max_side)
    assert sum(sides) == length
    assert max(sides) <= max_side
    assert max(sides) - min(sides) <= 1
    assert len(sides) == max(1, -(-length // max_side))


@pytest.mark.parametrize("arguments", [(-1, 2), (3, 0)])
def test_block_sides_refuses(arguments):
    with pytest.raises(ValueError, match="legal: >= 0, >= 1"):
        block_sides(*arguments)


def test_shampoo_root_flops_by_hand():
    # 9 n^3 for the eigenvectors and 2 n^3 for the root, of n = 4 and n = 3.
    assert shampoo_root_flops((4, 3), 8) == shampoo_root_flops((3, 4), 8) == 11 * (64 + 27)
    # In 2 x 1 blocks of 2 x 3: two factors of 2 and two of 3.
    assert shampoo_root_flops((4, 3), 3) == 11 * (2 * 8 + 2 * 27)
    # 2 x 2 blocks: rows 2, 2 and columns 2, 1, each factor once per block.
    assert shampoo_root_flops((4, 3), 2) == 11 * (2 * (8 + 8) + 2 * (8 + 1))
    assert shampoo_root_flops((0, 3), 8) == 11 * 27


def test_soap_basis_flops_by_hand():
    # n = 3: F Q 54, QR 72, change of basis 54, and 2 * 3 * 12 on the first moment; n = 4: 128, 170
    # (170 2/3 rounded down), 128 and 96.
    assert soap_basis_flops((4, 3), 4) == (54 + 72 + 54 + 72) + (128 + 170 + 128 + 96)
    assert soap_basis_flops((3, 4), 3) == soap_basis_flops((4, 3), 3) == 54 + 72 + 54 + 72
    assert soap_basis_flops((4, 3), 2) == soap_basis_flops((4, 3), 0) == 0
    assert soap_basis_flops((4, 3), 4, is_first=True) == (243 + 72) + (576 + 96)


def test_refresh_flops_refuse_other_shapes():
    for flops in (shampoo_root_flops, soap_basis_flops):
        with pytest.raises(ValueError, match="2D"):
            flops((2, 3, 4), 8)
        with pytest.raises(ValueError, match="negative"):
            flops((2, -3), 8)
        with pytest.raises(ValueError, match="legal"):
            flops((2, 3), -1)
