"""What the tests of checkpoints share: the whole state of a trainer, by layout-free names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.distributed.trainer import digest

SAVING = [
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--checkpoint.no-last-save-model-only",
    "--training.steps=2",
]


def whole_state(trainer: Any) -> dict[str, Any]:
    """Every value that a checkpoint holds but the position in the data: tensors as a digest of the
    whole tensor, the rest as it is; a collective, the same on every rank and for every layout."""
    states = trainer.checkpointer.states
    flat = dict(states["model"].state_dict())
    flat |= {f"optimizer.{k}": v for k, v in states["optimizer"].state_dict().items()}
    flat |= {f"lr_scheduler.{k}": v for k, v in states["lr_scheduler"].state_dict().items()}
    flat |= {"step": trainer.step}
    return {name: _value(value) for name, value in flat.items()}


def _value(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return digest(value.reshape(-1)) if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def erase(trainer: Any) -> None:
    """Zero all weights and optimizer state, so that what is loaded is seen to be loaded."""
    states = trainer.checkpointer.states
    for part in ("model", "optimizer"):
        for value in states[part].state_dict().values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    trainer.step = 0


def load(trainer: Any, step_folder: Path, model_only: bool = False) -> None:
    """Load a checkpoint of another run, as ``checkpoint.initial_load_path`` does."""
    manager = trainer.checkpointer
    manager.initial_load_path = str(step_folder)
    manager.initial_load_model_only = model_only
    assert manager.load()
