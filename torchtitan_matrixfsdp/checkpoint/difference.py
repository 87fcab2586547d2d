"""How two checkpoints differ, whatever their layouts: tensor by tensor, both sides in memory."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_matrixfsdp.checkpoint.stored import MODEL, Source, StoredTensor, part_of

_AT_ONCE = 1 << 20
"""Elements whose difference is computed together: float64 copies of a whole tensor may not fit."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that both checkpoints have.

    Attributes:
        what: a difference of shape or dtype, "" for none.
        largest: max |a - b| in float64; infinite where only one side is NaN, or infinite; ``nan``
            where shapes differ.
        elements: how many differ at all.
    """

    key: str
    what: str
    largest: float
    elements: int

    def counts(self, tolerance: float) -> bool:
        """Whether it makes two checkpoints different. Another dtype does so unless a tolerance was
        given: the values of an export in bfloat16 are then compared with what they came from."""
        return not self.largest <= tolerance or (bool(self.what) and tolerance == 0)


@dataclass(frozen=True)
class ObjectDifference:
    """An object that both checkpoints have, with other values.

    ``what`` shows both, or says that their stored bytes differ and could not be read.
    """

    key: str
    what: str


@dataclass
class Difference:
    """How two checkpoints differ.

    Attributes:
        only_a, only_b: keys that the other one lacks.
        tensors: those that differ in anything, the largest difference first.
        objects: those that differ.
        equal: how many tensors and objects do not.
        tolerance: up to which differences of values are none.
    """

    tolerance: float
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    objects: list[ObjectDifference] = field(default_factory=list)
    equal: int = 0

    @property
    def is_equal(self) -> bool:
        """Nothing differs by more than the tolerance."""
        return not (self.only_a or self.only_b or self.objects) and not any(
            entry.counts(self.tolerance) for entry in self.tensors
        )


def compare(
    a: Source,
    b: Source,
    progress: Callable[[int], None],
    model_only: bool = False,
    tolerance: float = 0.0,
) -> Difference:
    """Compare two checkpoints; one tensor of each is in memory at a time.

    Args:
        progress: called with the bytes of each tensor of ``a`` that is compared.
        model_only: leave out the optimizer and everything else beside the model.
    """
    result = Difference(tolerance)
    keys_a, keys_b = _keys(a, model_only), _keys(b, model_only)
    result.only_a = [key for key in keys_a if key not in keys_b]
    result.only_b = [key for key in keys_b if key not in keys_a]
    for key in keys_a:
        if key not in keys_b:
            continue
        if (key in a.tensors) != (key in b.tensors):
            kinds = ["a tensor" if key in side.tensors else "an object" for side in (a, b)]
            result.objects.append(ObjectDifference(key, " against ".join(kinds)))
        elif key in a.tensors:
            entry = _compare_tensor(a, b, key)
            if entry.what or entry.elements:
                result.tensors.append(entry)
            else:
                result.equal += 1
            progress(a.tensors[key].nbytes)
        elif (what := object_difference(a.object_bytes(key), b.object_bytes(key))) is not None:
            result.objects.append(ObjectDifference(key, what))
        else:
            result.equal += 1
    # Other shapes first: they have no number.
    result.tensors.sort(key=lambda t: (not math.isnan(t.largest), -t.largest, t.key))
    return result


def _keys(source: Source, model_only: bool) -> dict[str, None]:
    keys = [*source.tensors, *source.objects]
    return dict.fromkeys(k for k in keys if not model_only or part_of(k) == MODEL)


def _compare_tensor(a: Source, b: Source, key: str) -> TensorDifference:
    one, two = a.tensors[key], b.tensors[key]
    if one.shape != two.shape:
        return TensorDifference(key, f"shape {one.shape} against {two.shape}", math.nan, one.numel)
    largest, elements = largest_difference(a.tensor(key), b.tensor(key))
    return TensorDifference(key, _dtypes(one, two), largest, elements)


def _dtypes(one: StoredTensor, two: StoredTensor) -> str:
    if one.dtype == two.dtype:
        return ""
    names = [str(dtype).removeprefix("torch.") for dtype in (one.dtype, two.dtype)]
    return " against ".join(names)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    """``(max |a - b|, how many elements differ)`` of two tensors of one shape, in float64.

    NaN equals NaN, and an infinity itself. Integers that differ differ by at least 1, also where
    float64 does not tell them apart.
    """
    largest, count = 0.0, 0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    is_exact = not (a.is_floating_point() or a.is_complex())
    for x, y in zip(a.reshape(-1).split(_AT_ONCE), b.reshape(-1).split(_AT_ONCE), strict=True):
        # Not of other dtypes: torch.equal raises for some pairs of them.
        if x.dtype == y.dtype and torch.equal(x, y):
            continue
        wide_x, wide_y = x.to(wide), y.to(wide)
        same = x == y if is_exact and x.dtype == y.dtype else wide_x == wide_y
        same |= wide_x.isnan() & wide_y.isnan()
        if bool(same.all()):
            continue
        apart = (wide_x - wide_y).abs()[~same]
        if is_exact:
            apart = apart.clamp(min=1)
        largest = max(largest, float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        count += apart.numel()
    return largest, count


def object_difference(a: bytes, b: bytes) -> str | None:
    """How two stored objects differ; ``None`` if they do not.

    Objects are read as plain values. What holds others, such as a pickled class, is not read:
    unpickling would run code of the checkpoint; then the stored bytes are compared.
    """
    if a == b:
        return None
    try:
        one, two = (
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            for content in (a, b)
        )
    # No stream of torch.save, or not of plain values: each version of torch has its own exception.
    except Exception:
        return f"their stored bytes differ ({len(a):,} and {len(b):,}); not plain values"
    return None if _equal(one, two) else f"{_short(one)} against {_short(two)}"


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and largest_difference(a, b)[1] == 0
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def _short(value: Any, limit: int = 30) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
