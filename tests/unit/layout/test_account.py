from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.layout.models import (
    SMALL,
    Model,
    models,
    transformer,
    weights,
    weights_model,
)
from torchtitan_matrixfsdp.layout import (
    ALIGNMENT,
    BASELINE_STEPS,
    TRANSPORT_MODELS,
    BlockMeta,
    BlockPlan,
    MatrixShard,
    OwnerPlan,
    ParamMeta,
    RoleKind,
    StepAccount,
    StepShape,
    aligned,
    arrange_in_slices,
    choose_transport,
    fsdp_accounts,
    fsdp_gather_bytes,
    fsdp_slice_numel,
    fsdp_volume,
    largest_first,
    make_plan,
    muon_flops,
    owner_accounts,
    owner_gather_bytes,
)

WORLD_SIZES = (1, 2, 3, 4, 8, 64)
TRANSPORTS = (*TRANSPORT_MODELS, "auto")
BF16_AND_FLOAT32 = StepShape(gather_itemsize=2, reduce_itemsize=4, step_itemsize=4)


def plan_of(model: Model, world_size: int) -> OwnerPlan:
    return make_plan("cost_aware", model.blocks, model.matrices, world_size)


def matrices_of(plan: OwnerPlan) -> list[MatrixShard]:
    return [s for b in plan.blocks for s in b.shards if s.kind is RoleKind.MATRIX]


def rows_of(rank: int, rows: int, world_size: int) -> range:
    """The rows that torch.chunk gives a rank."""
    chunk = math.ceil(rows / world_size)
    return range(min(rank * chunk, rows), min((rank + 1) * chunk, rows))


def test_an_account_adds_up():
    account = StepAccount(forward=3, backward=5, step=7)
    assert (account.prefetched, account.exposed, account.total) == (8, 7, 15)


def test_gathers_and_reductions_of_a_step():
    """Resharded blocks are gathered twice; accumulation repeats both, but not the step."""
    assert StepShape().account(10, 100, 1000) == StepAccount(10, 110, 1000)
    assert StepShape(is_resharded=False).account(10, 100, 1000) == StepAccount(10, 100, 1000)
    assert StepShape(microbatches=3).account(10, 100, 1000) == StepAccount(30, 330, 1000)


@pytest.mark.parametrize(
    "field",
    ["gather_itemsize", "reduce_itemsize", "step_itemsize", "result_itemsize", "microbatches"],
)
def test_a_step_of_nothing_is_refused(field):
    with pytest.raises(ValueError, match=rf"StepShape.{field} is 0; legal: >= 1"):
        StepShape(**{field: 0})


def test_fsdp_by_hand():
    """W=4: 5 rows make chunks of 2 rows, 3 elements a chunk of 1; frozen ones are not reduced."""
    block = BlockMeta(
        "b",
        (
            ParamMeta("b.w", (5, 3), "float32", 4),
            ParamMeta("b.bias", (3,), "float32", 4),
            ParamMeta("b.frozen", (8, 2), "float32", 4, trainable=False),
            ParamMeta("b.cube", (4, 2, 5), "float32", 4),
            ParamMeta("b.empty", (0, 7), "float32", 4),
        ),
    )
    plan = plan_of(Model((block,), frozenset({"b.w"})), 4)
    trainable = 2 * 3 + 1 + 1 * 2 * 5
    assert fsdp_slice_numel(plan.blocks[0]) == trainable + 2 * 2
    assert fsdp_volume(plan.blocks[0]).elements == 3 * (trainable + 4)
    assert fsdp_gather_bytes(plan.blocks[0], 2) == 2 * 4 * (trainable + 4) * 2
    (account, *_) = fsdp_accounts(plan, "gather", BF16_AND_FLOAT32)
    gather, reduce = 3 * (trainable + 4) * 2, 3 * trainable * 4
    assert account == StepAccount(gather, gather + reduce, 3 * 2 * 3 * 4)


