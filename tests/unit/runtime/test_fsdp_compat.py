"""Copies of stock functions with other globals, and the torch versions they are made for."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import ROOT
from torchtitan_matrixfsdp.runtime import fsdp_compat
from torchtitan_matrixfsdp.runtime.fsdp_compat import rebind


def helper(value: int) -> int:
    return value + 1


def stock(value: int, factor: int = 10, *, offset: int = 3) -> int:
    return helper(value) * factor + offset


def nested(values: list[int]) -> list[int]:
    def each(value: int) -> int:
        return helper(value)

    return [each(value) for value in values]


def by_attribute(module: Any, value: int) -> int:
    result: int = module.helper(value)
    return result


def decorated(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def doubled(*args: Any, **kwargs: Any) -> int:
        return 2 * function(*args, **kwargs)

    return doubled


def closing_over(extra: int) -> Callable[[int], int]:
    def inner(value: int) -> int:
        return helper(value) + extra

    return inner


def minus(value: int) -> int:
    return value - 1


def test_a_global_is_replaced_and_the_original_left_alone() -> None:
    before = dict(globals())
    copy = rebind(stock, helper=minus)
    assert copy(5) == 4 * 10 + 3
    assert stock(5) == 6 * 10 + 3
    assert dict(globals()) == before
    assert helper(5) == 6


def test_defaults_and_closures_are_kept() -> None:
    copy = rebind(stock, helper=minus)
    assert copy(5, 2, offset=0) == 8
    assert copy.__name__ == "stock"
    assert rebind(closing_over(100), helper=minus)(5) == 104


def test_inner_functions_see_the_replacement() -> None:
    assert rebind(nested, helper=minus)([1, 2]) == [0, 1]
    assert nested([1, 2]) == [2, 3]


def test_decorators_are_peeled_off() -> None:
    wrapped = decorated(stock)
    assert wrapped(5) == 2 * 63
    assert rebind(wrapped, helper=minus)(5) == 43


def test_methods_can_be_rebound() -> None:
    class Stock:
        start = 5

        def run(self) -> int:
            return helper(self.start)

    class Ours(Stock):
        run = rebind(Stock.run, helper=minus)

    assert (Stock().run(), Ours().run()) == (6, 4)


@pytest.mark.parametrize("function", [stock, decorated(stock)])
def test_a_name_that_is_not_used_is_named(function: Callable[..., int]) -> None:
    with pytest.raises(RuntimeError) as raised:
        rebind(function, helper=minus, gather=minus, reduce=minus)
    message = str(raised.value)
    assert "stock" in message and torch.__version__ in message
    assert "['gather', 'reduce']" in message, message
    assert ">= 2.13, < 2.14" in message


@pytest.mark.parametrize("name", ["helper", "module"])
def test_an_attribute_or_argument_of_that_name_is_no_global(name: str) -> None:
    """Calling through a module would silently run the stock function."""
    with pytest.raises(RuntimeError, match=f"no longer uses \\['{name}'\\]"):
        rebind(by_attribute, **{name: minus})


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cu130", "2.13.0a0+git1234567"])
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    fsdp_compat._check_torch_version()


@pytest.mark.parametrize(
    "version", ["2.12.1", "2.14.0", "2.14.0.dev20260701+cpu", "3.13.0", "1.13"]
)
def test_unsupported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError) as raised:
        fsdp_compat._check_torch_version()
    message = str(raised.value)
    assert f"found {version}" in message
    assert "torch >= 2.13, < 2.14" in message
    assert 'pip install "torch>=2.13,<2.14"' in message


IMPORT = """
import torch

for version in ("2.14.0", "2.12.1"):
    torch.__version__ = version
    try:
        import torchtitan_matrixfsdp.runtime.fsdp_compat
    except ImportError as error:
        print(error)
"""


def test_the_version_is_checked_on_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    for line, version in zip(lines, ("2.14.0", "2.12.1"), strict=True):
        assert line.startswith(
            f"torchtitan_matrixfsdp.runtime supports torch >= 2.13, < 2.14, found {version}"
        )
