"""Newton-Schulz beside nothing but its matrix products.

[Note: what Newton-Schulz is compared with]
The baseline is the products of the iteration alone: per step one ``torch.bmm`` each for X X^T, A A
and B X, of the same shapes, dtype and number of matrices, hence the same FLOPs (counted, and equal
to the formula). No normalisation, no sums, no copies. A and B are symmetric and stand transposed in
their products, which changes no value: of torch's layouts for bfloat16 on a CPU without bfloat16
instructions it is the fastest by a factor of five, so the baseline is the strong one.

Ours is timed as Muon runs it on its matrices, which on a CPU is one after the other, and with all
of them stacked for one ``bmm``. All are timed in turn, in each repetition, and the ratios are of
times from the same repetition.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_matrixfsdp.bench.ranks import synchronise
from torchtitan_matrixfsdp.bench.results import (
    SCHEMA,
    NewtonSchulzReport,
    NewtonSchulzResult,
    NewtonSchulzSetting,
    Ratio,
)
from torchtitan_matrixfsdp.layout import newton_schulz_flops
from torchtitan_matrixfsdp.optim import newton_schulz, newton_schulz_each

SHAPES = ((8, 256, 256), (8, 768, 256), (2, 1024, 1024), (1, 2816, 1024))
"""What is measured by default: number of matrices, rows, columns."""

_SEED = 17


@dataclass(frozen=True)
class NewtonSchulzOptions:
    """What ``newton-schulz`` measures.

    Attributes:
        shapes: number of matrices, rows and columns of each batch.
        dtypes: of the products, each of which is measured.
        steps: iterations.
        coefficients: their name.
        repeats: rounds over everything that is compared.
        threads: of torch, on the CPU.
    """

    shapes: tuple[tuple[int, int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    steps: int
    coefficients: str
    repeats: int
    threads: int


def newton_schulz_report(options: NewtonSchulzOptions) -> NewtonSchulzReport:
    """Every shape in every dtype, in this process.

    Raises:
        RuntimeError: the products have other FLOPs than the formula.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with _threads(options.threads):
        results = tuple(
            _measure(shape, dtype, options, device)
            for dtype in options.dtypes
            for shape in options.shapes
        )
    setting = NewtonSchulzSetting(
        torch.__version__,
        device.type,
        options.threads,
        options.steps,
        options.coefficients,
        options.repeats,
    )
    return NewtonSchulzReport(SCHEMA, "newton-schulz", setting, results)


def _measure(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    options: NewtonSchulzOptions,
    device: torch.device,
) -> NewtonSchulzResult:
    count, rows, cols = shape
    generator = torch.Generator().manual_seed(_SEED)
    batch = torch.randn(shape, generator=generator).to(device)
    matrices = list(batch)
    steps, coefficients = options.steps, options.coefficients

    def each() -> list[torch.Tensor]:
        return newton_schulz_each(
            matrices, steps=steps, compute_dtype=dtype, coefficients=coefficients
        )

    def stacked() -> torch.Tensor:
        return newton_schulz(
            batch, steps=steps, compute_dtype=dtype, coefficients=coefficients, stacked=True
        )

    flops = count * newton_schulz_flops(rows, cols, steps)
    products = Products(batch, steps, dtype)
    if products.flops != flops:
        raise RuntimeError(f"{shape}: the products have {products.flops} FLOPs, predicted {flops}")
    works: list[Callable[[], object]] = [products, each, stacked]
    if dtype != torch.float32:
        works.append(Products(batch, steps, torch.float32))
    found = torch.stack(each())
    stacked()
    times = _interleaved(works, options.repeats, device)
    exact = newton_schulz(
        batch, steps=steps, compute_dtype=torch.float64, coefficients=coefficients
    )
    apart = torch.linalg.matrix_norm(found.double() - exact) / torch.linalg.matrix_norm(exact)
    values = torch.linalg.svdvals(found.float())
    return NewtonSchulzResult(
        str(dtype).removeprefix("torch."),
        count,
        rows,
        cols,
        flops,
        statistics.median(times[1]) * 1e3,
        _ratio(times[1], times[0]),
        _ratio(times[1], times[-1 if dtype != torch.float32 else 0]),
        _ratio(times[2], times[1]),
        float(apart.max()),
        float(values.min()),
        float(values.max()),
    )


class Products:
    """The iteration's matrix products and no more, see [Note: what Newton-Schulz is compared
    with]; ``flops`` counts them."""

    def __init__(self, batch: torch.Tensor, steps: int, dtype: torch.dtype) -> None:
        wide = batch.mT if batch.size(1) > batch.size(2) else batch
        # Of norm 1, as in the iteration: the rate of no product depends on overflows.
        norm = torch.linalg.matrix_norm(wide, keepdim=True)
        self._x = (wide / norm).to(dtype).contiguous()
        self._steps = steps
        with FlopCounterMode(display=False) as counter:
            self()
        self.flops: int = counter.get_total_flops()

    def __call__(self) -> None:
        for _ in range(self._steps):
            gram = torch.bmm(self._x, self._x.mT)
            polynomial = torch.bmm(gram.mT, gram)
            torch.bmm(polynomial.mT, self._x)


def _interleaved(
    works: Sequence[Callable[[], object]], repeats: int, device: torch.device
) -> list[list[float]]:
    """The seconds of each repetition of each of ``works``, run in turn, in alternating order."""
    times: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats):
        order = range(len(works)) if repeat % 2 == 0 else reversed(range(len(works)))
        for index in order:
            synchronise(device)
            start = time.perf_counter()
            works[index]()
            synchronise(device)
            times[index].append(time.perf_counter() - start)
    return times


def _ratio(ours: Sequence[float], baseline: Sequence[float]) -> Ratio:
    return Ratio.of(list(zip(baseline, ours, strict=True)))


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
