"""SOAP on plain tensors against an oracle, torch's AdamW and pytorch-optimizer."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.nn as nn

from tests.unit.optim.drawing import draw_params, set_random_grads
from torchtitan_matrixfsdp.optim import SOAP

# For bases of at most 10 the last three have one, the other one, and none.
SHAPES = ((10, 10), (7, 10), (10, 7), (8, 8), (12, 7), (7, 12), (12, 12))
LR, DECAY = 0.02, 0.1


def make_params(
    shapes: tuple[tuple[int, int], ...] = SHAPES, dtype: torch.dtype = torch.float64
) -> list[nn.Parameter]:
    return draw_params(shapes, dtype)


class OracleSOAP:
    """One matrix in float64. The first moment stays in the original space; bases multiply even
    where they are the identity; V's first marginals are quadratic forms of the factors."""

    def __init__(self, weight: torch.Tensor, phase: int, max_dim: int, **options: Any) -> None:
        self.weight, self.phase, self.o, self.t = weight, phase, options, 0
        self.m, self.v = torch.zeros_like(weight), torch.zeros_like(weight)
        sides = weight.shape
        self.has = [n <= max_dim for n in sides]
        self.factors = [weight.new_zeros(n, n) for n in sides]
        self.bases = [torch.eye(n, dtype=torch.float64) for n in sides]
        self.refreshes = 0

    def step(self, g: torch.Tensor) -> None:
        o, (b1, b2, bs) = self.o, (self.o["beta1"], self.o["beta2"], self.o["shampoo_beta"])
        self.t += 1
        left, right = self.bases
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * (left.T @ g @ right) ** 2
        normal = (left.T @ self.m @ right) / (1 - b1**self.t)
        normal = normal / ((self.v / (1 - b2**self.t)).sqrt() + o["eps"])
        self.weight *= 1 - o["lr"] * DECAY
        self.weight -= o["lr"] * left @ normal @ right.T
        for dim, outer in enumerate((g @ g.T, g.T @ g)):
            self.factors[dim] = bs * self.factors[dim] + (1 - bs) * outer
        if (self.t - 1) % o["precondition_frequency"] == self.phase and any(self.has):
            if self.refreshes == 0:
                self.first_bases()
            else:
                self.later_bases()
            self.refreshes += 1

    def first_bases(self) -> None:
        marginals = [self.v.sum(dim=1), self.v.sum(dim=0)]
        for dim, factor in enumerate(self.factors):
            if self.has[dim]:
                basis = torch.linalg.eigh(factor)[1].flip(1)
                self.bases[dim] = basis
                marginals[dim] = torch.diag(basis.T @ factor @ basis)
        rows, cols = (marginal / marginal.sum() for marginal in marginals)
        self.v = self.v.sum() * rows[:, None] * cols[None, :]

    def later_bases(self) -> None:
        for dim, factor in enumerate(self.factors):
            if self.has[dim]:
                basis = self.bases[dim]
                estimates = torch.diag(basis.T @ factor @ basis)
                order = sorted(range(len(estimates)), key=lambda i: -float(estimates[i]))
                self.v = self.v[order] if dim == 0 else self.v[:, order]
                self.bases[dim] = torch.linalg.qr(factor @ basis[:, order])[0]


@pytest.mark.parametrize(
    "variant",
    [{}, {"shampoo_beta": 0.8}, {"beta1": 0.0}, {"precondition_frequency": 6}],
    ids=str,
)
def test_float64_equals_the_oracle(variant: dict[str, Any]) -> None:
    """With phases of which every factor has full rank when it is first decomposed: the basis of a
    null space is arbitrary."""
    options: dict[str, Any] = {
        "lr": LR,
        "beta1": 0.9,
        "beta2": 0.95,
        "shampoo_beta": 0.95,
        "eps": 1e-8,
        "precondition_frequency": 4,
        **variant,
    }
    params, start = make_params(), make_params()
    soap = SOAP(params, weight_decay=DECAY, max_precond_dim=10, **options)
    oracles = []
    for param, first in zip(params, start, strict=True):
        rows, cols = param.shape
        phase = soap.refresh_phase(param)
        ranks = (phase + 1) * cols, (phase + 1) * rows
        assert all(n > 10 or rank >= n for n, rank in zip(param.shape, ranks, strict=True))
        oracles.append(OracleSOAP(first.detach().clone(), phase, 10, **options))
    for step in range(14):
        set_random_grads(params, seed=step)
        for param, oracle in zip(params, oracles, strict=True):
            oracle.step(param.grad)
        soap.step()
    for param, oracle, first in zip(params, oracles, start, strict=True):
        assert (param - first).norm() > 0.1
        torch.testing.assert_close(param.detach(), oracle.weight, rtol=0, atol=1e-12)


