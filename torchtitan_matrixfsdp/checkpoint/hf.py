"""Weights to and from Hugging Face's safetensors format, tensor by tensor, for every layout.

[Note: memory of a conversion]
Beyond its shards a rank holds one tensor at a time. Where the tensor is whole on a rank (on its
owner, under DDP) that is nothing but what the adapter makes of it; where it is cut (row shards,
tensor parallelism) it is the gathered tensor as well. TorchTitan's adapters return most tensors as
they are. Those that rotary embeddings permute, q and k, they copy: twice on the way to the format,
once on the way back. Another dtype adds a copy of what is whole in the dtype of the export, a GPU
one in host memory.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.hf_names import Convert, Reverse, to_hf_alone
from torchtitan_matrixfsdp.checkpoint.parts import Part, is_cut, part_here
from torchtitan_matrixfsdp.checkpoint.safetensors import (
    DEFAULT_MAX_FILE_BYTES,
    SafetensorsWriter,
    TensorMeta,
    plan_export,
    refuse_existing,
)
from torchtitan_matrixfsdp.checkpoint.safetensors_reader import READ_ERRORS, Reader
from torchtitan_matrixfsdp.checkpoint.verdict import (
    gather_or_raise,
    raise_together,
    rank_and_size,
)

logger = logging.getLogger(__name__)

# Old weights hold these buffers; every library computes them.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class _Offer:
    """One tensor of the model, as a rank announces it to the others.

    Attributes:
        tensors: what it becomes in the format.
        can_write: whether this rank will have it whole.
    """

    tensors: tuple[TensorMeta, ...]
    can_write: bool


@torch.no_grad()
def export_hf(
    state: Mapping[str, torch.Tensor],
    to_hf: Convert,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    extra_files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write the weights ``state`` as safetensors files with an index into ``folder``.

    A collective of all ranks; without a process group, of one. A matrix that is whole on a rank is
    converted and written there, without communication. One that is cut is gathered and written by
    one of the ranks that gather it; what several ranks could write goes to the one with the least
    so far. The files are the same bytes for every layout of the same weights. See [Note: memory of
    a conversion] and [Note: complete or absent].

    Args:
        state: tensors by canonical FQN, all of this rank or of its pipeline stages: owner-shaped or
            other DTensors, or plain tensors that are equal on all ranks that have them.
        to_hf: the adapter's conversion; called with one tensor at a time.
        folder: made if missing, and seen by all ranks.
        dtype: of floating-point tensors in the files; ``None`` keeps each as it is.
        max_file_bytes: tensors per file.
        extra_files: contents of further files by name, as rank 0 has them.

    Raises:
        CheckpointError: on every rank; ``folder`` already holds weights, the adapter does not know
            a tensor, or the file system refuses. Nothing in the folder is then taken for an export.
    """
    rank, ranks = rank_and_size()
    offers: dict[str, _Offer] = {}
    fault: str | None = None
    try:
        if rank == 0:
            refuse_existing(folder)
        offers = {fqn: _offer(fqn, tensor, to_hf, dtype) for fqn, tensor in state.items()}
    except CheckpointError as error:
        fault = str(error)
    except OSError as error:
        fault = _about_writing(folder, error)
    writer_of, tensors = _divide(gather_or_raise(offers, fault), ranks)
    writer = SafetensorsWriter(folder, plan_export(tensors, max_file_bytes))
    if rank == 0:
        try:
            writer.create()
        except OSError as error:
            fault = _about_writing(folder, error)
    raise_together(fault)
    try:
        mine = {fqn for fqn, writing in writer_of.items() if writing == rank}
        fault = _write_tensors(state, offers, to_hf, writer, mine)
        raise_together(fault)
    finally:
        writer.close()
    if rank == 0:
        try:
            writer.publish(extra_files)
        except OSError as error:
            fault = _about_writing(folder, error)
    raise_together(fault)


def _offer(fqn: str, tensor: torch.Tensor, to_hf: Convert, dtype: torch.dtype | None) -> _Offer:
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    can_write = is_cut(tensor) or part_here(tensor) is not None
    return _Offer(to_hf_alone(to_hf, fqn, tensor, target), can_write)


def _divide(offers: list[dict[str, _Offer]], ranks: int) -> tuple[dict[str, int], list[TensorMeta]]:
    """The writing rank of each tensor of the model, and all tensors of the format.

    Raises:
        CheckpointError: the ranks' offers do not fit together.
    """
    candidates: dict[str, list[int]] = defaultdict(list)
    agreed: dict[str, tuple[TensorMeta, ...]] = {}
    for rank, offered in enumerate(offers):
        for fqn, offer in offered.items():
            if agreed.setdefault(fqn, offer.tensors) != offer.tensors:
                raise CheckpointError(
                    f"{fqn} is {agreed[fqn]} on one rank and {offer.tensors} on rank {rank}. Start "
                    "every rank with the same configuration."
                )
            if offer.can_write:
                candidates[fqn].append(rank)
    load = [0] * ranks
    writer_of = {}
    for fqn in sorted(agreed):
        if agreed[fqn]:
            writer_of[fqn] = min(candidates[fqn], key=lambda rank: (load[rank], rank))
            load[writer_of[fqn]] += sum(tensor.nbytes for tensor in agreed[fqn])
    return writer_of, [tensor for fqn in sorted(agreed) for tensor in agreed[fqn]]


