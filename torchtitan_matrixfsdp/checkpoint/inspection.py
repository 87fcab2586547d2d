"""What is in a run's folder or in one checkpoint; reads indices, no values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_matrixfsdp.checkpoint.checksums import checksum_path
from torchtitan_matrixfsdp.checkpoint.folder import step_folders
from torchtitan_matrixfsdp.checkpoint.stored import (
    MODEL,
    OPTIMIZER,
    CheckpointReader,
    StoredTensor,
    data_degree,
    location_of,
    part_of,
    split_state_key,
)
from torchtitan_matrixfsdp.layout import gamma

REST = "rest"


@dataclass(frozen=True)
class StepSummary:
    """One folder of a run. ``state`` is "complete", "incomplete", "export" (Hugging Face weights),
    "moved aside" or "half deleted"; ``bytes`` are those of all its files."""

    name: str
    step: int | None
    state: str
    files: int
    bytes: int


@dataclass(frozen=True)
class RunSummary:
    """A run's folder. ``newest`` is the step that a job would resume from, if any."""

    path: str
    steps: tuple[StepSummary, ...]
    newest: int | None


@dataclass(frozen=True)
class PlanSummary:
    """An owner plan: of one pipeline stage, or of the whole model.

    ``rank_bytes`` are the bytes of parameters that each rank owns; ``imbalance`` is their largest
    over their mean.
    """

    planner: str
    chosen: str
    world_size: int
    blocks: int
    parameters: int
    rank_bytes: tuple[int, ...]
    imbalance: float


@dataclass(frozen=True)
class FileSummary:
    """A data file: its size, ``None`` if it is missing, and the tensors it holds a part of."""

    name: str
    bytes: int | None
    tensors: int
    has_checksums: bool


@dataclass(frozen=True)
class StateSummary:
    """All states of one name in the optimizer ("momentum", "exp_avg")."""

    name: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class TensorSummary:
    """One tensor: ``owner`` by the plan, ``files`` that hold it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    owner: int | None
    files: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointSummary:
    """One checkpoint in DCP's format.

    Attributes:
        job: what the manifest says of the run that saved it; empty without one.
        has_manifest: it was saved by this package.
        parameters, elements: of the model; ``dtypes`` are elements by dtype, ``layouts`` parameters
            by how they are cut.
        part_bytes: stored bytes of "model", "optimizer" and "rest".
        data_parallel_degree: of the saved position in the data; ``None`` without one.
        tensors: all of them, by key.
    """

    path: str
    job: Mapping[str, Any]
    has_manifest: bool
    has_checksums: bool
    plans: tuple[PlanSummary, ...]
    parameters: int
    elements: int
    dtypes: Mapping[str, int]
    layouts: Mapping[str, int]
    states: tuple[StateSummary, ...]
    objects: int
    part_bytes: Mapping[str, int]
    data_parallel_degree: int | None
    files: tuple[FileSummary, ...]
    tensors: tuple[TensorSummary, ...]


def inspect_run(folder: Path) -> RunSummary:
    """What is in a run's folder of checkpoints."""
    steps = step_folders(folder)
    known = {entry.path for entry in steps}
    found = []
    for entry in steps:
        state = "complete" if entry.is_complete else "export" if entry.is_export else "incomplete"
        found.append(_step(entry.path, entry.step, state))
    states = {"aside-": "moved aside", "deleting-": "half deleted"}
    for path in sorted(folder.iterdir()):
        state = next((s for prefix, s in states.items() if path.name.startswith(prefix)), "")
        if state and path.is_dir() and path not in known:
            found.append(_step(path, None, state))
    newest = max((entry.step for entry in steps if entry.is_complete), default=None)
    return RunSummary(str(folder), tuple(found), newest)


def _step(path: Path, step: int | None, state: str) -> StepSummary:
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    return StepSummary(path.name, step, state, len(sizes), sum(sizes))


