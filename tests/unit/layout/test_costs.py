from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.models import SMALL
from torchtitan_matrixfsdp.layout import gamma, muon_flops, newton_schulz_flops


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
