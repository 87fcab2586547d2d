r"""Shampoo on plain tensors.

Gupta et al. 2018 (arXiv 1802.09568); blocks and layer-wise grafting of Anil et al. (arXiv
2002.09018); averages, bias correction and eigendecompositions of Shi et al. (arXiv 2309.06497).
With gradient G of step t, momentum M, :math:`\beta_1` = ``beta1``, :math:`\beta_2` = ``beta2``,
:math:`p` = ``exponent``, learning rate :math:`\gamma` and decay :math:`\lambda`:

.. math::
    M &\leftarrow \beta_1 M + (1 - \beta_1) G \\
    L &\leftarrow \beta_2 L + (1 - \beta_2) G G^T \qquad
    R \leftarrow \beta_2 R + (1 - \beta_2) G^T G \\
    U &= M / (1 - \beta_1^t) \\
    P &= \hat L^{-p} \, U \, \hat R^{-p} \\
    W &\leftarrow (1 - \gamma \lambda) W - \gamma \, \frac{\|S\|_F}{\|P\|_F} P

- Momentum comes before preconditioning, as in Shi et al., so it needs no change when the roots do.
  ``nesterov`` looks one step ahead: :math:`U = (\beta_1 M + (1 - \beta_1) G) / (1 -
  \beta_1^{t+1})`, which is bias-corrected by its own weights.
- :math:`\beta_2 = 1` sums instead: :math:`L \leftarrow L + G G^T`, without bias correction.
- :math:`\hat L = L / (1 - \beta_2^t)`; the roots are taken every ``precondition_frequency`` steps,
  after the factors of that step, and used from that step on. How they are damped:
  :func:`~torchtitan_matrixfsdp.optim.matrix_functions.inverse_root`.
- S is the step of another method, whose norm P is given (``grafting``): ``adamw``
  :math:`U / (\sqrt{\hat V} + \epsilon)`, with :math:`V` the average of :math:`G^2` by
  :math:`\beta_2` (an AdaGrad with momentum for :math:`\beta_2 = 1`); ``sgd`` U. Norms are the whole
  matrix's, not a block's. With ``none`` P is taken as it is.
- Until a matrix has its first roots the update is S itself (U for ``none``): with ``adamw`` it is
  AdamW's step to rounding.

[Note: blocks] A matrix with a side above ``max_preconditioner_dim`` is cut into a grid of blocks of
at most that side, as equal as they can be. Each block has an L and an R of its own, and P is made
block by block; so with ``none`` it is Shampoo on each block alone. For blocks of rows
:math:`m_0, m_1, \dots` (sum m, at most m') and columns :math:`n_0, n_1, \dots` (sum n, at most
n'), in a grid of I x J, ``L`` is [J m, m'] and ``R`` is [I n, n']: the L of block (i, j) begins at
row :math:`j m + m_0 + \dots + m_{i-1}`, its R at row :math:`i n + n_0 + \dots + n_{j-1}`, each in
the first columns. One block: L is [m, m] and R is [n, n].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from torchtitan_matrixfsdp.layout import block_sides, shampoo_root_flops
from torchtitan_matrixfsdp.optim.kronecker import (
    KroneckerOptimizer,
    MatrixStep,
    as_number,
    check_common_options,
    check_option,
)
from torchtitan_matrixfsdp.optim.matrix_functions import direction, inverse_root

GRAFTING = ("adamw", "sgd", "none")
ROOT_DTYPES = (torch.float32, torch.float64)


class Shampoo(KroneckerOptimizer):
    """Shampoo for 2D parameters, one matrix at a time; see the module for the equations.

    State of a matrix [m, n] (float64 for float64 parameters, else float32): ``exp_avg`` [m, n] (M),
    ``L`` and ``R`` (factors), ``L_root`` and ``R_root`` (inverse roots, identity at first), and for
    ``adamw`` grafting ``exp_avg_sq`` [m, n] (V). Shapes of the factors: [Note: blocks].

    A decomposition that fails is retried in float64 with 1000 times the epsilon; then the previous
    root stays in use, with one warning per matrix. A factor of zeros has the identity for a root.

    Args:
        params: 2D parameters or groups of them.
        lr: learning rate, >= 0. It has the unit of the grafted method's: with ``adamw`` an AdamW
            rate carries over. With ``none`` and p = 1/4 it is a spectral norm: P of a single
            gradient is orthogonal, as Muon's update is.
        weight_decay: decoupled decay, >= 0; a step multiplies the weight by 1 - lr weight_decay.
        beta1: of the momentum, in [0, 1).
        beta2: of the factors and of the AdamW that is grafted, in [0, 1]; 1 sums.
        nesterov: look ahead by one momentum step.
        exponent: p of both sides, > 0; 1/4 for a matrix (Gupta et al.), 1/2 is used as well.
        root_epsilon: damping of the roots, relative to a factor's largest eigenvalue, > 0.
        eps: of the AdamW that is grafted, added to the root of the second moment, > 0.
        grafting: one of ``GRAFTING``. It decides which state there is and is no group option.
        precondition_frequency: steps between refreshes of a matrix's roots, >= 1.
        stagger: spread the refreshes of the matrices over the steps; if false, all take place
            together, in steps 1, 1 + precondition_frequency, ...
        max_preconditioner_dim: largest side of a block, >= 1. No group option either.
        root_dtype: of the eigendecompositions, one of ``ROOT_DTYPES``; float64 parameters always
            use float64.
        logical_shapes: as for :class:`MatrixOptimizerBase`.

    Raises:
        ValueError: a hyperparameter out of range, or a parameter that is not 2D or not whole.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        nesterov: bool = False,
        exponent: float = 0.25,
        root_epsilon: float = 1e-6,
        eps: float = 1e-8,
        grafting: str = "adamw",
        precondition_frequency: int = 50,
        stagger: bool = True,
        max_preconditioner_dim: int = 2048,
        root_dtype: torch.dtype = torch.float32,
        logical_shapes: Mapping[torch.Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        check_option("grafting", grafting, grafting in GRAFTING, str(list(GRAFTING)))
        check_option(
            "max_preconditioner_dim",
            max_preconditioner_dim,
            isinstance(max_preconditioner_dim, int) and as_number(max_preconditioner_dim) >= 1,
            "an integer >= 1",
        )
        check_option("root_dtype", root_dtype, root_dtype in ROOT_DTYPES, str(list(ROOT_DTYPES)))
        self.grafting = grafting
        self.max_preconditioner_dim = max_preconditioner_dim
        self._root_dtype = root_dtype
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "beta1": beta1,
            "beta2": beta2,
            "nesterov": nesterov,
            "exponent": exponent,
            "root_epsilon": root_epsilon,
            "eps": eps,
            "precondition_frequency": precondition_frequency,
            "stagger": stagger,
        }
        super().__init__(params, defaults, logical_shapes)

    def state_shapes(self, param: torch.Tensor) -> Mapping[str, tuple[int, ...]]:
        """Shapes by [Note: blocks]."""
        rows, cols = self.logical_shape(param)
        row_sides, col_sides = self._sides(rows), self._sides(cols)
        left = (len(col_sides) * rows, max(row_sides))
        right = (len(row_sides) * cols, max(col_sides))
        shapes = {"exp_avg": (rows, cols)}
        if self.grafting == "adamw":
            shapes["exp_avg_sq"] = (rows, cols)
        return shapes | {"L": left, "R": right, "L_root": left, "R_root": right}

    def refresh_flops(self, shape: tuple[int, ...]) -> int:
        """FLOPs of all roots of a matrix."""
        return shampoo_root_flops(shape, self.max_preconditioner_dim)

    def _sides(self, length: int) -> tuple[int, ...]:
        return block_sides(length, self.max_preconditioner_dim)

    def _create_state(self, group: dict[str, Any]) -> None:
        super()._create_state(group)
        for param in group["params"]:
            if param.numel() > 0:
                for block in self._blocks(param):
                    for side in block.sides:
                        side.of(self.state[param], "_root").fill_diagonal_(1)

    def _check(self, group: dict[str, Any]) -> None:
        check_common_options(group)
        beta1, beta2, nesterov = group["beta1"], group["beta2"], group["nesterov"]
        check_option("beta1", beta1, 0 <= as_number(beta1) < 1, "0 <= beta1 < 1")
        check_option("beta2", beta2, 0 <= as_number(beta2) <= 1, "0 <= beta2 <= 1")
        check_option("nesterov", nesterov, isinstance(nesterov, bool), "true or false")
        for name in ("exponent", "root_epsilon", "eps"):
            check_option(name, group[name], 0 < as_number(group[name]) < float("inf"), "> 0")

    def _step_matrix(self, now: MatrixStep) -> None:
        average = _averaged(now)
        grafted = self._grafted(now, average)
        self._accumulate(now)
        if now.is_due:
            self._refresh(now)
        if not (now.is_due or now.is_refreshed):
            now.apply(grafted)
            return
        if self.grafting == "none":
            now.apply(self._preconditioned(now, average))
            return
        # Lengths cancel, and roots of tiny gradients times a huge one would overflow.
        update = direction(self._preconditioned(now, direction(average)))
        now.apply(update.mul_(torch.linalg.vector_norm(grafted)))

    def _preconditioned(self, now: MatrixStep, average: torch.Tensor) -> torch.Tensor:
        """P [m, n]."""
        update = torch.empty_like(average)
        for block in self._blocks(now.param):
            left, right = (side.of(now.state, "_root") for side in block.sides)
            update[block.rows, block.cols] = left @ average[block.rows, block.cols] @ right
        return update

    def _grafted(self, now: MatrixStep, average: torch.Tensor) -> torch.Tensor:
        """S [m, n]; moves the second moment."""
        if self.grafting != "adamw":
            return average
        beta2, second = now.group["beta2"], now.state["exp_avg_sq"]
        second.mul_(beta2).addcmul_(now.grad, now.grad, value=_new_weight(beta2))
        root = (second / _total_weight(beta2, now.step)).sqrt_()
        return average / root.add_(now.group["eps"])

    def _accumulate(self, now: MatrixStep) -> None:
        beta2 = now.group["beta2"]
        weight = _new_weight(beta2)
        for block in self._blocks(now.param):
            grad = now.grad[block.rows, block.cols]
            left, right = (side.of(now.state) for side in block.sides)
            left.addmm_(grad, grad.mT, beta=beta2, alpha=weight)
            right.addmm_(grad.mT, grad, beta=beta2, alpha=weight)

    def _refresh(self, now: MatrixStep) -> None:
        weight = _total_weight(now.group["beta2"], now.step)
        for block in self._blocks(now.param):
            for side in block.sides:
                root_of = partial(
                    inverse_root,
                    side.of(now.state),
                    now.group["exponent"],
                    now.group["root_epsilon"],
                    torch.promote_types(now.grad.dtype, self._root_dtype),
                    weight,
                    self.eigh,
                )
                root = self._decomposed(now.index, side.name, root_of)
                if root is not None:
                    side.of(now.state, "_root").copy_(root)

    def _blocks(self, param: torch.Tensor) -> Iterator[_Block]:
        rows, cols = self.logical_shape(param)
        row_parts, col_parts = _ranges(self._sides(rows)), _ranges(self._sides(cols))
        for i, (top, bottom) in enumerate(row_parts):
            for j, (start, end) in enumerate(col_parts):
                yield _Block(
                    slice(top, bottom),
                    slice(start, end),
                    (
                        _Side("L", j * rows + top, bottom - top),
                        _Side("R", i * cols + start, end - start),
                    ),
                )


