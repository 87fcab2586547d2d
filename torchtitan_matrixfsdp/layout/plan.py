"""The frozen plan: every parameter of every block with its owner.

A plan is validated once, when it is built; whatever reads it afterwards trusts it. Ranks compare
fingerprints before their first collective, so a plan must come out equal on every rank: nothing
here depends on the order of a set or of a dict, on hashing, or on the process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TypedDict

from torchtitan_matrixfsdp.layout.block_plan import (
    BlockPlan,
    MatrixShard,
    PlanError,
    check_block,
    check_rank,
    check_world_size,
)
from torchtitan_matrixfsdp.layout.costs import gamma
from torchtitan_matrixfsdp.layout.params import canonical_fqn
from torchtitan_matrixfsdp.layout.roles import RoleKind


class _ShardRecord(TypedDict):
    # The block's name is not repeated: the block's record encloses this one.
    fqn: str
    shape: list[int]
    dtype: str
    itemsize: int
    kind: str
    trainable: bool
    owner: int


class _BlockRecord(TypedDict):
    name: str
    shards: list[_ShardRecord]


class _PlanRecord(TypedDict):
    planner: str
    chosen: str
    world_size: int
    blocks: list[_BlockRecord]


@dataclass(frozen=True)
class OwnerPlan:
    """Every block's parameters with their owners, for one shard group of ``world_size`` ranks.

    ``planner`` is the planner asked for, ``chosen`` the one whose placement was taken; they differ
    only for planners that choose between others. A rank may own nothing at all.

    Raises:
        PlanError: a parameter or block listed twice, an owner outside range(world_size), a tail
            with two owners, or a shard whose kind or block contradicts it.
    """

    planner: str
    world_size: int
    blocks: tuple[BlockPlan, ...]
    chosen: str

    def __post_init__(self) -> None:
        check_world_size(self.world_size)
        self._check_names()
        for block in self.blocks:
            if block.world_size != self.world_size:
                raise PlanError(
                    f"block {block.name!r}: world_size is {block.world_size}; legal: the plan's, "
                    f"{self.world_size}"
                )
            check_block(block)

    def shard(self, fqn: str) -> MatrixShard:
        """Returns what the plan says of one parameter; wrapped names are welcome.

        Raises:
            KeyError: the plan has no such parameter.
        """
        found = self._shards_by_fqn.get(canonical_fqn(fqn))
        if found is None:
            raise KeyError(
                f"no parameter {fqn!r} in this plan of {len(self._shards_by_fqn)} parameters; "
                "parameters outside the blocks have no owner"
            )
        return found

    def block(self, name: str) -> BlockPlan:
        """Returns the plan of one block.

        Raises:
            KeyError: the plan has no such block.
        """
        found = self._blocks_by_name.get(name)
        if found is None:
            raise KeyError(f"no block {name!r} in this plan; blocks: {list(self._blocks_by_name)}")
        return found

    def owned_bytes(self, rank: int) -> int:
        """Returns the parameter bytes that ``rank`` stores over all blocks."""
        check_rank(rank, self.world_size)
        return self._rank_bytes[rank]

    def rank_bytes(self) -> tuple[int, ...]:
        """Returns the parameter bytes that each rank stores over all blocks."""
        return self._rank_bytes

    @cached_property
    def num_roles(self) -> int:
        """Roles over all blocks: one per matrix or frozen weight, one per tail."""
        weights = sum(s.kind is not RoleKind.TAIL for b in self.blocks for s in b.shards)
        tails = sum(any(s.kind is RoleKind.TAIL for s in b.shards) for b in self.blocks)
        return weights + tails

    @property
    def imbalance(self) -> float:
        """Largest over mean bytes stored by a rank; 1 is perfect, and an empty plan is."""
        return gamma(self.world_size, self._rank_bytes, sum(self._rank_bytes))

    def gammas(self) -> tuple[float, ...]:
        """Returns gamma of each block, in block order."""
        return tuple(block.gamma for block in self.blocks)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of ``to_json()``: equal exactly when two plans are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the whole plan as canonical JSON: sorted keys, no spaces, ASCII."""
        return json.dumps(self._record(), sort_keys=True, separators=(",", ":"))

    def first_difference(self, other_json: str) -> str | None:
        """Returns where another plan's ``to_json()`` first departs from this one, or None.

        The text names the parameter (or the plan-wide field) and both values, "here" being this
        plan: it is meant for the error that ranks raise when their fingerprints disagree.
        """
        mine = self._record()
        theirs: _PlanRecord = json.loads(other_json)
        found = _first_field_difference("the plan's ", mine, theirs, ignored="blocks")
        if found:
            return found
        for index, (one, other) in enumerate(zip_longest(mine["blocks"], theirs["blocks"])):
            found = _block_difference(index, one, other)
            if found:
                return found
        return None

    def _check_names(self) -> None:
        blocks: set[str] = set()
        block_of: dict[str, str] = {}
        for block in self.blocks:
            if block.name in blocks:
                raise PlanError(f"block {block.name!r} is listed twice; legal: once")
            blocks.add(block.name)
            for shard in block.shards:
                if shard.fqn in block_of:
                    raise PlanError(
                        f"{shard.fqn}: listed in block {block_of[shard.fqn]!r} and again in block "
                        f"{block.name!r}; legal: once in the plan"
                    )
                block_of[shard.fqn] = block.name

    def _record(self) -> _PlanRecord:
        return {
            "planner": self.planner,
            "chosen": self.chosen,
            "world_size": self.world_size,
            "blocks": [
                {"name": block.name, "shards": [_shard_record(shard) for shard in block.shards]}
                for block in self.blocks
            ],
        }

    @cached_property
    def _shards_by_fqn(self) -> Mapping[str, MatrixShard]:
        return {shard.fqn: shard for block in self.blocks for shard in block.shards}

    @cached_property
    def _blocks_by_name(self) -> Mapping[str, BlockPlan]:
        return {block.name: block for block in self.blocks}

    @cached_property
    def _rank_bytes(self) -> tuple[int, ...]:
        owned = [0] * self.world_size
        for block in self.blocks:
            for rank in block.owners:
                owned[rank] += block.owned_bytes(rank)
        return tuple(owned)