def test_baseline_steps_by_hand():
    """W=2, matrices of 3x4 (owner 0), 3x4 (owner 1) and 1x4 (owner 1), float32."""
    shapes = {"b.p": ((3, 4), 0), "b.q": ((3, 4), 1), "b.r": ((1, 4), 1)}
    shards = tuple(
        MatrixShard(fqn, shape, "float32", 4, RoleKind.MATRIX, True, "b", owner)
        for fqn, (shape, owner) in shapes.items()
    )
    plan = OwnerPlan("by hand", 2, (BlockPlan("b", 2, shards),), "by hand")

    def step(name: str) -> list[int]:
        return [account.step for account in fsdp_accounts(plan, name, StepShape())]

    chunks = 2 * 4 + 2 * 4 + 1 * 4  # a rank's rows of each, padded
    assert step("gather") == [4 * chunks] * 2
    assert step("gather_once") == [4 * chunks] * 2
    assert step("gather_and_back") == [4 * chunks + 2 * 28 // 2] * 2
    # Rank 0 has rows 0 and 1 of p and q, and r; it works on p and r, rank 1 on q. Rank 0 sends its
    # rows of q, in float32, and of p's result row 2, in bfloat16. Rank 1 sends its row of p, and of
    # q's result rank 0's two rows. (The plan's owners are others.)
    assert step("all_to_all") == [4 * 8 + 2 * 4, 4 * 4 + 2 * 8]
    # A batch of two 3x4 and a batch of one 1x4, filled up to two: one matrix a rank of each; there
    # and back, in bfloat16.
    assert step("padded_all_to_all") == [2 * 2 * (2 * 4 + 1 * 4)] * 2


@SMALL
@given(models(), st.sampled_from(WORLD_SIZES))
def test_all_to_all_moves_each_row_to_its_worker_and_back(model, world_size):
    plan = plan_of(model, world_size)
    shapes = [matrix.shape for matrix in matrices_of(plan)]
    workers = largest_first([muon_flops(shape, 1) for shape in shapes], world_size)
    sent = [0] * world_size
    for (rows, cols), worker in zip(shapes, workers, strict=True):
        for rank in range(world_size):
            if rank != worker:
                numel = len(rows_of(rank, rows, world_size)) * cols
                sent[rank] += 4 * numel
                sent[worker] += 2 * numel
    accounts = fsdp_accounts(plan, "all_to_all", StepShape(step_itemsize=4, result_itemsize=2))
    assert [account.step for account in accounts] == sent


@SMALL
@given(models(), st.sampled_from(WORLD_SIZES))
def test_fsdp_moves_what_torch_chunk_makes(model, world_size):
    plan = plan_of(model, world_size)
    for block in plan.blocks:
        chunks = 0
        for shard in block.shards:
            rows, *rest = shard.shape or (1,)
            largest = max(len(rows_of(r, rows, world_size)) for r in range(world_size))
            chunks += largest * math.prod(rest)
        assert fsdp_slice_numel(block) == chunks
        assert world_size * chunks >= block.numel


@SMALL
@given(models(), st.sampled_from(WORLD_SIZES), st.booleans(), st.integers(1, 3))
def test_the_step_of_owner_shards_is_empty(model, world_size, is_resharded, microbatches):
    plan = plan_of(model, world_size)
    shape = StepShape(2, 4, 4, is_resharded, microbatches)
    for transport in TRANSPORTS:
        for account in owner_accounts(plan, transport, shape):
            assert account.exposed == 0
            assert account.total == account.prefetched
            if world_size == 1:
                assert account.total == 0


@SMALL
@given(models(), st.sampled_from(WORLD_SIZES))
def test_balanced_exceeds_fsdp_by_its_overflow_at_most(model, world_size):
    """Per gather at most what the rank owns, per reduction at most one slice; and FSDP2's slice is
    exceeded by alignment alone."""
    plan = plan_of(model, world_size)
    gathers = [0] * world_size
    reductions = [0] * world_size
    for block in plan.blocks:
        gathered, reduced = arrange_in_slices(block), arrange_in_slices(block.trainable())
        padding = [
            layout.slice_numel - fsdp_slice_numel(layout.block) for layout in (gathered, reduced)
        ]
        assert max(padding) <= ALIGNMENT * (2 + len(block.shards) / world_size)
        for rank in range(world_size):
            gathers[rank] += (world_size - 1) * padding[0] + gathered.packed_numel(rank)
            reductions[rank] += (world_size - 1) * padding[1] + reduced.slice_numel
    shape = StepShape(2, 4)
    ours = owner_accounts(plan, "balanced", shape)
    stock = fsdp_accounts(plan, "gather", shape)
    for rank in range(world_size):
        gather, reduction = 2 * gathers[rank], 4 * reductions[rank]
        assert ours[rank].forward - stock[rank].forward <= gather
        assert ours[rank].backward - stock[rank].backward <= gather + reduction


@SMALL
@given(
    st.integers(1, 5),
    st.sampled_from(WORLD_SIZES),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_balanced_blocks_send_fsdps_bytes_and_nothing_more(blocks, world_size, rows, cols):
    """gamma = 1, one weight per rank and no padding on either side: equal to the byte."""
    shape = (world_size * rows, ALIGNMENT * cols)
    model = weights_model(
        *(
            BlockMeta(
                f"b{b}",
                tuple(ParamMeta(f"b{b}.w{i}", shape, "float32", 4) for i in range(world_size)),
            )
            for b in range(blocks)
        )
    )
    plan = plan_of(model, world_size)
    assert set(plan.gammas()) == {1.0}
    stock = fsdp_accounts(plan, "gather", BF16_AND_FLOAT32)
    for transport in ("balanced", "p2p"):
        ours = owner_accounts(plan, transport, BF16_AND_FLOAT32)
        assert [replace(account, step=0) for account in stock] == list(ours)


@SMALL
@given(models(), st.sampled_from(WORLD_SIZES))
def test_auto_is_the_runtimes_choice_per_block(model, world_size):
    """One choice per block, for its trainable part too."""
    plan = plan_of(model, world_size)
    shape = StepShape(2, 4)
    ranks = sorted({0, world_size // 2, world_size - 1})
    gather = [0] * len(ranks)
    reduce = [0] * len(ranks)
    for block in plan.blocks:
        model = TRANSPORT_MODELS[choose_transport(block, 2, 4)]
        for i, rank in enumerate(ranks):
            gather[i] += 2 * model.gather(model.arrange(block), rank).elements
            trainable = model.arrange(block.trainable())
            reduce[i] += 4 * model.reduce(trainable, rank).elements
    accounts = owner_accounts(plan, "auto", shape, ranks)
    assert [a.forward for a in accounts] == gather
    assert [a.backward for a in accounts] == [g + r for g, r in zip(gather, reduce, strict=True)]


def test_auto_reduces_as_it_gathers():
    """A frozen weight decides the block's transport; its trainable part would choose another."""
    shards = [
        MatrixShard(f"b.w{rank}", (64, 64), "float32", 4, RoleKind.MATRIX, True, "b", rank)
        for rank in range(3)
    ]
    frozen = MatrixShard("b.frozen", (6400, 64), "float32", 4, RoleKind.FROZEN, False, "b", 0)
    block = BlockPlan("b", 4, (*shards, frozen))
    assert choose_transport(block, 2, 4) == "balanced"
    assert choose_transport(block.trainable(), 2, 4) == "p2p"
    plan = OwnerPlan("by hand", 4, (block,), "by hand")
    shape = StepShape(2, 4)
    assert owner_accounts(plan, "auto", shape) == owner_accounts(plan, "balanced", shape)
    assert owner_accounts(plan, "auto", shape) != owner_accounts(plan, "p2p", shape)


@pytest.mark.parametrize("world_size", [64, 4096])
def test_llama_at_many_ranks(world_size):
    """Every block sparse: the overflow of the whole model stays near M / W per operation."""
    plan = plan_of(transformer(32, dim=4096, hidden=14336), world_size)
    shape = StepShape(2, 4)
    ranks = [0, 1, world_size // 3, world_size - 1]
    ours = owner_accounts(plan, "balanced", shape, ranks)
    total = sum(block.numel for block in plan.blocks)
    largest = max(map(plan.owned_bytes, range(world_size))) // 4
    for account in ours:
        ring = (world_size - 1) * math.ceil(total / world_size)
        padding = len(plan.blocks) * world_size * 2 * ALIGNMENT
        assert account.exposed == 0
        assert account.forward <= 2 * (ring + largest + padding)
        reduction = account.backward - account.forward
        assert reduction <= 4 * (ring + math.ceil(total / world_size) + padding)
    for step in BASELINE_STEPS:
        for account in fsdp_accounts(plan, step, shape, ranks):
            assert account.exposed > 0


def test_memory_of_a_gather_by_hand():
    """W=4, one weight of 5 elements: FSDP2 pads it to 4 chunks of 1 row of 5."""
    plan = plan_of(weights_model(weights("b", 5)), 4)
    (block,) = plan.blocks
    assert fsdp_gather_bytes(block, 4) == 2 * 4 * 5 * 4
    assert owner_gather_bytes(block, "p2p", 4) == 5 * 4
    assert owner_gather_bytes(block, "balanced", 4) == 4 * aligned(2) * 4


def test_unknown_names_and_ranks_are_refused():
    plan = plan_of(transformer(1), 2)
    with pytest.raises(ValueError, match=r"owner_fsdp.transport = 'pigeon'.*'balanced'"):
        owner_accounts(plan, "pigeon", StepShape())
    with pytest.raises(ValueError, match=r"'wait' is unknown; legal: \['gather'"):
        fsdp_accounts(plan, "wait", StepShape())
    for account in (
        lambda: owner_accounts(plan, "p2p", StepShape(), [2]),
        lambda: fsdp_accounts(plan, "gather", StepShape(), [-1]),
    ):
        with pytest.raises(ValueError, match="legal: 0 to 1"):
            account()