@dataclass(frozen=True)
class _Side:
    """Where one factor of a block lies in ``L`` or ``R``."""

    name: str
    first: int
    length: int

    def of(self, state: Mapping[str, torch.Tensor], suffix: str = "") -> torch.Tensor:
        """The factor, or with ``"_root"`` its root: a view [length, length]."""
        whole = state[self.name + suffix]
        return whole[self.first : self.first + self.length, : self.length]


@dataclass(frozen=True)
class _Block:
    rows: slice
    cols: slice
    sides: tuple[_Side, _Side]


def _ranges(sides: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = list(accumulate(sides))
    return list(zip([0, *ends], ends, strict=False))


def _averaged(now: MatrixStep) -> torch.Tensor:
    """U [m, n]; moves the momentum."""
    beta1, average = now.group["beta1"], now.state["exp_avg"]
    average.lerp_(now.grad, 1 - beta1)
    if now.group["nesterov"]:
        return now.grad.lerp(average, beta1) / (1 - beta1 ** (now.step + 1))
    return average / (1 - beta1**now.step)


def _new_weight(beta2: float) -> float:
    return 1.0 if beta2 == 1 else 1 - beta2


def _total_weight(beta2: float, step: int) -> float:
    return 1.0 if beta2 == 1 else 1 - beta2**step
