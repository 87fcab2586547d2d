"""Writing safetensors files piece by piece, from many ranks at once.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: dtype,
shape and byte range of each tensor) and then the tensors' bytes, back to back in row-major order.
So names, shapes and dtypes alone say where every byte goes: one rank writes the headers, and then
whoever has a tensor writes it at its place. The ``safetensors`` library cannot do that: its
``save_file`` takes a dict of all tensors of a file, in memory. For reading it is used
(``checkpoint.safetensors_reader``).

[Note: complete or absent]
TorchTitan takes ``model.safetensors.index.json`` as the sign that a folder holds a whole export. It
is written last, under another name, and renamed. Until shortly before, the weights carry the suffix
``.partial`` as well: libraries that look for ``model.safetensors`` without asking for an index find
nothing in what a crash has left behind, and the next export into the same folder replaces it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.folder import HF_INDEX, sync_folder

DEFAULT_MAX_FILE_BYTES = 5_000_000_000
PARTIAL = ".partial"
_WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# A write may be cut short at 2 GiB. In these steps a signal is also answered while one is going on.
_WRITE_BYTES = 64 * 2**20

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that can be written, by their names in the format."""


@dataclass(frozen=True)
class TensorMeta:
    """What the header says of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class FilePlan:
    """One file of an export.

    Attributes:
        name: the file's name, without folder.
        header: everything before the first tensor's bytes.
        offsets: byte at which each tensor begins, from the start of the file.
        size: bytes of the whole file.
    """

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


@dataclass(frozen=True)
class ExportPlan:
    """Where every byte of an export goes; the same on every rank for the same tensors."""

    tensors: Mapping[str, TensorMeta]
    files: tuple[FilePlan, ...]

    @property
    def index(self) -> bytes:
        """The content of the index file."""
        weight_map = {name: file.name for file in self.files for name in file.offsets}
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(index, indent=2) + "\n").encode()


def plan_export(
    tensors: Iterable[TensorMeta], max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
) -> ExportPlan:
    """Distribute tensors over files, in the order of their names.

    A file holds at most ``max_file_bytes`` of tensors, or a single tensor that is larger. In a file
    wider dtypes come first, so that every tensor is aligned to its element size.

    Raises:
        ValueError: a name occurs twice or means something else to the format, a dtype has no name
            in it, or ``max_file_bytes`` is not positive.
    """
    if max_file_bytes <= 0:
        raise ValueError(f"max_file_bytes is {max_file_bytes}, expected a positive number of bytes")
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    by_name = {tensor.name: tensor for tensor in ordered}
    if len(by_name) < len(ordered) or "__metadata__" in by_name:
        raise ValueError("tensor names must differ from each other and from '__metadata__'")
    groups: list[list[TensorMeta]] = [[]]
    for tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{tensor.name}: {tensor.dtype} cannot be written, only "
                f"{', '.join(str(dtype) for dtype in DTYPE_NAMES)}"
            )
        filled = sum(other.nbytes for other in groups[-1])
        if groups[-1] and filled + tensor.nbytes > max_file_bytes:
            groups.append([])
        groups[-1].append(tensor)
    count = len(groups)
    # One file is numbered as well: TorchTitan looks for a number in every name of an index.
    names = [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    files = tuple(_plan_file(name, group) for name, group in zip(names, groups, strict=True))
    return ExportPlan(by_name, files)


def _plan_file(name: str, tensors: list[TensorMeta]) -> FilePlan:
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for tensor in ordered:
        begins[tensor.name] = end
        end += tensor.nbytes
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[tensor.name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + begin for name, begin in begins.items()}
    return FilePlan(name, header, offsets, len(header) + end)


class SafetensorsWriter:
    """Writes an :class:`ExportPlan` into ``folder``.

    One rank calls :meth:`create`, then all of them :meth:`write` and :meth:`sync`, then one of them
    :meth:`publish`; the caller has the ranks wait for each other in between. The folder must be the
    same for all of them, on a file system that they share. Every method raises ``OSError`` as the
    system reports it.
    """

    def __init__(self, folder: Path, plan: ExportPlan) -> None:
        self.folder = folder
        self.plan = plan
        self._file_of = {name: file for file in plan.files for name in file.offsets}
        self._open: dict[str, int] = {}  # file descriptors by file name

    def create(self) -> None:
        """Make the folder, and the files with their headers at their final sizes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob(f"*{PARTIAL}"):
            if _WEIGHT_FILE.fullmatch(stale.name.removesuffix(PARTIAL)):
                stale.unlink()
        for file in self.plan.files:
            with open(self._partial(file), "xb") as stream:
                stream.write(file.header)
                stream.truncate(file.size)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor at its place.

        Raises:
            ValueError: shape or dtype is not the planned one.
        """
        planned, file = self.plan.tensors[name], self._file_of[name]
        if (tensor.dtype, tuple(tensor.shape)) != (planned.dtype, planned.shape):
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} was to be written, but "
                f"{planned.dtype} {planned.shape} planned"
            )
        if file.name not in self._open:
            self._open[file.name] = os.open(self._partial(file), os.O_WRONLY)
        content = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        left = content.numpy().data
        position = file.offsets[name]
        while left:
            count = os.pwrite(self._open[file.name], left[:_WRITE_BYTES], position)
            left, position = left[count:], position + count

    def file_of(self, name: str) -> str:
        """The file that holds tensor ``name``, without folder."""
        return self._file_of[name].name

    def sync(self) -> None:
        """Put on disk what this rank has written, and close the files."""
        try:
            for descriptor in self._open.values():
                os.fsync(descriptor)
        finally:
            self.close()

    def close(self) -> None:
        """Close the files; for who gives up before :meth:`sync`."""
        while self._open:
            os.close(self._open.popitem()[1])

    def publish(self, extra_files: Mapping[str, bytes]) -> None:
        """Write ``extra_files``, then give the weights their names and, last, write the index."""
        for name, content in extra_files.items():
            self._replace(name, content)
        for file in self.plan.files:
            with open(self._partial(file), "rb") as stream:
                os.fsync(stream.fileno())  # the header, which no tensor may follow
            os.rename(self._partial(file), self.folder / file.name)
        sync_folder(self.folder)
        self._replace(HF_INDEX, self.plan.index)
        sync_folder(self.folder)

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.folder / (name + PARTIAL)
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, self.folder / name)

    def _partial(self, file: FilePlan) -> Path:
        return self.folder / (file.name + PARTIAL)


def refuse_existing(folder: Path) -> None:
    """Check that ``folder`` holds no weights.

    Raises:
        CheckpointError: it does, of a finished export or of somebody else.
        OSError: it is no folder, or cannot be read.
    """
    if not folder.exists():
        return
    found = sorted(entry.name for entry in folder.iterdir())
    weights = [name for name in found if name == HF_INDEX or _WEIGHT_FILE.fullmatch(name)]
    if weights:
        raise CheckpointError(
            f"{folder} already holds {weights[-1]}: an export never replaces weights. Choose "
            "another folder, or remove this one."
        )
