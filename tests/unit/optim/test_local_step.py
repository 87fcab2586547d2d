"""LocalStepOptimizer over plain parameters is the inner optimizer, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_matrixfsdp.optim import LocalStepOptimizer, Muon, create_adam_state

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 5

every_implementation = pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (7,), (3, 2, 2))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    """The gradients of a step: the same for every list of parameters."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def local_adamw(params: Any, implementation: str = "foreach", **options: Any) -> LocalStepOptimizer:
    def factory(
        groups: list[dict[str, Any]], of_local: Mapping[torch.Tensor, torch.Tensor]
    ) -> Optimizer:
        inner = AdamW(groups, **IMPLEMENTATIONS[implementation], **{**OPTIONS, **options})
        create_adam_state(inner)
        return inner

    return LocalStepOptimizer(params, factory)


def local_muon(params: Any, **options: Any) -> LocalStepOptimizer:
    return LocalStepOptimizer(params, lambda groups, of_local: Muon(groups, **options))


def torch_adamw(params: Any, implementation: str = "foreach") -> AdamW:
    return AdamW(params, **IMPLEMENTATIONS[implementation], **OPTIONS)


def assert_equal(params: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for param, reference in zip(params, expected, strict=True):
        assert torch.equal(param, reference), (param, reference)


def assert_equal_states(params: list[nn.Parameter], *optimizers: Any) -> None:
    """Both optimizers, the second over copies of ``params``, hold the same state to the bit."""
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert [sorted(state) for state in states] == [list(range(len(params)))] * 2
    for mine, theirs in zip(states[0].values(), states[1].values(), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name


@every_implementation
def test_equals_adamw(implementation: str) -> None:
    params, references = make_params(), make_params()
    local = local_adamw(params, implementation)
    stock = torch_adamw(references, implementation)
    for step in range(STEPS):
        set_grads(params, step)
        set_grads(references, step)
        local.step()
        stock.step()
        assert_equal(params, references)
        assert_equal_states(params, local, stock)
    assert local.state[params[0]]["step"] == STEPS


@every_implementation
def test_state_before_the_first_step(implementation: str) -> None:
    """Case 10: made without a step, and the first step is the first."""
    params, references = make_params(), make_params()
    optimizer = torch_adamw(params, implementation)
    create_adam_state(optimizer)
    assert_equal(params, references)
    for param in params:
        state = optimizer.state[param]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(not value.any() for value in state.values())
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == param.shape
        assert param.grad is None
    fresh = torch_adamw(references, implementation)
    set_grads(params, 0)
    set_grads(references, 0)
    optimizer.step()
    fresh.step()
    assert_equal(params, references)
    assert_equal_states(params, optimizer, fresh)


def test_amsgrad_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="amsgrad"):
        create_adam_state(AdamW(make_params(), amsgrad=True))


def test_groups_list_the_parameters_and_every_option() -> None:
    """Case 28: the caller's groups are honoured; checkpoints find parameters by identity."""
    params, references = make_params(), make_params()
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0, "lr": 0.01}]
    stock_groups = [
        {**groups[0], "params": references[:1]},
        {**groups[1], "params": references[1:]},
    ]
    local, stock = local_adamw(groups), torch_adamw(stock_groups)
    listed = [group["params"] for group in local.param_groups]
    assert [[id(p) for p in g] for g in listed] == [[id(params[0])], [id(p) for p in params[1:]]]
    for group, other in zip(local.param_groups, stock.param_groups, strict=True):
        assert group.keys() == other.keys()
        assert all(group[key] == other[key] for key in group if key != "params")
    for step in range(STEPS):
        set_grads(params, step)
        set_grads(references, step)
        local.step()
        stock.step()
    assert_equal(params, references)


def test_an_option_changed_from_outside_is_used() -> None:
    params, references = make_params(), make_params()
    local, stock = local_adamw(params), torch_adamw(references)
    for step in range(STEPS):
        for optimizer in (local, stock):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        set_grads(params, step)
        set_grads(references, step)
        local.step()
        stock.step()
    assert_equal(params, references)


def test_a_scheduler_drives_it() -> None:
    params, references = make_params(), make_params()
    local, stock = local_adamw(params), torch_adamw(references)
    schedulers = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in (local, stock)]
    for step in range(STEPS):
        set_grads(params, step)
        set_grads(references, step)
        local.step()
        stock.step()
        for scheduler in schedulers:
            scheduler.step()
    assert local.param_groups[0]["lr"] == stock.param_groups[0]["lr"] == OPTIONS["lr"] / (1 + STEPS)
    assert_equal(params, references)


def test_zero_grad_clears_and_gradients_do_not_pile_up() -> None:
    """Case 28: three steps at rate 0 on one batch give one gradient, not 1, 2 and 3 times it."""
    model = nn.Linear(4, 3)
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for make in (local_adamw, local_muon):
        optimizer = make([model.weight], lr=0.0)
        seen = []
        for _ in range(3):
            model(batch).square().sum().backward()
            assert model.weight.grad is not None
            seen.append(model.weight.grad.clone())
            optimizer.step()
            assert all(p.grad is None for g in optimizer.inner.param_groups for p in g["params"])
            optimizer.zero_grad()
            assert model.weight.grad is None
        assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_the_gradient_is_left_as_it_was() -> None:
    """When to drop it is the caller's decision."""
    params = make_params()
    optimizer = local_adamw(params)
    set_grads(params, 0)
    grads = [param.grad for param in params]
    values = [grad.clone() for grad in grads if grad is not None]
    optimizer.step()
    for param, grad, value in zip(params, grads, values, strict=True):
        assert param.grad is grad and torch.equal(value, param.grad)


