"""Every TOML file of train_configs/: parses, validates, routes, plans; its header is true."""

from __future__ import annotations

import re

import pytest
import torch
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_matrixfsdp.titan
from tests.support import ROOT, CorpusPaths
from torchtitan_matrixfsdp.layout import OwnerPlan, RoleKind, make_plan, route
from torchtitan_matrixfsdp.titan.parallelize import describe_blocks, describe_params
from torchtitan_matrixfsdp.titan.train_specs import MODEL_NAMES, dense_flavors
from torchtitan_matrixfsdp.titan.validation import (
    check_toml_file,
    matrix_optimizer_of,
    owner_fsdp_of,
    validate_job_config,
)

assert torchtitan_matrixfsdp.titan  # registers the models
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))
GIB = 2**30


def plan_of(
    model_name: str, flavor: str, planner: str, ranks: int, include: list[str]
) -> OwnerPlan:
    spec = get_train_spec(model_name)
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args[flavor])
    blocks = describe_blocks(model)
    block_of = {param.fqn: block.name for block in blocks for param in block.params}
    routing = route(describe_params(model), block_of, include, [])
    return make_plan(planner, blocks, set(routing.matrices), ranks)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_is_valid_and_plans(path, corpus_dir: CorpusPaths) -> None:
    arguments = [
        "--job.config_file",
        str(path),
        f"--model.hf_assets_path={corpus_dir.tokenizer}",
        f"--training.dataset_path={corpus_dir.corpus}",
    ]
    check_toml_file(arguments)
    config = ConfigManager().parse_args(arguments)
    validate_job_config(config, 8, dense_flavors(config.model.name))
    section = owner_fsdp_of(config)
    include = matrix_optimizer_of(config).include
    plan = plan_of(config.model.name, config.model.flavor, section.planner, 8, include)
    assert plan.imbalance < 1.1


def test_the_8b_headers_numbers() -> None:
    """The plan's numbers in llama3_8b_muon.toml, computed again."""
    text = (ROOT / "train_configs" / "llama3_8b_muon.toml").read_text()
    include = [r"layers\..*\.weight$"]
    plan = plan_of("llama3_owner", "8B", "cost_aware", 8, include)
    shards = [shard for block in plan.blocks for shard in block.shards]
    assert f"{sum(s.kind is RoleKind.MATRIX for s in shards)} matrices" in text
    low, high = re.search(r"owns ([\d.]+) to ([\d.]+) GiB of block", text).groups()
    owned = [size / GIB for size in plan.rank_bytes()]
    assert (f"{min(owned):.2f}", f"{max(owned):.2f}") == (low, high)
    assert f"gamma is {max(plan.gammas()):.2f}" in text
    with torch.device("meta"):
        model = get_train_spec("llama3_owner").model_cls(dense_flavors("llama3_owner")["8B"])
    planned = {shard.fqn for shard in shards}
    outside = sum(p.nbytes for p in describe_params(model) if p.fqn not in planned)
    resident = [0.0] * 8
    for shard in shards:
        # parameter, gradient, then momentum for a matrix and two moments for a tail
        copies = 3 if shard.kind is RoleKind.MATRIX else 4
        resident[shard.owner] += copies * shard.nbytes / GIB
    resident = [size + 4 * outside / 8 / GIB for size in resident]
    assert f"{min(resident):.1f} to {max(resident):.1f} GiB per rank" in text


def test_the_readmes_storage_table() -> None:
    """Bytes of the debug model on four ranks: owner shards, FSDP2's rows (ceil(rows / W)), DDP."""
    readme = (ROOT / "README.md").read_text()
    ranks = 4
    plan = plan_of("llama3_owner", "debugmodel", "cost_aware", ranks, [r"layers\..*\.weight$"])
    shards = {shard.fqn: shard for block in plan.blocks for shard in block.shards}
    with torch.device("meta"):
        model = get_train_spec("llama3_owner").model_cls(
            dense_flavors("llama3_owner")["debugmodel"]
        )
    ours, stock, ddp, matrices = [0] * ranks, [0] * ranks, 0, 0
    for param in describe_params(model):
        shard = shards.get(param.fqn)
        is_matrix = shard is not None and shard.kind is RoleKind.MATRIX
        # parameter, gradient, then momentum for a matrix and two moments for the rest
        copies = 3 if is_matrix else 4
        matrices += param.nbytes if is_matrix else 0
        ddp += copies * param.nbytes
        per_row = param.nbytes // param.shape[0]
        rows = -(-param.shape[0] // ranks)
        for rank in range(ranks):
            row_bytes = per_row * max(0, min(rows, param.shape[0] - rank * rows))
            stock[rank] += copies * row_bytes
            if shard is None:
                ours[rank] += copies * row_bytes
            elif shard.owner == rank:
                ours[rank] += copies * param.nbytes
    assert f"| zero3 | {max(ours):,} bytes | 0 | 0 bytes |" in readme
    sent = matrices * (ranks - 1) // ranks  # an all-gather of every matrix
    assert f"| stock | {max(stock):,} bytes | 42, one per matrix | {sent:,} bytes |" in readme
    assert f"| ddp | {ddp:,} bytes | 0 | 0 bytes |" in readme


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_dense_flavor_routes_and_plans(name: str) -> None:
    """Llama 3 and Qwen3 as TorchTitan 0.2.2 ships them, without the expert flavors."""
    # Tests that ran in this process before may have added flavors of their own.
    flavors = [flavor for flavor in dense_flavors(name) if not flavor.startswith("tiny")]
    assert {"debugmodel", "8B"} <= set(flavors)
    assert not any(flavor in flavors for flavor in ("debugmodel_moe", "30B-A3B", "235B-A22B"))
    for flavor in flavors:
        plan = plan_of(name, flavor, "cost_aware", 4, [r"layers\..*\.weight$"])
        shards = [shard for block in plan.blocks for shard in block.shards]
        assert all((s.kind is RoleKind.MATRIX) == (len(s.shape) == 2) for s in shards)
        assert plan.imbalance < 1.1
