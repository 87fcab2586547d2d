"""What Shampoo and SOAP share: counters, staggered refreshes, and state that keeps its dtype."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchtitan_matrixfsdp.optim.base import MatrixOptimizerBase, PendingUpdate
from torchtitan_matrixfsdp.optim.matrix_functions import DecompositionError, bounded
from torchtitan_matrixfsdp.optim.stagger import refresh_phases

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class MatrixStep:
    """One update of one matrix that is here.

    Attributes:
        param: [m, n], the weight.
        grad: [m, n] in the state's dtype, contiguous.
        state: of the parameter.
        group: its options.
        step: the number of this update, from 1.
        is_refreshed: whether a refresh was due in an earlier update.
        is_due: whether one is due in this update.
        index: of the parameter, in the order of all groups.
    """

    param: torch.Tensor
    grad: torch.Tensor
    state: dict[str, torch.Tensor]
    group: dict[str, Any]
    step: int
    is_refreshed: bool
    is_due: bool
    index: int

    def apply(self, update: torch.Tensor) -> None:
        """Decay the weight, and subtract the learning rate times ``update`` [m, n].

        The sum is formed in the update's dtype and rounded to the weight's.
        """
        lr = self.group["lr"]
        self.param.mul_(1 - lr * self.group["weight_decay"])
        self.param.add_(update, alpha=-lr)


class KroneckerOptimizer(MatrixOptimizerBase):
    """An optimizer with a factor per side of the gradient, G G^T and G^T G, and something costly
    made of them every ``precondition_frequency`` steps.

    State, besides what a subclass names in ``state_shapes``:

    - ``step``: updates of this parameter so far, a CPU float32 scalar as torch's AdamW has it;
    - ``refreshes``: how many of them were due to refresh, alike.

    Both advance on every rank. All other state is float64 for float64 parameters and float32 for
    any other dtype, and an update is computed in that dtype.

    The group options ``precondition_frequency`` and ``stagger`` say when a matrix refreshes: see
    :mod:`~torchtitan_matrixfsdp.optim.stagger`. Phases are shared by all matrices that stagger with
    the same frequency, whatever their group; with ``stagger`` false a matrix has phase 0. A
    change of either takes effect in the next step.

    Raises:
        ValueError: a parameter is not 2D, or is a part of a matrix: it can be stepped only whole.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        logical_shapes: Mapping[torch.Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        self._phase_of: dict[torch.Tensor, int] = {}
        self._phases_are_for: tuple[Any, ...] = ()
        self._index: dict[torch.Tensor, int] = {}
        self._reported: set[int] = set()
        super().__init__(params, defaults, logical_shapes)

    @staticmethod
    def eigh(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Eigenvalues, ascending, and eigenvectors of a symmetric [n, n], on its device."""
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors

    @abstractmethod
    def refresh_flops(self, shape: tuple[int, ...]) -> int:
        """The cost of a refresh of a matrix of logical ``shape``."""

    @abstractmethod
    def _step_matrix(self, now: MatrixStep) -> None:
        """Update one matrix, its state and, if due, what is refreshed."""

    @abstractmethod
    def _check(self, group: dict[str, Any]) -> None:
        """Raise ValueError for an option out of range."""

    def refresh_phase(self, param: torch.Tensor) -> int:
        """The phase of ``param``, the same on every rank: it refreshes in its step t, counted from
        1, if ``(t - 1) % precondition_frequency`` is the phase."""
        self._update_phases()
        return self._phase_of[param]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load as the base does, if the options are legal.

        Raises:
            ValueError: other groups, names or shapes than this optimizer's, or an illegal option.
        """
        for saved in state_dict["param_groups"]:
            self._check(saved)
        super().load_state_dict(state_dict)

    def _create_state(self, group: dict[str, Any]) -> None:
        self._check(group)
        for param in group["params"]:
            shape = self.logical_shape(param)
            if param.numel() > 0 and tuple(param.shape) != shape:
                raise ValueError(
                    f"{type(self).__name__} steps whole matrices: received a part of shape "
                    f"{tuple(param.shape)}; legal: {shape}, or nothing of it. Use Muon or AdamW "
                    "where a matrix is cut."
                )
            self._index[param] = len(self._index)
            dtype = _dtype_of_state(param)
            state = self.state[param]
            for name in ("step", "refreshes"):
                state[name] = torch.zeros((), dtype=torch.float32)
            for name, size in self.state_shapes(param).items():
                state[name] = self._state_tensor(param, size, dtype)
        self._phases_are_for = ()

    def _update(self, pending: Sequence[PendingUpdate]) -> None:
        self._update_phases()
        # One matrix after another: a single update is alive at a time.
        for param, grad, group in pending:
            state = self.state[param]
            step = int(state["step"].add_(1))  # on the CPU: no synchronisation
            phase = self._phase_of[param]
            is_due = (step - 1) % group["precondition_frequency"] == phase
            if param.numel() > 0:
                self._step_matrix(
                    MatrixStep(
                        param,
                        bounded(grad, _dtype_of_state(param)),
                        state,
                        group,
                        step,
                        bool(state["refreshes"] > 0),
                        is_due,
                        self._index[param],
                    )
                )
            if is_due:
                state["refreshes"].add_(1)

    def _update_phases(self) -> None:
        wanted = tuple((g["precondition_frequency"], g["stagger"]) for g in self.param_groups)
        if wanted == self._phases_are_for:
            return
        self._phase_of = {param: 0 for group in self.param_groups for param in group["params"]}
        for frequency in {frequency for frequency, stagger in wanted if stagger}:
            matrices = [
                param
                for group in self.param_groups
                if group["stagger"] and group["precondition_frequency"] == frequency
                for param in group["params"]
            ]
            costs = [self.refresh_flops(self.logical_shape(param)) for param in matrices]
            self._phase_of.update(zip(matrices, refresh_phases(costs, frequency), strict=True))
        self._phases_are_for = wanted

    def _decomposed(self, index: int, name: str, decompose: Callable[[], _Found]) -> _Found | None:
        """What ``decompose`` makes of the factor ``name`` of parameter ``index``; ``None``, with a
        warning once per parameter, if that fails.

        Raises:
            FloatingPointError: the factor is not finite.
        """
        where = f"{type(self).__name__}: parameter {index}, {name}"
        try:
            return decompose()
        except FloatingPointError as error:
            raise FloatingPointError(
                f"{where}: {error}. A gradient was NaN or infinite in this step or an earlier one; "
                "skip steps whose gradient norm is not finite."
            ) from error
        except DecompositionError as error:
            if index not in self._reported:
                self._reported.add(index)
                logger.warning(
                    f"{where}: {error}, in float64 either; the previous one stays in use. Further "
                    "failures of this parameter are not reported."
                )
            return None


def _dtype_of_state(param: torch.Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def check_option(name: str, value: Any, is_legal: bool, legal: str) -> None:
    """Raise ValueError unless ``is_legal``."""
    if not is_legal:
        raise ValueError(f"{name}: received {value!r}; legal: {legal}")


def as_number(value: Any) -> float:
    """``value``, or NaN if it is no number, so that no comparison with a range holds."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else math.nan


def check_common_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError unless the options that every Kronecker optimizer has are legal."""
    for name in ("lr", "weight_decay"):
        check_option(name, group[name], 0 <= as_number(group[name]) < math.inf, ">= 0")
    frequency = group["precondition_frequency"]
    is_legal = isinstance(frequency, int) and as_number(frequency) >= 1
    check_option("precondition_frequency", frequency, is_legal, "an integer >= 1")
    check_option("stagger", group["stagger"], isinstance(group["stagger"], bool), "true or false")
