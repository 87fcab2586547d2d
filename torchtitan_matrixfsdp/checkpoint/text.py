"""The reports of the command line as plain text, in at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torchtitan_matrixfsdp.checkpoint.difference import Difference, TensorDifference
from torchtitan_matrixfsdp.checkpoint.hf_report import HfSummary
from torchtitan_matrixfsdp.checkpoint.inspection import CheckpointSummary, PlanSummary, RunSummary
from torchtitan_matrixfsdp.checkpoint.verification import Verification

WIDTH = 100
_LISTED = 16
"""Rows of a table whose length grows with the number of ranks."""


def run_text(run: RunSummary) -> str:
    """The steps of a run."""
    rows = [
        (entry.name, entry.state, f"{entry.files:,}", size_text(entry.bytes)) for entry in run.steps
    ]
    newest = "none, so a job starts anew" if run.newest is None else f"step {run.newest}"
    return "\n".join(
        [
            f"{run.path}",
            "",
            *table(("folder", "state", "files", "size"), rows),
            "",
            f"newest complete: {newest}",
        ]
    )


def checkpoint_text(summary: CheckpointSummary, list_tensors: bool) -> str:
    """One checkpoint."""
    saved = "this package" if summary.has_manifest else "no manifest: by stock DCP"
    sums = "every data file" if summary.has_checksums else "none, or not of every file"
    degree = summary.data_parallel_degree
    lines = [
        summary.path,
        "",
        *pairs([(str(key), str(value)) for key, value in summary.job.items()]),
        *pairs(
            [
                ("saved by", saved),
                ("checksums", sums),
                ("data-parallel degree", "no data state" if degree is None else str(degree)),
                ("parameters", f"{summary.parameters:,}, {summary.elements:,} elements"),
                ("dtypes", ", ".join(f"{name}: {n:,}" for name, n in summary.dtypes.items())),
                ("layout", ", ".join(f"{name}: {n:,}" for name, n in summary.layouts.items())),
            ]
        ),
        "",
    ]
    total = sum(summary.part_bytes.values())
    parts = [(name, size_text(size)) for name, size in summary.part_bytes.items()]
    lines += table(("part", "bytes"), [*parts, ("all", size_text(total))])
    if summary.states:
        states = [
            (state.name, f"{state.tensors:,}", f"{state.elements:,}", size_text(state.bytes))
            for state in summary.states
        ]
        lines += ["", *table(("optimizer state", "tensors", "elements", "bytes"), states)]
    for number, plan in enumerate(summary.plans):
        title = f"owner plan of stage {number}" if len(summary.plans) > 1 else "owner plan"
        lines += ["", *_plan_lines(title, plan)]
    lines += ["", *_file_lines(summary)]
    if list_tensors:
        rows = [
            (
                t.key,
                t.dtype,
                _shape_text(t.shape),
                t.layout,
                "-" if t.owner is None else str(t.owner),
            )
            for t in summary.tensors
        ]
        lines += ["", *table(("tensor", "dtype", "shape", "layout", "owner"), rows)]
    return "\n".join(lines)


def hf_text(summary: HfSummary, list_tensors: bool) -> str:
    """A folder of Hugging Face weights."""
    lines = [
        summary.path,
        "",
        *pairs(
            [
                ("format", "Hugging Face weights"),
                ("index", "yes" if summary.has_index else "no: a single file"),
                ("tensors", f"{len(summary.tensors):,}, {summary.elements:,} elements"),
                ("dtypes", ", ".join(f"{name}: {n:,}" for name, n in summary.dtypes.items())),
            ]
        ),
        "",
    ]
    files = [(name, size_text(size)) for name, size in summary.files.items()]
    lines += _shortened(("file", "bytes"), files)
    if list_tensors:
        rows = [
            (name, dtype, _shape_text(shape)) for name, (dtype, shape) in summary.tensors.items()
        ]
        lines += ["", *table(("tensor", "dtype", "shape"), rows)]
    return "\n".join(lines)


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _plan_lines(title: str, plan: PlanSummary) -> Iterator[str]:
    chose = "" if plan.chosen == plan.planner else f" (chose {plan.chosen})"
    yield (
        f"{title}: {plan.planner}{chose}, {plan.parameters:,} parameters of {plan.blocks} blocks "
        f"over {plan.world_size} ranks"
    )
    owned = plan.rank_bytes
    yield (
        f"bytes owned: min {size_text(min(owned))}, max {size_text(max(owned))}, "
        f"max/mean {plan.imbalance:.3f}"
    )
    rows = [(str(rank), size_text(size)) for rank, size in enumerate(owned)]
    yield from _shortened(("rank", "bytes owned"), rows)


def _file_lines(summary: CheckpointSummary) -> Iterator[str]:
    sizes = [file.bytes for file in summary.files if file.bytes is not None]
    if not sizes:
        yield "no data files"
        return
    mean = sum(sizes) / len(sizes)
    yield (
        f"data files: {len(summary.files)}, min {size_text(min(sizes))}, max "
        f"{size_text(max(sizes))}, max/mean {max(sizes) / mean if mean else 1:.3f}"
    )
    rows = [
        (f.name, "missing" if f.bytes is None else size_text(f.bytes), f"{f.tensors:,}")
        for f in summary.files
    ]
    yield from _shortened(("file", "bytes", "entries"), rows)


def _shortened(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if len(rows) <= _LISTED:
        return table(head, rows)
    return [*table(head, rows[:_LISTED]), f"and {len(rows) - _LISTED} more; --json lists all"]


def verification_text(path: Path, found: Verification, finite: bool) -> str:
    """What verify found: a line for each problem, and a last one."""
    lines = [f"note: {note}" for note in found.notes]
    lines += [f"problem: {problem}" for problem in found.problems]
    count = len(found.problems)
    read = f"{found.tensors:,} tensors, {found.files:,} files, {size_text(found.bytes)}"
    if count:
        lines.append(f"{path}: {count} problem{'s' if count > 1 else ''} ({read})")
    else:
        lines.append(f"{path}: complete{' and finite' if finite else ''} ({read})")
    return "\n".join(lines)


def difference_text(difference: Difference, names: tuple[str, str]) -> str:
    """How two checkpoints differ."""
    lines = [f"only in {names[0]}: {key}" for key in difference.only_a]
    lines += [f"only in {names[1]}: {key}" for key in difference.only_b]
    lines += [f"object {entry.key}: {entry.what}" for entry in difference.objects]
    if difference.tensors:
        rows = [_difference_row(entry) for entry in difference.tensors]
        lines += table(("tensor", "max |a-b|", "elements", "note"), rows)
    counting = [entry for entry in difference.tensors if entry.counts(difference.tolerance)]
    within = len(difference.tensors) - len(counting)
    one_sided = len(difference.only_a) + len(difference.only_b)
    largest = max((t.largest for t in difference.tensors if t.largest >= 0), default=0.0)
    lines.append(
        f"{'equal' if difference.is_equal else 'different'}: {difference.equal:,} the same, "
        f"{within:,} within the tolerance {difference.tolerance:g}, {len(counting):,} tensors and "
        f"{len(difference.objects):,} objects differ, {one_sided:,} on one side only; largest "
        f"difference {largest:g}"
    )
    return "\n".join(lines)


def _difference_row(entry: TensorDifference) -> tuple[str, ...]:
    largest = "-" if entry.largest != entry.largest else f"{entry.largest:.6g}"
    return entry.key, largest, f"{entry.elements:,}", entry.what


def size_text(size: int) -> str:
    """Bytes as people read them."""
    if size < 1024:
        return f"{size} B"
    value, units = size / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.2f} {units[0]}"


def pairs(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Names and values, one pair a line; long values are cut."""
    return [f"{name:<22} {_fit(value, WIDTH - 23)}".rstrip() for name, value in rows]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first to the left, sizes and counts to the right. Where a line would be
    longer than ``WIDTH`` the first column is cut in its middle: names differ at both ends."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    room = WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = max(min(widths[0], room), 12)
    lines = []
    for row in (head, *rows):
        cells = [_fit(row[0], widths[0]).ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _fit(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    left = (width - 3) // 2
    return f"{text[:left]}...{text[len(text) - (width - 3 - left) :]}"
