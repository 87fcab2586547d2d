"""What a job may ask of tensor parallelism, and what is said when it may not."""

from __future__ import annotations

from typing import Any

import pytest
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs

from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.job_config import OwnerFSDP
from torchtitan_matrixfsdp.titan.tensor_parallel import check_model_cut, check_tensor_parallel

LLAMA = TransformerModelArgs(n_heads=12, n_kv_heads=6, vocab_size=2048)


def config(degree: int, **changes: Any) -> JobConfig:
    made = JobConfig()
    made.parallelism.tensor_parallel_degree = degree
    for name, value in changes.items():
        setattr(made.training if name == "seq_len" else made.parallelism, name, value)
    return made


def check(degree: int, owner_fsdp: OwnerFSDP, world_size: int = 8, **changes: Any) -> None:
    check_tensor_parallel(config(degree, **changes), owner_fsdp, world_size)


GATHER = OwnerFSDP(tensor_parallel="gather")


@pytest.mark.parametrize("owner_fsdp", [GATHER, OwnerFSDP(mode="stock")])
def test_gather_and_stock_are_accepted(owner_fsdp: OwnerFSDP) -> None:
    check(2, owner_fsdp)
    check(4, owner_fsdp, data_parallel_shard_degree=2)


def test_without_tensor_parallelism_nothing_is_asked() -> None:
    check(1, OwnerFSDP(), world_size=1, pipeline_parallel_degree=2)
    check_model_cut(config(1), Qwen3ModelArgs())


@pytest.mark.parametrize(
    ("owner_fsdp", "changes", "fragments"),
    [
        (OwnerFSDP(), {}, ['tensor_parallel = "refuse"', '= "gather"', "degree to 1"]),
        (GATHER, {"pipeline_parallel_degree": 2}, ["pipeline_parallel_degree: received 2"]),
        (GATHER, {"context_parallel_degree": 2}, ["context_parallel_degree: received 2"]),
        (GATHER, {"data_parallel_shard_degree": 1}, ["shard degree of 1", "2 or more"]),
        (
            OwnerFSDP(mode="stock"),
            {"data_parallel_replicate_degree": 4},
            ["shard degree of 1", "data_parallel_shard_degree"],
        ),
        (GATHER, {"enable_async_tensor_parallel": True}, ["enable_async_tensor_parallel", "false"]),
        (GATHER, {"seq_len": 30}, ["training.seq_len: received 30", "multiple of 4"]),
    ],
)
def test_refusals_name_key_value_and_remedy(
    owner_fsdp: OwnerFSDP, changes: dict[str, Any], fragments: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(2, owner_fsdp, **changes)
    for fragment in ["parallelism.", *fragments]:
        assert fragment in str(refusal.value)


@pytest.mark.parametrize(
    ("degree", "said"),
    [(5, "12 attention heads"), (4, "6 key and value heads"), (3, "2048 tokens")],
)
def test_heads_and_vocabulary_must_divide(degree: int, said: str) -> None:
    check_model_cut(config(2), LLAMA)
    with pytest.raises(ConfigError) as refusal:
        check_model_cut(config(degree), LLAMA)
    assert f"received {degree}" in str(refusal.value) and said in str(refusal.value)


def test_qwen3_needs_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"received 2 .* on CPU; legal: 1"):
        check_model_cut(config(2), Qwen3ModelArgs())
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    check_model_cut(config(2), Qwen3ModelArgs())
