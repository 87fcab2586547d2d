"""What the console says once about a job's transports."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan_matrixfsdp.comm import TransportFactory
from torchtitan_matrixfsdp.layout import TRANSPORT_MODELS, BlockPlan, OwnerPlan


def describe_transports(plan: OwnerPlan, factory: TransportFactory) -> Iterator[str]:
    """One line for each block shape of the plan: which transports its blocks got, how often, and
    what their busiest ranks send in a gather, as a multiple of FSDP's all-gather.

    Blocks of one shape may have different owners, hence different transports.
    """
    by_shape: dict[tuple[tuple[int, ...], ...], list[BlockPlan]] = {}
    for block in plan.blocks:
        by_shape.setdefault(tuple(shard.shape for shard in block.shards), []).append(block)
    for blocks in by_shape.values():
        chosen: dict[str, list[float]] = {}
        for block in blocks:
            name = factory.choose(block)
            chosen.setdefault(name, []).append(relative_traffic(name, block))
        parts = [
            f"{name} for {len(costs)} ({min(costs):.2f} to {max(costs):.2f} times FSDP's bytes)"
            for name, costs in sorted(chosen.items())
        ]
        first = blocks[0]
        names = first.name if len(blocks) == 1 else f"{first.name} .. {blocks[-1].name}"
        yield (
            f"Transport ({factory.name}) of {len(blocks)} blocks of {first.numel:,} elements, "
            f"{names}: " + ", ".join(parts)
        )


def relative_traffic(transport: str, block: BlockPlan) -> float:
    """What the busiest rank moves in one gather of ``block``, over the ``(W - 1) / W`` of the block
    that every rank sends in an all-gather; 1.0 where nothing moves."""
    model = TRANSPORT_MODELS[transport]
    ideal = (block.world_size - 1) * block.numel / block.world_size
    return model.busiest(model.arrange(block)).elements / ideal if ideal else 1.0
