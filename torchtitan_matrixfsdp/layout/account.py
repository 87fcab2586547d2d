"""What one training step sends: the whole account, ours beside the systems it is compared with.

Bytes that one rank sends for the blocks of a model, in the ring convention of ``volumes``. What
lies outside the blocks (embedding, head, final norm) is row-sharded alike in every system and left
out, as are the few scalars of gradient clipping.

The bytes of forward and backward are *prefetched*: they travel on streams of their own while
other blocks compute. (The first gather of a step and its last reduction have little to hide behind,
in every system alike.) Those of the optimizer step are *exposed*: backward is over and the next
forward waits for the result.

With owner shards the step sends nothing. What is asked instead is whether forward and backward
send more than FSDP2's own. Under ``balanced`` they send FSDP2's slices and the *overflow*: per
gather at most what the rank owns, per reduction at most one slice (about M / W over a model of M
elements), and nothing where every owner's part fills its own slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan_matrixfsdp.layout._messages import config_message
from torchtitan_matrixfsdp.layout.baseline_steps import BASELINE_STEPS, row_chunk_numel
from torchtitan_matrixfsdp.layout.block_plan import BlockPlan, check_rank
from torchtitan_matrixfsdp.layout.buffer import BufferLayout
from torchtitan_matrixfsdp.layout.plan import OwnerPlan
from torchtitan_matrixfsdp.layout.roles import RoleKind
from torchtitan_matrixfsdp.layout.volumes import (
    TRANSPORT_MODELS,
    TransportModel,
    Volume,
    choose_transport,
    ring_volume,
)


@dataclass(frozen=True, slots=True)
class StepAccount:
    """What one rank sends in one training step, in bytes.

    Attributes:
        forward: the gathers of the forward.
        backward: the gathers and reductions of the backward.
        step: the optimizer step's own traffic.
    """

    forward: int
    backward: int
    step: int

    @property
    def prefetched(self) -> int:
        """Bytes that travel while forward or backward computes."""
        return self.forward + self.backward

    @property
    def exposed(self) -> int:
        """Bytes with neither forward nor backward to hide behind."""
        return self.step

    @property
    def total(self) -> int:
        """All bytes sent."""
        return self.prefetched + self.exposed


@dataclass(frozen=True, slots=True)
class StepShape:
    """How a training step uses the blocks.

    Attributes:
        gather_itemsize: bytes per element of a gathered parameter.
        reduce_itemsize: bytes per element of a reduced gradient.
        step_itemsize: bytes per element of the updates that a baseline's optimizer step exchanges,
            unless its source fixes that: the stored dtype of gradients and momentum.
        is_resharded: whether blocks are resharded after forward, and so gathered once more.
        microbatches: forwards and backwards per step, each with its gathers and reduction.
        result_itemsize: bytes per element of the results that a baseline's step exchanges:
            Newton-Schulz's dtype.

    Raises:
        ValueError: an itemsize or ``microbatches`` below 1.
    """

    gather_itemsize: int = 4
    reduce_itemsize: int = 4
    step_itemsize: int = 4
    is_resharded: bool = True
    microbatches: int = 1
    result_itemsize: int = 2

    def __post_init__(self) -> None:
        counts = {
            "gather_itemsize": self.gather_itemsize,
            "reduce_itemsize": self.reduce_itemsize,
            "step_itemsize": self.step_itemsize,
            "result_itemsize": self.result_itemsize,
            "microbatches": self.microbatches,
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"StepShape.{name} is {value}; legal: >= 1")

    def account(self, gather: int, reduce: int, step: int) -> StepAccount:
        """Returns the account of ``gather`` bytes per gather of all blocks, ``reduce`` bytes per
        reduction and ``step`` bytes per optimizer step."""
        backward = (gather if self.is_resharded else 0) + reduce
        return StepAccount(self.microbatches * gather, self.microbatches * backward, step)


def owner_accounts(
    plan: OwnerPlan, transport: str, shape: StepShape, ranks: Iterable[int] | None = None
) -> tuple[StepAccount, ...]:
    """Returns the accounts of owner shards under ``transport``, of ``ranks`` (default: all).

    ``"auto"`` chooses once per block, as the runtime does: a block and its trainable part, which
    is reduced, go the same way.

    Raises:
        ValueError: an unknown transport, or a rank outside the plan.
    """
    if transport != "auto" and transport not in TRANSPORT_MODELS:
        legal = ", ".join(repr(name) for name in ("auto", *TRANSPORT_MODELS))
        raise ValueError(
            config_message(
                "owner_fsdp.transport", transport, "unknown transport", legal, "use one of these"
            )
        )
    gathered: list[tuple[TransportModel, BufferLayout]] = []
    reduced: list[tuple[TransportModel, BufferLayout]] = []
    for block in plan.blocks:
        name = transport
        if transport == "auto":
            name = choose_transport(block, shape.gather_itemsize, shape.reduce_itemsize)
        model = TRANSPORT_MODELS[name]
        gathered.append((model, model.arrange(block)))
        reduced.append((model, model.arrange(block.trainable())))
    accounts = []
    for rank in _checked(plan, ranks):
        gather = sum(model.gather(layout, rank).elements for model, layout in gathered)
        reduce = sum(model.reduce(layout, rank).elements for model, layout in reduced)
        accounts.append(
            shape.account(gather * shape.gather_itemsize, reduce * shape.reduce_itemsize, 0)
        )
    return tuple(accounts)


def fsdp_accounts(
    plan: OwnerPlan, step: str, shape: StepShape, ranks: Iterable[int] | None = None
) -> tuple[StepAccount, ...]:
    """Returns the accounts of stock FSDP2 with the optimizer step ``step`` (see
    ``BASELINE_STEPS``), of ``ranks`` (default: all). The plan's owners play no part.

    Raises:
        ValueError: an unknown step, or a rank outside the plan.
    """
    baseline = BASELINE_STEPS.get(step)
    if baseline is None:
        raise ValueError(f"step {step!r} is unknown; legal: {list(BASELINE_STEPS)}")
    gather = sum(fsdp_volume(block).elements for block in plan.blocks)
    reduce = sum(fsdp_volume(block.trainable()).elements for block in plan.blocks)
    shards = [shard for block in plan.blocks for shard in block.shards]
    matrices = [shard.shape for shard in shards if shard.kind is RoleKind.MATRIX]
    update_itemsize = baseline.itemsize or shape.step_itemsize
    result_itemsize = baseline.itemsize or shape.result_itemsize
    step_volume = baseline.volume(matrices, plan.world_size)
    return tuple(
        shape.account(
            gather * shape.gather_itemsize,
            reduce * shape.reduce_itemsize,
            step_volume(rank).nbytes(update_itemsize, result_itemsize),
        )
        for rank in _checked(plan, ranks)
    )


def fsdp_volume(block: BlockPlan) -> Volume:
    """Returns what each rank sends in FSDP2's all-gather of a block, and in its reduce-scatter.

    FSDP2 cuts each parameter into W chunks of ``ceil(rows / W)`` rows, the last ones padded, and
    moves a block's chunks in one collective.
    """
    return ring_volume(fsdp_slice_numel(block), block.world_size)


def fsdp_slice_numel(block: BlockPlan) -> int:
    """Returns the elements that each rank contributes to FSDP2's all-gather, padding included."""
    return sum(row_chunk_numel(shard.shape, block.world_size) for shard in block.shards)


def fsdp_gather_bytes(block: BlockPlan, itemsize: int) -> int:
    """Returns the bytes that FSDP2 holds on top of the shards while it unshards a block: the
    all-gather's output, and the parameters that are copied out of it.

    From two ranks on; mixed precision adds one slice, the cast shards.
    """
    return 2 * block.world_size * fsdp_slice_numel(block) * itemsize


def owner_gather_bytes(block: BlockPlan, transport: str, itemsize: int) -> int:
    """Returns the same for owner shards: the block's flat buffer, into which every transport
    gathers and of which the parameters are views."""
    return TRANSPORT_MODELS[transport].arrange(block).numel * itemsize


def _checked(plan: OwnerPlan, ranks: Iterable[int] | None) -> Sequence[int]:
    chosen = range(plan.world_size) if ranks is None else tuple(ranks)
    for rank in chosen:
        check_rank(rank, plan.world_size)
    return chosen
