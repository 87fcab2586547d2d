"""What a foreign optimizer class stores for one parameter, as flat named tensors and back.

See [Note: a foreign class] in ``optim.foreign``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

GROUP = "group"
"""Prefix of the names of what a class keeps in the parameter's group."""


class ForeignStateError(TypeError):
    """A class keeps state that a checkpoint could not hold."""


@dataclass(frozen=True)
class NumberLeaf:
    """A number's place in a template."""

    type: type[bool | int | float]

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that shows it."""
        return torch.float64 if self.type is float else torch.int64

    @property
    def shown_shape(self) -> tuple[int, ...]:
        """Of the tensor that shows it."""
        return (1,)


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor's place in a template. What is loaded gets the same strides: results of matrix
    products depend on them in the last bit, and a basis from QR is stored by columns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = field(compare=False)

    @property
    def shown_shape(self) -> tuple[int, ...]:
        """Its shape, or one element where it has no dimension: elsewhere it must be empty."""
        return self.shape or (1,)


Leaf: TypeAlias = NumberLeaf | TensorLeaf


@dataclass(frozen=True)
class Template:
    """The structure of what a class stores for a parameter, and its leaves by flat name.

    Attributes:
        structure: nested dicts, lists and tuples of ("leaf", name) and ("constant", value).
        leaves: by name, in the order of the structure.
        group_keys: what of the parameter's group is state, because steps change it.
    """

    structure: Any
    leaves: Mapping[str, Leaf]
    group_keys: frozenset[str]


def describe(
    instance: Optimizer, param: torch.Tensor, group_keys: frozenset[str]
) -> tuple[Template, dict[str, Any]]:
    """The template of what ``instance`` stores for ``param`` now, and the tensors and numbers in
    it by flat name.

    Raises:
        ForeignStateError: something that is no dense tensor, number or constant.
    """
    leaves: dict[str, Leaf] = {}
    values: dict[str, Any] = {}

    def visit(value: Any, name: str) -> Any:
        if type(value) is dict:
            return {key: visit(child, _join(name, key)) for key, child in value.items()}
        if type(value) in (list, tuple):
            children = (visit(child, _join(name, i)) for i, child in enumerate(value))
            return type(value)(children)
        if type(value) is torch.Tensor and value.layout == torch.strided:
            leaf: Leaf = TensorLeaf(tuple(value.shape), value.dtype, value.stride())
        elif isinstance(value, bool | int | float):
            leaf = NumberLeaf(type(value))
        elif value is None or isinstance(value, str | set | torch.dtype | torch.device):
            return ("constant", copy.copy(value))
        else:
            raise ForeignStateError(
                f"{class_name(type(instance))} stores {name!r} as {type(value).__name__}, which a "
                "checkpoint cannot hold; legal: dense tensors, numbers, None, strings, sets, and "
                "nested dicts, lists and tuples of them."
            )
        if name in leaves:
            raise ForeignStateError(
                f"{class_name(type(instance))} stores two values that flatten to {name!r}"
            )
        leaves[name], values[name] = leaf, value
        return ("leaf", name)

    structure = visit(_stored(instance, param, group_keys), "")
    return Template(structure, leaves, group_keys), values


def restore(
    instance: Optimizer,
    param: torch.Tensor,
    template: Template,
    values: Mapping[str, torch.Tensor],
) -> None:
    """Give ``instance`` the state that ``values`` show, over their storage."""
    stored = _rebuild(template.structure, values, template.leaves)
    group_of(instance, param).update(stored.pop(GROUP, {}))
    instance.state[param] = stored


def group_of(instance: Optimizer, param: torch.Tensor) -> dict[str, Any]:
    """The group of a parameter that has one to itself."""
    return next(group for group in instance.param_groups if group["params"][0] is param)


def class_name(cls: type) -> str:
    """As a TOML file names it."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _stored(instance: Optimizer, param: torch.Tensor, group_keys: frozenset[str]) -> dict[Any, Any]:
    stored = dict(instance.state.get(param, {}))
    group = group_of(instance, param)
    in_group = {key: group[key] for key in sorted(group_keys & group.keys())}
    if in_group:
        if GROUP in stored:
            raise ForeignStateError(
                f"{class_name(type(instance))} stores {GROUP!r}, a name that is taken"
            )
        stored[GROUP] = in_group
    return stored


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _rebuild(structure: Any, values: Mapping[str, torch.Tensor], leaves: Mapping[str, Leaf]) -> Any:
    match structure:
        case ("leaf", str(name)):
            leaf, value = leaves[name], values[name]
            if isinstance(leaf, NumberLeaf):
                return leaf.type(value.item())
            return value.view(leaf.shape)
        case ("constant", value):
            return copy.copy(value)
        case dict():
            return {key: _rebuild(child, values, leaves) for key, child in structure.items()}
    return type(structure)(_rebuild(child, values, leaves) for child in structure)
