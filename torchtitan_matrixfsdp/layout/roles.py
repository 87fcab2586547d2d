"""Cuts a block into roles, the atoms of ownership."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from torchtitan_matrixfsdp.layout._messages import some
from torchtitan_matrixfsdp.layout.params import BlockMeta, ParamMeta


class RoleKind(StrEnum):
    """Why parameters share an owner. The values are part of a plan's fingerprint."""

    MATRIX = "matrix"
    """One trainable 2D weight that the matrix optimizer updates."""
    FROZEN = "frozen"
    """One frozen weight of two or more dimensions. It is never updated, but stored and sent like
    a matrix: inside the tail it would drag the norms and biases onto one overloaded rank."""
    TAIL = "tail"
    """Everything else of the block, packed: biases, norms, weights routed elementwise."""


@dataclass(frozen=True, slots=True)
class Role:
    """Parameters of one block that live whole on one owner.

    ``index`` counts within the block: weights in parameter order, then the tail. ``params`` holds
    one parameter, or for the tail one or more in the block's order.
    """

    block: str
    index: int
    kind: RoleKind
    params: tuple[ParamMeta, ...]

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(param.numel for param in self.params)

    @property
    def nbytes(self) -> int:
        """Bytes of all its parameters in their stored dtypes."""
        return sum(param.nbytes for param in self.params)

    @property
    def name(self) -> str:
        """The weight's FQN, or "<block>/tail"."""
        return f"{self.block}/tail" if self.kind is RoleKind.TAIL else self.params[0].fqn


def build_roles(
    blocks: Sequence[BlockMeta], matrices: AbstractSet[str]
) -> tuple[tuple[Role, ...], ...]:
    """Returns each block's roles: its weights in parameter order, then its tail if it has one.

    ``matrices`` holds the canonical FQNs routed to the matrix optimizer. Every parameter of every
    block lands in exactly one role.

    Raises:
        ValueError: a matrix that lies in no block, is frozen, or is not 2D.
    """
    roles = tuple(_block_roles(block, matrices) for block in blocks)
    placed = {r.params[0].fqn for block in roles for r in block if r.kind is RoleKind.MATRIX}
    strays = sorted(matrices - placed)
    if strays:
        raise ValueError(
            f"{some(strays)}: routed to the matrix optimizer, but in none of the "
            f"{len(blocks)} blocks given; legal: canonical FQNs of the blocks' own weights"
        )
    return roles


def _block_roles(block: BlockMeta, matrices: AbstractSet[str]) -> tuple[Role, ...]:
    roles: list[Role] = []
    tail: list[ParamMeta] = []
    for param in block.params:
        kind = _kind_of(param, matrices)
        if kind is RoleKind.TAIL:
            tail.append(param)
        else:
            roles.append(Role(block.name, len(roles), kind, (param,)))
    if tail:
        roles.append(Role(block.name, len(roles), RoleKind.TAIL, tuple(tail)))
    return tuple(roles)


def _kind_of(param: ParamMeta, matrices: AbstractSet[str]) -> RoleKind:
    if param.fqn in matrices:
        if not param.trainable or param.ndim != 2:
            raise ValueError(
                f"{param.fqn}: routed to the matrix optimizer with shape {param.shape} and "
                f"trainable={param.trainable}; legal: trainable 2D weights"
            )
        return RoleKind.MATRIX
    if not param.trainable and param.ndim >= 2:
        return RoleKind.FROZEN
    return RoleKind.TAIL
