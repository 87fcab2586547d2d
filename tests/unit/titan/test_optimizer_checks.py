"""Which optimizer works where, refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchtitan.config import JobConfig as TitanJobConfig

from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.custom_class import class_options, import_class
from torchtitan_matrixfsdp.titan.job_config import MatrixOptimizer, OwnerFSDP
from torchtitan_matrixfsdp.titan.optimizer_checks import check_matrix_optimizer, shard_degree


def check(mode: str = "zero3", degrees: dict[str, int] | None = None, **options: Any) -> None:
    config = TitanJobConfig()
    for key, value in (degrees or {}).items():
        setattr(config.parallelism, key, value)
    check_matrix_optimizer(config, OwnerFSDP(mode=mode), MatrixOptimizer(**options), 4)


MUON = "torch.optim:Muon"
TP = {"tensor_parallel_degree": 2}
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no colon": (
        {"class_path": "torch.optim.Muon"},
        ["'torch.optim.Muon'", "package.module:Class"],
    ),
    "no module": ({"class_path": ":Muon"}, ["':Muon'", "package.module:Class"]),
    "not installed": ({"class_path": "nowhere_at_all:Muon"}, ["No module named", "install"]),
    "no such class": ({"class_path": "torch.optim:Moun"}, ["'Moun'", "'Muon'"]),
    "no optimizer": ({"class_path": "torch.nn:Linear"}, ["'torch.nn:Linear'", "no optimizer"]),
    "an unknown argument": (
        {"class_path": MUON, "kwargs": {"ns_step": 3}},
        ["matrix_optimizer.kwargs", "'ns_step'", "'ns_steps'"],
    ),
    "the rate twice": (
        {"class_path": MUON, "kwargs": {"lr": 0.1}},
        ["matrix_optimizer.kwargs.lr", "set matrix_optimizer.lr, now 0.02"],
    ),
    "no weight decay": (
        {"class_path": "torch.optim:Rprop"},
        ["matrix_optimizer.weight_decay", "0.1", "legal: 0 for Rprop"],
    ),
    "rows for SOAP": (
        {"name": "SOAP", "mode": "stock"},
        ["matrix_optimizer.name", "'SOAP'", "['Muon', 'AdamW']", 'mode = "zero3"'],
    ),
    "rows for a class": (
        {"class_path": MUON, "mode": "stock"},
        ["matrix_optimizer.class", repr(MUON), "rows of each matrix"],
    ),
    "fragments for Shampoo": (
        {"name": "Shampoo", "degrees": TP},
        ["matrix_optimizer.name", "tensor_parallel_degree = 2", "fragments"],
    ),
    "a split for SOAP": (
        {"name": "SOAP", "split": {"wq": "heads"}},
        ["matrix_optimizer.split", "'SOAP'", 'name = "Muon"'],
    ),
    "a split of fragments": (
        {"split": {"wq": "heads"}, "degrees": TP},
        ["matrix_optimizer.split", "tensor_parallel_degree = 2"],
    ),
    "an unknown rule": ({"split": {"wq": "head"}}, ["matrix_optimizer.split", "'head'", "rows:N"]),
}


@pytest.mark.parametrize(("options", "fragments"), WRONG.values(), ids=list(WRONG))
def test_what_cannot_work_is_refused(options: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        check(**options)
    assert all(fragment in str(raised.value) for fragment in fragments), raised.value


RIGHT: list[dict[str, Any]] = [
    {},
    {"name": "SOAP"},
    {"name": "AdamW", "mode": "stock"},
    {"mode": "stock", "degrees": TP},
    {"name": "SOAP", "mode": "stock", "degrees": {"data_parallel_shard_degree": 1}},
    {"class_path": MUON, "kwargs": {"ns_steps": 3}},
    {"split": {"wq$": "heads", "w1$": "rows:2"}},
]


@pytest.mark.parametrize("options", RIGHT, ids=str)
def test_what_works_passes(options: dict[str, Any]) -> None:
    check(**options)


def test_options_of_a_class() -> None:
    """Arrays of a TOML file are lists, which some classes do not take for a pair of numbers."""
    cls = import_class("torch.optim:AdamW")
    assert cls is torch.optim.AdamW
    found = class_options(cls, {"betas": [0.9, 0.95], "fused": True}, 0.1, 0.2)
    assert found == {"betas": (0.9, 0.95), "fused": True, "lr": 0.1, "weight_decay": 0.2}
    rprop = class_options(torch.optim.Rprop, {"etas": [0.5, 1.2]}, 0.1, 0.0)
    assert rprop == {"etas": (0.5, 1.2), "lr": 0.1}


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({}, 8),
        ({"data_parallel_shard_degree": 2}, 2),
        ({"data_parallel_replicate_degree": 4}, 2),
        ({"context_parallel_degree": 2}, 8),
        ({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}, 2),
    ],
)
def test_shard_degree(degrees: dict[str, int], expected: int) -> None:
    config = TitanJobConfig()
    for key, value in degrees.items():
        setattr(config.parallelism, key, value)
    assert shard_degree(config, 8) == expected