def test_both_sides_too_large_is_adam() -> None:
    """Also every matrix until its first basis: AdamW to rounding."""
    params, references = make_params(), make_params()
    soap = SOAP(params, lr=LR, weight_decay=DECAY, max_precond_dim=0)
    adamw = torch.optim.AdamW(references, lr=LR, betas=(0.95, 0.95), weight_decay=DECAY)
    late, late_references = make_params(SHAPES[:1] * 9), make_params(SHAPES[:1] * 9)
    staggered = SOAP(late, lr=LR, weight_decay=DECAY, precondition_frequency=9)
    late_adamw = torch.optim.AdamW(late_references, lr=LR, betas=(0.95, 0.95), weight_decay=DECAY)
    assert sorted(staggered.refresh_phase(p) for p in late) == list(range(9))
    for step in range(9):
        set_random_grads(params, references, seed=step)
        set_random_grads(late, late_references, seed=step)
        for optimizer in (soap, adamw, staggered, late_adamw):
            optimizer.step()
        for param, reference in zip(late, late_references, strict=True):
            # The update in which a basis is due is made in the old one.
            is_adam = step <= staggered.refresh_phase(param)
            assert is_adam is bool((param - reference).abs().max() < 1e-13)
    for param, reference in zip(params, references, strict=True):
        assert set(soap.state[param]) == {"step", "refreshes", "exp_avg", "exp_avg_sq"}
        torch.testing.assert_close(param, reference, rtol=0, atol=1e-13)


def test_the_second_moment_when_the_first_basis_arrives() -> None:
    """Its total stays, and its row and column sums are those that V would have had, had every
    gradient been seen in that basis."""
    (param,) = make_params(((6, 9),))
    soap = SOAP([param], beta2=0.9, precondition_frequency=4)
    state = soap.state[param]
    gradients = []
    for step in range(2):
        set_random_grads([param], seed=step)
        gradients.append(param.grad)
        before = state["exp_avg_sq"].clone()
        soap.step()
        if step == 0:
            assert state["refreshes"] == 1
            left, right = state["L_basis"].clone(), state["R_basis"].clone()
            rotated = left.T @ gradients[0] @ right
            expected = 0.1 * rotated**2
            second = state["exp_avg_sq"]
            for dim in (0, 1):
                torch.testing.assert_close(second.sum(dim), expected.sum(dim), rtol=0, atol=1e-14)
            assert torch.linalg.matrix_rank(second) == 1
            torch.testing.assert_close(
                left @ state["exp_avg"] @ right.T, 0.05 * gradients[0], rtol=0, atol=1e-14
            )
        else:
            rotated = left.T @ gradients[1] @ right
            torch.testing.assert_close(
                state["exp_avg_sq"], 0.9 * before + 0.1 * rotated**2, rtol=0, atol=1e-14
            )


