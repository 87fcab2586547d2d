r"""SOAP on plain tensors: Adam in the eigenbasis of Shampoo's factors.

Vyas et al. (arXiv 2409.11321). With gradient G of step t, :math:`\beta_s` = ``shampoo_beta``,
bases :math:`Q_L` and :math:`Q_R` (identity at first), moments M and V that live in the basis,
learning rate :math:`\gamma` and decay :math:`\lambda`:

.. math::
    G' &= Q_L^T G Q_R \\
    M &\leftarrow \beta_1 M + (1 - \beta_1) G' \qquad
    V \leftarrow \beta_2 V + (1 - \beta_2) G' \odot G' \\
    N &= \frac{M / (1 - \beta_1^t)}{\sqrt{V / (1 - \beta_2^t)} + \epsilon} \\
    W &\leftarrow (1 - \gamma \lambda) W - \gamma \, Q_L N Q_R^T \\
    L &\leftarrow \beta_s L + (1 - \beta_s) G G^T \qquad
    R \leftarrow \beta_s R + (1 - \beta_s) G^T G

Every ``precondition_frequency`` steps the bases follow the factors, after the update, so that a
gradient never chooses the basis in which it is normalised (as the authors have it). The first basis
is an eigendecomposition, later ones take one step of power iteration and a QR decomposition
(algorithm 4 of the paper). Until its first basis, a matrix is stepped by Adam as it is; no step is
skipped, where the authors' code skips the first.

[Note: moments when the basis turns] M is linear in the gradients: it is taken back to the old
coordinates and into the new ones, which is exact. V is not: squares in one basis do not determine
those in another.

- Later bases turn little. Columns are sorted by their estimated eigenvalues, V's rows and columns
  are permuted with them, and the small turn is neglected, as in the authors' code.
- The first basis turns from the identity, which no permutation describes. But the factors know
  V's marginals in the new basis: :math:`q_k^T L q_k = \sum_l V_{kl}` when
  :math:`\beta_s = \beta_2`. V becomes the rank-one matrix with these row and column sums
  (Adafactor's estimate, with which the paper explains Shampoo), scaled to V's own total, which no
  rotation changes. Bias correction then stays right for every t: the total is the same average
  of :math:`\|G\|^2` from zero as before. Of a side without a basis the sums are V's own.

A side above ``max_precond_dim`` has no factor and keeps the identity: one-sided SOAP. With both
above, the matrix is stepped by Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from torchtitan_matrixfsdp.layout import soap_basis_flops
from torchtitan_matrixfsdp.optim.kronecker import (
    KroneckerOptimizer,
    MatrixStep,
    as_number,
    check_common_options,
    check_option,
)
from torchtitan_matrixfsdp.optim.matrix_functions import eigenbasis, next_basis

_SIDES = ("L", "R")  # of dimension 0 and 1


class SOAP(KroneckerOptimizer):
    """SOAP for 2D parameters, one matrix at a time; see the module for the equations.

    State of a matrix [m, n] (float64 for float64 parameters, else float32): ``exp_avg`` and
    ``exp_avg_sq`` [m, n] (M and V, in the basis); for m up to ``max_precond_dim`` ``L`` and
    ``L_basis`` [m, m], for n up to it ``R`` and ``R_basis`` [n, n]. A basis has its vectors in
    columns, is the identity at first, and has deterministic signs.

    A decomposition that fails is retried in float64; then the previous basis stays in use, with one
    warning per matrix. A factor of zeros leaves its basis as it is.

    Args:
        params: 2D parameters or groups of them.
        lr: learning rate, >= 0, in Adam's unit: the typical change of a coordinate in the basis.
        weight_decay: decoupled decay, >= 0; a step multiplies the weight by 1 - lr weight_decay.
        beta1: of M, in [0, 1).
        beta2: of V, in [0, 1).
        shampoo_beta: of the factors, in [0, 1); ``None`` takes the constructor's ``beta2``.
        eps: added to the root of the second moment, > 0.
        precondition_frequency: steps between refreshes of a matrix's bases, >= 1.
        stagger: spread the refreshes of the matrices over the steps; if false, all take place
            together, in steps 1, 1 + precondition_frequency, ...
        max_precond_dim: largest side with a basis, >= 0. It decides which state there is and is
            no group option.
        logical_shapes: as for :class:`MatrixOptimizerBase`.

    Raises:
        ValueError: a hyperparameter out of range, or a parameter that is not 2D or not whole.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.01,
        beta1: float = 0.95,
        beta2: float = 0.95,
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        precondition_frequency: int = 10,
        stagger: bool = True,
        max_precond_dim: int = 10000,
        logical_shapes: Mapping[torch.Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        check_option(
            "max_precond_dim",
            max_precond_dim,
            isinstance(max_precond_dim, int) and as_number(max_precond_dim) >= 0,
            "an integer >= 0",
        )
        self.max_precond_dim = max_precond_dim
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "beta1": beta1,
            "beta2": beta2,
            "shampoo_beta": beta2 if shampoo_beta is None else shampoo_beta,
            "eps": eps,
            "precondition_frequency": precondition_frequency,
            "stagger": stagger,
        }
        super().__init__(params, defaults, logical_shapes)

    def state_shapes(self, param: torch.Tensor) -> Mapping[str, tuple[int, ...]]:
        """``exp_avg``, ``exp_avg_sq``, and a factor and a basis for each side that has one."""
        shape = self.logical_shape(param)
        shapes: dict[str, tuple[int, ...]] = {"exp_avg": shape, "exp_avg_sq": shape}
        for name, length in zip(_SIDES, shape, strict=True):
            if length <= self.max_precond_dim:
                shapes |= {name: (length, length), f"{name}_basis": (length, length)}
        return shapes

    def refresh_flops(self, shape: tuple[int, ...]) -> int:
        """FLOPs of a later refresh of a matrix's bases."""
        return soap_basis_flops(shape, self.max_precond_dim)

    def _create_state(self, group: dict[str, Any]) -> None:
        super()._create_state(group)
        for param in group["params"]:
            if param.numel() > 0:
                for name in self._sides(self.state[param]):
                    self.state[param][f"{name}_basis"].fill_diagonal_(1)

    def _check(self, group: dict[str, Any]) -> None:
        check_common_options(group)
        for name in ("beta1", "beta2", "shampoo_beta"):
            check_option(name, group[name], 0 <= as_number(group[name]) < 1, f"0 <= {name} < 1")
        check_option("eps", group["eps"], 0 < as_number(group["eps"]) < float("inf"), "> 0")

    def _step_matrix(self, now: MatrixStep) -> None:
        group, state = now.group, now.state
        bases: dict[str, torch.Tensor] = {}
        if now.is_refreshed:
            bases = {name: state[f"{name}_basis"] for name in self._sides(state)}
        grad = _into(now.grad, bases)
        first = state["exp_avg"].lerp_(grad, 1 - group["beta1"])
        second = state["exp_avg_sq"]
        second.mul_(group["beta2"]).addcmul_(grad, grad, value=1 - group["beta2"])
        root = (second / (1 - group["beta2"] ** now.step)).sqrt_().add_(group["eps"])
        update = first / (1 - group["beta1"] ** now.step) / root
        now.apply(_into(update, {name: basis.mT for name, basis in bases.items()}))
        beta = group["shampoo_beta"]
        for name in self._sides(state):
            grad = now.grad if name == "L" else now.grad.mT
            state[name].addmm_(grad, grad.mT, beta=beta, alpha=1 - beta)
        if now.is_due and now.is_refreshed:
            self._turn(now)
        elif now.is_due:
            self._turn_first(now)

    def _turn_first(self, now: MatrixStep) -> None:
        """The first bases; see [Note: moments when the basis turns]."""
        state = now.state
        second = state["exp_avg_sq"]
        sums = {"L": second.sum(dim=1), "R": second.sum(dim=0)}
        bases = {}
        for name in self._sides(state):
            found = self._decomposed(now.index, name, partial(eigenbasis, state[name], self.eigh))
            if found is not None:
                bases[name], sums[name] = found
                state[f"{name}_basis"].copy_(bases[name])
        if bases:
            shares = [sums[name] / _or_one(sums[name].sum()) for name in _SIDES]
            second.copy_(second.sum() * torch.outer(*shares))
            state["exp_avg"].copy_(_into(state["exp_avg"], bases))

    def _turn(self, now: MatrixStep) -> None:
        """Later bases; see [Note: moments when the basis turns]."""
        state = now.state
        turns = {}
        for dim, name in enumerate(_SIDES):
            if name not in state:
                continue
            basis = state[f"{name}_basis"]
            found = self._decomposed(now.index, name, partial(next_basis, state[name], basis))
            if found is not None:
                new, order = found
                turns[name] = basis.mT @ new
                basis.copy_(new)
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].index_select(dim, order))
        state["exp_avg"].copy_(_into(state["exp_avg"], turns))

    @staticmethod
    def _sides(state: Mapping[str, torch.Tensor]) -> list[str]:
        return [name for name in _SIDES if name in state]


def _into(matrix: torch.Tensor, bases: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """L^T matrix R with the bases there are."""
    if "L" in bases:
        matrix = bases["L"].mT @ matrix
    return matrix @ bases["R"] if "R" in bases else matrix


def _or_one(value: torch.Tensor) -> torch.Tensor:
    return torch.where(value > 0, value, 1)
