"""What holds of Shampoo and SOAP alike: their state, what they do with empty, zero, tiny and huge
gradients, and that who owns a matrix changes no bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from torchtitan_matrixfsdp.optim import SOAP, Shampoo
from torchtitan_matrixfsdp.optim.base import MatrixOptimizerBase

Make = Callable[..., MatrixOptimizerBase]

SHAPES = ((12, 7), (7, 12), (8, 8), (1, 9), (9, 1), (1, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LR, DECAY, FREQUENCY = 0.02, 0.1, 3


def make_shampoo(params: Any, **options: Any) -> Shampoo:
    return Shampoo(params, **{"max_preconditioner_dim": 8, **options})


def make_soap(params: Any, **options: Any) -> SOAP:
    return SOAP(params, **{"max_precond_dim": 9, **options})


both = pytest.mark.parametrize("make", [make_shampoo, make_soap])


def common(**options: Any) -> dict[str, Any]:
    every: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "precondition_frequency": FREQUENCY}
    return every | options


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def set_random_grads(*lists: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """Give the parameters of all lists the same gradients, where they are not empty."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for index, shape in enumerate(SHAPES):
        grad = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        for params in lists:
            param = params[index]
            param.grad = (grad if param.numel() else torch.empty(param.shape)).to(param.dtype)


def run(optimizer: MatrixOptimizerBase, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_random_grads(params, seed=step)
        optimizer.step()


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_exists_in_its_shapes_and_dtypes(make: Make, dtype: torch.dtype) -> None:
    """Cases 10, 14 and 17: tensors under fixed names before any step, and the same ones after."""
    params = make_params(dtype)
    optimizer = make([{"params": params[:2]}], **common())
    optimizer.add_param_group({"params": params[2:]})
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    before: dict[tuple[int, str], torch.Tensor] = {}
    for index, param in enumerate(params):
        shapes = optimizer.state_shapes(param)
        state = optimizer.state[param]
        assert state.keys() == {"step", "refreshes", *shapes}
        for name, tensor in state.items():
            is_counter = name in ("step", "refreshes")
            assert tensor.shape == (() if is_counter else shapes[name])
            assert tensor.dtype == (torch.float32 if is_counter else wide)
            assert not tensor.requires_grad
            if name.endswith(("_root", "_basis")) and tensor.size(0) == tensor.size(1):
                assert torch.equal(tensor, torch.eye(len(tensor), dtype=wide))
            elif not name.endswith(("_root", "_basis")):
                assert not tensor.any()
            before[index, name] = tensor
    run(optimizer, params, range(FREQUENCY + 1))
    for (index, name), tensor in before.items():
        assert optimizer.state[params[index]][name] is tensor
    for param in params:
        assert optimizer.state[param]["step"] == FREQUENCY + 1
        phase = optimizer.refresh_phase(param)
        assert optimizer.state[param]["refreshes"] == (2 if phase == 0 else 1)


@both
def test_any_choice_of_owners_gives_the_same_bits(make: Make) -> None:
    """Cases 11, 18 and 20: each rank steps what it owns, with all others empty; together they do
    exactly what one device does, and counters are equal everywhere."""
    alone = make_params()
    single = make(alone, **common())
    run(single, alone, range(8))
    for owners in ((0, 1, 0, 1, 0, 1), (2, 2, 2, 0, 0, 0), (0, 1, 2, 3, 4, 5)):
        for rank in range(max(owners) + 1):
            params = [
                param if owner == rank else nn.Parameter(torch.empty(0, shape[1]))
                for param, owner, shape in zip(make_params(), owners, SHAPES, strict=True)
            ]
            logical = dict(zip(params, SHAPES, strict=True))
            optimizer = make(params, logical_shapes=logical, **common())
            for mine, whole in zip(params, alone, strict=True):
                assert optimizer.refresh_phase(mine) == single.refresh_phase(whole)
            run(optimizer, params, range(8))
            for mine, whole in zip(params, alone, strict=True):
                state, expected = optimizer.state[mine], single.state[whole]
                assert list(state) == list(expected)
                for name, tensor in state.items():
                    if tensor.dim() == 0 or mine.numel() > 0:
                        assert torch.equal(tensor, expected[name]), name
                    else:
                        assert tensor.shape == (0, *expected[name].shape[1:])
                        assert tensor.dtype == expected[name].dtype
                if mine.numel() > 0:
                    assert torch.equal(mine, whole)


@both
@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)], ids=str)
def test_matrices_that_are_empty_everywhere(make: Make, shape: tuple[int, int]) -> None:
    empty = nn.Parameter(torch.empty(shape))
    optimizer = make([empty, *make_params()], **common())
    for _ in range(FREQUENCY + 1):
        empty.grad = torch.empty(shape)
        optimizer.step()
    assert optimizer.state[empty]["step"] == FREQUENCY + 1
    assert all(t.numel() == 0 for t in optimizer.state[empty].values() if t.dim())


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("resumed_at", [1, FREQUENCY, 7])
def test_state_round_trip(make: Make, dtype: torch.dtype, resumed_at: int) -> None:
    """Cases 13, 15 and 17: copied into fresh tensors, the next steps are the same bits."""
    params = make_params(dtype)
    optimizer = make(params, **common())
    run(optimizer, params, range(resumed_at))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed_params = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = make(resumed_params, **common(lr=9.0))
    own = [dict(resumed.state[param]) for param in resumed_params]
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == LR
    for param, before in zip(resumed_params, own, strict=True):
        for name, tensor in resumed.state[param].items():
            assert tensor is before[name]
    for again, fresh in ((optimizer, params), (resumed, resumed_params)):
        run(again, fresh, range(resumed_at, resumed_at + 2 * FREQUENCY))
    for one, other in zip(params, resumed_params, strict=True):
        assert torch.equal(one, other)
        for name, tensor in optimizer.state[one].items():
            assert torch.equal(tensor, resumed.state[other][name]), name


