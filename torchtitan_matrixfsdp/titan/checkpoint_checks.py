"""The ``[checkpoint]`` section against the folders that it names, before the first collective.

What only the files' content can tell is found out when the checkpoint is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchtitan.components.checkpoint import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE
from torchtitan.config import JobConfig as TitanJobConfig

from torchtitan_matrixfsdp.checkpoint import step_folders
from torchtitan_matrixfsdp.checkpoint.folder import HF_INDEX
from torchtitan_matrixfsdp.checkpoint.manifest import METADATA
from torchtitan_matrixfsdp.titan.checks import ConfigError, check_choice

EXCLUDABLE = (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE)
"""Parts of the state that a job may start without. TorchTitan would also skip the model, and train
on from random weights."""


def check_checkpoint(config: TitanJobConfig) -> None:
    """Check ``[checkpoint]``, if it is enabled.

    Raises:
        ConfigError: on the first fault, with key, value, what is legal and the remedy.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    for part in checkpoint.exclude_from_loading:
        check_choice("checkpoint.exclude_from_loading", part, EXCLUDABLE)
    _check_hugging_face(config)
    folder = Path(config.job.dump_folder) / checkpoint.folder
    if not checkpoint.load_only:
        _check_writable(folder)
    complete = [entry.step for entry in step_folders(folder) if entry.is_complete]
    if checkpoint.load_step != -1:
        if checkpoint.load_step not in complete:
            raise ConfigError(
                f"checkpoint.load_step: received {checkpoint.load_step}; legal: -1 (the newest) or "
                f"a complete step in {folder}: {complete}; change it, or job.dump_folder."
            )
    elif not complete:
        _check_initial(config)


def _check_hugging_face(config: TitanJobConfig) -> None:
    checkpoint = config.checkpoint
    # TorchTitan asserts these, the first after the last step of training.
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        raise ConfigError(
            "checkpoint.last_save_in_hf: received True with last_save_model_only = false; legal: "
            "with last_save_model_only = true, since the format holds weights alone; set that, or "
            "last_save_in_hf = false."
        )
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        raise ConfigError(
            "checkpoint.initial_load_in_hf: received True with initial_load_model_only = false; "
            "legal: with initial_load_model_only = true, since the format holds weights alone; set "
            "that, or initial_load_in_hf = false."
        )
    if checkpoint.initial_load_in_hf_quantized:
        raise ConfigError(
            "checkpoint.initial_load_in_hf_quantized: received True; legal: False, since the "
            "models of this plugin have no quantized form; set it to false."
        )


def _check_writable(folder: Path) -> None:
    existing = folder.absolute()
    # What the file system cannot look up (a file for a folder above it) does not exist either.
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        problem = f"{existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} is not writable for this user"
    else:
        return
    raise ConfigError(
        f"checkpoint.folder: received {str(folder)!r} (job.dump_folder with checkpoint.folder), "
        f"but {problem}; legal: a folder that can be made and written; change one of the two keys, "
        "or set checkpoint.load_only = true."
    )


def _check_initial(config: TitanJobConfig) -> None:
    checkpoint = config.checkpoint
    key, path = "checkpoint.initial_load_path", checkpoint.initial_load_path
    if checkpoint.initial_load_in_hf:
        if not path:
            key, path = "model.hf_assets_path", config.model.hf_assets_path
        folder = Path(path)
        if not (folder / HF_INDEX).is_file() and not any(folder.glob("*.safetensors")):
            raise ConfigError(
                f"{key}: received {path!r} with checkpoint.initial_load_in_hf = true, where "
                f"neither {HF_INDEX} nor any *.safetensors exists; legal: a folder of Hugging Face "
                "weights; change it, or set initial_load_in_hf = false."
            )
    elif path and not (Path(path) / METADATA).is_file():
        steps = [entry.path for entry in step_folders(Path(path)) if entry.is_complete]
        hint = (
            f"choose a step in it, such as {str(steps[-1])!r}" if steps else "change or remove it"
        )
        raise ConfigError(
            f"{key}: received {path!r}, which is no complete checkpoint; legal: a folder with a "
            f"file {METADATA}, its step included; {hint}."
        )
