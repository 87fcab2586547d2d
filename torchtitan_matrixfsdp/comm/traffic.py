"""Exact byte and message counters for what this rank sends.

A transport *predicts* its traffic from the plan and *counts* what it really hands to the
process group; tests assert that the two agree to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one operation.

    Attributes:
        sent_bytes: payload bytes handed to the process group.
        messages: number of sends (one per peer and segment).
    """

    sent_bytes: int = 0
    messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent_bytes + other.sent_bytes, self.messages + other.messages)


@dataclass
class TrafficCounter:
    """Running totals of one process, by operation name (``"gather"``, ``"reduce"``)."""

    totals: dict[str, Traffic] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def record(self, operation: str, traffic: Traffic) -> None:
        """Add one operation's sends to its running total."""
        name = self._names.get(operation, operation)
        self.totals[name] = self.total(name) + traffic

    @contextmanager
    def counted_as(self, operation: str, name: str) -> Iterator[None]:
        """Count what is recorded under ``operation`` in this context under ``name`` instead."""
        self._names[operation] = name
        try:
            yield
        finally:
            del self._names[operation]

    def total(self, operation: str) -> Traffic:
        """The running total of ``operation``; zero if it never ran."""
        return self.totals.get(operation, Traffic())

    def reset(self) -> None:
        """Forget all totals."""
        self.totals.clear()