@both
def test_state_of_another_optimizer_is_refused(make: Make) -> None:
    params = make_params()
    optimizer = make(params, **common())
    before = copy.deepcopy(optimizer.state_dict())
    fewer = make(params[:2], **common()).state_dict()
    with pytest.raises(ValueError, match=r"per group: received \[2\]; legal: \[6\]"):
        optimizer.load_state_dict(fewer)
    names = ("max_preconditioner_dim", "max_precond_dim")
    other = make(params, **common(**{names[make is make_soap]: 5})).state_dict()
    with pytest.raises(ValueError, match=r"state of parameter 0: received .*exp_avg"):
        optimizer.load_state_dict(other)
    broken = copy.deepcopy(before)
    broken["param_groups"][0]["precondition_frequency"] = 0
    broken["state"][0]["step"].fill_(7)
    with pytest.raises(ValueError, match="precondition_frequency: received 0"):
        optimizer.load_state_dict(broken)
    for index, state in before["state"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, optimizer.state_dict()["state"][index][name])


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stagger", [True, False])
def test_zero_gradients_decay_and_do_no_more(make: Make, dtype: torch.dtype, stagger: bool) -> None:
    """Case 8: from the first step on, and once there have been gradients, all finite."""
    params = make_params(dtype)
    optimizer = make(params, **common(stagger=stagger))
    expected = [param.detach().clone() for param in params]
    for _ in range(FREQUENCY + 1):
        set_random_grads(params, seed=0, scale=0.0)
        optimizer.step()
        for value in expected:
            value.mul_(1 - LR * DECAY)
    for param, value in zip(params, expected, strict=True):
        assert torch.equal(param, value)
    run(optimizer, params, range(FREQUENCY))
    for _ in range(5 * FREQUENCY):
        set_random_grads(params, seed=0, scale=0.0)
        optimizer.step()
    assert all(param.isfinite().all() for param in params)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stagger", [True, False])
def test_tiny_and_huge_gradients(make: Make, dtype: torch.dtype, stagger: bool) -> None:
    """Case 7: finite, state included, also when they follow one another."""
    for scales in ((1e-20,), (1e-38,), (1e20,), (1e37,), (1e-20, 1.0, 1e20)):
        params = make_params(dtype)
        optimizer = make(params, **common(stagger=stagger))
        for step in range(2 * FREQUENCY + 1):
            set_random_grads(params, seed=step, scale=scales[step % len(scales)])
            optimizer.step()
        for index, param in enumerate(params):
            assert param.isfinite().all(), (scales, index)
            for name, tensor in optimizer.state[param].items():
                assert tensor.isfinite().all(), (scales, index, name)