def _write_tensors(
    state: Mapping[str, torch.Tensor],
    offers: Mapping[str, _Offer],
    to_hf: Convert,
    writer: SafetensorsWriter,
    mine: set[str],
) -> str | None:
    """Write the tensors ``mine`` and take part in gathering all; what went wrong, if anything."""
    fault: str | None = None
    for fqn in sorted(state):
        if not offers[fqn].tensors or (fqn not in mine and not is_cut(state[fqn])):
            continue
        # After a fault as well: the other ranks wait in this gather.
        whole = _whole(state[fqn].detach().to(offers[fqn].tensors[0].dtype))
        if fqn in mine and fault is None:
            fault = _write(fqn, whole, to_hf, writer)
        del whole  # before the next is gathered
    if fault is None:
        try:
            writer.sync()
        except OSError as error:
            fault = _about_writing(writer.folder, error)
    return fault


def _write(fqn: str, whole: torch.Tensor, to_hf: Convert, writer: SafetensorsWriter) -> str | None:
    for name, converted in to_hf({fqn: whole}).items():
        try:
            writer.write(name, converted)
        except OSError as error:
            return _about_writing(writer.folder / writer.file_of(name), error)
    return None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` whole; of a cut one, a collective of its mesh."""
    if is_cut(tensor):
        assert isinstance(tensor, DTensor)
        return tensor.full_tensor()
    part = part_here(tensor)
    assert part is not None  # only ranks that have it are asked to write it
    return part.local


def _about_writing(path: Path, error: OSError) -> str:
    named = error.filename2 or error.filename or path
    return (
        f"export of weights: cannot write {named}: {error.strerror or error}. Free space or choose "
        "a folder that can be written to, and export again."
    )


@torch.no_grad()
def import_hf(
    state: Mapping[str, torch.Tensor], to_hf: Convert, from_hf: Convert, folder: Path
) -> None:
    """Replace the weights ``state`` by those in ``folder``, in place.

    Called by all ranks, which only exchange names and faults: each reads what it stores itself, an
    owner its matrix, a row shard its rows. Where rotary embeddings permute a matrix, whoever stores
    a part of it reads it whole. See [Note: memory of a conversion]. Another dtype in the files is
    converted. Blocks that stay gathered (mode ``zero1``) must be told afterwards, by
    ``OwnerContext.invalidate()`` or ``load_state_dict``.

    Args:
        state: as for :func:`export_hf`.
        to_hf, from_hf: the adapter's conversions; called with one tensor at a time.
        folder: holds ``model.safetensors``, or several files with an index.

    Raises:
        CheckpointError: on every rank; a tensor is missing, superfluous or of another shape, or a
            file is missing or cut short. Nothing has been changed, unless the error says so.
    """
    names: set[str] = set()
    fault: str | None = None
    try:
        reader = Reader(folder)
        reverse = Reverse(state, to_hf, from_hf)
        names = {meta.name for source in reverse.sources.values() for meta in source.tensors}
    except CheckpointError as error:
        fault = str(error)
    known = set[str]().union(*gather_or_raise(names, fault))
    parts = {fqn: part for fqn in sorted(state) if (part := part_here(state[fqn])) is not None}
    try:
        wanted = [meta for fqn in parts for meta in reverse.sources[fqn].tensors]
        dtypes = reader.check(wanted)
        check_others(reader, reverse, known)
        _log_conversion(dtypes, state)
    except CheckpointError as error:
        fault = str(error)
    except READ_ERRORS as error:
        fault = f"{folder} cannot be read: {error}. Fetch or export the folder again."
    raise_together(fault)
    name = ""
    try:
        for fqn, part in parts.items():
            name = reverse.sources[fqn].tensors[0].name
            _read_part(fqn, part, reverse, reader)
    except READ_ERRORS as error:
        fault = (
            f"{folder / reader.file_of[name]} cannot be read: {error}. The model holds a part "
            "of the new weights: import again from the start."
        )
    raise_together(fault)


def _read_part(fqn: str, part: Part, reverse: Reverse, reader: Reader) -> None:
    source = reverse.sources[fqn]
    if source.is_verbatim:
        part.local.copy_(reader.read(source.tensors[0].name, part.index))
        return
    values = {meta.name: reader.read(meta.name) for meta in source.tensors}
    part.local.copy_(reverse.convert(fqn, values)[part.index])


def check_others(reader: Reader, reverse: Reverse, known: set[str]) -> None:
    """Check that what nobody asked for may be left out.

    Raises:
        CheckpointError: the model has no place for a tensor, or it has values of its own although
            the model ties it to another.
    """
    others = sorted(
        name for name in reader.file_of if name not in known and not name.endswith(_IGNORED_SUFFIX)
    )
    duplicates = reverse.duplicates(others)
    surplus = [name for name in others if name not in duplicates]
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise CheckpointError(
            f"{reader.folder / reader.file_of[surplus[0]]} has tensor {surplus[0]}{more}, without "
            "a place in the model. Choose the model name and flavor that the weights were made for."
        )
    rank, _ = rank_and_size()
    for name, original in duplicates.items():
        if rank == 0 and not reader.are_equal(name, original):
            raise CheckpointError(
                f"{reader.folder / reader.file_of[name]}: tensor {name} differs from "
                f"{original}, to which the model ties it. Choose a flavor without tied weights."
            )


def _log_conversion(dtypes: set[torch.dtype], state: Mapping[str, torch.Tensor]) -> None:
    here = {tensor.dtype for tensor in state.values()}
    if not dtypes <= here:
        logger.info(f"Imported weights are converted from {_listed(dtypes)} to {_listed(here)}")


def _listed(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
