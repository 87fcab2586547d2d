"""The blocks that the benchmarks move: real ones as modules, whole models as shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn as nn

from torchtitan_matrixfsdp.layout import BlockMeta, BlockPlan, OwnerPlan, ParamMeta, make_plan

PLANNER = "cost_aware"
BLOCK_NAME = "block"

# Width of keys and values, and of the feed-forward, over the model's: Llama 3 8B's.
_KV_SHARE = 4
_HIDDEN_RATIO = 3.5

_HEAD_DIM = 16
# A width that makes whole heads of keys and values.
WIDTH_MULTIPLE = _KV_SHARE * _HEAD_DIM

LAYOUTS = ("balanced", "sparse", "one_owner")


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The widths of TorchTitan's Llama 3 flavors, embedding and head left out."""

    layers: int
    dim: int
    kv_dim: int
    hidden: int


MODELS: Mapping[str, LlamaShape] = {
    "debugmodel": LlamaShape(6, 256, 256, 768),
    "8B": LlamaShape(32, 4096, 1024, 14336),
    "70B": LlamaShape(80, 8192, 1024, 28672),
}


def scaled_model(dim: int, layers: int) -> LlamaShape:
    """Llama 3 8B's proportions at width ``dim``."""
    return LlamaShape(layers, dim, dim // _KV_SHARE, int(_HIDDEN_RATIO * dim))


def model_blocks(shape: LlamaShape) -> tuple[BlockMeta, ...]:
    """The blocks of a model in float32, without a tensor. The order is ``LlamaBlock``'s."""
    shapes = {f"{name}.weight": size for name, size in _matrices(shape).items()}
    shapes |= {f"{name}.weight": (shape.dim,) for name in ("attention_norm", "ffn_norm")}
    return tuple(_block(f"layers.{i}", shapes) for i in range(shape.layers))


def matrix_blocks(shape: LlamaShape) -> tuple[BlockMeta, ...]:
    """The same without norms and with names that ``ShapeBlock`` takes: what a matrix optimizer
    steps."""
    return tuple(_block(f"layers.{i}", _matrices(shape)) for i in range(shape.layers))


def _matrices(shape: LlamaShape) -> Mapping[str, tuple[int, ...]]:
    return {
        "wq": (shape.dim, shape.dim),
        "wk": (shape.kv_dim, shape.dim),
        "wv": (shape.kv_dim, shape.dim),
        "wo": (shape.dim, shape.dim),
        "w1": (shape.hidden, shape.dim),
        "w2": (shape.dim, shape.hidden),
        "w3": (shape.hidden, shape.dim),
    }


def plan_blocks(blocks: tuple[BlockMeta, ...], world_size: int) -> OwnerPlan:
    """The plan with every 2D parameter a matrix, by the default planner."""
    matrices = {p.fqn for block in blocks for p in block.params if p.ndim == 2}
    return make_plan(PLANNER, blocks, matrices, world_size)


def block_layout(name: str, dim: int, world_size: int, dtype: torch.dtype) -> BlockPlan:
    """One block in one of ``LAYOUTS``.

    - ``balanced``: W equal weights, one on each rank: gamma is 1;
    - ``sparse``: a Llama block whose projections are fused, hence of 5 roles: beyond 5 ranks some
      own nothing, and gamma is W times the largest weight's share;
    - ``one_owner``: the same block, all of it on rank 0: gamma is W.
    """
    hidden = int(_HIDDEN_RATIO * dim)
    shapes: dict[str, tuple[int, ...]] = {
        "wqkv": (dim + 2 * dim // _KV_SHARE, dim),
        "wo": (dim, dim),
        "w13": (2 * hidden, dim),
        "w2": (dim, hidden),
        "norms": (2 * dim,),
    }
    if name == "balanced":
        shapes = {f"w{i}": (2 * dim, dim) for i in range(world_size)}
    meta = _block(BLOCK_NAME, shapes, dtype)
    (block,) = plan_blocks((meta,), world_size).blocks
    if name == "one_owner":
        block = replace(block, shards=tuple(replace(s, owner=0) for s in block.shards))
    return block


class ShapeBlock(nn.Module):
    """A module with the parameters of a plan and the cheapest forward that uses all of them."""

    def __init__(self, block: BlockPlan, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        for shard in block.shards:
            value = torch.randn(shard.shape, dtype=dtype, device=device)
            self.register_parameter(shard.fqn.removeprefix(f"{block.name}."), nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [] times the sum of all parameters."""
        return x * torch.stack([p.sum() for p in self.parameters()]).sum()


class LlamaBlock(nn.Module):
    """A Llama transformer block without rotary embedding: ``[batch, tokens, dim]`` to the same."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)
        self.w1 = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.ffn_norm = nn.RMSNorm(shape.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (self._heads(w(h)) for w in (self.wq, self.wk, self.wv))
        attended = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))

    @staticmethod
    def _heads(projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, _HEAD_DIM)).transpose(1, 2)


class LlamaBlocks(nn.Module):
    """The blocks of a model, without embedding and head."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _block(
    name: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> BlockMeta:
    bare = str(dtype).removeprefix("torch.")
    return BlockMeta(
        name,
        tuple(ParamMeta(f"{name}.{k}", size, bare, dtype.itemsize) for k, size in shapes.items()),
    )
