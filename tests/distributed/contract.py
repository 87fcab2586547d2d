"""One contract for every optimizer: what the suite runs on each rank.

The model is a bag of matrices whose gradient is known: the loss is the inner product of each weight
with a matrix that the test chooses, a W-th of it on each rank. W is a power of two and the matrix
has few digits, so the owner's sum is that matrix to the bit in any order, and any difference from
the plain class is the optimizer's.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from torchtitan_matrixfsdp.comm import TransportFactory
from torchtitan_matrixfsdp.layout import BlockMeta, ParamMeta, make_plan
from torchtitan_matrixfsdp.optim import (
    SOAP,
    ForeignOptimizer,
    LocalStepOptimizer,
    Muon,
    Shampoo,
    create_adam_state,
    logical_shapes,
)
from torchtitan_matrixfsdp.runtime import OwnerContext, owner_shard, sum_gradients

# Tall, wide, square, one row, one column, and several of one shape, which are batched.
SHAPES: tuple[tuple[int, ...], ...] = ((12, 5), (4, 9), (6, 6), (1, 7), (8, 1), (6, 6), (12, 5))
STEPS = 5


@dataclass(frozen=True)
class Subject:
    """An optimizer under test.

    Attributes:
        plain: makes the plain single-device optimizer.
        options: its keyword arguments.
        is_foreign: whether it runs inside of ``ForeignOptimizer`` on owners.
        decays_alone: a step with a zero gradient from the beginning multiplies by 1 - lr * decay.
        dtype: the widest that it knows.
    """

    plain: Callable[..., Optimizer]
    options: Mapping[str, Any]
    is_foreign: bool = False
    decays_alone: bool = True
    dtype: torch.dtype = torch.float64

    def make_plain(self, params: Any) -> Optimizer:
        return self.plain(params, **self.options)

    def make_inner(self, groups: Any, of_local: Mapping[torch.Tensor, torch.Tensor]) -> Optimizer:
        """What runs on owners."""
        shapes = logical_shapes(of_local)
        if self.is_foreign:
            assert isinstance(self.plain, type)
            return ForeignOptimizer(groups, self.plain, self.options, shapes)
        if self.plain is torch.optim.AdamW:
            optimizer = torch.optim.AdamW(groups, **self.options)
            create_adam_state(optimizer)
            return optimizer
        return self.plain(groups, **self.options, logical_shapes=shapes)


def library_class(name: str) -> type[Optimizer]:
    """An optimizer class of a library of the dev extra."""
    module, _, cls = name.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it does at import is its own business
        library = importlib.import_module(module)
        if module == "heavyball":
            library.utils.compile_mode = None  # it would compile each step with inductor
    found: type[Optimizer] = vars(library)[cls]
    return found


_SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
OURS: dict[str, Subject] = {
    "Muon": Subject(Muon, {**_SETTINGS, "ns_dtype": torch.float64}),
    "Muon, polar express": Subject(
        Muon, {**_SETTINGS, "ns_dtype": torch.float64, "coefficients": "polar_express"}
    ),
    "Shampoo": Subject(Shampoo, {**_SETTINGS, "precondition_frequency": 3}),
    "Shampoo, blocked, no graft": Subject(
        Shampoo,
        {
            **_SETTINGS,
            "precondition_frequency": 2,
            "max_preconditioner_dim": 5,
            "grafting": "none",
        },
    ),
    "SOAP": Subject(SOAP, {**_SETTINGS, "precondition_frequency": 3}),
    "SOAP, one-sided": Subject(
        SOAP, {**_SETTINGS, "precondition_frequency": 2, "max_precond_dim": 6, "stagger": False}
    ),
    "AdamW": Subject(torch.optim.AdamW, {**_SETTINGS, "foreach": True}),
}


def subjects(with_libraries: bool) -> dict[str, Subject]:
    """All of them; those of other libraries, which are slow to import and to step, on demand."""
    foreign: dict[str, Any] = {"torch.optim:Muon": _SETTINGS}
    if with_libraries:
        foreign |= {
            "pytorch_optimizer:SOAP": {**_SETTINGS, "precondition_frequency": 2},
            "heavyball:SOAP": _SETTINGS,
        }
    return OURS | {
        name: Subject(
            library_class(name),
            options,
            is_foreign=True,
            decays_alone=False,
            dtype=torch.float32 if name.startswith("heavyball") else torch.float64,
        )
        for name, options in foreign.items()
    }


class Bag(nn.Module):
    """A block of matrices; in ``layers.0.w3`` the weight of index 3."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for index, weight in enumerate(weights):
            self.register_parameter(f"w{index}", nn.Parameter(weight))

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        products = [(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]
        return torch.stack(products).sum()


class Bags(nn.Module):
    """Blocks of matrices, cut from one list."""

    def __init__(self, weights: Sequence[torch.Tensor], per_block: int = 4) -> None:
        super().__init__()
        self.per_block = per_block
        starts = range(0, len(weights), per_block)
        self.layers = nn.ModuleList(Bag(weights[i : i + per_block]) for i in starts)

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        n = self.per_block
        losses = [bag(gradients[i * n : (i + 1) * n]) for i, bag in enumerate(self.layers)]
        return torch.stack(losses).sum()


@dataclass
class Job:
    """A sharded bag with its optimizer.

    Attributes:
        dtype: of the weights; None is the subject's widest.
        zero_from: the step from which gradients are zero.
        zero: weights whose gradients always are.
        groups: cuts parameters into groups with options of their own, by index.
    """

    subject: Subject
    shapes: Sequence[tuple[int, ...]] = SHAPES
    dtype: torch.dtype | None = None
    zero_from: int = 1 << 30
    zero: Sequence[int] = ()
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def draw(self, seed: int) -> list[torch.Tensor]:
        """A matrix of each shape; every other one is a transposed view, hence not contiguous."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for index, shape in enumerate(self.shapes):
            stored = shape if index % 2 == 0 else shape[::-1]
            value = torch.randn(stored, generator=generator, dtype=torch.float64)
            value = value.to(self.dtype or self.subject.dtype)
            found.append(value if index % 2 == 0 else value.T)
        return found

    def gradients(self, step: int) -> list[torch.Tensor]:
        """The global gradients, of bfloat16's few digits."""
        found = [g.to(torch.bfloat16).to(g.dtype) for g in self.draw(100 + step)]
        is_zero = [step >= self.zero_from or i in self.zero for i in range(len(found))]
        return [g * 0 if z else g for g, z in zip(found, is_zero, strict=True)]

    def grouped(self, params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Groups: the first plain, the second with a tenth of the rate and no decay."""
        second = set(self.groups.get("slow", ()))
        groups: list[dict[str, Any]] = [
            {"params": [p for i, p in enumerate(params) if i not in second]}
        ]
        if second:
            slow = [p for i, p in enumerate(params) if i in second]
            groups.append({"params": slow, "lr": 0.002, "weight_decay": 0.0})
        return groups

    def train_plain(self, steps: int = STEPS) -> list[torch.Tensor]:
        """The oracle: the plain class on whole matrices. A foreign class gets contiguous ones, as
        it does from an owner: pytorch-optimizer's SOAP depends on strides."""

        def given(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.contiguous() if self.subject.is_foreign else tensor

        params = [given(w).clone().requires_grad_() for w in self.draw(0)]
        optimizer = self.subject.make_plain(self.grouped(params))
        for step in range(steps):
            for param, grad in zip(params, self.gradients(step), strict=True):
                param.grad = given(grad)
            optimizer.step()
        return [param.detach() for param in params]

    def shard(self, mesh: DeviceMesh) -> tuple[Bags, LocalStepOptimizer]:
        model = Bags(self.draw(0))
        blocks = [
            BlockMeta(
                f"layers.{i}",
                tuple(
                    ParamMeta(
                        f"layers.{i}.{name}",
                        tuple(p.shape),
                        str(p.dtype).removeprefix("torch."),
                        p.element_size(),
                        True,
                    )
                    for name, p in layer.named_parameters()
                ),
            )
            for i, layer in model.layers.named_children()
        ]
        names = {p.fqn for block in blocks for p in block.params}
        plan = make_plan("cost_aware", blocks, names, mesh.size())
        context = OwnerContext()
        for i, layer in model.layers.named_children():
            owner_shard(
                layer,
                plan.block(f"layers.{i}"),
                mesh=mesh,
                transport=TransportFactory("auto"),
                context=context,
            )
        fully_shard(model, mesh=mesh)
        sum_gradients(model)
        params = list(model.parameters())
        return model, LocalStepOptimizer(self.grouped(params), self.subject.make_inner)

    def train(
        self,
        model: Bags,
        optimizer: LocalStepOptimizer,
        steps: Sequence[int],
        around_step: Callable[[Callable[[], Any]], Any] = lambda step: step(),
    ) -> None:
        world_size = torch.distributed.get_world_size()
        for step in steps:
            model([g / world_size for g in self.gradients(step)]).backward()
            around_step(optimizer.step)
            optimizer.zero_grad()


def whole_weights(model: Bags) -> list[torch.Tensor]:
    return [param.full_tensor() for param in model.parameters()]


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def worst(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest weight."""
    scale = max(e.abs().max().item() for e in expected)
    pairs = zip(found, expected, strict=True)
    return max((f - e).abs().max().item() for f, e in pairs) / scale
