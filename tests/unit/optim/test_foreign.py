"""Any installed optimizer class, unchanged: same weights, state that survives, or a refusal."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_matrixfsdp.optim import (
    ForeignOptimizer,
    ForeignStateError,
    LocalStepOptimizer,
    logical_shapes,
)

SHAPES = ((8, 6), (6, 8), (5, 5), (1, 7))
ABSENT = (9, 4)  # another rank owns it
STEPS = 5

CLASSES: dict[str, dict[str, Any]] = {
    "torch.optim:Muon": {"lr": 0.01, "weight_decay": 0.1},
    "torch.optim:AdamW": {"lr": 0.01, "fused": True},
    "torch.optim:SGD": {"lr": 0.01},  # has no state
    "torch.optim:Adafactor": {"lr": 0.01},  # of its own shapes
    "torch.optim:NAdam": {"lr": 0.01},  # 0-dim floats
    # Lists of tensors, numbers, and a counter in the group (case 14).
    "pytorch_optimizer:SOAP": {"lr": 0.01, "precondition_frequency": 2},
    "pytorch_optimizer:Shampoo": {"lr": 0.01, "preconditioning_compute_steps": 2},
    # Nested dicts by number, sets, a hook on state_dict, a counter with a group's first parameter.
    "heavyball:SOAP": {"lr": 0.01},
}
every_class = pytest.mark.parametrize("name", list(CLASSES))


def load(name: str) -> type[Optimizer]:
    module, _, cls = name.partition(":")
    if module == "heavyball":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it does at import is its own business
            library = importlib.import_module(module)
            library.utils.compile_mode = None  # it would compile each step with inductor
        return vars(library)[cls]
    return vars(importlib.import_module(module))[cls]


def make_params() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def set_grads(params: list[torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def foreign(name: str, params: Any, **options: Any) -> ForeignOptimizer:
    return ForeignOptimizer(params, load(name), {**CLASSES[name], **options})


def wrapped(name: str, params: Any) -> LocalStepOptimizer:
    def factory(groups: Any, of_local: Any) -> ForeignOptimizer:
        return ForeignOptimizer(groups, load(name), CLASSES[name], logical_shapes(of_local))

    return LocalStepOptimizer(params, factory)


@every_class
def test_equals_the_class_itself(name: str) -> None:
    params, references = make_params(), make_params()
    ours, stock = wrapped(name, params), load(name)(references, **CLASSES[name])
    for step in range(STEPS):
        set_grads(params, step)
        set_grads(references, step)
        ours.step()
        stock.step()
        for param, reference in zip(params, references, strict=True):
            assert torch.equal(param, reference), step


@every_class
def test_every_rank_names_the_same_state_from_the_beginning(name: str) -> None:
    """Cases 10, 11: whoever has the matrix, stepped or not."""
    here = torch.randn(ABSENT, generator=torch.Generator().manual_seed(0)).requires_grad_()
    absent = torch.empty(0, ABSENT[1]).requires_grad_()
    owner = foreign(name, [here])
    other = ForeignOptimizer([absent], load(name), CLASSES[name], {absent: ABSENT})
    for step in range(STEPS):
        assert owner.state_shapes(here) == other.state_shapes(absent)
        for optimizer, param in ((owner, here), (other, absent)):
            shapes = optimizer.state_shapes(param)
            assert optimizer.state[param].keys() == shapes.keys()
            for key, value in optimizer.state[param].items():
                expected = shapes[key] if param is here else (0, *shapes[key][1:])
                assert tuple(value.shape) == expected, key
        dtypes = [
            {k: v.dtype for k, v in o.state[p].items()} for o, p in ((owner, here), (other, absent))
        ]
        assert dtypes[0] == dtypes[1]
        groups = [o.param_groups[0].keys() for o in (owner, other)]
        assert groups[0] == groups[1]
        assert owner.state[here]["started"].item() == (step > 0)
        for param in (here, absent):
            param.grad = torch.full_like(param, 0.1 * (step + 1))
        owner.step()
        other.step()


@every_class
@pytest.mark.parametrize("steps", [0, STEPS])
def test_loading_continues_to_the_bit(name: str, steps: int) -> None:
    """Cases 10, 13: also what was saved before the first step."""
    params = make_params()
    ours = wrapped(name, params)
    for step in range(steps):
        set_grads(params, step)
        ours.step()
    resumed = [param.detach().clone().requires_grad_() for param in params]
    other = wrapped(name, resumed)
    for _ in range(2):  # state of its own, to be replaced
        for param in resumed:
            param.grad = torch.zeros_like(param)
        if steps:
            other.step()
    for param, saved in zip(resumed, params, strict=True):
        param.data.copy_(saved)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    for step in range(steps, 3 * STEPS):
        set_grads(params, step)
        set_grads(resumed, step)
        ours.step()
        other.step()
        for param, reference in zip(resumed, params, strict=True):
            assert torch.equal(param, reference), step


@every_class
@pytest.mark.filterwarnings("ignore:Learning rate changed between steps")
def test_a_schedule_drives_it(name: str) -> None:
    params, references = make_params(), make_params()
    ours, stock = wrapped(name, params), load(name)(references, **CLASSES[name])
    schedulers = [LambdaLR(o, lambda step: 1 / (1 + step)) for o in (ours, stock)]
    for step in range(STEPS):
        set_grads(params, step)
        set_grads(references, step)
        for optimizer, scheduler in zip((ours, stock), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    for param, reference in zip(params, references, strict=True):
        assert torch.equal(param, reference)


@every_class
def test_what_is_loaded_has_the_strides_of_the_classs_own(name: str) -> None:
    """Products with a basis from QR, which is stored by columns, depend on them in the last bit."""
    (param, *_) = make_params()
    optimizer = foreign(name, [param])
    before = {key: value.stride() for key, value in optimizer.state[param].items()}
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert {key: value.stride() for key, value in optimizer.state[param].items()} == before


def test_groups_keep_their_options() -> None:
    """Case 28."""
    params, references = make_params(), make_params()

    def groups_of(tensors: list[torch.Tensor]) -> list[dict[str, Any]]:
        return [{"params": tensors[:1]}, {"params": tensors[1:], "lr": 0.1, "weight_decay": 0.0}]

    name = "torch.optim:Muon"
    ours = wrapped(name, groups_of(params))
    stock = load(name)(groups_of(references), **CLASSES[name])
    for step in range(STEPS):
        set_grads(params, step)
        set_grads(references, step)
        ours.step()
        stock.step()
    assert [group["lr"] for group in ours.param_groups] == [0.01, 0.1]
    for param, reference in zip(params, references, strict=True):
        assert torch.equal(param, reference)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    """Case 22: it resumes as never stepped."""
    params = make_params()
    optimizer = foreign("pytorch_optimizer:SOAP", params)
    set_grads(params, 0)
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert [int(optimizer.state[param]["started"]) for param in params] == [1, 0, 1, 1]


def test_the_jobs_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    foreign("torch.optim:Muon", make_params())
    assert torch.equal(torch.rand(4), expected)


class Stateless(Optimizer):
    """A base for classes with faults."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    def change(self, param: torch.Tensor) -> torch.Tensor:
        return param.grad

    @torch.no_grad()
    def step(self) -> None:
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.change(param), alpha=group["lr"])


