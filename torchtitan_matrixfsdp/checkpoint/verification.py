"""Whether every byte of a checkpoint is there, as it was saved, and finite."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from torchtitan_matrixfsdp.checkpoint.checksums import checksum_path
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.manifest import (
    DATA_SUFFIX,
    MANIFEST,
    METADATA,
    Manifest,
    read_manifest,
)
from torchtitan_matrixfsdp.checkpoint.reader import (
    DamagedError,
    DataFile,
    StoredStream,
    parse_metadata,
)
from torchtitan_matrixfsdp.checkpoint.stored import StoredTensor, location_of, stored_tensors

Progress = Callable[[int], None]
"""Called with the number of bytes that are done since the last call."""

_AT_ONCE = 1 << 22
"""Elements that are looked at together, so that what is computed of them is small."""


@dataclass
class Verification:
    """What was found.

    Attributes:
        problems: one line each; none for a checkpoint that is as it was saved.
        notes: what could not be checked.
        files: data files that were read.
        tensors: tensors in the index.
        bytes: of the data files.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class _Expected:
    """A stream that the index places in a file.

    ``tensor`` is ``None`` for an object; ``sizes`` are the chunk's.
    """

    key: str
    length: int
    tensor: StoredTensor | None = None
    sizes: tuple[int, ...] = ()


def data_bytes(folder: Path) -> int:
    """Bytes of all data files of a checkpoint, for a progress bar."""
    return sum(path.stat().st_size for path in folder.glob(f"*{DATA_SUFFIX}"))


def verify_dcp(folder: Path, finite: bool, progress: Progress) -> Verification:
    """Check a checkpoint in DCP's format; reads every byte, one chunk in memory at a time.

    Args:
        finite: also count what is NaN or infinite in floating-point tensors.
    """
    found = Verification()
    manifest, metadata = _read_index(folder, found)
    streams: dict[str, dict[int, _Expected]] = {}
    if metadata is not None:
        tensors = stored_tensors(metadata)
        found.tensors = len(tensors)
        for entry in tensors.values():
            found.problems += [f"{folder / METADATA}: {what}" for what in tiling_faults(entry)]
        streams = _streams(folder, metadata, tensors, found)
    names = {path.name for path in folder.glob(f"*{DATA_SUFFIX}")}
    sums = {path.with_suffix(DATA_SUFFIX).name for path in folder.glob("__*.json")}
    if sums and manifest is None and not found.problems:
        found.problems.append(f"{folder / MANIFEST}: missing, though there are checksum files")
    if not sums and manifest is None:
        found.notes.append(
            "no checksums: it was not saved by this package. Checked instead: that every stream "
            "can be read, and the CRC-32 that torch.save stores with it."
        )
    for name in sorted(names | sums | streams.keys()):
        _verify_file(folder / name, streams.get(name, {}), manifest, finite, found, progress)
    return found


def _read_index(folder: Path, found: Verification) -> tuple[Manifest | None, Metadata | None]:
    manifest = None
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        found.problems.append(str(error))
    try:
        sha256 = manifest.metadata_sha256 if manifest is not None else None
        return manifest, parse_metadata(folder, sha256)
    except CheckpointError as error:
        found.problems.append(_line(error))
        found.notes.append(
            f"without its index {METADATA} the checkpoint cannot be loaded; the files are checked "
            "against their checksums alone"
        )
    return manifest, None


def _line(error: CheckpointError) -> str:
    """Without the remedy, which is that of a run that loads."""
    return f"{error.path}: {error.what}" if isinstance(error, DamagedError) else str(error)


def _streams(
    folder: Path, metadata: Metadata, tensors: Mapping[str, StoredTensor], found: Verification
) -> dict[str, dict[int, _Expected]]:
    """What the index places in each file, by offset; what it contradicts itself in is noted."""
    wanted: dict[MetadataIndex, _Expected] = {}
    for key in metadata.state_dict_metadata:
        entry = tensors.get(key)
        if entry is None:
            wanted[MetadataIndex(key)] = _Expected(key, 0)
            continue
        for offsets, sizes in entry.chunks:
            wanted[MetadataIndex(key, offsets)] = _Expected(key, 0, entry, sizes)
    streams: dict[str, dict[int, _Expected]] = {}
    for index, expected in wanted.items():
        try:
            where = location_of(folder, metadata, index)
        except CheckpointError as error:
            found.problems.append(_line(error))
            continue
        at = streams.setdefault(where.relative_path, {})
        if where.offset in at:
            found.problems.append(
                f"{folder / METADATA}: {index.fqn} and {at[where.offset].key} lie at the same place"
            )
        at[where.offset] = _Expected(index.fqn, where.length, expected.tensor, expected.sizes)
    found.problems += [
        f"{folder / METADATA}: it places a part of {index.fqn} at {index.offset} that no tensor has"
        for index in metadata.storage_data
        if index not in wanted
    ]
    return streams


def tiling_faults(entry: StoredTensor) -> Iterator[str]:
    """What keeps the chunks of a tensor from covering it exactly once."""
    inside = []
    for offsets, sizes in entry.chunks:
        ends = [start + size for start, size in zip(offsets, sizes, strict=True)]
        if len(ends) != len(entry.shape) or any(
            start < 0 or end > size
            for start, end, size in zip(offsets, ends, entry.shape, strict=False)
        ):
            yield f"{entry.key}: chunk {sizes} at {offsets} does not lie in {entry.shape}"
        elif math.prod(sizes):
            inside.append((offsets, ends))
    overlaps = 0
    for number, (offsets, ends) in enumerate(inside):
        for others, other_ends in inside[number + 1 :]:
            # In the order of their offsets: nothing that follows begins before this one ends.
            if others and others[0] >= ends[0]:
                break
            if all(
                a < other_end and b < end
                for a, end, b, other_end in zip(offsets, ends, others, other_ends, strict=True)
            ):
                overlaps += 1
                yield f"{entry.key}: the chunks at {offsets} and {others} overlap"
    covered = sum(
        math.prod(end - start for start, end in zip(offsets, ends, strict=True))
        for offsets, ends in inside
    )
    if not overlaps and covered != entry.numel:
        yield (
            f"{entry.key}: a hole: the chunks hold {covered:,} of {entry.numel:,} elements of "
            f"{entry.shape}"
        )


