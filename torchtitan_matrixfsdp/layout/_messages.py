"""The one shape of an error about a configuration key."""

from __future__ import annotations

from collections.abc import Sequence


def config_message(key: str, value: object, problem: str, legal: str, remedy: str) -> str:
    """Returns one line: the key, the value received, what is wrong, what is legal, the remedy."""
    return f"{key} = {value!r}: {problem}. Legal: {legal}. Remedy: {remedy}."


def some(names: Sequence[str], limit: int = 8) -> str:
    """Returns up to ``limit`` names, and how many were left off: an error must stay readable."""
    shown = ", ".join(repr(name) for name in names[:limit])
    left = len(names) - limit
    return f"{shown} and {left} more" if left > 0 else shown
