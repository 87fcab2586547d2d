"""Shampoo on plain tensors against an oracle, torch's AdamW and pytorch-optimizer."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.nn as nn

from tests.unit.optim.drawing import draw_params, set_random_grads
from torchtitan_matrixfsdp.optim import GRAFTING, Shampoo
from torchtitan_matrixfsdp.optim.matrix_functions import RETRY_EPSILON, inverse_root

SHAPES = ((12, 7), (7, 12), (8, 8), (1, 9))
LR, DECAY = 0.02, 0.1


def make_params(
    shapes: tuple[tuple[int, int], ...] = SHAPES, dtype: torch.dtype = torch.float64
) -> list[nn.Parameter]:
    return draw_params(shapes, dtype)


class OracleShampoo:
    """One matrix, one block, in float64; roots by singular values, which are a factor's
    eigenvalues."""

    def __init__(self, weight: torch.Tensor, phase: int, **options: Any) -> None:
        rows, cols = weight.shape
        self.weight, self.phase, self.t = weight, phase, 0
        self.o = {"weight_decay": DECAY, "eps": 1e-8, "nesterov": False, "exponent": 0.25}
        self.o |= options
        self.m, self.v = torch.zeros_like(weight), torch.zeros_like(weight)
        self.left, self.right = weight.new_zeros(rows, rows), weight.new_zeros(cols, cols)
        self.roots: tuple[torch.Tensor, torch.Tensor] | None = None

    def root(self, factor: torch.Tensor) -> torch.Tensor:
        u, s, _ = torch.linalg.svd(factor)
        return u @ torch.diag((s + self.o["root_epsilon"] * s[0]) ** -self.o["exponent"]) @ u.T

    def step(self, g: torch.Tensor) -> None:
        o, b1, b2 = self.o, self.o["beta1"], self.o["beta2"]
        self.t += 1
        new, total = (1, 1) if b2 == 1 else (1 - b2, 1 - b2**self.t)
        self.m = b1 * self.m + (1 - b1) * g
        u = self.m / (1 - b1**self.t)
        if o["nesterov"]:
            u = (b1 * self.m + (1 - b1) * g) / (1 - b1 ** (self.t + 1))
        self.v = b2 * self.v + new * g * g
        self.left = b2 * self.left + new * g @ g.T
        self.right = b2 * self.right + new * g.T @ g
        grafted = u / ((self.v / total).sqrt() + o["eps"]) if o["grafting"] == "adamw" else u
        if (self.t - 1) % o["precondition_frequency"] == self.phase:
            self.roots = self.root(self.left / total), self.root(self.right / total)
        if self.roots is None:
            update = grafted
        else:
            update = self.roots[0] @ u @ self.roots[1]
            if o["grafting"] != "none":
                update = update * grafted.norm() / update.norm()
        self.weight *= 1 - o["lr"] * o["weight_decay"]
        self.weight -= o["lr"] * update


@pytest.mark.parametrize("grafting", GRAFTING)
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"nesterov": True},
        {"beta2": 1.0},
        {"beta1": 0.0, "beta2": 0.0},
        {"exponent": 0.5},
        {"stagger": False},
    ],
    ids=str,
)
def test_float64_equals_the_oracle(grafting: str, variant: dict[str, Any]) -> None:
    options: dict[str, Any] = {
        "lr": LR,
        "beta1": 0.9,
        "beta2": 0.95,
        "root_epsilon": 1e-3,
        "grafting": grafting,
        "precondition_frequency": 3,
        **variant,
    }
    params, start = make_params(), make_params()
    shampoo = Shampoo(params, weight_decay=DECAY, **options)
    options.pop("stagger", None)
    oracles = [
        OracleShampoo(p.detach().clone(), shampoo.refresh_phase(q), **options)
        for p, q in zip(start, params, strict=True)
    ]
    for step in range(10):
        set_random_grads(params, seed=step)
        for param, oracle in zip(params, oracles, strict=True):
            oracle.step(param.grad)
        shampoo.step()
    for param, oracle, first in zip(params, oracles, start, strict=True):
        assert (param - first).norm() > 0.1
        torch.testing.assert_close(param.detach(), oracle.weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grafting", ["adamw", "sgd"])
def test_until_its_first_roots_a_matrix_takes_the_grafted_step(grafting: str) -> None:
    """AdamW's to rounding; SGD's, with the bias-corrected momentum, as a plain sum."""
    params, references = make_params(SHAPES[:1] * 5), make_params(SHAPES[:1] * 5)
    shampoo = Shampoo(params, lr=LR, grafting=grafting, precondition_frequency=5)
    late = [i for i, p in enumerate(params) if shampoo.refresh_phase(p) == 4]
    assert len(late) == 1
    adamw = torch.optim.AdamW(references, lr=LR, betas=(0.9, 0.99), weight_decay=0.1)
    averages = torch.zeros_like(references[0])
    for step in range(4):
        set_random_grads(params, references, seed=step)
        grad = references[late[0]].grad
        assert grad is not None
        if grafting == "adamw":
            adamw.step()
        else:
            averages = 0.9 * averages + 0.1 * grad
            with torch.no_grad():
                rate = LR / (1 - 0.9 ** (step + 1))
                references[late[0]].mul_(1 - LR * 0.1).sub_(rate * averages)
        shampoo.step()
    param, reference = params[late[0]], references[late[0]]
    torch.testing.assert_close(param, reference, rtol=0, atol=1e-14)
    assert torch.equal(shampoo.state[param]["L_root"], torch.eye(12, dtype=torch.float64))
    set_random_grads(params, references, seed=4)
    adamw.step()
    shampoo.step()
    assert (param - reference).norm() > 0.01


@pytest.mark.parametrize("grafting", GRAFTING)
def test_the_norm_is_the_grafted_steps(grafting: str) -> None:
    """Direction by the roots, length by the other method: one step of rate 1 from zero, in blocks.

    In the first step AdamW's update is 1 in every coordinate.
    """
    param = nn.Parameter(torch.zeros(9, 6, dtype=torch.float64))
    set_random_grads([param], seed=0)
    Shampoo([param], lr=1, grafting=grafting, max_preconditioner_dim=4).step()
    length = float(param.detach().norm())
    assert param.grad is not None
    expected = {"adamw": math.sqrt(54), "sgd": float(param.grad.norm())}
    if grafting == "none":
        assert all(abs(length / value - 1) > 0.01 for value in expected.values())
    else:
        assert length == pytest.approx(expected[grafting], rel=1e-6)  # eps is 1e-8


@pytest.mark.parametrize("shape", [(9, 6), (8, 8), (5, 23), (1, 9)], ids=str)
def test_blocks_are_stepped_as_matrices_of_their_own(shape: tuple[int, int]) -> None:
    """A 9x6 matrix in blocks of at most 4: rows 3, 3, 3 and columns 3, 3."""
    options: dict[str, Any] = {"lr": LR, "grafting": "none", "precondition_frequency": 2}
    options["root_epsilon"] = 1e-3  # what a singular factor makes of rounding is no matter here
    (whole,) = make_params((shape,))
    rows, cols = (math.ceil(n / 4) for n in shape)
    blocks = [nn.Parameter(piece) for piece in grid(whole, rows, cols)]
    one = Shampoo([whole], max_preconditioner_dim=4, **options)
    # Each alone, since phases would be spread over the blocks.
    many = [Shampoo([block], **options) for block in blocks]
    for step in range(5):
        set_random_grads([whole], seed=step)
        assert whole.grad is not None
        for block, grad in zip(blocks, grid(whole.grad, rows, cols), strict=True):
            block.grad = grad
        for optimizer in (one, *many):
            optimizer.step()
    for block, piece in zip(blocks, grid(whole, rows, cols), strict=True):
        torch.testing.assert_close(block.detach(), piece, rtol=0, atol=1e-12)
    shapes = one.state_shapes(whole)
    for name, side in (("L", 0), ("R", 1)):
        numel = sum(block.shape[side] ** 2 for block in blocks)
        used = one.state[whole][name]
        assert shapes[name] == tuple(used.shape)
        assert int((used != 0).sum()) == numel <= used.numel()


def grid(matrix: torch.Tensor, rows: int, cols: int) -> list[torch.Tensor]:
    return [
        piece.detach().clone()
        for row in matrix.tensor_split(rows, dim=0)
        for piece in row.tensor_split(cols, dim=1)
    ]


def test_one_block_has_one_factor_a_side() -> None:
    shampoo = Shampoo(make_params())
    param = nn.Parameter(torch.zeros(3000, 2))
    expected = {"exp_avg": (3000, 2), "exp_avg_sq": (3000, 2), "L": (3000, 1500), "R": (4, 2)}
    expected |= {"L_root": (3000, 1500), "R_root": (4, 2)}
    assert shampoo.state_shapes(param) == expected
    assert shampoo.state_shapes(nn.Parameter(torch.zeros(5, 3)))["L"] == (5, 5)
    assert "exp_avg_sq" not in Shampoo(make_params(), grafting="sgd").state_shapes(param)


def steps_of(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], count: int) -> Any:
    params = make_params(((8, 8), (6, 10), (10, 6)))
    optimizer = make(params)
    for step in range(count):
        set_random_grads(params, seed=step)
        optimizer.step()
    return [param.detach() for param in params]


def test_it_is_the_shampoo_of_pytorch_optimizer() -> None:
    """Sums, no momentum, no grafting, roots in every step. Their epsilon is absolute and added to
    the factor, ours relative and to its eigenvalues: 1e-13 of either is 1e-9 of the smallest
    eigenvalue there is, and of the null spaces of the first steps a gradient has nothing but
    rounding, times 1e-13^(-1/4) = 2e3."""
    options: dict[str, Any] = {"lr": LR, "weight_decay": 0.0, "precondition_frequency": 1}
    ours = steps_of(
        lambda params: Shampoo(
            params, beta1=0.0, beta2=1.0, grafting="none", root_epsilon=1e-13, **options
        ),
        6,
    )
    theirs = steps_of(
        lambda params: pytorch_optimizer.Shampoo(params, lr=LR, momentum=0.0, matrix_eps=1e-13), 6
    )
    starts = [param.detach() for param in make_params(((8, 8), (6, 10), (10, 6)))]
    for one, other, start in zip(ours, theirs, starts, strict=True):
        assert (one - start).norm() > 0.05
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)


@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("graft", ["NONE", "SGD"])
def test_it_is_the_scalable_shampoo_of_pytorch_optimizer(graft: str, block_size: int) -> None:
    """With averages, blocks and layer-wise grafting. Where conventions differ:

    - theirs corrects no bias: the factors' cancels out of a grafted step; ungrafted, both sides
      together make ours (1 - beta2^t)^(1/2) times shorter, which the rate makes up for here;
    - theirs has its momentum after the roots: none here;
    - theirs cuts off full blocks, ours equal ones: the same for these sides.
    """
    beta2, shapes = 0.9, ((10, 10), (5, 15), (15, 10))
    params, references = make_params(shapes), make_params(shapes)
    ours = Shampoo(
        params,
        lr=LR,
        weight_decay=0.0,
        beta1=0.0,
        beta2=beta2,
        grafting=graft.lower(),
        root_epsilon=1e-13,
        precondition_frequency=1,
        max_preconditioner_dim=block_size,
    )
    theirs = pytorch_optimizer.ScalableShampoo(
        references,
        lr=LR,
        betas=(0.0, beta2),
        start_preconditioning_step=1,
        preconditioning_compute_steps=1,
        block_size=block_size,
        shape_interpretation=False,
        graft_type=pytorch_optimizer.optimizer.utils.graft.LayerWiseGrafting[graft],
        nesterov=False,
        matrix_eps=1e-13,
        use_svd=True,
    )
    for step in range(6):
        set_random_grads(params, references, seed=step)
        if graft == "NONE":
            ours.param_groups[0]["lr"] = LR / math.sqrt(1 - beta2 ** (step + 1))
        ours.step()
        theirs.step()
    for param, reference, first in zip(params, references, make_params(shapes), strict=True):
        assert (param - first).norm() > 0.1
        torch.testing.assert_close(param, reference, rtol=0, atol=1e-8)


class FailingShampoo(Shampoo):
    """Its eigendecompositions fail in the dtypes named."""

    failing: tuple[torch.dtype, ...] = ()

    def eigh(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        if matrix.dtype in self.failing:
            raise torch.linalg.LinAlgError("not converged")
        return super().eigh(matrix)


def test_a_failed_root_keeps_the_last_one_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = make_params(dtype=torch.float32)
    shampoo = FailingShampoo(params, lr=LR, precondition_frequency=1)
    set_random_grads(params, seed=0)
    shampoo.step()
    roots = [shampoo.state[p]["L_root"].clone() for p in params]
    shampoo.failing = (torch.float32,)
    set_random_grads(params, seed=1)
    shampoo.step()
    for param, root in zip(params, roots, strict=True):
        state = shampoo.state[param]
        factor, weight = state["L"], 1 - 0.99**2
        expected = inverse_root(factor, 0.25, RETRY_EPSILON * 1e-6, torch.float64, weight)
        assert torch.equal(state["L_root"], expected) and not torch.equal(expected, root)
    assert not caplog.records
    shampoo.failing = (torch.float32, torch.float64)
    roots = [shampoo.state[p]["L_root"].clone() for p in params]
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            set_random_grads(params, seed=2 + step)
            shampoo.step()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(params)
    for index, message in enumerate(messages):
        assert f"parameter {index}, L: no inverse root" in message
    for param, root in zip(params, roots, strict=True):
        assert torch.equal(shampoo.state[param]["L_root"], root)
        assert param.isfinite().all()


def test_the_roots_dtype() -> None:
    """float64 roots of a float32 factor are closer to the exact ones; they are kept in float32."""
    errors = {}
    for dtype in (torch.float32, torch.float64):
        params = make_params(((24, 24),), torch.float32)
        shampoo = Shampoo(params, root_dtype=dtype, precondition_frequency=1, beta2=0.5)
        set_random_grads(params, seed=0)
        shampoo.step()
        state = shampoo.state[params[0]]
        assert state["L_root"].dtype == torch.float32
        exact = inverse_root(state["L"].double(), 0.25, 1e-6, torch.float64, 0.5)
        errors[dtype] = float((state["L_root"] - exact).norm() / exact.norm())
    assert errors[torch.float64] < 1e-7 < errors[torch.float32]  # 6e-8 is float32's rounding


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("lr", -0.1, ">= 0"),
        ("lr", math.nan, ">= 0"),
        ("lr", math.inf, ">= 0"),
        ("lr", "3e-4", ">= 0"),
        ("weight_decay", -1e-9, ">= 0"),
        ("beta1", 1.0, "0 <= beta1 < 1"),
        ("beta2", 1.1, "0 <= beta2 <= 1"),
        ("beta2", math.nan, "0 <= beta2 <= 1"),
        ("nesterov", 1, "true or false"),
        ("exponent", 0.0, "> 0"),
        ("root_epsilon", 0.0, "> 0"),
        ("eps", 0.0, "> 0"),
        ("grafting", "adam", "['adamw', 'sgd', 'none']"),
        ("precondition_frequency", 0, "an integer >= 1"),
        ("precondition_frequency", 5.7, "an integer >= 1"),
        ("precondition_frequency", True, "an integer >= 1"),
        ("stagger", "no", "true or false"),
        ("max_preconditioner_dim", 0, "an integer >= 1"),
        ("root_dtype", torch.bfloat16, "[torch.float32, torch.float64]"),
    ],
)
def test_hyperparameters_out_of_range(name: str, value: Any, legal: str) -> None:
    expected = f"{name}: received {value!r}; legal: {legal}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        Shampoo(make_params(), **{name: value})
    constructor_only = ("grafting", "max_preconditioner_dim", "root_dtype")
    if name not in constructor_only:  # of a group as well
        with pytest.raises(ValueError, match=re.escape(expected)):
            Shampoo([{"params": make_params(), name: value}])