def inspect_dcp(reader: CheckpointReader) -> CheckpointSummary:
    """What is in a checkpoint in DCP's format."""
    model = {key: t for key, t in reader.tensors.items() if part_of(key) == MODEL}
    manifest = reader.manifest
    plans = manifest.plans if manifest is not None else ()
    holders = _holders(reader)
    files = tuple(_file(reader.folder / name, keys) for name, keys in sorted(holders.items()))
    dtypes: Counter[str] = Counter()
    for tensor in model.values():
        dtypes[_name(tensor)] += tensor.numel
    return CheckpointSummary(
        path=str(reader.folder),
        job=manifest.job if manifest is not None else {},
        has_manifest=manifest is not None,
        has_checksums=bool(files) and all(file.has_checksums for file in files),
        plans=tuple(_plan(record) for record in plans),
        parameters=len(model),
        elements=sum(tensor.numel for tensor in model.values()),
        dtypes=dict(dtypes.most_common()),
        layouts=dict(Counter(tensor.layout for tensor in model.values()).most_common()),
        states=_states(reader.tensors, model),
        objects=len(reader.objects),
        part_bytes=_part_bytes(reader),
        data_parallel_degree=data_degree(reader.metadata) or None,
        files=files,
        tensors=_tensors(reader.tensors.values(), plans, holders),
    )


def _plan(record: Mapping[str, Any]) -> PlanSummary:
    world_size = int(record["world_size"])
    owned = [0] * world_size
    shards = [shard for block in record["blocks"] for shard in block["shards"]]
    for shard in shards:
        size = int(shard["itemsize"])
        for dim in shard["shape"]:
            size *= int(dim)
        owned[shard["owner"]] += size
    return PlanSummary(
        record["planner"],
        record["chosen"],
        world_size,
        len(record["blocks"]),
        len(shards),
        tuple(owned),
        gamma(world_size, owned, sum(owned)),
    )


def _holders(reader: CheckpointReader) -> dict[str, set[str]]:
    """The keys of the tensors and objects in each file."""
    holders: dict[str, set[str]] = {}
    for index, info in reader.metadata.storage_data.items():
        holders.setdefault(info.relative_path, set()).add(index.fqn)
    return holders


def _file(path: Path, keys: set[str]) -> FileSummary:
    size = path.stat().st_size if path.is_file() else None
    return FileSummary(path.name, size, len(keys), checksum_path(path).is_file())


def _states(
    tensors: Mapping[str, StoredTensor], model: Mapping[str, StoredTensor]
) -> tuple[StateSummary, ...]:
    by_name: dict[str, list[StoredTensor]] = {}
    for key, tensor in tensors.items():
        if (found := split_state_key(key, model)) is not None:
            by_name.setdefault(found[1], []).append(tensor)
    return tuple(
        StateSummary(name, len(all_), sum(t.numel for t in all_), sum(t.nbytes for t in all_))
        for name, all_ in sorted(by_name.items())
    )


def _part_bytes(reader: CheckpointReader) -> dict[str, int]:
    sizes = dict.fromkeys((MODEL, OPTIMIZER, REST), 0)
    for index in reader.metadata.storage_data:
        part = part_of(index.fqn)
        length = location_of(reader.folder, reader.metadata, index).length
        sizes[part if part in sizes else REST] += length
    return sizes


def _tensors(
    tensors: Iterable[StoredTensor],
    plans: Iterable[Mapping[str, Any]],
    holders: Mapping[str, set[str]],
) -> tuple[TensorSummary, ...]:
    owners = {
        shard["fqn"]: int(shard["owner"])
        for plan in plans
        for block in plan["blocks"]
        for shard in block["shards"]
    }
    files: dict[str, list[str]] = {}
    for name, keys in sorted(holders.items()):
        for key in keys:
            files.setdefault(key, []).append(name)
    summaries = []
    for tensor in tensors:
        state = split_state_key(tensor.key, owners)
        owner = owners.get(tensor.key if state is None else state[0])
        held = tuple(files.get(tensor.key, ()))
        summaries.append(
            TensorSummary(tensor.key, _name(tensor), tensor.shape, tensor.layout, owner, held)
        )
    return tuple(sorted(summaries, key=lambda summary: summary.key))


def _name(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