def _verify_file(
    path: Path,
    expected: Mapping[int, _Expected],
    manifest: Manifest | None,
    finite: bool,
    found: Verification,
    progress: Progress,
) -> None:
    if not path.is_file():
        keys = sorted({stream.key for stream in expected.values()})
        holds = f": it holds {_some(keys)}" if keys else ", though its checksum file is there"
        found.problems.append(f"{path}: missing{holds}")
        return
    found.files += 1
    found.bytes += path.stat().st_size
    try:
        file = DataFile(path, manifest.save_id if manifest is not None else None)
    except CheckpointError as error:
        found.problems.append(str(error))
        return
    lengths = {offset: stream.length for offset, stream in expected.items()}
    for offset, item in (file.items or {}).items():
        if expected and lengths.get(offset) != item.length:
            found.problems.append(
                f"{checksum_path(path)}: it knows {item.length:,} bytes at {offset:,}, which "
                f"{METADATA} does not place there"
            )
        lengths.setdefault(offset, item.length)
    if not lengths:
        found.problems.append(f"{path}: neither {METADATA} nor a checksum file knows what it holds")
    with file:
        found.problems += [f"{path}: {what}" for what in _extent_faults(lengths, file.size)]
        for offset, length in sorted(lengths.items()):
            stream = expected.get(offset, _Expected("unknown", length))
            try:
                _verify_stream(file.stream(offset, length, stream.key), stream, finite, found)
            except DamagedError as error:
                found.problems.append(_line(error))
            progress(min(length, max(file.size - offset, 0)))


def _extent_faults(lengths: Mapping[int, int], size: int) -> Iterator[str]:
    """Whether the streams, by offset, fill a file of ``size`` bytes exactly; that it is too short
    is told of each stream that it cuts."""
    end = 0
    for offset, length in sorted(lengths.items()):
        if offset != end:
            what = f"{offset - end:,} bytes that belong to nothing" if offset > end else "overlap"
            yield f"{what} at {min(offset, end):,}"
        end = max(end, offset + length)
    if size > end:
        yield f"{size - end:,} bytes too long: {size:,}, where {end:,} were saved"


def _verify_stream(
    stream: StoredStream, expected: _Expected, finite: bool, found: Verification
) -> None:
    if stream.item is not None:
        faults = [_line(fault) for fault in stream.faults()]
        found.problems += faults
        if faults:
            return
    elif expected.tensor is not None and (record := _wrong_crc(stream)) is not None:
        raise DamagedError(
            stream.data_file.path, f"{stream.key}: {record} is not what was saved: CRC-32 differs"
        )
    if expected.tensor is None:
        if stream.item is None:
            _check_object(stream)
        return
    tensor = _load(stream)
    shape, dtype = expected.sizes, expected.tensor.dtype
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise DamagedError(
            stream.data_file.path,
            f"{stream.key} is {tensor.dtype} {tuple(tensor.shape)}, where {METADATA} has {dtype} "
            f"{shape}",
        )
    if finite and (bad := count_not_finite(tensor)):
        found.problems.append(
            f"{stream.data_file.path}: {stream.key}: {bad:,} of {tensor.numel():,} values are NaN "
            "or infinite"
        )


def _load(stream: StoredStream) -> torch.Tensor:
    """The tensor of a stream whose bytes are checked already."""
    try:
        loaded = torch.load(stream.view(), map_location="cpu", weights_only=True)
    # What no checksum covers fails in whatever way.
    except Exception as error:
        raise DamagedError(
            stream.data_file.path, f"{stream.key} cannot be read ({_first_line(error)})"
        ) from error
    if not isinstance(loaded, torch.Tensor):
        raise DamagedError(
            stream.data_file.path,
            f"{stream.key} is a {type(loaded).__name__}, where {METADATA} has a tensor",
        )
    return loaded


def _wrong_crc(stream: StoredStream) -> str | None:
    """The first record of a stream by ``torch.save`` that is not what it was."""
    try:
        with zipfile.ZipFile(stream.view()) as archive:
            return archive.testzip()
    # zipfile raises what the damaged bytes happen to lead to.
    except Exception as error:
        raise DamagedError(
            stream.data_file.path, f"{stream.key} is damaged ({_first_line(error)})"
        ) from error


def _check_object(stream: StoredStream) -> None:
    """Objects are streams of torch.save or bytes of their owner; only the former can be checked."""
    content = io.BytesIO(stream.whole())
    if content.getvalue()[:2] == b"PK" and _wrong_crc(stream) is not None:
        raise DamagedError(stream.data_file.path, f"{stream.key} is not what was saved")


def count_not_finite(tensor: torch.Tensor) -> int:
    """How many values are NaN or infinite; always 0 for integers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    flat = tensor.reshape(-1)
    # Eight bits wide formats know no isfinite of their own.
    narrow = tensor.dtype.itemsize == 1
    return sum(
        int((~torch.isfinite(part.float() if narrow else part)).sum())
        for part in flat.split(_AT_ONCE)
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _some(keys: list[str], limit: int = 3) -> str:
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(keys[:limit]) + more
