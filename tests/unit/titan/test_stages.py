"""What pipeline, context and tensor parallelism ask of a configuration, checked before any process
group exists; each fault with its key, value, legal range and remedy."""

from __future__ import annotations

import re

import pytest
import torch
from torchtitan.config import ConfigManager

import torchtitan_matrixfsdp.titan
from tests.support import ROOT, CorpusPaths
from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.train_specs import dense_flavors
from torchtitan_matrixfsdp.titan.validation import validate_job_config

assert torchtitan_matrixfsdp.titan  # registers the models
LLAMA, QWEN = "debug_muon.toml", "debug_qwen3_muon.toml"
PP = "--parallelism.pipeline_parallel_degree=2"
ZERO_BUBBLE = "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble"
GATHER = ["--parallelism.tensor_parallel_degree=2", "--owner_fsdp.tensor_parallel=gather"]


def check(corpus: CorpusPaths, file: str, overrides: list[str], ranks: int = 4) -> None:
    config = ConfigManager().parse_args(
        [
            f"--job.config_file={ROOT / 'train_configs' / file}",
            f"--model.hf_assets_path={corpus.tokenizer}",
            f"--training.dataset_path={corpus.corpus}",
            *overrides,
        ]
    )
    validate_job_config(config, ranks, dense_flavors(config.model.name))


@pytest.mark.parametrize(
    "overrides",
    [
        [PP],
        [PP, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"],
        [PP, ZERO_BUBBLE],
        [PP, "--compile.enable"],
        ["--compile.enable"],
        ["--compile.enable", "--activation_checkpoint.mode=memory_budget"],
        ["--owner_fsdp.replicas=partitioned", "--parallelism.data_parallel_replicate_degree=2"],
        GATHER,
    ],
    ids=" ".join,
)
def test_what_is_supported_passes(corpus_dir: CorpusPaths, overrides: list[str]) -> None:
    check(corpus_dir, LLAMA, overrides)


WRONG = [
    (LLAMA, [PP, "--parallelism.pipeline_parallel_schedule=2F2B"], "pipeline_parallel_schedule: "),
    (
        LLAMA,
        [PP, "--parallelism.pipeline_parallel_schedule_csv=a.csv"],
        "pipeline_parallel_schedule_csv: received 'a.csv'",
    ),
    (
        LLAMA,
        [PP, "--parallelism.pipeline_parallel_microbatch_size=3"],
        "local_batch_size: received .*; legal: a multiple of",
    ),
    (
        LLAMA,
        [PP, "--parallelism.pipeline_parallel_layers_per_stage=100"],
        "pipeline_parallel_layers_per_stage: gives 1 stages to 2 pipeline ranks",
    ),
    (
        LLAMA,
        [PP, '--parallelism.module_fqns_per_model_part=[["tok_embeddings"],["norm","output"]]'],
        "module_fqns_per_model_part: received .*each once and in this order",
    ),
    (
        LLAMA,
        [PP, ZERO_BUBBLE, "--parallelism.fsdp_reshard_after_forward=always"],
        "fsdp_reshard_after_forward: received 'always' with the schedule",
    ),
    (LLAMA, [PP, ZERO_BUBBLE, "--compile.enable"], "compile.enable: received True with"),
    (
        LLAMA,
        [PP, "--parallelism.data_parallel_replicate_degree=2"],
        "data_parallel_replicate_degree: received 2 with",
    ),
    (QWEN, [PP], "pipeline_parallel_degree: received 2 with flavor .*one weight"),
    (LLAMA, ["--parallelism.expert_parallel_degree=2"], "expert_parallel_degree: received 2"),
    (LLAMA, GATHER[:1], r"tensor_parallel_degree: received 2 .*owner_fsdp\.tensor_parallel"),
    (LLAMA, [*GATHER, PP], "pipeline_parallel_degree: received 2 with"),
    (
        LLAMA,
        [
            *GATHER,
            "--parallelism.data_parallel_replicate_degree=2",
            "--owner_fsdp.replicas=partitioned",
        ],
        "owner_fsdp.replicas: received 'partitioned' with",
    ),
    (
        LLAMA,
        ["--activation_checkpoint.mode=memory_budget"],
        "activation_checkpoint.mode: received 'memory_budget'",
    ),
]


@pytest.mark.parametrize(("file", "overrides", "message"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_faults_are_named(
    corpus_dir: CorpusPaths, file: str, overrides: list[str], message: str
) -> None:
    ranks = 8 if len(overrides) > 3 else 4
    with pytest.raises(ConfigError) as error:
        check(corpus_dir, file, overrides, ranks)
    assert re.search(message, str(error.value)), str(error.value)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="only a CPU lacks these")
@pytest.mark.parametrize(
    "override", ["--parallelism.context_parallel_degree=2", "--training.enable_cpu_offload"]
)
def test_what_a_cpu_cannot_do(corpus_dir: CorpusPaths, override: str) -> None:
    with pytest.raises(ConfigError, match="on CPU"):
        check(corpus_dir, LLAMA, [override])