class HiddenCounter(Stateless):
    def change(self, param: torch.Tensor) -> torch.Tensor:
        return param.grad / self.calls


class HiddenRandom(Stateless):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(0)

    def change(self, param: torch.Tensor) -> torch.Tensor:
        return torch.randn(param.shape, generator=self.generator)


class StrangeState(Stateless):
    def change(self, param: torch.Tensor) -> torch.Tensor:
        self.state[param]["history"] = object()
        return param.grad


class LateState(Stateless):
    def change(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        if state["step"] == 5:
            state["average"] = param.grad.clone()
        return param.grad


class Broken(Stateless):
    def change(self, param: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("only square ones")


class Regrouping(Stateless):
    def __init__(self, params: Any) -> None:
        super().__init__([p for group in params for p in group["params"]])


@pytest.mark.parametrize("cls", [HiddenCounter, HiddenRandom])
def test_state_outside_is_refused(cls: type[Optimizer]) -> None:
    with pytest.raises(ForeignStateError, match=f"{cls.__name__} does not continue from its saved"):
        ForeignOptimizer(make_params(), cls, {})


def test_a_counter_that_changes_nothing_is_fine() -> None:
    """`calls` of the base class is no reason to refuse."""
    params = make_params()
    optimizer = ForeignOptimizer(params, Stateless, {})
    set_grads(params, 0)
    optimizer.step()
    assert [set(optimizer.state[param]) for param in params] == [{"started"}] * len(params)


def test_what_a_checkpoint_cannot_hold_is_refused() -> None:
    with pytest.raises(ForeignStateError, match="stores 'history' as object"):
        ForeignOptimizer(make_params(), StrangeState, {})


def test_state_that_comes_late_is_refused_when_it_comes() -> None:
    params = make_params()
    optimizer = ForeignOptimizer(params, LateState, {})
    with pytest.raises(ForeignStateError, match="LateState changed what it stores"):
        for step in range(5):
            set_grads(params, step)
            optimizer.step()
    assert step == 4


def test_a_failing_step_is_explained() -> None:
    with pytest.raises(ValueError, match=r"Broken: a trial step on a matrix .*only square ones"):
        ForeignOptimizer(make_params(), Broken, {})


def test_classes_without_groups_are_refused() -> None:
    with pytest.raises(ForeignStateError, match="made 1 groups of the 4"):
        ForeignOptimizer(make_params(), Regrouping, {})
