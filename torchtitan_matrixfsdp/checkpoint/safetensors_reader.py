"""Reading safetensors files: checks that name what is wrong, then each tensor or part alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.folder import HF_INDEX
from torchtitan_matrixfsdp.checkpoint.safetensors import DTYPE_NAMES, TensorMeta

_MAX_HEADER_BYTES = 100_000_000  # the library refuses more
_COMPARED_BYTES = 64 * 2**20
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Reader:
    """The tensors in a folder of safetensors files.

    Raises:
        CheckpointError: the folder has no weights, or its index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = read_weight_map(folder)
        self._headers: dict[str, dict[str, TensorMeta]] = {}

    def meta(self, name: str) -> TensorMeta:
        """What the files say of tensor ``name``.

        Raises:
            CheckpointError: they do not have it, or its file is missing or damaged.
        """
        if name not in self.file_of:
            raise CheckpointError(
                f"{self.folder} lacks tensor {name}, which the model needs. Choose the model name "
                "and flavor that the weights were made for."
            )
        file = self.file_of[name]
        if file not in self._headers:
            self._headers[file] = read_header(self.folder / file)
        if name not in self._headers[file]:
            raise CheckpointError(
                f"{self.folder / file} lacks tensor {name}, which {HF_INDEX} places in it. Fetch "
                "or export the folder again."
            )
        return self._headers[file][name]

    def check(self, wanted: Iterable[TensorMeta]) -> set[torch.dtype]:
        """Check that the files have all of ``wanted`` in these shapes; the dtypes they have.

        Raises:
            CheckpointError: as :meth:`meta`, or a shape differs.
        """
        dtypes = set()
        for expected in wanted:
            found = self.meta(expected.name)
            if found.shape != expected.shape:
                raise CheckpointError(
                    f"{self.folder / self.file_of[expected.name]}: tensor {expected.name} has "
                    f"shape {found.shape}, the model needs {expected.shape}. Choose the model name "
                    "and flavor that the weights were made for."
                )
            dtypes.add(found.dtype)
        return dtypes

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Tensor ``name`` or the box ``index`` of it: a view of the mapped file.

        Raises:
            OSError, SafetensorError: the file cannot be read.
        """
        # Opened each time: a mapping goes when the file is closed and the tensor dropped, so that
        # no more of a file is mapped than is in use.
        with safe_open(self.folder / self.file_of[name], framework="pt") as opened:
            return opened.get_slice(name)[index] if index else opened.get_tensor(name)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same shape and values; reads some rows at a time.

        Raises:
            OSError, SafetensorError: as :meth:`read`.
            CheckpointError: as :meth:`meta`.
        """
        one, two = self.meta(name), self.meta(other)
        if one.shape != two.shape or not one.shape:
            return False
        row_bytes = max(1, one.nbytes // max(1, one.shape[0]))
        step = max(1, _COMPARED_BYTES // row_bytes)
        rows = [slice(begin, begin + step) for begin in range(0, one.shape[0], step)]
        return all(torch.equal(self.read(name, (r,)), self.read(other, (r,))) for r in rows)


READ_ERRORS = (OSError, SafetensorError)
"""What :meth:`Reader.read` raises."""


def read_weight_map(folder: Path) -> dict[str, str]:
    """Name of the file of each tensor in ``folder``: from its index, or of ``model.safetensors``.

    Raises:
        CheckpointError: neither is there, or the index cannot be read.
    """
    index, single = folder / HF_INDEX, folder / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return dict.fromkeys(read_header(single), single.name)
        raise CheckpointError(
            f"{folder} holds neither {HF_INDEX} nor {single.name}. Name a folder with weights in "
            "safetensors format, as Hugging Face's save_pretrained writes them."
        )
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} cannot be read ({type(error).__name__}: {error}). Expected JSON with a "
            '"weight_map" of tensor names to file names: fetch or export the folder again.'
        ) from error


def read_header(path: Path) -> dict[str, TensorMeta]:
    """What the header of ``path`` says of its tensors.

    Raises:
        CheckpointError: the file is missing, shorter than its header says, no safetensors file, or
            has a dtype that is not in :data:`DTYPE_NAMES`.
    """
    remedy = "Fetch or export the folder again."
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(min(length, _MAX_HEADER_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {remedy}") from error
    if size < 8 + length <= 8 + _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is cut short: it has {size} bytes, its header alone {8 + length}. {remedy}"
        )
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        metas = {
            name: (entry["dtype"], tuple(int(d) for d in entry["shape"]))
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file. {remedy}") from error
    if size != 8 + length + end:
        what = "is cut short" if size < 8 + length + end else "is too long"
        raise CheckpointError(
            f"{path} {what}: it has {size} bytes, its header says {8 + length + end}. {remedy}"
        )
    for name, (dtype, _) in metas.items():
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name} has dtype {dtype}, expected one of {', '.join(_DTYPES)}. "
                "Convert the weights first."
            )
    return {name: TensorMeta(name, _DTYPES[dtype], s) for name, (dtype, s) in metas.items()}