@both
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named(make: Make, value: float) -> None:
    """At the next refresh of its matrix, here the second parameter's."""
    params = make_params()
    optimizer = make(params, **common(precondition_frequency=1))
    set_random_grads(params, seed=0)
    assert params[1].grad is not None
    params[1].grad[2, 3] = value
    with pytest.raises(FloatingPointError, match=r"parameter 1, L: a factor .*NaN or infinite"):
        optimizer.step()


@both
def test_strides_do_not_matter(make: Make) -> None:
    """Case 27: a transposed weight and gradient step as contiguous ones do, to the bit."""
    start = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).T
    view, plain = nn.Parameter(start), nn.Parameter(start.contiguous())
    assert view.stride() != plain.stride()
    optimizers = [make([param], **common()) for param in (view, plain)]
    for step in range(FREQUENCY + 2):
        generator = torch.Generator().manual_seed(step)
        plain.grad = torch.randn(8, 16, generator=generator)
        view.grad = plain.grad.T.contiguous().T
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(view, plain)


@both
def test_updates_of_bfloat16_weights_are_computed_in_float32(make: Make) -> None:
    """One step of rate 1 without decay from zero is the float32 step, rounded once."""
    params, wide = make_params(torch.bfloat16), make_params()
    with torch.no_grad():
        for param in (*params, *wide):
            param.zero_()
    options = common(lr=1.0, weight_decay=0.0, precondition_frequency=1)
    optimizers = [make(params, **options), make(wide, **options)]
    set_random_grads(params, seed=0)
    for param, reference in zip(params, wide, strict=True):
        assert param.grad is not None
        reference.grad = param.grad.float()
    for optimizer in optimizers:
        optimizer.step()
    for param, reference in zip(params, wide, strict=True):
        assert torch.equal(param, reference.bfloat16())


@both
def test_no_gradient_is_no_step(make: Make) -> None:
    """Case 22: neither decay nor state; and a gradient is not changed."""
    params = make_params()
    optimizer = make(params, **common())
    set_random_grads(params, seed=0)
    params[1].grad = None
    before = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in params]
    optimizer.step()
    for index, (param, (weight, grad)) in enumerate(zip(params, before, strict=True)):
        assert torch.equal(param, weight) is (index == 1)
        assert (grad is None) if param.grad is None else torch.equal(param.grad, grad)
        assert optimizer.state[param]["step"] == (0 if index == 1 else 1)


@both
def test_groups_have_their_own_options(make: Make) -> None:
    """Case 28: a no-decay group is honoured; options changed later are used."""
    params = make_params()
    groups: list[dict[str, Any]] = [
        {"params": params[:3]},
        {"params": params[3:], "weight_decay": 0.0},
    ]
    optimizer = make(groups, **common())
    set_random_grads(params, seed=0, scale=0.0)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    for index, (param, weight) in enumerate(zip(params, before, strict=True)):
        kept = weight * (1 - LR * DECAY) * (1 - 0.5 * DECAY) if index < 3 else weight
        torch.testing.assert_close(param.detach(), kept, rtol=1e-6, atol=0)
        assert torch.equal(param, weight) is (index >= 3)


@both
def test_a_part_of_a_matrix_is_refused(make: Make) -> None:
    """Case 1: a row shard has factors of its own, which are not the matrix's."""
    part = nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"part of shape \(4, 6\); legal: \(8, 6\)"):
        make([part], logical_shapes={part: (8, 6)}, **common())


@both
@pytest.mark.parametrize("shape", [(), (16,), (4, 16, 8)], ids=str)
def test_only_matrices_are_taken(make: Make, shape: tuple[int, ...]) -> None:
    """Cases 18 and 27."""
    with pytest.raises(ValueError, match="2D"):
        make([*make_params(), nn.Parameter(torch.zeros(shape))], **common())
