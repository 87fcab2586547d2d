"""The plugin's own TOML sections: every wrong value is named before anything starts (case 30)."""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict
from typing import Any

import pytest
from torchtitan.config import ConfigManager

from torchtitan_matrixfsdp.comm import TRANSPORTS
from torchtitan_matrixfsdp.layout import PLANNERS
from torchtitan_matrixfsdp.optim import SOAP, Shampoo
from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.job_config import (
    MATRIX_OPTIMIZERS,
    MODES,
    NS_DTYPES,
    JobConfig,
    MatrixOptimizer,
    OwnerFSDP,
    ShampooOptions,
    SoapOptions,
)

UNIT = "a finite number >= 0 and < 1"
NOT_NEGATIVE = "a finite number >= 0"
NS_STEPS = "a finite number >= 1 and <= 20"

TABLES = {
    OwnerFSDP: "owner_fsdp",
    MatrixOptimizer: "matrix_optimizer",
    ShampooOptions: "matrix_optimizer.shampoo",
    SoapOptions: "matrix_optimizer.soap",
}

WRONG: list[tuple[type[Any], str, Any, str]] = [
    (OwnerFSDP, "mode", "zero2", "one of ['zero3', 'zero1', 'stock']"),
    (OwnerFSDP, "mode", "ZERO3", "one of ['zero3', 'zero1', 'stock']"),
    (OwnerFSDP, "mode", 3, "a value of type str"),
    (OwnerFSDP, "stock_step", "scatter", "one of ['gather', 'gather_once', 'all_to_all']"),
    (OwnerFSDP, "planner", "greedy", "one of ['cost_aware', 'role_greedy', 'scope_greedy']"),
    (OwnerFSDP, "planner", None, "a value of type str"),
    (OwnerFSDP, "transport", "nccl", "one of ['auto', 'balanced', 'broadcast', 'p2p']"),
    (OwnerFSDP, "transport", ["p2p"], "a value of type str"),
    (OwnerFSDP, "replicas", "sharded", "one of ['redundant', 'partitioned']"),
    (OwnerFSDP, "tensor_parallel", "ignore", "one of ['refuse', 'gather']"),
    (OwnerFSDP, "tensor_parallel", False, "a value of type str"),
    (MatrixOptimizer, "name", "muon", "one of ['Muon', 'Shampoo', 'SOAP', 'AdamW']"),
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
    (MatrixOptimizer, "ns_coefficients", "cubic", "one of ['polar_express', 'quintic']"),
    (MatrixOptimizer, "split", {"wq": 4}, "a value of type dict[str, str]"),
    (MatrixOptimizer, "class_path", 3, "a value of type str"),
    (ShampooOptions, "beta1", 1.0, UNIT),
    (ShampooOptions, "beta2", 1.1, "a finite number >= 0 and <= 1"),
    (ShampooOptions, "nesterov", 0, "a value of type bool"),
    (ShampooOptions, "grafting", "adam", "one of ['adamw', 'sgd', 'none']"),
    (ShampooOptions, "eps", 0.0, "a finite number > 0"),
    (ShampooOptions, "exponent", 0, "a finite number > 0"),
    (ShampooOptions, "root_epsilon", -1e-6, "a finite number > 0"),
    (ShampooOptions, "root_dtype", "bfloat16", "one of ['float32', 'float64']"),
    (ShampooOptions, "precondition_frequency", 0, "a finite number >= 1"),
    (ShampooOptions, "precondition_frequency", 2.5, "a value of type int"),
    (ShampooOptions, "stagger", "yes", "a value of type bool"),
    (ShampooOptions, "max_preconditioner_dim", 0, "a finite number >= 1"),
    (SoapOptions, "beta1", -0.1, UNIT),
    (SoapOptions, "beta2", 1.0, UNIT),
    (SoapOptions, "shampoo_beta", math.nan, UNIT),
    (SoapOptions, "eps", 0.0, "a finite number > 0"),
    (SoapOptions, "precondition_frequency", 0, "a finite number >= 1"),
    (SoapOptions, "stagger", 1, "a value of type bool"),
    (SoapOptions, "max_precond_dim", -1, "a finite number >= 0"),
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
    key = f"{TABLES[section]}.{'class' if name == 'class_path' else name}"
    with pytest.raises(ConfigError) as raised:
        section(**{name: value})
    expected = f"{key}: received {value!r} ({type(value).__name__}); legal: {legal}; "
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
    (MatrixOptimizer, "split", {"wq": "heads"}),
    (ShampooOptions, "beta2", 1.0),
    (SoapOptions, "max_precond_dim", 0),
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


@pytest.mark.parametrize(
    ("options", "kind"),
    [(ShampooOptions(), Shampoo), (SoapOptions(), SOAP)],
    ids=["Shampoo", "SOAP"],
)
def test_defaults_are_the_optimizers_own(options: Any, kind: type[Any]) -> None:
    own = {name: p.default for name, p in inspect.signature(kind).parameters.items()}
    if kind is Shampoo:
        own["root_dtype"] = str(own["root_dtype"]).removeprefix("torch.")
    else:
        assert own["shampoo_beta"] is None, "beta2's"
        own["shampoo_beta"] = own["beta2"]
    assert asdict(options) == {name: own[name] for name in asdict(options)}


def test_kwargs_belong_to_a_class() -> None:
    with pytest.raises(
        ConfigError, match=r"matrix_optimizer.kwargs: received .*matrix_optimizer.class"
    ):
        MatrixOptimizer(kwargs={"ns_steps": 3})
    kept = MatrixOptimizer(class_path="torch.optim:Muon", kwargs={"ns_steps": 3})
    assert (kept.title, kept.kwargs) == ("torch.optim:Muon", {"ns_steps": 3})


TOML = """
[job]
custom_config_module = "torchtitan_matrixfsdp.titan.job_config"
[matrix_optimizer]
class = "torch.optim:Muon"
lr = 0.1
[matrix_optimizer.kwargs]
ns_steps = 3
ns_coefficients = [3.0, -4.0, 2.0]
[matrix_optimizer.split]
"wq$" = "heads"
[matrix_optimizer.soap]
precondition_frequency = 7
"""


def test_a_toml_file_has_the_key_class(tmp_path: Any) -> None:
    """A keyword of Python, hence no name of a field; TorchTitan's own reader, and its command
    line."""
    path = tmp_path / "job.toml"
    path.write_text(TOML)

    def read(*overrides: str) -> MatrixOptimizer:
        arguments = ["--job.config_file", str(path), *overrides]
        return vars(ConfigManager().parse_args(arguments))["matrix_optimizer"]

    read_back = read()
    assert read_back.class_path == "torch.optim:Muon"
    assert read_back.kwargs == {"ns_steps": 3, "ns_coefficients": [3.0, -4.0, 2.0]}
    assert (read_back.split, read_back.soap.precondition_frequency) == ({"wq$": "heads"}, 7)
    assert asdict(read_back)["class"] == "torch.optim:Muon"
    assert "class_path" not in asdict(read_back)
    overridden = read("--matrix_optimizer.class", "a:B", "--matrix_optimizer.soap.beta1", "0.5")
    assert (overridden.class_path, overridden.soap.beta1, overridden.lr) == ("a:B", 0.5, 0.1)
