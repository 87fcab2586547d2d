"""Dataclass fields whose TOML key is a Python keyword."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T", bound=type)


def rename_field(attribute: str, key: str) -> Callable[[_T], _T]:
    """A decorator above ``@dataclass``: the field ``attribute`` is called ``key`` by everyone who
    asks the dataclass for its fields (TorchTitan's TOML reader, the command line, ``asdict``).

    Python code goes on using ``attribute``, which may be what ``key`` may not be: an identifier.
    """

    def rename(cls: _T) -> _T:
        fields: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        spec = fields.pop(attribute)
        spec.name = key
        fields[key] = spec
        cls.__annotations__[key] = cls.__annotations__.pop(attribute)
        initialise: Any = cls.__init__  # type: ignore[misc]

        def __init__(self: Any, *args: Any, **values: Any) -> None:
            if key in values:
                values[attribute] = values.pop(key)
            initialise(self, *args, **values)

        cls.__init__ = __init__  # type: ignore[misc]
        setattr(cls, key, property(lambda self: vars(self)[attribute]))
        return cls

    return rename
