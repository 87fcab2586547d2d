"""Checks of configuration values. Each error names key, value, what is legal and the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type


class ConfigError(ValueError):
    """A user's configuration is wrong."""


def check_field_types(section: Any, prefix: str) -> None:
    """Check every field of a (nested) dataclass instance against its annotation.

    TorchTitan passes TOML values through unchecked, so a string reaches a float field. An int is
    accepted for a float, a bool never for a number.

    Raises:
        ConfigError: naming the key.
    """
    for spec in fields(section):
        key = f"{prefix}.{spec.name}"
        value = getattr(section, spec.name)
        if is_dataclass(value):
            check_field_types(value, key)
            continue
        try:
            # By default only the first item of a list is looked at.
            check_type(
                value, spec.type, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS
            )
        except TypeCheckError:
            legal = spec.type.__name__ if isinstance(spec.type, type) else str(spec.type)
            _fail(key, value, f"a value of type {legal}", "write it without quotes or change it")
        if isinstance(value, bool) and spec.type in (int, float, float | int):
            _fail(key, value, "a number", "write a number")


def check_choice(key: str, value: str, legal: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``legal``."""
    if value not in legal:
        _fail(key, value, f"one of {list(legal)}", f'set {key} = "{legal[0]}", for example')


def check_range(
    key: str,
    value: float,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> None:
    """Raise ConfigError unless ``value`` is finite and within the bounds that are given:
    ``>= low``, ``> above``, ``<= high``, ``< below``."""
    bounds = [(">=", low), (">", above), ("<=", high), ("<", below)]
    given = [f"{sign} {bound}" for sign, bound in bounds if bound is not None]
    ok = math.isfinite(value)
    ok = ok and (low is None or value >= low) and (above is None or value > above)
    ok = ok and (high is None or value <= high) and (below is None or value < below)
    if not ok:
        _fail(key, value, f"a finite number {' and '.join(given)}", f"change {key}")


def check_patterns(key: str, patterns: Sequence[str]) -> None:
    """Raise ConfigError unless every pattern is a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            _fail(key, pattern, "Python regular expressions", f"correct it ({error})")


def _fail(key: str, value: Any, legal: str, remedy: str) -> None:
    raise ConfigError(
        f"{key}: received {value!r} ({type(value).__name__}); legal: {legal}; {remedy}."
    )
