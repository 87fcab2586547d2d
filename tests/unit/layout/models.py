"""Models as plain metadata, for the layout's tests: hand-made, transformer-shaped and random."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st

from torchtitan_matrixfsdp.layout import BlockMeta, BlockPlan, MatrixShard, ParamMeta, RoleKind
from torchtitan_matrixfsdp.layout.block_plan import check_block

SMALL = settings(max_examples=60, deadline=None)

MATRIX_SHAPES = ((1, 1), (1, 16), (5, 3), (8, 8), (3, 11), (0, 4))
ANY_SHAPES = (*MATRIX_SHAPES, (), (1,), (7,), (0,), (2, 3, 5), (2, 1, 3, 3))


@dataclass(frozen=True)
class Model:
    """Blocks, and the FQNs of those of their weights that are routed to the matrix optimizer."""

    blocks: tuple[BlockMeta, ...]
    matrices: frozenset[str]

    @property
    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(param for block in self.blocks for param in block.params)


def param(fqn: str, shape: Sequence[int], trainable: bool = True) -> ParamMeta:
    return ParamMeta(fqn, tuple(shape), "float32", 4, trainable)


def weights(name: str, *numels: int) -> BlockMeta:
    """A block of 1xN weights w0, w1, ... with these numbers of elements."""
    return BlockMeta(name, tuple(param(f"{name}.w{i}", (1, n)) for i, n in enumerate(numels)))


def weights_model(*blocks: BlockMeta) -> Model:
    """A model whose every parameter is a matrix."""
    return Model(blocks, frozenset(p.fqn for block in blocks for p in block.params))


def transformer(layers: int, dim: int = 64, hidden: int = 192) -> Model:
    """TorchTitan's Llama layer: 7 matrices and 2 norms per block, key and value heads grouped."""
    shapes = {
        "attention.wq": (dim, dim),
        "attention.wk": (dim // 4, dim),
        "attention.wv": (dim // 4, dim),
        "attention.wo": (dim, dim),
        "feed_forward.w1": (hidden, dim),
        "feed_forward.w2": (dim, hidden),
        "feed_forward.w3": (hidden, dim),
        "attention_norm": (dim,),
        "ffn_norm": (dim,),
    }
    blocks = tuple(
        BlockMeta(
            f"layers.{layer}",
            tuple(param(f"layers.{layer}.{name}.weight", shape) for name, shape in shapes.items()),
        )
        for layer in range(layers)
    )
    return Model(blocks, frozenset(p.fqn for b in blocks for p in b.params if p.ndim == 2))


_PARAMS = st.sampled_from(
    [(shape, "matrix") for shape in MATRIX_SHAPES]
    + [(shape, "elementwise") for shape in ANY_SHAPES]
    + [(shape, "frozen") for shape in ANY_SHAPES]
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """1 to 12 blocks of 0 to 8 parameters of any kind; zero-sized ones and scalars included."""
    drawn = draw(st.lists(st.lists(_PARAMS, max_size=8), min_size=1, max_size=12))
    blocks = []
    matrices = set()
    for b, block in enumerate(drawn):
        params = []
        for p, (shape, use) in enumerate(block):
            fqn = f"layers.{b}.p{p}"
            params.append(param(fqn, shape, trainable=use != "frozen"))
            if use == "matrix":
                matrices.add(fqn)
        blocks.append(BlockMeta(f"layers.{b}", tuple(params)))
    return Model(tuple(blocks), frozenset(matrices))


world_sizes = st.integers(min_value=1, max_value=64)


def block_of(
    world_size: int,
    weights: Sequence[tuple[int, int]],
    tail: Sequence[int] = (),
    tail_owner: int = 0,
    frozen: Collection[int] = (),
) -> BlockPlan:
    """A block "a" with owners chosen by hand.

    ``weights`` holds (numel, owner) of w0, w1, ..., of which those in ``frozen`` are frozen;
    ``tail`` the numels of t0, t1, ... The tail's parameters stand between the weights.
    """
    shards = []
    for i, (numel, owner) in enumerate(weights):
        kind = RoleKind.FROZEN if i in frozen else RoleKind.MATRIX
        shards.append(_shard(f"a.w{i}", (1, numel), kind, owner))
        if i < len(tail):
            shards.append(_shard(f"a.t{i}", (tail[i],), RoleKind.TAIL, tail_owner))
    for i, numel in list(enumerate(tail))[len(weights) :]:
        shards.append(_shard(f"a.t{i}", (numel,), RoleKind.TAIL, tail_owner))
    plan = BlockPlan("a", world_size, tuple(shards))
    check_block(plan)
    return plan


def _shard(fqn: str, shape: tuple[int, ...], kind: RoleKind, owner: int) -> MatrixShard:
    return MatrixShard(fqn, shape, "float32", 4, kind, kind is not RoleKind.FROZEN, "a", owner)


@st.composite
def block_plans(
    draw: st.DrawFn,
    max_world: int = 9,
    max_weights: int = 9,
    min_weights: int = 0,
    multiple_of: int = 1,
) -> BlockPlan:
    """Any owners, balanced or not; numels are multiples of ``multiple_of``, empty ones included."""
    world_size = draw(st.integers(1, max_world))
    owners = st.integers(0, world_size - 1)
    numels = st.integers(0, 70 // multiple_of).map(lambda n: n * multiple_of)
    weights = draw(st.lists(st.tuples(numels, owners), min_size=min_weights, max_size=max_weights))
    frozen = draw(st.sets(st.integers(0, max_weights), max_size=2))
    return block_of(world_size, weights, draw(st.lists(numels, max_size=4)), draw(owners), frozen)
