"""A small run's state under TorchTitan's keys, and ways to save it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.trainer import add_tiny_flavors
from torchtitan_matrixfsdp.checkpoint import Manifest, OwnerStorageWriter
from torchtitan_matrixfsdp.titan.stored_models import StoredModel

# Over two pieces of 4 MiB in float32, so that a tensor spans a boundary of checksums.
ROWS, COLUMNS = 1100, 2048


def make_state(seed: int = 0, layers: int = 2) -> dict[str, Any]:
    """Parameters of a model, their momentum, and the other parts of a run."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (ROWS, COLUMNS)}
    for layer in range(layers):
        shapes[f"layers.{layer}.attention.wq.weight"] = (7, 6)
        shapes[f"layers.{layer}.attention_norm.weight"] = (6,)
    shapes["output.weight"] = (17, 6)
    model = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    state = {
        f"state.{key}.momentum": torch.randn(value.shape, generator=generator)
        for key, value in model.items()
    }
    state["state.output.weight.step"] = torch.tensor(3.0)
    options = {f"param_groups.{key}.lr": 0.25 for key in model}
    return {
        **model,
        "optimizer": state | options,
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": b"position 0", "dp_rank_1": b"position 1", "world_size": 2},
        "train_state": {"step": torch.tensor(3), "ntokens_seen": torch.tensor(768)},
    }


def save_owner(state: Mapping[str, Any], path: Path, **job: Any) -> Path:
    """Save with this package's writer; one process, so one data file."""
    with _without_warnings():
        dcp.save(dict(state), storage_writer=OwnerStorageWriter(path, Manifest(job=job)))
    return path


def save_stock(state: Mapping[str, Any], path: Path) -> Path:
    """Save with DCP's own writer."""
    with _without_warnings():
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path))
    return path


def save_model(
    path: Path, name: str = "llama3_owner", tied: bool = True
) -> tuple[Path, StoredModel]:
    """A checkpoint of flavor ``tiny``, whose manifest does not name it. ``tied``: the head is the
    embedding where the model has it so."""
    add_tiny_flavors()
    model = StoredModel(name, "tiny")
    generator = torch.Generator().manual_seed(0)
    weights, momenta = (
        {key: torch.randn(value.shape, generator=generator) for key, value in model.state.items()}
        for _ in range(2)
    )
    if tied and name == "qwen3_owner":
        weights["output.weight"] = weights["tok_embeddings.weight"]
    state = make_state()
    momenta = {f"state.{key}.momentum": value for key, value in momenta.items()}
    rest = {key: state[key] for key in ("lr_scheduler", "dataloader", "train_state")}
    return save_owner({**weights, "optimizer": momenta, **rest}, path), model


def load_stock(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint, by DCP's own reader alone: the judge of what was written."""
    state = make_state(seed=1)
    with _without_warnings():
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    return state


def _without_warnings() -> warnings.catch_warnings[Any]:
    # DCP warns of a save without a process group.
    return warnings.catch_warnings(action="ignore")
