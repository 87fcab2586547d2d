"""What all matrix optimizers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from torchtitan_matrixfsdp.optim import SOAP, ForeignOptimizer, Muon, Shampoo, logical_shapes


def foreign_muon(params: Any, **options: Any) -> Optimizer:
    return ForeignOptimizer(params, torch.optim.Muon, {"lr": 0.01}, **options)


every_class = pytest.mark.parametrize("make", [Muon, Shampoo, SOAP, foreign_muon])


@every_class
@pytest.mark.parametrize("shape", [(8,), (4, 16, 8), (8, 4, 3, 3)], ids=str)
def test_only_matrices_are_taken(make: Any, shape: tuple[int, ...]) -> None:
    """Case 27: the rule is 2D. By it routing sends everything else to AdamW
    (tests/unit/layout/test_routing.py), and a parameter that gets here nevertheless is refused."""
    with pytest.raises(ValueError, match=r"2D parameters"):
        make([torch.zeros(shape).requires_grad_()])


@every_class
def test_the_logical_shape_counts(make: Any) -> None:
    """Case 18: a rank that has nothing of a matrix names its state like the one that has it."""
    whole, nothing = torch.ones(6, 4).requires_grad_(), torch.empty(0, 4).requires_grad_()
    shapes = logical_shapes({nothing: whole})
    assert shapes == {nothing: (6, 4)}
    owner, other = make([whole]), make([nothing], logical_shapes=shapes)
    assert owner.state_shapes(whole) == other.state_shapes(nothing)
    assert owner.state[whole].keys() == other.state[nothing].keys()
    with pytest.raises(ValueError, match="2D parameters"):
        make([nothing], logical_shapes={nothing: (6, 4, 1)})


@every_class
def test_a_closure_is_called_with_gradients(make: Any) -> None:
    param = torch.ones(6, 4).requires_grad_()
    optimizer = make([param])
    before = param.detach().clone()

    def closure() -> float:
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 24.0
    assert not torch.equal(param, before)
