"""``matrix_optimizer.class``: an optimizer class of the user's, by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from torchtitan_matrixfsdp.titan.checks import ConfigError

_KEY = "matrix_optimizer.class"
_LEGAL = '"package.module:Class", a torch.optim.Optimizer that can be imported here'


def import_class(path: str) -> type[Optimizer]:
    """The class that ``package.module:Class`` names.

    Raises:
        ConfigError: it cannot be imported, or is no optimizer.
    """
    module_name, separator, name = path.partition(":")
    if not (separator and module_name and name):
        raise ConfigError(f"{_KEY}: received {path!r}; legal: {_LEGAL}.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{_KEY}: received {path!r}, whose module cannot be imported ({error}); legal: "
            f"{_LEGAL}; install the package on every node or correct the name."
        ) from error
    found = vars(module).get(name)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Optimizer)
        ]
        raise ConfigError(
            f"{_KEY}: received {path!r}, but {module_name} has no optimizer class {name!r}; legal: "
            f"{_LEGAL}; {module_name} has {classes[:12]}."
        )
    return found


def class_options(
    optimizer_class: type[Optimizer], kwargs: Mapping[str, Any], lr: float, weight_decay: float
) -> dict[str, Any]:
    """The keyword arguments of ``optimizer_class``: ``kwargs``, arrays as tuples, and the learning
    rate and weight decay of the section.

    Raises:
        ConfigError: the class does not take them.
    """
    for key, value in (("lr", lr), ("weight_decay", weight_decay)):
        if key in kwargs:
            raise ConfigError(
                f"matrix_optimizer.kwargs.{key}: received {kwargs[key]!r}; legal: no such key; set "
                f"matrix_optimizer.{key}, now {value!r}."
            )
    options = {key: _tuples(value) for key, value in kwargs.items()} | {"lr": lr}
    signature = inspect.signature(optimizer_class)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if "weight_decay" in signature.parameters or takes_any:
        options["weight_decay"] = weight_decay
    elif weight_decay != 0:
        raise ConfigError(
            f"matrix_optimizer.weight_decay: received {weight_decay!r}; legal: 0 for "
            f"{optimizer_class.__qualname__}, which takes none; set it to 0."
        )
    try:
        signature.bind([], **options)
    except TypeError as error:
        legal = [name for name in signature.parameters if name != "params"]
        raise ConfigError(
            f"matrix_optimizer.kwargs: received {dict(kwargs)!r} for "
            f"{optimizer_class.__qualname__}: {error}; legal: {legal}."
        ) from error
    return options


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
