"""Parallel degrees against processes, batches and the model, whatever the device."""

from __future__ import annotations

import pytest
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.models.llama3 import TransformerModelArgs

from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.stages import check_layers
from torchtitan_matrixfsdp.titan.validation import check_mesh


def _degrees(**degrees: int) -> TitanJobConfig:
    """TorchTitan's defaults with these keys of [parallelism] or [training]."""
    config = TitanJobConfig()
    for key, value in degrees.items():
        section = config.training if hasattr(config.training, key) else config.parallelism
        setattr(section, key, value)
    return config


PP, CP = "pipeline_parallel_degree", "context_parallel_degree"
SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"


@pytest.mark.parametrize(
    ("degrees", "step"),
    [
        # local_batch_size is 8; step = 8 x replicas x shards: neither stages nor context ranks.
        ({}, 64),
        ({SHARD: 8}, 64),
        ({REPLICATE: 2}, 64),
        ({PP: 2}, 32),
        ({PP: 2, SHARD: 4}, 32),
        ({CP: 2}, 32),
        ({CP: 8}, 8),
        ({CP: 8, SHARD: 1}, 8),
        ({CP: 2, REPLICATE: 4, SHARD: 1}, 32),
        ({PP: 2, CP: 2, REPLICATE: 2}, 16),
        ({PP: 8}, 8),
    ],
)
def test_batches_divide_by_the_data_parallel_degree(degrees: dict[str, int], step: int) -> None:
    check_mesh(_degrees(**degrees), 8)
    check_mesh(_degrees(**degrees, global_batch_size=3 * step), 8)
    for wrong in (step // 2, step + 1):
        with pytest.raises(ConfigError, match=rf"global_batch_size: received {wrong};.* = {step},"):
            check_mesh(_degrees(**degrees, global_batch_size=wrong), 8)


@pytest.mark.parametrize(
    ("degrees", "fragments"),
    [
        ({PP: 3}, ["8 processes", f"{PP} = 3"]),
        ({PP: 2, SHARD: 8}, [f"{SHARD} = 8", f"{PP} = 2"]),
        ({CP: 2, SHARD: 2}, [f"{SHARD} = 2", f"{CP} = 2"]),
        ({PP: 0}, [f"parallelism.{PP}", "received 0", ">= 1"]),
        ({CP: 4, "seq_len": 60}, ["training.seq_len", "received 60", f"{CP} = 8"]),
        ({PP: 2, REPLICATE: 4}, [f"parallelism.{REPLICATE}", "received 4", "DDP", SHARD]),
    ],
)
def test_degrees_that_do_not_fit(degrees: dict[str, int], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_mesh(_degrees(**degrees), 8)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_attention_that_context_parallelism_lacks() -> None:
    config = _degrees(context_parallel_degree=2)
    check_layers(config, TransformerModelArgs(attn_type="flex"))
    with pytest.raises(ConfigError, match=r"context_parallel_degree: received 2.*'varlen'"):
        check_layers(config, TransformerModelArgs(attn_type="varlen"))