def test_the_first_moment_follows_every_basis() -> None:
    """Seen in the original coordinates it is the plain average, whatever bases have come."""
    params = make_params(((8, 8), (6, 9), (12, 5)))
    soap = SOAP(params, beta1=0.9, precondition_frequency=2, max_precond_dim=9)
    averages = [torch.zeros_like(param) for param in params]
    for step in range(7):
        set_random_grads(params, seed=step)
        soap.step()
        for param, average in zip(params, averages, strict=True):
            average.lerp_(param.grad, 0.1)
    for param, average in zip(params, averages, strict=True):
        state = soap.state[param]
        assert state["refreshes"] >= 3
        shown = state["exp_avg"] @ state["R_basis"].T
        if "L_basis" in state:
            shown = state["L_basis"] @ shown
        torch.testing.assert_close(shown, average, rtol=0, atol=1e-13)


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("max_dim", [20, 9])
def test_it_is_the_soap_of_pytorch_optimizer(frequency: int, max_dim: int) -> None:
    """From their first basis on. Where conventions differ:

    - their first call makes a basis and takes no step, and counts steps from the second: ours
      starts here from what theirs has then. Their counter says when to refresh, too: they do when
      it is a multiple of the frequency, which in our counting is phase frequency - 1. Of as many
      equal matrices as the frequency one has it;
    - their epsilon comes before bias correction: both next to nothing here;
    - they decay after the update, we before: no decay here.

    Their QR is in float32, hence 1e-6: of rates of 0.02, over 8 steps.
    """
    shape = (12, 8)
    params, references = make_params((shape,) * frequency), make_params((shape,))
    theirs = pytorch_optimizer.SOAP(
        references,
        lr=LR,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        precondition_frequency=frequency,
        max_precondition_dim=max_dim,
        eps=1e-30,
    )
    ours = SOAP(
        params,
        lr=LR,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.95,
        eps=1e-30,
        precondition_frequency=frequency,
        max_precond_dim=max_dim,
    )
    (param,) = [p for p in params if ours.refresh_phase(p) == frequency - 1]
    (reference,) = references
    with torch.no_grad():
        param.copy_(reference)
    set_random_grads(references, seed=0)
    theirs.step()
    state, their_state = ours.state[param], theirs.state[reference]
    state["refreshes"].fill_(1)
    for name, factor, basis in zip("LR", their_state["GG"], their_state["Q"], strict=True):
        if name in state:
            state[name].copy_(factor)
            state[f"{name}_basis"].copy_(basis)
    assert ("L" in state) is (max_dim == 20)
    for step in range(8):
        set_random_grads([param], references, seed=1 + step)
        theirs.step()
        ours.step()
    assert state["refreshes"] == 1 + 8 // frequency
    assert (reference - make_params((shape,))[0]).norm() > 0.1
    torch.testing.assert_close(param, reference, rtol=0, atol=1e-6)


class FailingSOAP(SOAP):
    """No eigendecomposition converges."""

    @staticmethod
    def eigh(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise torch.linalg.LinAlgError("not converged")


def test_a_failed_first_basis_leaves_adam_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params, references = make_params(SHAPES[:3]), make_params(SHAPES[:3])
    soap = FailingSOAP(params, lr=LR, weight_decay=DECAY, stagger=False, precondition_frequency=4)
    adamw = torch.optim.AdamW(references, lr=LR, betas=(0.95, 0.95), weight_decay=DECAY)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            set_random_grads(params, references, seed=step)
            soap.step()
            adamw.step()
    for param, reference in zip(params, references, strict=True):
        torch.testing.assert_close(param, reference, rtol=0, atol=1e-13)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert all(f"parameter {i}, L: no eigenv" in text for i, text in enumerate(messages))
    # The second refresh, in step 5, begins the power iteration at the identity.
    for param in params:
        basis = soap.state[param]["L_basis"]
        eye = torch.eye(len(basis), dtype=torch.float64)
        assert (basis - eye).norm() > 0.1
        torch.testing.assert_close(basis.T @ basis, eye, rtol=0, atol=1e-13)


def test_bases_are_orthogonal_in_float32() -> None:
    """After 30 of them, to float32's rounding: errors do not add up."""
    params = make_params(((24, 24), (24, 9)), torch.float32)
    soap = SOAP(params, precondition_frequency=1)
    for step in range(30):
        set_random_grads(params, seed=step)
        soap.step()
    for param in params:
        for name in ("L_basis", "R_basis"):
            basis = soap.state[param][name]
            torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("lr", -0.1, ">= 0"),
        ("lr", math.nan, ">= 0"),
        ("lr", None, ">= 0"),
        ("weight_decay", math.inf, ">= 0"),
        ("beta1", 1.0, "0 <= beta1 < 1"),
        ("beta2", 1.0, "0 <= beta2 < 1"),
        ("shampoo_beta", -1, "0 <= shampoo_beta < 1"),
        ("eps", 0.0, "> 0"),
        ("precondition_frequency", 0, "an integer >= 1"),
        ("precondition_frequency", 2.0, "an integer >= 1"),
        ("stagger", 1, "true or false"),
        ("max_precond_dim", -1, "an integer >= 0"),
    ],
)
def test_hyperparameters_out_of_range(name: str, value: Any, legal: str) -> None:
    expected = f"{name}: received {value!r}; legal: {legal}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        SOAP(make_params(), **{name: value})
    if name != "max_precond_dim":  # of a group as well
        with pytest.raises(ValueError, match=re.escape(expected)):
            SOAP([{"params": make_params(), name: value}])


def test_shampoo_beta_is_beta2_unless_given() -> None:
    assert SOAP(make_params(), beta2=0.8).param_groups[0]["shampoo_beta"] == 0.8
    assert SOAP(make_params(), shampoo_beta=0.0).param_groups[0]["shampoo_beta"] == 0.0
