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
from torchtitan_matrixfsdp.runtime import fsdp_check, fsdp_compat
from torchtitan_matrixfsdp.runtime.fsdp_compat import (
    Reduction,
    claim_original,
    rebind,
    reduce_adapter,
)


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
    assert ">=2.11,<2.14" in message


@pytest.mark.parametrize("name", ["helper", "module"])
def test_an_attribute_or_argument_of_that_name_is_no_global(name: str) -> None:
    """Calling through a module would silently run the stock function."""
    with pytest.raises(RuntimeError, match=f"no longer uses \\['{name}'\\]"):
        rebind(by_attribute, **{name: minus})


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("2.11.0", (2, 11)),
        ("2.12.1+cu130", (2, 12)),
        ("2.13.0", (2, 13)),
        ("2.13.0a0+git1234567", (2, 13)),
    ],
)
def test_supported_versions(
    monkeypatch: pytest.MonkeyPatch, version: str, minor: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert fsdp_check._check_torch_version() == minor


@pytest.mark.parametrize(
    "version", ["2.10.1", "2.14.0", "2.14.0.dev20260701+cpu", "3.13.0", "1.13"]
)
def test_unsupported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError) as raised:
        fsdp_check._check_torch_version()
    message = str(raised.value)
    assert f"found {version}" in message
    assert "supports torch >=2.11,<2.14" in message
    assert 'pip install "torch>=2.11,<2.14"' in message


# Each changes torch, imports the package, prints the error and undoes the change.
IMPORT = """
from unittest import mock
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

def group(self, params, modules, mesh_info, post_forward_mesh_info, device, shard_placement_fn,
          mp_policy, offload_policy):
    self.parameters = params

def renamed(self, changed): ...

def reduce() -> tuple[int, int]: ...
reduce.__signature__ = __import__("inspect").signature(collectives.foreach_reduce).replace(
    return_annotation=tuple[int, int])

for target, name, value in [
    (torch, "__version__", "2.14.0"),
    (torch, "__version__", "2.10.1"),
    (FSDPParam, "to_sharded_dtensor", None),
    (FSDPParam, "reset_sharded_param", renamed),
    (FSDPParamGroup, "__init__", group),
    (FSDPModule, "set_gradient_divide_factor", None),
    (collectives, "foreach_reduce", reduce),
    (collectives, "foreach_all_gather", None),
]:
    with mock.patch.object(target, name, value):
        if value is None:
            delattr(target, name)
        try:
            import torchtitan_matrixfsdp.runtime.fsdp_compat
        except (ImportError, RuntimeError) as error:
            print(type(error).__name__, error)
import torchtitan_matrixfsdp.runtime
"""


def test_version_and_private_names_are_checked_on_import() -> None:
    """Everything that is gone is named, and an intact torch imports."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    expected = [
        "ImportError torchtitan_matrixfsdp.runtime supports torch >=2.11,<2.14, found 2.14.0",
        "ImportError torchtitan_matrixfsdp.runtime supports torch >=2.11,<2.14, found 2.10.1",
        "FSDPParam does not define to_sharded_dtensor. ",
        "reset_sharded_param takes ['self', 'changed'], expected ['self']. ",
        "FSDPParamGroup does not set fsdp_params; ",
        "FSDPModule does not define set_gradient_divide_factor. ",
        "foreach_reduce returns tuple[int, int], expected ",
        "_fsdp_collectives does not define foreach_all_gather",
    ]
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected), done.stdout
    for line, fragment in zip(lines, expected, strict=True):
        assert fragment in line
        if "ImportError" not in fragment:
            assert f"torch {torch.__version__} lacks private parts" in line, line


def test_a_reduction_takes_the_form_of_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, partial = torch.zeros(3), torch.ones(1)

    def reduce(stream: Any, *, event: Any) -> Reduction:
        return Reduction(packed, event, stream, "after", partial_output=partial)

    adapted = reduce_adapter(reduce)
    monkeypatch.setattr(fsdp_compat, "TORCH", (2, 12))
    assert adapted("stream", event="e") == (packed, "e", "after", None, None, partial)
    monkeypatch.setattr(fsdp_compat, "TORCH", (2, 13))
    assert adapted("stream", event="e") == (packed, "e", "stream", "after", None, None, partial)


def test_a_parameter_is_owned_once() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    assert claim_original(param, "layers.0.w") == claim_original(param, "layers.0.w")
    with pytest.raises(ValueError, match=r"layers\.1\.w: .* shared with layers\.0\.w"):
        claim_original(param, "layers.1.w")
