"""Which rank's file holds which part of a tensor, in a checkpoint that no job saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.stored import DATA_RANK, StoredTensor, split_state_key
from torchtitan_matrixfsdp.layout import BlockMeta, OwnerPlan, ParamMeta


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in one rank's file."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Placement:
    """Places tensors as the jobs of ``world_size`` ranks do that this package knows.

    Parameters of the blocks, with their states, lie whole in the file of their owner. All others,
    and without a plan all of them, are cut into row chunks as FSDP2 cuts them, with those states
    that have their shape. What has another shape (a count of steps, a factor of Shampoo's) and no
    owner lies whole in the file that has the fewest bytes so far.

    Args:
        parameters: the model's tensors by FQN.
        plan: the owners; ``None``: nothing is owned.
    """

    def __init__(
        self, world_size: int, parameters: Mapping[str, StoredTensor], plan: OwnerPlan | None
    ) -> None:
        self.world_size = world_size
        self._parameters = parameters
        self._owners: dict[str, int] = {}
        if plan is not None:
            self._owners = {s.fqn: s.owner for block in plan.blocks for s in block.shards}
        self._bytes = [0] * world_size

    def pieces(self, tensor: StoredTensor) -> list[Piece]:
        """Where ``tensor`` goes; call it once for each tensor, always in the same order."""
        state = split_state_key(tensor.key, self._parameters)
        fqn = tensor.key if state is None else state[0]
        parameter = self._parameters.get(fqn)
        if fqn in self._owners:
            pieces = [_whole(tensor, self._owners[fqn])]
        elif parameter is not None and tensor.shape == parameter.shape and tensor.shape:
            pieces = row_pieces(tensor.shape, self.world_size)
        else:
            pieces = [_whole(tensor, self._bytes.index(min(self._bytes)))]
        for piece in pieces:
            self._bytes[piece.rank] += math.prod(piece.sizes) * tensor.dtype.itemsize
        return pieces

    def rank_of_object(self, key: str) -> int:
        """Whose file holds an object: a data rank's position its own, the others rank 0's."""
        number = key.removeprefix(DATA_RANK)
        if number == key or not number.isdecimal():
            return 0
        return int(number) % self.world_size


def _whole(tensor: StoredTensor, rank: int) -> Piece:
    return Piece(rank, (0,) * len(tensor.shape), tensor.shape)


def row_pieces(shape: Sequence[int], world_size: int) -> list[Piece]:
    """The rows of each rank: chunks of ``ceil(rows / world_size)``, as ``torch.chunk`` makes them,
    so that the last ranks may have fewer or none. An empty tensor is one piece."""
    rows, *rest = shape
    if 0 in shape:
        return [Piece(0, (0,) * len(shape), tuple(shape))]
    step = -(-rows // world_size)
    return [
        Piece(rank, (start, *[0] * len(rest)), (min(step, rows - start), *rest))
        for rank, start in enumerate(range(0, rows, step))
    ]


@dataclass(frozen=True)
class Blocks:
    """What a planner needs: the blocks, and which of their parameters are matrices."""

    blocks: tuple[BlockMeta, ...]
    matrices: frozenset[str]


def blocks_of_plans(plans: Sequence[Mapping[str, Any]]) -> Blocks:
    """The blocks that plans (records of a manifest) were made of, with the routing of their run.

    Stages of a pipeline have a plan each; together they have all blocks.
    """
    found: list[BlockMeta] = []
    matrices: set[str] = set()
    for block in (block for plan in plans for block in plan["blocks"]):
        params = tuple(
            ParamMeta(s["fqn"], tuple(s["shape"]), s["dtype"], s["itemsize"], s["trainable"])
            for s in block["shards"]
        )
        found.append(BlockMeta(block["name"], params))
        matrices.update(s["fqn"] for s in block["shards"] if s["kind"] == "matrix")
    # Interleaved stages hold every other block.
    found.sort(key=lambda block: [int(p) if p.isdecimal() else -1 for p in block.name.split(".")])
    return Blocks(tuple(found), frozenset(matrices))


def as_stored(blocks: Blocks, parameters: Mapping[str, StoredTensor], source: str) -> Blocks:
    """``blocks`` with the dtypes that the checkpoint has them in: planners count bytes.

    Raises:
        CheckpointError: the checkpoint lacks a parameter, or has it in another shape.
    """
    return replace(
        blocks,
        blocks=tuple(
            replace(block, params=tuple(_stored(p, parameters, source) for p in block.params))
            for block in blocks.blocks
        ),
    )


def _stored(param: ParamMeta, parameters: Mapping[str, StoredTensor], source: str) -> ParamMeta:
    stored = parameters.get(param.fqn)
    if stored is None or stored.shape != param.shape:
        received = "nothing" if stored is None else f"shape {stored.shape}"
        raise CheckpointError(
            f"{source}: {param.fqn}: received {received}; legal: shape {param.shape}. Choose the "
            "--model and --flavor that it was saved from."
        )
    dtype = str(stored.dtype).removeprefix("torch.")
    return replace(param, dtype=dtype, itemsize=stored.dtype.itemsize)
