"""DCP planners: one that accepts only the state it was asked for, one that converts as it saves."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.stored import MODEL, part_of

_SHOWN = 3


class StrictLoadPlanner(DefaultLoadPlanner):
    """Loads a checkpoint that fits; DCP's own ignores what the job does not ask for.

    Args:
        source: the checkpoint, for messages.
        ignored: parts of the state that are not loaded on purpose, by the first part of their keys.

    Raises:
        CheckpointError: on every rank, before anything is changed: a parameter or state is
            missing in the checkpoint, is there and not in this job, or has another shape.
    """

    def __init__(self, source: str, ignored: Collection[str]) -> None:
        super().__init__()
        self._source = source
        self._ignored = ignored

    def create_local_plan(self) -> LoadPlan:
        """As the base class, after a check of this rank's keys and shapes."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        missing = [key for key in self.state_dict if key not in saved]
        if missing:
            raise CheckpointError(self._missing(missing, saved))
        shapes = [
            f"{key}: received {tuple(entry.size)}; legal: {tuple(value.shape)}"
            for key, value in self.state_dict.items()
            if isinstance(value, torch.Tensor)
            and isinstance(entry := saved[key], TensorStorageMetadata)
            and entry.size != value.shape
        ]
        if shapes:
            raise CheckpointError(
                f"{self._source}: of another model: {_some(shapes)}. Use the model.flavor that "
                "saved it, or another checkpoint."
            )
        kinds = [
            key
            for key, value in self.state_dict.items()
            if isinstance(value, torch.Tensor) != isinstance(saved[key], TensorStorageMetadata)
        ]
        if kinds:
            raise CheckpointError(
                f"{self._source}: a tensor on one side and a plain object on the other: "
                f"{_some(kinds)}. Use the optimizer that saved it, or add optimizer to "
                "checkpoint.exclude_from_loading."
            )
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: whatever no rank asks for is too much."""
        asked = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        # Of an empty tensor nothing is read.
        asked |= self.state_dict.keys()
        assert self.metadata is not None
        extra = [
            key
            for key in self.metadata.state_dict_metadata
            if key not in asked and part_of(key) not in self._ignored
        ]
        if extra:
            raise CheckpointError(
                f"{self._source}: it holds what this job does not have: {_some(extra)}. Use the "
                "model.flavor, routing and optimizer that saved it; state of an optimizer alone "
                "is left out by adding optimizer to checkpoint.exclude_from_loading."
            )
        return super().create_global_plan(global_plan)

    def _missing(self, missing: list[str], saved: Collection[str]) -> str:
        absent = {part_of(key) for key in missing} - {part_of(key) for key in saved}
        if absent and MODEL not in absent:
            return (
                f"{self._source}: it holds no {', '.join(sorted(absent))}, only "
                f"{sorted({part_of(key) for key in saved})}: the last step of a run is saved "
                "so unless checkpoint.last_save_model_only = false. Resume from an earlier step "
                "with checkpoint.load_step; or start a new run, in a folder of its own, with "
                "checkpoint.initial_load_path; or add what is missing to "
                "checkpoint.exclude_from_loading."
            )
        return (
            f"{self._source}: missing in the checkpoint: {_some(missing)}. Use the model.flavor, "
            "routing and optimizer that saved it; to load only the rest, add optimizer to "
            "checkpoint.exclude_from_loading."
        )


class ConvertingSavePlanner(DefaultSavePlanner):
    """Saves floating-point tensors as ``dtype``, converted one at a time as they are written."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def create_local_plan(self) -> SavePlan:
        """As the base class, with the converted dtype in the index."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[self._converted(item) for item in plan.items])
        return self.plan

    def _converted(self, item: WriteItem) -> WriteItem:
        data = item.tensor_data
        if data is None or not data.properties.dtype.is_floating_point:
            return item
        properties = replace(data.properties, dtype=self._dtype)
        return replace(item, tensor_data=replace(data, properties=properties))

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        """The tensor in the dtype to save."""
        value = super().transform_object(write_item, object)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self._dtype)
        return value


def _some(texts: Iterable[str]) -> str:
    """The first few, and how many there are."""
    listed = sorted(texts)
    more = f" ({len(listed)} in all)" if len(listed) > _SHOWN else ""
    return "; ".join(listed[:_SHOWN]) + more
