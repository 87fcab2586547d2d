"""Hugging Face folders as a source and as a target of conversions, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torchtitan_matrixfsdp.checkpoint.conversion import new_folder
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.hf import check_others
from torchtitan_matrixfsdp.checkpoint.hf_names import Convert, Reverse, to_hf_alone
from torchtitan_matrixfsdp.checkpoint.safetensors import (
    SafetensorsWriter,
    TensorMeta,
    plan_export,
)
from torchtitan_matrixfsdp.checkpoint.safetensors_reader import READ_ERRORS, Reader
from torchtitan_matrixfsdp.checkpoint.stored import MODEL, Source, StoredTensor, part_of
from torchtitan_matrixfsdp.checkpoint.verification import Progress


class HfFolder:
    """A :class:`~torchtitan_matrixfsdp.checkpoint.stored.Source` over a folder of weights, by
    their names in it.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    objects: Sequence[str] = ()

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.tensors = {
            name: _stored(name, meta.shape, meta.dtype)
            for name, meta in ((name, reader.meta(name)) for name in reader.file_of)
        }

    def tensor(self, key: str) -> torch.Tensor:
        """One tensor, on CPU.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return _read(self.reader, key)

    def object_bytes(self, key: str) -> bytes:
        """There are no objects."""
        raise KeyError(key)


class HfModel:
    """A :class:`~torchtitan_matrixfsdp.checkpoint.stored.Source` over a folder of weights, by the
    names that a model has for them.

    Args:
        state: the model's tensors by FQN, on meta.
        to_hf, from_hf: the adapter's conversions.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape; a file is damaged.
    """

    objects: Sequence[str] = ()

    def __init__(
        self,
        reader: Reader,
        state: Mapping[str, torch.Tensor],
        to_hf: Convert,
        from_hf: Convert,
    ) -> None:
        self.reader = reader
        self._reverse = Reverse(state, to_hf, from_hf)
        wanted = [meta for source in self._reverse.sources.values() for meta in source.tensors]
        reader.check(wanted)
        check_others(reader, self._reverse, {meta.name for meta in wanted})
        self.tensors = {
            fqn: _stored(
                fqn, tensor.shape, reader.meta(self._reverse.sources[fqn].tensors[0].name).dtype
            )
            for fqn, tensor in state.items()
        }

    def tensor(self, key: str) -> torch.Tensor:
        """One tensor of the model, on CPU.

        Raises:
            CheckpointError: the file cannot be read.
        """
        source = self._reverse.sources[key]
        values = {meta.name: _read(self.reader, meta.name) for meta in source.tensors}
        if source.is_verbatim:
            return values[source.tensors[0].name]
        return self._reverse.convert(key, values)

    def object_bytes(self, key: str) -> bytes:
        """There are no objects."""
        raise KeyError(key)


def _stored(key: str, shape: Sequence[int], dtype: torch.dtype) -> StoredTensor:
    sizes = tuple(shape)
    return StoredTensor(key, sizes, dtype, (((0,) * len(sizes), sizes),))


def _read(reader: Reader, name: str) -> torch.Tensor:
    try:
        return reader.read(name)
    except READ_ERRORS as error:
        raise CheckpointError(
            f"{reader.folder / reader.file_of[name]}: {name} cannot be read: {error}. Fetch or "
            "export the folder again."
        ) from error


def convert_to_hf(
    source: Source,
    target: Path,
    state: Mapping[str, torch.Tensor],
    to_hf: Convert,
    from_hf: Convert,
    dtype: torch.dtype | None,
    extra_files: Mapping[str, bytes],
    progress: Progress,
) -> None:
    """Write the model's tensors of ``source`` to the new folder ``target``.

    Args:
        state: the tensors that the model has, by FQN, on meta.
        to_hf, from_hf: the adapter's conversions; called with one tensor at a time.
        dtype: of floating-point tensors in the files; ``None`` keeps each as it is.
        extra_files: contents of further files by name.
        progress: called with the bytes of each tensor that is done.

    Raises:
        CheckpointError: ``target`` exists, ``source`` is damaged or of another model; ``target`` is
            then not made.
    """
    tensors = {key: t for key, t in source.tensors.items() if part_of(key) == MODEL}
    check_model(state, tensors)
    names: dict[str, tuple[TensorMeta, ...]] = {}
    for fqn, tensor in tensors.items():
        target_dtype = dtype if dtype is not None and tensor.dtype.is_floating_point else None
        names[fqn] = to_hf_alone(to_hf, fqn, state[fqn], target_dtype or tensor.dtype)
    plan = plan_export([meta for metas in names.values() for meta in metas])
    originals = _originals(names, Reverse(state, to_hf, from_hf))
    writer = SafetensorsWriter(target, plan)
    with new_folder(target):
        writer.create()
        try:
            for fqn, metas in names.items():
                value = source.tensor(fqn)
                if not metas and not torch.equal(value, source.tensor(originals[fqn])):
                    raise CheckpointError(
                        f"{fqn} differs from {originals[fqn]}, to which the model ties it: the "
                        "format has no place for both. Choose the --flavor that it was saved from."
                    )
                if metas:
                    for name, converted in to_hf({fqn: value.to(metas[0].dtype)}).items():
                        writer.write(name, converted)
                progress(tensors[fqn].nbytes)
            writer.sync()
        finally:
            writer.close()
        writer.publish(extra_files)


def _originals(names: Mapping[str, tuple[TensorMeta, ...]], reverse: Reverse) -> dict[str, str]:
    """The tensor of the model that each one without a counterpart of its own is tied to."""
    fqn_of = {meta.name: fqn for fqn, metas in names.items() for meta in metas}
    return {
        fqn: fqn_of[reverse.sources[fqn].tensors[0].name]
        for fqn, metas in names.items()
        if not metas
    }


def check_model(state: Mapping[str, torch.Tensor], tensors: Mapping[str, StoredTensor]) -> None:
    """Check that ``tensors`` are those of the model ``state``, on meta.

    Raises:
        CheckpointError: one is missing, superfluous or of another shape.
    """
    received = {key: tensor.shape for key, tensor in tensors.items()}
    legal = {key: tuple(tensor.shape) for key, tensor in state.items()}
    for key in sorted(received.keys() | legal.keys()):
        if received.get(key) != legal.get(key):
            texts = [
                "no such tensor" if key not in shapes else f"shape {shapes[key]}"
                for shapes in (received, legal)
            ]
            raise CheckpointError(
                f"{key}: received {texts[0]}; legal: {texts[1]}. Choose the --model and --flavor "
                "that it was saved from."
            )