def _shard_record(shard: MatrixShard) -> _ShardRecord:
    return {
        "fqn": shard.fqn,
        "shape": list(shard.shape),
        "dtype": shard.dtype,
        "itemsize": shard.itemsize,
        "kind": shard.kind.value,
        "trainable": shard.trainable,
        "owner": shard.owner,
    }


# Differences are looked for field by field, whatever the fields are: a plan from another version of
# this package then still gets a sentence that names the field.
def _first_field_difference(
    label: str, mine: Mapping[str, object], theirs: Mapping[str, object], ignored: str
) -> str | None:
    for field in sorted((mine.keys() | theirs.keys()) - {ignored}):
        if mine.get(field) != theirs.get(field):
            return f"{label}{field} is {mine.get(field)!r} here and {theirs.get(field)!r} there"
    return None


def _block_difference(
    index: int, mine: _BlockRecord | None, theirs: _BlockRecord | None
) -> str | None:
    if mine is None or theirs is None or mine["name"] != theirs["name"]:
        names = [repr(record["name"]) if record else "absent" for record in (mine, theirs)]
        return f"block {index} is {names[0]} here and {names[1]} there"
    where = f"block {mine['name']!r}, parameter"
    for position, (one, other) in enumerate(zip_longest(mine["shards"], theirs["shards"])):
        if one is None or other is None or one["fqn"] != other["fqn"]:
            fqns = [repr(record["fqn"]) if record else "absent" for record in (one, other)]
            return f"{where} {position} is {fqns[0]} here and {fqns[1]} there"
        found = _first_field_difference(f"{where} {one['fqn']!r}: ", one, other, ignored="fqn")
        if found:
            return found
    return None
