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

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torchtitan_matrixfsdp.layout._messages import config_message
from torchtitan_matrixfsdp.layout.block_plan import BlockPlan, MatrixShard, check_rank
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

_BFLOAT16 = 2


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
        step_itemsize: bytes per element of what a baseline's optimizer step exchanges, unless its
            source fixes that: the stored dtype of gradients and momentum.
        is_resharded: whether blocks are resharded after forward, and so gathered once more.
        microbatches: forwards and backwards per step, each with its gathers and reduction.

    Raises:
        ValueError: an itemsize or ``microbatches`` below 1.
    """

    gather_itemsize: int = 4
    reduce_itemsize: int = 4
    step_itemsize: int = 4
    is_resharded: bool = True
    microbatches: int = 1

    def __post_init__(self) -> None:
        counts = {
            "gather_itemsize": self.gather_itemsize,
            "reduce_itemsize": self.reduce_itemsize,
            "step_itemsize": self.step_itemsize,
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
    ``BASELINE_STEPS``), of ``ranks`` (default: all).

    Only ``all_to_all`` reads the plan's owners, as those who orthogonalise.

    Raises:
        ValueError: an unknown step, or a rank outside the plan.
    """
    baseline = BASELINE_STEPS.get(step)
    if baseline is None:
        raise ValueError(f"step {step!r} is unknown; legal: {list(BASELINE_STEPS)}")
    gather = sum(fsdp_volume(block).elements for block in plan.blocks)
    reduce = sum(fsdp_volume(block.trainable()).elements for block in plan.blocks)
    shards = [shard for block in plan.blocks for shard in block.shards]
    matrices = [shard for shard in shards if shard.kind is RoleKind.MATRIX]
    itemsize = baseline.itemsize or shape.step_itemsize
    elements = baseline.elements(matrices, plan.world_size)
    return tuple(
        shape.account(
            gather * shape.gather_itemsize,
            reduce * shape.reduce_itemsize,
            elements(rank) * itemsize,
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
    return sum(_chunk_numel(shard, block.world_size) for shard in block.shards)


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


ElementsOf = Callable[[int], int]
"""A rank to the elements that it sends."""


@dataclass(frozen=True, slots=True)
class BaselineStep:
    """How a matrix optimizer on row shards comes by whole matrices.

    Attributes:
        elements: what each rank sends, from the matrices and W.
        itemsize: bytes per element where the source fixes the dtype; None: ``step_itemsize``.
        label: for tables.
    """

    elements: Callable[[Sequence[MatrixShard], int], ElementsOf]
    itemsize: int | None
    label: str


def _gather_each(matrices: Sequence[MatrixShard], world_size: int) -> ElementsOf:
    """Stock FSDP2-Muon, this package's ``mode = "stock"``: every rank gathers each matrix's update
    and orthogonalises all of them. One all-gather per matrix, of the rows padded to equal chunks,
    in the stored dtype (what ``DTensor.full_tensor`` does)."""
    chunks = sum(_chunk_numel(matrix, world_size) for matrix in matrices)
    sent = ring_volume(chunks, world_size).elements
    return lambda rank: sent


def _gather_once(matrices: Sequence[MatrixShard], world_size: int) -> ElementsOf:
    """One packed all-gather of all updates, Newton-Schulz on one owner per matrix, one packed
    all-gather of the results. Assumed in its favour: the results divide evenly over the ranks,
    whatever the sizes of the matrices."""
    chunks = sum(_chunk_numel(matrix, world_size) for matrix in matrices)
    results = -(-sum(matrix.numel for matrix in matrices) // world_size)
    sent = ring_volume(chunks + results, world_size).elements
    return lambda rank: sent


def _all_to_all(matrices: Sequence[MatrixShard], world_size: int) -> ElementsOf:
    """DistMuon (TorchTitan's flex_shard): the row shards of each update go to its owner, and the
    rows of the result come back, in uneven all-to-alls without padding, in the stored dtype. Owners
    are the plan's, which are as balanced as its own LPT's. Its buckets are double buffered, so
    that Newton-Schulz on one hides part of the next one's traffic; none of it is hidden behind
    forward or backward."""
    owned: dict[int, list[MatrixShard]] = {}
    for matrix in matrices:
        owned.setdefault(matrix.owner, []).append(matrix)
    shapes = Counter(matrix.shape for matrix in matrices)

    def elements(rank: int) -> int:
        rows = sum(n * _row_shard_numel(shape, rank, world_size) for shape, n in shapes.items())
        mine = owned.get(rank, ())
        kept = sum(_row_shard_numel(matrix.shape, rank, world_size) for matrix in mine)
        there = rows - kept
        back = sum(matrix.numel for matrix in mine) - kept
        return there + back

    return elements


def _padded_all_to_all(matrices: Sequence[MatrixShard], world_size: int) -> ElementsOf:
    """dion's Muon: matrices of one shape make a batch, padded with zero matrices to a multiple of
    W; row shards are padded to ``ceil(rows / W)``. Each rank orthogonalises 1 / W of the batch,
    between two even all-to-alls in bfloat16."""
    sent = 0
    for shape, count in Counter(matrix.shape for matrix in matrices).items():
        rows, cols = shape
        per_rank = -(-count // world_size)
        # To each peer: this rank's rows of the peer's matrices; and the same amount back.
        sent += 2 * (world_size - 1) * per_rank * -(-rows // world_size) * cols
    return lambda rank: sent


BASELINE_STEPS: Mapping[str, BaselineStep] = MappingProxyType(
    {
        "gather_each": BaselineStep(_gather_each, None, "gather each matrix"),
        "gather_once": BaselineStep(_gather_once, None, "gather once, results back"),
        "all_to_all": BaselineStep(_all_to_all, None, "all-to-all (DistMuon)"),
        "padded_all_to_all": BaselineStep(
            _padded_all_to_all, _BFLOAT16, "padded all-to-all, bf16 (dion)"
        ),
    }
)


def _checked(plan: OwnerPlan, ranks: Iterable[int] | None) -> Sequence[int]:
    chosen = range(plan.world_size) if ranks is None else tuple(ranks)
    for rank in chosen:
        check_rank(rank, plan.world_size)
    return chosen


def _chunk_numel(shard: MatrixShard, world_size: int) -> int:
    """Elements of one of the W equal chunks, in rows, that FSDP2 and DTensor pad a tensor to."""
    rows, *rest = shard.shape or (1,)
    numel = -(-rows // world_size)
    for size in rest:
        numel *= size
    return numel


def _row_shard_numel(shape: Sequence[int], rank: int, world_size: int) -> int:
    """Elements of the rows of a matrix that ``rank`` holds, without padding."""
    rows, cols = shape
    chunk = -(-rows // world_size)
    return max(0, min(rows - rank * chunk, chunk)) * cols