def test_a_parameter_without_gradient_is_skipped() -> None:
    params, references = make_params(), make_params()
    optimizer = local_adamw(params)
    set_grads(params, 0)
    params[1].grad = None
    optimizer.step()
    moved = [not torch.equal(p, r) for p, r in zip(params, references, strict=True)]
    assert moved == [True, False, True]
    assert [int(optimizer.state[param]["step"]) for param in params] == [1, 0, 1]


@every_implementation
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_loading_continues_to_the_bit(implementation: str, assign: bool) -> None:
    """Cases 10 and 13: also where the weights arrive in another storage."""
    params, resumed = make_params(), make_params()
    local = local_adamw(params, implementation)
    for step in range(STEPS):
        set_grads(params, step)
        local.step()
    other = local_adamw(resumed, implementation, lr=1.0)
    other.load_state_dict(copy.deepcopy(local.state_dict()))
    for param, saved in zip(resumed, params, strict=True):
        if assign:
            param.data = saved.detach().clone()
        else:
            param.data.copy_(saved)
    assert other.param_groups[0]["lr"] == OPTIONS["lr"]
    for step in range(STEPS, 2 * STEPS):
        set_grads(params, step)
        set_grads(resumed, step)
        local.step()
        other.step()
        assert_equal(resumed, params)
        assert_equal_states(params, other, local)


@pytest.mark.parametrize("make", [local_adamw, local_muon])
def test_nothing_is_stored_twice(make: Any) -> None:
    """Weights and state have one storage, whoever looks, from construction on."""
    param = make_params()[0]
    optimizer = make([param], lr=0.01)
    for step in range(2):
        (local,) = optimizer.inner.param_groups[0]["params"]
        assert local.data_ptr() == param.data_ptr()
        shown, inner = optimizer.state[param], optimizer.inner.state[local]
        assert shown.keys() == inner.keys()
        assert all(shown[name].data_ptr() == inner[name].data_ptr() for name in inner)
        set_grads([param], step)
        optimizer.step()


@pytest.mark.parametrize("make", [local_adamw, local_muon])
def test_reading_the_state_changes_nothing(make: Any) -> None:
    """Case 10: neither before the first step nor later, by hand or as a checkpoint reads it."""
    model, untouched = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    untouched.load_state_dict(model.state_dict())
    optimizer, reference = make([model.weight], lr=0.01), make([untouched.weight], lr=0.01)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    keys = set(optimizer.state[model.weight])
    assert keys
    for step in range(6):
        is_before_backward = model.weight.grad is None
        before = model.weight.detach().clone()
        first = copy.deepcopy(optimizer.state_dict())
        flat = get_optimizer_state_dict(model, optimizer, options=options)
        assert {f"state.weight.{key}" for key in keys} <= set(flat)
        again = optimizer.state_dict()
        assert first["param_groups"] == again["param_groups"]
        assert set(again["state"][0]) == keys
        for key in keys:
            assert torch.equal(first["state"][0][key], again["state"][0][key])
            assert torch.equal(first["state"][0][key], flat[f"state.weight.{key}"])
        assert torch.equal(model.weight, before)
        assert (model.weight.grad is None) == is_before_backward
        for module, stepped in ((model, optimizer), (untouched, reference)):
            if is_before_backward:
                set_grads([module.weight], step)
            else:
                stepped.step()
                stepped.zero_grad()
        assert torch.equal(model.weight, untouched.weight)


@every_implementation
def test_empty_tensors_step_along(implementation: str) -> None:
    """Case 20: a rank that owns none or some of the matrices counts the same steps."""
    own, alone = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    empties = [nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(0))]
    mixed = local_adamw([empties[0], own, empties[1]], implementation)
    others = [nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(0))]
    nothing = local_adamw(others, implementation)
    reference = torch_adamw([alone], implementation)
    for step in range(1, 4):
        for params in ([own], [alone], empties, others):
            set_grads(params, step)
        for optimizer in (mixed, nothing, reference):
            optimizer.step()
        counters = [
            int(optimizer.state[param]["step"])
            for optimizer, params in ((mixed, [own, *empties]), (nothing, others))
            for param in params
        ]
        assert counters == [step] * 5
    assert torch.equal(own, alone)
    for param in empties:
        state = mixed.state[param]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == param.shape


def test_a_list_without_parameters() -> None:
    """A model without matrices still has its matrix optimizer."""
    for optimizer in (local_adamw([]), local_muon([])):
        optimizer.step()
        assert optimizer.state_dict()["state"] == {}
        assert len(optimizer.param_groups) == 1


def test_a_closure_is_called_once_with_gradients() -> None:
    (param, *_) = make_params()
    before = param.detach().clone()
    optimizer = local_adamw([param])
    losses = []

    def closure() -> float:
        loss = param.square().sum()
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    assert optimizer.step(closure) == losses[0]
    assert len(losses) == 1
    assert not torch.equal(param, before)


def test_momentum_dtype_survives_loading() -> None:
    """Case 17: bfloat16 parameters have bfloat16 state."""
    for make in (local_adamw, local_muon):
        params = [nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16)) for _ in range(2)]
        optimizers = [make([param], lr=0.01) for param in params]
        grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        params[0].grad = grad
        optimizers[0].step()
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        params[1].data.copy_(params[0])
        for steps_since in range(2):
            for name, value in optimizers[0].state[params[0]].items():
                loaded = optimizers[1].state[params[1]][name]
                assert name == "step" or value.dtype == torch.bfloat16, name
                assert loaded.dtype == value.dtype, (name, steps_since)
                assert torch.equal(loaded, value), (name, steps_since)
            for param, optimizer in zip(params, optimizers, strict=True):
                param.grad = grad
                optimizer.step()
