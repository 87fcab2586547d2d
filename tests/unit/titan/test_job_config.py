"""The plugin's own TOML sections: every wrong value is named before anything starts (case 30)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torchtitan_matrixfsdp.comm import TRANSPORTS
from torchtitan_matrixfsdp.layout import PLANNERS
from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.job_config import (
    MATRIX_OPTIMIZERS,
    MODES,
    NS_DTYPES,
    JobConfig,
    MatrixOptimizer,
    OwnerFSDP,
)

UNIT = "a finite number >= 0 and < 1"
NOT_NEGATIVE = "a finite number >= 0"
NS_STEPS = "a finite number >= 1 and <= 20"

WRONG: list[tuple[type[Any], str, Any, str]] = [
    (OwnerFSDP, "mode", "zero2", "one of ['zero3', 'stock']"),
    (OwnerFSDP, "mode", "ZERO3", "one of ['zero3', 'stock']"),
    (OwnerFSDP, "mode", 3, "a value of type str"),
    (OwnerFSDP, "planner", "greedy", "one of ['cost_aware', 'role_greedy', 'scope_greedy']"),
    (OwnerFSDP, "planner", None, "a value of type str"),
    (OwnerFSDP, "transport", "nccl", "one of ['auto', 'balanced', 'broadcast', 'p2p']"),
    (OwnerFSDP, "transport", ["p2p"], "a value of type str"),
    (OwnerFSDP, "replicas", "sharded", "one of ['redundant', 'partitioned']"),
    (OwnerFSDP, "tensor_parallel", "ignore", "one of ['refuse', 'gather']"),
    (OwnerFSDP, "tensor_parallel", False, "a value of type str"),
    (MatrixOptimizer, "name", "muon", "one of ['Muon', 'AdamW']"),
    (MatrixOptimizer, "lr", "3e-4", "a value of type float"),
    (MatrixOptimizer, "lr", None, "a value of type float"),
    (MatrixOptimizer, "lr", True, "a number"),
    (MatrixOptimizer, "lr", -1e-9, NOT_NEGATIVE),
    (MatrixOptimizer, "lr", math.nan, NOT_NEGATIVE),
    (MatrixOptimizer, "lr", math.inf, NOT_NEGATIVE),
    (MatrixOptimizer, "weight_decay", "0", "a value of type float"),
    (MatrixOptimizer, "weight_decay", -0.1, NOT_NEGATIVE),
    (MatrixOptimizer, "weight_decay", math.nan, NOT_NEGATIVE),
    (MatrixOptimizer, "momentum", 1.0, UNIT),
    (MatrixOptimizer, "momentum", -0.5, UNIT),
    (MatrixOptimizer, "momentum", math.nan, UNIT),
    (MatrixOptimizer, "momentum", "0.95", "a value of type float"),
    (MatrixOptimizer, "nesterov", "true", "a value of type bool"),
    (MatrixOptimizer, "nesterov", 1, "a value of type bool"),
    (MatrixOptimizer, "ns_steps", 5.7, "a value of type int"),
    (MatrixOptimizer, "ns_steps", 5.0, "a value of type int"),
    (MatrixOptimizer, "ns_steps", "5", "a value of type int"),
    (MatrixOptimizer, "ns_steps", True, "a number"),
    (MatrixOptimizer, "ns_steps", 0, NS_STEPS),
    (MatrixOptimizer, "ns_steps", 21, NS_STEPS),
    (MatrixOptimizer, "ns_dtype", "bf16", "one of ['bfloat16', 'float32', 'float64']"),
    (MatrixOptimizer, "adjust_lr", "spectral", "one of ['original', 'match_rms_adamw']"),
    (MatrixOptimizer, "include", "layers", "a value of type list[str]"),
    (MatrixOptimizer, "include", ["layers", 3], "a value of type list[str]"),
    (MatrixOptimizer, "exclude", "wq", "a value of type list[str]"),
    (MatrixOptimizer, "exclude", [None], "a value of type list[str]"),
]


@pytest.mark.parametrize(
    ("section", "name", "value", "legal"),
    WRONG,
    ids=[f"{name}={value!r}" for _, name, value, _ in WRONG],
)
def test_a_wrong_value_is_named(section: type[Any], name: str, value: Any, legal: str) -> None:
    table = {OwnerFSDP: "owner_fsdp", MatrixOptimizer: "matrix_optimizer"}[section]
    with pytest.raises(ConfigError) as raised:
        section(**{name: value})
    expected = f"{table}.{name}: received {value!r} ({type(value).__name__}); legal: {legal}; "
    assert str(raised.value).startswith(expected)
    assert str(raised.value) != expected, "and what to do about it"


RIGHT: list[tuple[type[Any], str, Any]] = [
    *((OwnerFSDP, "mode", value) for value in MODES),
    *((OwnerFSDP, "planner", value) for value in PLANNERS),
    *((OwnerFSDP, "transport", value) for value in TRANSPORTS),
    *((MatrixOptimizer, "name", value) for value in MATRIX_OPTIMIZERS),
    *((MatrixOptimizer, "ns_dtype", value) for value in NS_DTYPES),
    *((MatrixOptimizer, "adjust_lr", value) for value in ("original", "match_rms_adamw")),
    (MatrixOptimizer, "lr", 0.0),
    (MatrixOptimizer, "lr", 0),
    (MatrixOptimizer, "lr", 1),
    (MatrixOptimizer, "weight_decay", 0.0),
    (MatrixOptimizer, "momentum", 0.0),
    (MatrixOptimizer, "momentum", 0.999),
    (MatrixOptimizer, "nesterov", False),
    (MatrixOptimizer, "ns_steps", 1),
    (MatrixOptimizer, "ns_steps", 20),
    (MatrixOptimizer, "include", []),
    (MatrixOptimizer, "exclude", ["wq", "wk"]),
]


@pytest.mark.parametrize(
    ("section", "name", "value"), RIGHT, ids=[f"{name}={value!r}" for _, name, value in RIGHT]
)
def test_a_legal_value_is_kept(section: type[Any], name: str, value: Any) -> None:
    """Zero, False and an empty list too: nothing falls back to the default through ``or``."""
    kept = getattr(section(**{name: value}), name)
    assert kept == value and type(kept) is type(value)


def test_defaults_are_legal_and_not_shared() -> None:
    one, other = JobConfig(), JobConfig()
    assert one == other
    one.matrix_optimizer.exclude.append("wq")
    one.matrix_optimizer.include.append("wk")
    assert other.matrix_optimizer.exclude == []
    assert other.matrix_optimizer.include == [r"layers\..*\.weight$"]
