r"""Newton-Schulz orthogonalisation: the only copy in the project.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). With
:math:`X_0 = G / \lVert G \rVert_F` and coefficients :math:`(a, b, c)`, each step computes

.. math::  A = X X^T, \qquad X \leftarrow a X + (b A + c A^2) X,

which drives the singular values of X towards 1 without an SVD; the singular vectors are kept
exactly. The sets of ``COEFFICIENTS``:

- ``quintic`` (Jordan): the same triple in each step, the steepest slope at zero that still stays
  bounded. After five steps the values are between about 0.7 and 1.2, and more steps do not bring
  them nearer.
- ``polar_express`` (Amsel et al., arXiv 2505.16932): in each step the odd quintic that is best in
  the maximum norm for what the steps before have left of the interval [l, 1], with l = 1e-3 and
  the lower end held at 0.0240733 of the upper one (the cushion). All but the last are applied to
  x / 1.01 (the safety factor, against values that rounding lifts above 1). Values from [1e-3, 1]
  are in [0.846, 1.124] after five steps, [0.994, 1.002] after six, at 1 to 1e-5 after seven. Steps
  beyond the table repeat its last entry, which converges to 1 by itself.

[Note: products on the CPU]
Two rules hold on the CPU. (a) A matrix is orthogonalised by itself, in contiguous memory of its
own, also when it is one of a batch. MKL's sums depend on the number of matrices in a ``bmm``, on
where each of them starts and on the threads, and an owner's matrices differ with the number of
ranks: a result would depend on the owner's other matrices. So it does not, to the bit. From 256
rows on one ``bmm`` for all is no faster (the ``newton-schulz`` benchmark measures it). (b) Where
there are no bfloat16 instructions, a bfloat16 product is a float32 product of the same values,
rounded to bfloat16: what such instructions compute, several times faster than without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from types import MappingProxyType
from typing import TypeAlias

import torch

Triple: TypeAlias = tuple[float, float, float]
"""The coefficients (a, b, c) of one step."""

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients."""

_SAFETY = 1.01
_OPTIMAL: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

POLAR_EXPRESS: tuple[Triple, ...] = (
    *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _OPTIMAL[:-1]),
    _OPTIMAL[-1],
)
"""The triples of Polar Express, safety factor included."""

COEFFICIENTS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {"quintic": (QUINTIC,), "polar_express": POLAR_EXPRESS}
)
"""One triple per step, by name; the last one is repeated as often as needed."""

BATCH_ELEMENTS = 1 << 24
"""At most so many elements are orthogonalised as one batch, if it has more than one matrix."""


