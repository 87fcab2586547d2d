"""The rules of ``[matrix_optimizer.split]``, on the weights of TorchTitan's own models."""

from __future__ import annotations

import re

import pytest
import torch
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_matrixfsdp.titan
from torchtitan_matrixfsdp.optim import Split
from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.split import check_split_table, resolve_splits

assert torchtitan_matrixfsdp.titan  # registers the models

MATRICES = {
    "layers.0.attention.wq.weight": (64, 48),
    "layers.0.attention.wk.weight": (16, 48),
    "layers.0.attention.wv.weight": (16, 48),
    "layers.0.attention.wo.weight": (48, 64),
    "layers.0.feed_forward.w1.weight": (96, 48),
}


def resolve(table: dict[str, str]) -> dict[str, Split]:
    return resolve_splits(table, MATRICES, heads=8, kv_heads=2)


def test_heads() -> None:
    """Whatever the head's size: 64 / 8 here, not 48 / 8."""
    assert resolve({r"attention\.w[qkvo]": "heads"}) == {
        "layers.0.attention.wq.weight": Split(0, 8),
        "layers.0.attention.wk.weight": Split(0, 2),
        "layers.0.attention.wv.weight": Split(0, 2),
        "layers.0.attention.wo.weight": Split(1, 8),
    }


def test_rows_and_columns() -> None:
    table = {r"wq": "rows:4", r"w1": "columns:3", r"wo": "rows:1"}
    assert resolve(table) == {
        "layers.0.attention.wq.weight": Split(0, 4),
        "layers.0.feed_forward.w1.weight": Split(1, 3),
        "layers.0.attention.wo.weight": Split(0, 1),
    }
    assert resolve({}) == {}


@pytest.mark.parametrize("flavor", ["llama3_owner debugmodel", "qwen3_owner debugmodel"])
def test_heads_of_torchtitans_models(flavor: str) -> None:
    """Every block is one head: of head_dim rows, or columns for the output's projection."""
    name, size = flavor.split()
    spec = get_train_spec(name)
    args = spec.model_args[size]
    with torch.device("meta"):
        model = spec.model_cls(args)
    matrices = {
        name: (param.shape[0], param.shape[1])
        for name, param in model.named_parameters()
        if param.ndim == 2 and name.startswith("layers")
    }
    head_dim = {module.head_dim for module in model.modules() if hasattr(module, "n_kv_heads")}
    kv_heads = args.n_kv_heads or args.n_heads
    splits = resolve_splits({r"\.attention\.": "heads"}, matrices, args.n_heads, kv_heads)
    assert len(splits) == 4 * args.n_layers
    for name, split in splits.items():
        assert {split.block_shape(matrices[name])[split.dim]} == head_dim, name
        assert split.dim == (".wo." in name)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"w[q": "heads"}, "matrix_optimizer.split: received 'w[q'"),
        (
            {"w9": "heads"},
            "received 'w9' = 'heads'; legal: an expression found in the name of a matrix, such as "
            "layers.0.attention.wq.weight; correct or remove it.",
        ),
        (
            {"wq": "heads", r"attention\.": "rows:2"},
            r"received 'attention\\.' = 'rows:2'; legal: one rule for each matrix; "
            "layers.0.attention.wq.weight is matched by 'wq' too; narrow one of the two.",
        ),
        ({"wq": "rows:7"}, "that divides the 64 rows of layers.0.attention.wq.weight, not 7"),
        ({"wo": "columns:5"}, "that divides the 64 columns of layers.0.attention.wo.weight, not 5"),
        (
            {"w1": "heads"},
            "weights of modules named wq, wk, wv, wo; layers.0.feed_forward.w1.weight is none; "
            'use "rows:N" or "columns:N" for it.',
        ),
    ],
)
def test_mistakes_are_named(table: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(table)


@pytest.mark.parametrize(
    "rule", ["head", "", "rows", "rows:", "rows:0", "rows:-2", "rows:2.5", "cols:2", "rows:2:2"]
)
def test_unknown_rules_are_named_without_a_model(rule: str) -> None:
    said = f'received \'wq\' = {rule!r}; legal: "heads", "rows:N" or "columns:N" with N >= 1'
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_split_table({"wq": rule})


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"divides the 16 rows of .*wk.weight, not 3"):
        resolve_splits({"attention": "heads"}, MATRICES, heads=8, kv_heads=3)
