r"""Muon on plain tensors.

The maths are those of ``torch.optim.Muon`` (and its conventions, which differ between libraries).
With gradient :math:`g`, momentum buffer :math:`B`, :math:`\mu` = ``momentum``, learning rate
:math:`\gamma`, decay :math:`\lambda` and a weight of logical shape (out, in):

.. math::
    B &\leftarrow \mu B + (1 - \mu) g \\
    u &= (1 - \mu) g + \mu B \ \text{ if nesterov, else } B \\
    O &= \mathrm{NewtonSchulz}(u) \\
    W &\leftarrow (1 - \gamma \lambda) W - \gamma \, s(\text{out}, \text{in}) \, O

The decay uses the base learning rate, not the adjusted one. :math:`s` is ``adjust_lr``:

- ``original`` (Jordan): :math:`\sqrt{\max(1, \text{out}/\text{in})}`;
- ``match_rms_adamw`` (Moonlight, arXiv 2502.16982): :math:`0.2\sqrt{\max(\text{out}, \text{in})}`.
  The update then has the RMS of a typical AdamW step, and AdamW's rate and decay carry over.

The one difference from ``torch.optim.Muon``: the orthogonalisation is scale-invariant down to
1e-30 (see :mod:`~torchtitan_matrixfsdp.optim.newton_schulz`), and its dtype and coefficients can be
chosen.

A weight that holds several matrices, such as the heads of an attention projection, can have a
:class:`Split`: then u is cut into blocks, each block is orthogonalised by itself, and (out, in) in
s is the block's shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_matrixfsdp.optim.base import MatrixOptimizerBase, PendingUpdate
from torchtitan_matrixfsdp.optim.newton_schulz import (
    batches,
    newton_schulz_each,
    step_coefficients,
)

ADJUST_LR = ("original", "match_rms_adamw")


def lr_scale(adjust_lr: str, shape: tuple[int, ...]) -> float:
    """The factor s(out, in) on the learning rate (dimensionless).

    Raises:
        ValueError: ``adjust_lr`` is unknown.
    """
    # Nothing of an empty matrix is scaled; its width must only not be divided by.
    rows, cols = shape[0], shape[1] or 1
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / cols))
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    raise ValueError(f"adjust_lr: received {adjust_lr!r}; legal: {list(ADJUST_LR)}")


@dataclass(frozen=True)
class Split:
    """A weight of ``parts`` equal blocks that are orthogonalised one by one.

    Attributes:
        dim: 0 for blocks of rows, 1 for blocks of columns.
        parts: how many, at least 1.

    Raises:
        ValueError: another ``dim``, or ``parts`` below 1.
    """

    dim: int
    parts: int

    def __post_init__(self) -> None:
        if self.dim not in (0, 1) or self.parts < 1:
            raise ValueError(
                f"Split(dim={self.dim}, parts={self.parts}); legal: dim 0 (rows) or 1 (columns), "
                "parts >= 1"
            )

    def block_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """The shape of each block of a weight of ``shape`` (rows, columns).

        Raises:
            ValueError: the length does not divide by ``parts``.
        """
        block = [shape[0], shape[1]]
        if block[self.dim] % self.parts:
            raise ValueError(
                f"{self} of a weight of shape {tuple(shape)}; legal: a number of parts that "
                f"divides {block[self.dim]}"
            )
        block[self.dim] //= self.parts
        return block[0], block[1]


class Muon(MatrixOptimizerBase):
    """Muon for 2D parameters.

    Matrices of one shape are orthogonalised together where that is faster, up to
    ``newton_schulz.BATCH_ELEMENTS`` elements at a time; beside the parameters, gradients and
    momentum, no more updates than these are alive.

    Parameters with numel 0 (matrices that another rank owns) keep their empty state and are not
    orthogonalised. State is created with the optimizer: ``momentum_buffer``, of the parameter's
    shape and dtype.

    Args:
        params: 2D parameters or groups of them.
        lr: learning rate, >= 0.
        weight_decay: decoupled decay, >= 0.
        momentum: in [0, 1).
        nesterov: look ahead by one momentum step.
        ns_steps: Newton-Schulz iterations, >= 1.
        ns_dtype: dtype of Newton-Schulz.
        adjust_lr: one of ``ADJUST_LR``.
        logical_shapes: as for :class:`MatrixOptimizerBase`.
        coefficients: of Newton-Schulz, a name in ``newton_schulz.COEFFICIENTS``.
        split: the weights that are cut into blocks, by their logical shape.

    Raises:
        ValueError: a hyperparameter out of range, a parameter that is not 2D, or a split that
            does not divide its parameter or is of another tensor.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 0.02,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        adjust_lr: str = "match_rms_adamw",
        logical_shapes: Mapping[torch.Tensor, tuple[int, ...]] | None = None,
        coefficients: str = "quintic",
        split: Mapping[torch.Tensor, Split] | None = None,
    ) -> None:
        if not lr >= 0:  # NaN too
            raise ValueError(f"lr: received {lr}; legal: >= 0")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay: received {weight_decay}; legal: >= 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum: received {momentum}; legal: 0 <= momentum < 1")
        if ns_steps < 1:
            raise ValueError(f"ns_steps: received {ns_steps}; legal: >= 1")
        lr_scale(adjust_lr, (1, 1))  # raises on an unknown name
        step_coefficients(coefficients, ns_steps)  # likewise
        # Not group options: checkpoints save those, and these are how to compute, not state.
        self._ns_dtype = ns_dtype
        self._coefficients = coefficients
        self._split = dict(split or {})
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
        }
        super().__init__(params, defaults, logical_shapes)
        mine = {param for group in self.param_groups for param in group["params"]}
        for param in self._split.keys() - mine:
            raise ValueError(
                f"split: received a tensor of shape {tuple(param.shape)} that is in no group; "
                "legal: the parameters themselves"
            )

    def state_shapes(self, param: torch.Tensor) -> Mapping[str, tuple[int, ...]]:
        """``momentum_buffer``, of the matrix's shape."""
        return {"momentum_buffer": self.logical_shape(param)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and create its state."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            self._matrix_shape(param)  # raises where a split does not divide

    def _create_state(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(
                param, requires_grad=False, memory_format=torch.preserve_format
            )

    def _update(self, pending: Sequence[PendingUpdate]) -> None:
        # A rank owns a part of the list, and has nothing to do for the rest.
        for batch in self._batches([entry for entry in pending if entry[0].numel() > 0]):
            params = [param for param, _, _ in batch]
            updates = [self._average(*entry) for entry in batch]
            directions = self._orthogonalise(params, updates, batch[0][2]["ns_steps"])
            for (param, _, group), direction in zip(batch, directions, strict=True):
                self._apply(param, direction, group)

    def _batches(self, pending: Sequence[PendingUpdate]) -> Iterator[list[PendingUpdate]]:
        """Parts of ``pending`` that are averaged, orthogonalised and applied together: their
        updates are alive at a time."""
        by_steps: dict[int, list[PendingUpdate]] = {}
        for entry in pending:
            by_steps.setdefault(entry[2]["ns_steps"], []).append(entry)
        for entries in by_steps.values():
            for indices in batches([param for param, _, _ in entries]):
                yield [entries[index] for index in indices]

    def _average(
        self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        """Moves the momentum buffer; returns what is to be orthogonalised, of ``grad``'s shape."""
        momentum = group["momentum"]
        buffer = self.state[param]["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if group["nesterov"] else buffer

    def _apply(self, param: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]) -> None:
        lr = group["lr"]
        scale = lr_scale(group["adjust_lr"], self._matrix_shape(param))
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(direction, alpha=-lr * scale)

    def _matrix_shape(self, param: torch.Tensor) -> tuple[int, ...]:
        """The logical shape of what is orthogonalised: a block of a split weight."""
        shape = self.logical_shape(param)
        split = self._split.get(param)
        return shape if split is None else split.block_shape(shape)

    def _orthogonalise_wholes(
        self, entries: Sequence[PendingUpdate], wholes: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The orthogonalised whole of each entry's update, for subclasses whose parameters are
        parts of matrices."""
        results = list(wholes)
        by_steps: dict[int, list[int]] = {}
        for index, (_, _, group) in enumerate(entries):
            by_steps.setdefault(group["ns_steps"], []).append(index)
        for steps, indices in by_steps.items():
            params = [entries[index][0] for index in indices]
            found = self._orthogonalise(params, [wholes[index] for index in indices], steps)
            for index, result in zip(indices, found, strict=True):
                results[index] = result
        return results

    def _orthogonalise(
        self, params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor], steps: int
    ) -> list[torch.Tensor]:
        """Each orthogonalised update, of its shape: a whole matrix, or numel 0."""
        blocks = [self._blocks(*pair) for pair in zip(params, updates, strict=True)]
        found = iter(
            newton_schulz_each(
                [block for blocks_of_one in blocks for block in blocks_of_one],
                steps=steps,
                compute_dtype=self._ns_dtype,
                coefficients=self._coefficients,
            )
        )
        results = []
        for param, blocks_of_one in zip(params, blocks, strict=True):
            parts = [next(found) for _ in blocks_of_one]
            results.append(
                parts[0] if len(parts) == 1 else torch.cat(parts, self._split[param].dim)
            )
        return results

    def _blocks(self, param: torch.Tensor, update: torch.Tensor) -> Sequence[torch.Tensor]:
        split = self._split.get(param)
        if split is None or update.numel() == 0:
            return [update]
        return update.chunk(split.parts, split.dim)
