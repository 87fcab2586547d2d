"""``inspect`` and ``verify`` of a folder of Hugging Face weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.folder import HF_INDEX
from torchtitan_matrixfsdp.checkpoint.safetensors import PARTIAL, TensorMeta
from torchtitan_matrixfsdp.checkpoint.safetensors_reader import (
    READ_ERRORS,
    Reader,
    read_header,
    read_weight_map,
)
from torchtitan_matrixfsdp.checkpoint.verification import (
    Progress,
    Verification,
    count_not_finite,
)


@dataclass(frozen=True)
class HfSummary:
    """A folder of weights. ``tensors`` gives dtype and shape by name, ``files`` the bytes."""

    path: str
    has_index: bool
    elements: int
    dtypes: Mapping[str, int]
    files: Mapping[str, int]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def inspect_hf(folder: Path) -> HfSummary:
    """What is in a folder of weights.

    Raises:
        CheckpointError: the index or a file cannot be read.
    """
    reader = Reader(folder)
    metas = [reader.meta(name) for name in sorted(reader.file_of)]
    files = sorted(set(reader.file_of.values()))
    dtypes: Counter[str] = Counter()
    for meta in metas:
        dtypes[_dtype(meta)] += _numel(meta)
    return HfSummary(
        path=str(folder),
        has_index=(folder / HF_INDEX).is_file(),
        elements=sum(_numel(meta) for meta in metas),
        dtypes=dict(dtypes.most_common()),
        files={name: (folder / name).stat().st_size for name in files},
        tensors={meta.name: (_dtype(meta), meta.shape) for meta in metas},
    )


def _dtype(meta: TensorMeta) -> str:
    return str(meta.dtype).removeprefix("torch.")


def _numel(meta: TensorMeta) -> int:
    return meta.nbytes // meta.dtype.itemsize


def weight_bytes(folder: Path) -> int:
    """Bytes of all weight files of a folder, for a progress bar."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def verify_hf(folder: Path, finite: bool, progress: Progress) -> Verification:
    """Check the index against the files, their sizes, and that values are finite; the format has
    no checksums. One tensor is in memory at a time."""
    found = Verification(
        notes=["no checksums: the format has none. Checked: index, headers, sizes and values."]
    )
    try:
        weight_map = read_weight_map(folder)
    except CheckpointError as error:
        found.problems.append(str(error))
        return found
    headers: dict[str, dict[str, TensorMeta]] = {}
    for name in sorted(set(weight_map.values())):
        found.files += 1
        try:
            headers[name] = read_header(folder / name)
            found.bytes += (folder / name).stat().st_size
        except CheckpointError as error:
            found.problems.append(str(error))
    for name, file in sorted(weight_map.items()):
        if file in headers and name not in headers[file]:
            found.problems.append(f"{folder / file}: {name} is missing, which {HF_INDEX} has")
    for file, metas in headers.items():
        found.problems += [
            f"{folder / file}: {name} is there, but not in {HF_INDEX}"
            for name in metas
            if weight_map.get(name) != file
        ]
    if len(headers) == found.files:
        found.problems += _size_faults(folder, headers)
    found.notes += [
        f"{path.name} belongs to no finished export" for path in folder.glob(f"*{PARTIAL}")
    ]
    others = {path.name for path in folder.glob("*.safetensors")} - set(weight_map.values())
    found.notes += [f"{name} is not in {HF_INDEX}, and not read" for name in sorted(others)]
    reader = Reader(folder)
    for file, metas in headers.items():
        for name, meta in metas.items():
            found.tensors += 1
            if finite and weight_map.get(name) == file:
                _verify_values(reader, meta, found)
            progress(meta.nbytes)
    return found


def _size_faults(folder: Path, headers: Mapping[str, Mapping[str, TensorMeta]]) -> list[str]:
    """The index also says how many bytes all tensors have."""
    if not (folder / HF_INDEX).is_file():
        return []
    said = json.loads((folder / HF_INDEX).read_bytes()).get("metadata", {}).get("total_size")
    total = sum(meta.nbytes for metas in headers.values() for meta in metas.values())
    if said in (None, total):
        return []
    return [f"{folder / HF_INDEX}: total_size is {said!r}, but the tensors have {total} bytes"]


def _verify_values(reader: Reader, meta: TensorMeta, found: Verification) -> None:
    path = reader.folder / reader.file_of[meta.name]
    try:
        tensor = reader.read(meta.name)
    except READ_ERRORS as error:
        found.problems.append(f"{path}: {meta.name} cannot be read: {error}")
        return
    if bad := count_not_finite(tensor):
        found.problems.append(
            f"{path}: {meta.name}: {bad:,} of {tensor.numel():,} values are NaN or infinite"
        )
