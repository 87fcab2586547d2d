"""Any optimizer class that is installed, unchanged, as a matrix optimizer.

[Note: a foreign class]
A foreign class makes its state in its first step, with whatever names, shapes and types it likes.
A checkpoint needs the same tensors on every rank before that ([Note: state of a matrix optimizer]),
so the class is tried out once for each shape: an instance of its own steps a random matrix of that
shape a few times, with random gradients, and is dropped. What it then stores is the template:

- nested dicts, lists and tuples become flat names (``Q.0``), in the order of the structure;
- tensors stay tensors, over the class's own storage; numbers become tensors of one element, also
  tensors of 0 dimensions, because the rank that has the matrix alone knows them;
- what steps change in the parameter's group (``group.step``) is state like any other;
- ``None``, strings, sets and dtypes are structure: every step must leave them alone;
- what the class adds to its ``state_dict()`` by a hook goes along, pickled, as the option
  ``extras``;
- anything else is refused, as is state that changes names.

A second trial, on one small matrix, shows that nothing else matters (a counter or a random
generator in an attribute): an instance that goes on from a copy of the named state must give the
same weights, to the bit, as the one that made it.

``started`` says whether the class has made its state for a parameter. Until then the named tensors
are zeros that it never sees; a checkpoint that was written before the first step loads as that.

Each parameter has a group of the instance to itself, because classes keep counters by group, or
with a group's first parameter, and which parameters share a rank depends on the world size. The
class sees no empty tensor: many would divide by zero. On a rank that has no matrix at all it steps
a small placeholder instead, so that what it counts for itself goes on.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from torchtitan_matrixfsdp.optim.base import MatrixOptimizerBase, PendingUpdate, as_groups
from torchtitan_matrixfsdp.optim.foreign_state import (
    ForeignStateError,
    NumberLeaf,
    Template,
    class_name,
    describe,
    restore,
)

STARTED = "started"
EXTRAS = "extras"

_TRIAL_STEPS = 3
_RESUME_SHAPE = (8, 6)
_RESUME_STEPS = 13  # each side: more than the usual interval of 10
_PLACEHOLDER_SHAPE = (4, 4)
_SEED = 20


class ForeignOptimizer(MatrixOptimizerBase):
    """An instance of any ``torch.optim.Optimizer`` class, with state that every rank can name; see
    [Note: a foreign class].

    Args:
        params: as for :class:`MatrixOptimizerBase`.
        optimizer_class: called as ``optimizer_class(groups, **options)``.
        options: its keyword arguments.
        logical_shapes: as for :class:`MatrixOptimizerBase`.

    Attributes:
        foreign: the instance.

    Raises:
        ForeignStateError: it keeps state that a checkpoint could not hold.
        ValueError: a trial step failed.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        options: Mapping[str, Any],
        logical_shapes: Mapping[torch.Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        groups = as_groups(params)
        self._class = optimizer_class
        self._options = dict(options)
        self._templates: dict[torch.Tensor, Template] = {}
        own = [(param, group) for group in groups for param in group["params"] if param.numel() > 0]
        self._placeholder = None if own else _placeholder(groups)
        self.foreign = _make(
            optimizer_class,
            self._options,
            [{**group, "params": [param]} for param, group in own]
            or [{"params": [self._placeholder]}],
        )
        kinds = {(p.dtype, p.device) for group in groups for p in group["params"]}
        self._group_keys = frozenset[str]().union(
            *(trial_resume(optimizer_class, self._options, *kind) for kind in kinds)
        )
        # The group's options with the class's defaults: what schedules change, and users see.
        defaults = _Trial(optimizer_class, self._options, {}, torch.ones(_PLACEHOLDER_SHAPE)).group
        options_shown = {
            k: v for k, v in defaults.items() if k != "params" and k not in self._group_keys
        }
        self._has_extras = bool(_extras(self.foreign))
        if self._has_extras:
            options_shown[EXTRAS] = _extras(self.foreign)
        super().__init__([{**options_shown, **group} for group in groups], {}, logical_shapes)

    def state_shapes(self, param: torch.Tensor) -> Mapping[str, tuple[int, ...]]:
        """``started`` and the class's own state, by flat name."""
        leaves = self._templates[param].leaves
        return {STARTED: (1,), **{name: leaf.shown_shape for name, leaf in leaves.items()}}

    def state_loaded(self) -> None:
        """Hand the loaded values to the instance, for parameters that had been stepped."""
        if self._has_extras and self.param_groups:
            _load_extras(self.foreign, self.param_groups[0][EXTRAS])
        self._hand_options_in()
        for group in self.param_groups:
            for param in group["params"]:
                self.foreign.state.pop(param, None)
                if param.numel() > 0 and self.state[param][STARTED].item():
                    restore(self.foreign, param, self._templates[param], self.state[param])

    def _create_state(self, group: dict[str, Any]) -> None:
        tried: dict[tuple[Any, ...], Template] = {}
        for param in group["params"]:
            key = (self.logical_shape(param), param.dtype, param.device)
            if key not in tried:
                options = self._handed(group)
                tried[key] = _try_out(self._class, self._options, options, self._group_keys, *key)
            leaves = tried[key].leaves
            if STARTED in leaves:
                raise ForeignStateError(
                    f"{class_name(self._class)} stores {STARTED!r}, a name that is taken"
                )
            self._templates[param] = tried[key]
            self.state[param] = {STARTED: self._state_tensor(param, (1,), torch.int64)}
            for name, leaf in leaves.items():
                shown = self._state_tensor(param, leaf.shown_shape, leaf.dtype)
                if not isinstance(leaf, NumberLeaf) and tuple(shown.shape) == leaf.shape:
                    shown = torch.empty_strided(
                        leaf.shape, leaf.stride, dtype=leaf.dtype, device=param.device
                    ).zero_()
                self.state[param][name] = shown

    def _update(self, pending: Sequence[PendingUpdate]) -> None:
        if not pending:
            return
        self._hand_options_in()
        if self._placeholder is not None:
            self._placeholder.grad = torch.ones_like(self._placeholder)
        self.foreign.step()
        for param, _, _ in pending:
            if param.numel() > 0:
                self._collect(param)
        if self._has_extras:
            extras = _extras(self.foreign)
            for group in self.param_groups:
                group[EXTRAS] = extras

    def _handed(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group that are the class's."""
        hidden = ("params", EXTRAS)
        return {k: v for k, v in group.items() if k not in hidden and k not in self._group_keys}

    def _hand_options_in(self) -> None:
        group_of_param = {id(g["params"][0]): g for g in self.foreign.param_groups}
        for group in self.param_groups:
            options = self._handed(group)
            for param in group["params"]:
                if param.numel() > 0:
                    group_of_param[id(param)].update(options)

    def _collect(self, param: torch.Tensor) -> None:
        """Shows the state that the instance has for ``param``."""
        template, own = self._templates[param], self.state[param]
        found, values = describe(self.foreign, param, template.group_keys)
        if found != template:
            raise ForeignStateError(
                f"{class_name(self._class)} changed what it stores for a parameter of shape "
                f"{self.logical_shape(param)}: {found.structure} of {dict(found.leaves)}; in a "
                f"trial of {_TRIAL_STEPS} steps it was {template.structure} of "
                f"{dict(template.leaves)}. A checkpoint could not hold both."
            )
        own[STARTED].fill_(1)
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                shown = value if value.ndim > 0 else value.view(1)
                if own[name].data_ptr() != shown.data_ptr():
                    own[name] = shown
            else:
                own[name].fill_(value)


class _Trial:
    """An instance of a class with one parameter of its own."""

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        options: Mapping[str, Any],
        group: Mapping[str, Any],
        param: torch.Tensor,
    ) -> None:
        self.param = param.requires_grad_()
        self.instance = _make(optimizer_class, options, [{**group, "params": [self.param]}])
        self._first_group = copy.copy(self.group)

    @property
    def group(self) -> dict[str, Any]:
        return self.instance.param_groups[0]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.param.grad = torch.randn_like(self.param)
            self.instance.step()

    def changed_in_group(self) -> frozenset[str]:
        """What steps have added to the group, or changed there."""
        before = self._first_group
        changed = (k for k, v in self.group.items() if k not in before or before[k] is not v)
        return frozenset(changed) - {"params"}


def trial_resume(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> frozenset[str]:
    """Check that an instance which goes on from a copy of another's named state continues it;
    return what of the group steps change.

    Raises:
        ForeignStateError: it does not: what matters is not all in its state and groups.
        ValueError: a step failed.
    """
    with _private_random(device):
        first = _Trial(optimizer_class, options, {}, _random(_RESUME_SHAPE, dtype, device))
        attributes = dict(vars(first.instance))
        with _explained(optimizer_class, _RESUME_SHAPE, dtype):
            first.run(_RESUME_STEPS)
        keys = first.changed_in_group()
        template, stored = describe(first.instance, first.param, keys)
        values = {
            name: torch.as_tensor(value, dtype=template.leaves[name].dtype).detach().clone()
            for name, value in stored.items()
        }
        second = _Trial(optimizer_class, options, {}, first.param.detach().clone())
        _load_extras(second.instance, _extras(first.instance))
        restore(second.instance, second.param, template, values)
        for trial in (first, second):
            torch.manual_seed(_SEED + 1)
            trial.run(_RESUME_STEPS)
        if not torch.equal(first.param, second.param):
            now = vars(first.instance)
            changed = sorted(k for k, v in now.items() if attributes.get(k) is not v)
            raise ForeignStateError(
                f"{class_name(optimizer_class)} does not continue from its saved state: after "
                f"{_RESUME_STEPS} more steps weights differ by "
                f"{(first.param - second.param).abs().max().item():.2g}. It keeps something that "
                f"is neither in its state nor in its groups nor in its state_dict()"
                f"{f', perhaps in {changed}' if changed else ''}; no checkpoint would hold that."
            )
        return keys


def _try_out(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    group_keys: frozenset[str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Template:
    with _private_random(device):
        trial = _Trial(optimizer_class, options, group, _random(shape, dtype, device))
        with _explained(optimizer_class, shape, dtype):
            trial.run(_TRIAL_STEPS)
        template, _ = describe(trial.instance, trial.param, group_keys)
        return template


def _make(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> Optimizer:
    """An instance whose options no other instance shares."""
    entries = [
        copy.deepcopy({k: v for k, v in group.items() if k != "params"})
        | {"params": group["params"]}
        for group in groups
    ]
    instance = optimizer_class(entries, **copy.deepcopy(dict(options)))
    if len(instance.param_groups) != len(groups):
        raise ForeignStateError(
            f"{class_name(optimizer_class)} made {len(instance.param_groups)} groups of the "
            f"{len(groups)} it was given; legal: the groups of its caller, whose options schedules "
            "change."
        )
    return instance


def _extras(instance: Optimizer) -> bytes:
    """What a class adds to its ``state_dict()``, pickled; nothing, if it adds nothing.

    Opaque to a checkpoint: of a nested dict it would load the entries that a fresh instance has.
    """
    saved = instance.state_dict()
    extras = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    try:
        return pickle.dumps(extras) if extras else b""
    except Exception as error:
        raise ForeignStateError(
            f"{class_name(type(instance))} adds {sorted(extras)} to its state_dict(), which cannot "
            f"be pickled: {error}"
        ) from error


def _load_extras(instance: Optimizer, extras: bytes) -> None:
    if extras:
        # Its own way in; state follows afterwards, which this way would cast.
        added = pickle.loads(extras)
        instance.load_state_dict({**instance.state_dict(), "state": {}, **added})


def _placeholder(groups: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    params = [param for group in groups for param in group["params"]]
    like = params[0] if params else torch.empty(0)
    return torch.ones(_PLACEHOLDER_SHAPE, dtype=like.dtype, device=like.device).requires_grad_()


@contextmanager
def _private_random(device: torch.device) -> Iterator[None]:
    """Random numbers that are always the same, and leave the job's generators alone."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device]), torch.no_grad():
        torch.manual_seed(_SEED)
        yield


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


@contextmanager
def _explained(
    optimizer_class: type[Optimizer], shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{class_name(optimizer_class)}: a trial step on a matrix of shape {shape} and dtype "
            f"{dtype} failed: {type(error).__name__}: {error}. Legal: optimizers that step 2D "
            "parameters without a closure; check matrix_optimizer.kwargs."
        ) from error