def step_coefficients(coefficients: str | Sequence[Triple], steps: int) -> list[Triple]:
    """The triple of each step, from a name in ``COEFFICIENTS`` or the triples themselves.

    Raises:
        ValueError: the name is unknown, there is no triple, or ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"newton_schulz: steps is {steps}; legal: >= 1")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"coefficients: received {coefficients!r}; legal: {list(COEFFICIENTS)}"
            )
        coefficients = COEFFICIENTS[coefficients]
    if not coefficients:
        raise ValueError("coefficients: received no triple; legal: one or more")
    each = chain(coefficients, repeat(coefficients[-1]))
    return [next(each) for _ in range(steps)]


def newton_schulz(
    matrix: torch.Tensor,
    *,
    steps: int,
    compute_dtype: torch.dtype,
    coefficients: str | Sequence[Triple] = "quintic",
    stacked: bool | None = None,
) -> torch.Tensor:
    """Orthogonalise ``matrix``, or every matrix of a batch by itself.

    The input is normalised before it is cast down: first by its largest magnitude, then by its
    Frobenius norm, in float32 (float64 for a float64 input or computation). So the result does
    not depend on the scale of the input, from 1e-30 to 1e30, and is exactly zero for zero.
    It depends on the values alone, not on strides.

    Args:
        matrix: ``[m, n]`` or ``[k, m, n]``, any strides, any floating dtype; may be empty.
        steps: number of iterations, at least 1.
        compute_dtype: dtype of the matrix products and of the result.
        coefficients: a name in ``COEFFICIENTS``, or triples: one per step, the last repeated.
        stacked: whether the k matrices are multiplied by one ``bmm``; by default everywhere but on
            the CPU, see [Note: products on the CPU]. Relative to its own norm, a result differs
            from that of the matrix alone by at most 1e-12 in float64, 1e-4 in float32 and 0.04 in
            bfloat16.

    Returns:
        The shape of ``matrix``, in ``compute_dtype``.

    Raises:
        ValueError: ``matrix`` is neither 2D nor 3D, or as :func:`step_coefficients`.
    """
    if matrix.ndim not in (2, 3):
        raise ValueError(
            "newton_schulz: expected a 2D matrix or a 3D batch, got shape "
            f"{tuple(matrix.shape)}; reshape it, since nothing is flattened silently"
        )
    triples = step_coefficients(coefficients, steps)
    if matrix.numel() == 0:
        return matrix.new_empty(matrix.shape, dtype=compute_dtype)
    # The Gram matrix is taken on the short side: m^2 n instead of n^2 m products.
    tall = matrix.size(-2) > matrix.size(-1)
    wide = matrix.mT if tall else matrix
    if wide.ndim == 2 or (_stacks(wide.device) if stacked is None else stacked):
        result = _orthogonalise(_gather([wide], wide.shape, compute_dtype), triples, compute_dtype)
    else:
        result = wide.new_empty(wide.shape, dtype=compute_dtype)
        for one, into in zip(wide, result, strict=True):
            own = _gather([one], one.shape, compute_dtype)
            into.copy_(_orthogonalise(own, triples, compute_dtype))
    return result.mT if tall else result


def newton_schulz_each(
    matrices: Sequence[torch.Tensor],
    *,
    steps: int,
    compute_dtype: torch.dtype,
    coefficients: str | Sequence[Triple] = "quintic",
) -> list[torch.Tensor]:
    """:func:`newton_schulz` of every ``[m, n]`` in ``matrices``, in the batches of
    :func:`batches`; results in the order of the input."""
    results: list[torch.Tensor] = [matrix.new_empty(0) for matrix in matrices]
    for batch in batches(matrices):
        if len(batch) == 1 or matrices[batch[0]].numel() == 0:
            for index in batch:
                results[index] = newton_schulz(
                    matrices[index],
                    steps=steps,
                    compute_dtype=compute_dtype,
                    coefficients=coefficients,
                )
            continue
        wide = [matrices[i].mT if _is_tall(matrices[i]) else matrices[i] for i in batch]
        stack = _gather(wide, (len(wide), *wide[0].shape), compute_dtype)
        found = _orthogonalise(stack, step_coefficients(coefficients, steps), compute_dtype)
        for index, result in zip(batch, found, strict=True):
            results[index] = result.mT if _is_tall(matrices[index]) else result
    return results


def batches(
    matrices: Sequence[torch.Tensor], max_elements: int = BATCH_ELEMENTS
) -> list[list[int]]:
    """The indices of ``matrices``, in the batches in which they are orthogonalised.

    Together are matrices of one shape (or its transpose), dtype and device, in order, up to
    ``max_elements``; on the CPU each is alone, see [Note: products on the CPU].
    """
    found: list[list[int]] = []
    open_batches: dict[tuple[object, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        key = (min(matrix.shape), max(matrix.shape), matrix.dtype, matrix.device)
        batch = open_batches.get(key)
        fits = batch is not None and (len(batch) + 1) * matrix.numel() <= max_elements
        if batch is None or not fits or not _stacks(matrix.device):
            batch = open_batches[key] = []
            found.append(batch)
        batch.append(index)
    return found


def _stacks(device: torch.device) -> bool:
    return device.type != "cpu"


def _is_tall(matrix: torch.Tensor) -> bool:
    return matrix.size(0) > matrix.size(1)


def _gather(
    wide: Sequence[torch.Tensor], shape: Sequence[int], compute_dtype: torch.dtype
) -> torch.Tensor:
    """The matrices in contiguous memory of their own, in the dtype of normalisation."""
    is_double = torch.float64 in (wide[0].dtype, compute_dtype)
    x = wide[0].new_empty(shape, dtype=torch.float64 if is_double else torch.float32)
    for into, one in zip(x.view(len(wide), *wide[0].shape), wide, strict=True):
        into.copy_(one)
    return x


def _orthogonalise(
    x: torch.Tensor, triples: Sequence[Triple], compute_dtype: torch.dtype
) -> torch.Tensor:
    """The result for wide ``[m, n]`` or ``[k, m, n]``; writes to ``x``."""
    # Two divisions: the square of a tiny or huge entry would leave the exponent range. The
    # guards act on zero alone (no epsilon, which would damp small gradients), and stay on the
    # device (no host synchronisation).
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    x.div_(torch.where(largest > 0, largest, 1))
    # By rows first: one sum over millions of float32 squares is off by 5e-5.
    rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    norm = torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
    x.div_(torch.where(norm > 0, norm, 1))
    x = x.to(compute_dtype)
    in_float32 = x.is_cpu and compute_dtype.itemsize < 4 and not _multiplies_bfloat16()
    x = x.float() if in_float32 else x

    def rounded(product: torch.Tensor) -> torch.Tensor:
        return product.copy_(product.to(compute_dtype)) if in_float32 else product

    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in triples:
        gram = rounded(x @ x.mT)
        polynomial = rounded(add(gram, gram, gram, beta=b, alpha=c))
        x = rounded(add(x, polynomial, x, beta=a))
    return x.to(compute_dtype)


def _multiplies_bfloat16() -> bool:
    """Whether torch's bfloat16 matrix products on this CPU are oneDNN's, not plain loops."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
