"""Block buffers in training: who may touch the memory, when it is given back, what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.distributed.toy import (
    DIM,
    TRANSPORTS,
    Block,
    ObservedFactory,
    Run,
    Sharded,
    allocated,
    batch,
    buffers_of,
    loss_of,
    make_toy,
    max_difference,
    mesh_of,
    owner_parameters,
    rows_of,
    run_transports,
    shard_toy,
    train,
    train_oracle,
)
from tests.harness import run_ranks
from torchtitan_matrixfsdp.comm import P2PTransport, TransportFactory
from torchtitan_matrixfsdp.runtime import BufferStateError, OwnerContext, reset_iter_state

TOLERANCE = 1e-13  # three float64 steps; 1e-15 is seen


class PoolingFactory(TransportFactory):
    """A wrong transport: reductions return memory of a pool of ``depth`` tensors, which is handed
    out in turn, per block or (``is_shared``) to all blocks alike."""

    def __init__(self, depth: int = 1, is_shared: bool = False) -> None:
        super().__init__("p2p")
        self.depth = depth
        self.pools: dict[str, list[torch.Tensor]] = {}
        self.is_shared = is_shared

    def __call__(self, name, block, rank, counter):
        pool = self.pools.setdefault("all" if self.is_shared else block.name, [])
        depth = self.depth

        class Pooling(P2PTransport):
            def reduce(self, buffer, group):
                reduced = super().reduce(buffer, group)
                memory = pool.pop(0) if len(pool) == depth else reduced.new_empty(10_000)
                pool.append(memory)
                return memory[: reduced.numel()].copy_(reduced)

        return Pooling(block, rank, counter)


def _early_reuse(what: str) -> tuple[str, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run, replicas = Run(), 1
    factory = PoolingFactory()
    if what == "across blocks":
        factory = PoolingFactory(is_shared=True)
    elif what == "across microbatches":
        run = Run(accumulation=2)
    elif what == "into the sum of microbatches":
        factory, run = PoolingFactory(depth=2), Run(accumulation=3)
    elif what == "into a sum that waits for its all-reduce":
        run, replicas = Run(accumulation=2, deferred_all_reduce=True), ranks
    run = replace(run, transport=factory, planner="role_greedy")
    sharded = shard_toy(make_toy(), mesh_of(replicas, ranks), run)
    try:
        train(sharded, run, 2, rank, ranks)
    except BufferStateError as error:
        reset_iter_state(sharded.model)
        return str(error), 0.0
    return "", max_difference(sharded.model, train_oracle(2, run.accumulation))


EARLY = {
    "across blocks": ("layers.1", "layers.2"),
    "across microbatches": ("layers.2", "layers.2"),
    "into the sum of microbatches": ("layers.2", "layers.2"),
    "into a sum that waits for its all-reduce": ("layers.2", "layers.2"),
    "after the step": ("", ""),
}


def _early_reuses() -> dict[str, tuple[str, float]]:
    return {what: _early_reuse(what) for what in EARLY}


def test_a_transport_that_reuses_memory_too_early_is_caught() -> None:
    """Silent corruption otherwise. Reuse after the optimizer's step is right, and passes."""
    for found in run_ranks(_early_reuses, 2):
        for what, (message, difference) in found.items():
            writer, holder = EARLY[what]
            if writer:
                expected = f"block {writer}: its reduction wrote into the memory of block {holder}"
                assert expected in message, what
            assert difference < TOLERANCE, what
        assert found["after the step"][0] == ""


def _free(param: nn.Parameter) -> None:
    param.grad.to_local().untyped_storage().resize_(0)


def _early_free(transport: str) -> tuple[str, str, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(transport=transport)
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    model = sharded.model
    owned = [p for n, p in owner_parameters(model).items() if p.is_owner and ".1." in n]
    handle = owned[-1].register_post_accumulate_grad_hook(_free)
    with pytest.raises(BufferStateError) as in_backward:
        train(sharded, run, 1, rank, ranks)
    handle.remove()
    reset_iter_state(model)

    for optimizer in sharded.optimizers:
        optimizer.zero_grad()
    tokens, targets = batch(0)
    loss_of(model, tokens[rows_of(rank, ranks)], targets[rows_of(rank, ranks)]).backward()
    matrix = next(p for p in owned if p.ndim == 2)
    _free(matrix)
    with pytest.raises(BufferStateError) as in_step:
        sharded.optimizers[0].step()
    train(sharded, run, 2, rank, ranks)
    difference = max_difference(model, train_oracle(2, 1))
    return str(in_backward.value), str(in_step.value), difference


def test_memory_of_a_gradient_freed_before_the_optimizer_is_caught() -> None:
    """At the end of backward and in the step, where reading it would end the process."""
    for in_backward, in_step, difference in run_transports(_early_free, 2):
        assert "block layers.1: the storage of a gradient of shape" in in_backward
        assert "was freed before an optimizer consumed it" in in_step
        assert difference < TOLERANCE


def _misuse(transport: str) -> tuple[list[str], float]:
    """Free or gather the buffer again while modules read it, in forward and in backward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(transport=transport)
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    buffer = buffers_of(sharded.model)[1]
    refused: list[str] = []
    again = (buffer.release, lambda: buffer.start_gather(torch.float64, torch.device("cpu")))

    def misuse(*_: Any) -> None:
        for step in again:
            with pytest.raises(BufferStateError, match=r"layers\.1: its buffer is unsharded") as e:
                step()
            refused.append(str(e.value))

    mix = sharded.model.layers[1].mix
    mix.register_forward_hook(misuse)
    mix.register_full_backward_hook(misuse)
    train(sharded, run, 2, rank, ranks)
    with pytest.raises(BufferStateError, match="read while released"):
        _ = buffer.flat
    return refused, max_difference(sharded.model, train_oracle(2, 1))


def test_a_buffer_in_use_is_neither_freed_nor_gathered_again() -> None:
    for refused, difference in run_transports(_misuse, 2):
        assert len(refused) == 2 * 2 * 2
        assert difference < TOLERANCE, "a refused step changes nothing"


# One letter per block, when a gather starts: Released, Gathering, Unsharded, reTired.
BACKWARD = ["RRG", "RGU", "GUR"]
ORDERS = {
    "deferred": (Run(defer_release=True), ["GRR", "TGR", "RTG"]),
    "at once": (Run(defer_release=False), ["GRR", "RGR", "RRG"]),
    # Prefetched after block i's wait, which gives block i-1's memory back.
    "deferred, explicit": (Run(defer_release=True, explicit_prefetch=True), ["GRR", "UGR", "RUG"]),
    # Gathers in the compute stream follow the block's compute anyway.
    "deferred, async": (Run(defer_release=True, async_unshard=True), ["GRR", "RGR", "RRG"]),
    "deferred, kept": (Run(defer_release=True, reshard=False), ["GRR", "UGR", "UUG"]),
}


def _order(transport: str, run: Run) -> tuple[list[str], list[str]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seen: list[str] = []

    def states() -> str:
        letters = {"released": "R", "gathering": "G", "unsharded": "U", "retired": "T"}
        return "".join(letters[b.state.value] for b in buffers_of(sharded.model))

    def observe(operation: str, block: str) -> None:
        if operation == "gather":
            seen.append(states())

    run = replace(run, transport=ObservedFactory(transport, observe))
    sharded = shard_toy(make_toy(), mesh_of(1, ranks), run)
    after: list[str] = []
    sharded.model.register_forward_hook(lambda *_: after.append(states()))
    train(sharded, run, 1, rank, ranks)
    after.append(states())
    seen.clear()
    train(sharded, run, 1, rank, ranks)  # the first forward initialises FSDP2
    return seen, [*after, states()]


def _orders(transport: str) -> dict[str, tuple[list[str], list[str]]]:
    return {name: _order(transport, run) for name, (run, _) in ORDERS.items()}


def test_memory_is_given_back_in_the_order_of_the_note() -> None:
    """[Note: block buffers]: the gather of block i+1 never waits for block i's compute, and with
    it at most two blocks have memory."""
    for found in run_transports(_orders, 2):
        for name, (run, forward) in ORDERS.items():
            seen, after = found[name]
            assert seen == forward + (BACKWARD if run.reshard else []), name
            kept = "RRR" if run.reshard else "UUU"
            # The hook of the test was registered before that of the context.
            assert after[1::2] == ["RRR", "RRR"], name
            assert set(after) <= {"RRR", "RRT", kept}, name


Prepare = Callable[[Sharded], None]


def _unshard_first(sharded: Sharded) -> None:
    """Gathers that the caller starts: waited for by the caller, by the forward, or by nobody."""
    first, second, third = sharded.model.layers
    first.unshard(async_op=True).wait()
    second.unshard(async_op=True)
    third.unshard(async_op=False)
    third.reshard()


def _prefetch_for_nothing(sharded: Sharded) -> None:
    first, _, last = sharded.model.layers
    first.set_modules_to_backward_prefetch([last])


def _evaluate_first(sharded: Sharded) -> None:
    with torch.no_grad():
        loss_of(sharded.model, *batch(0))
    assert allocated(sharded.model) == {}


def _checkpoint_outside(sharded: Sharded) -> None:
    """Forward runs again in backward, with FSDP2's hooks inside the recomputation."""
    for name, layer in list(sharded.model.layers.named_children()):
        sharded.model.layers.register_module(name, checkpoint_wrapper(layer))


def _compile(sharded: Sharded) -> None:
    for layer in sharded.model.layers:
        layer.compile(backend="aot_eager")


def _nothing(sharded: Sharded) -> None:
    pass


WAYS: dict[str, tuple[Run, Prepare]] = {
    "implicit prefetch": (Run(), _nothing),
    "explicit prefetch": (Run(explicit_prefetch=True), _nothing),
    "async unshard": (Run(async_unshard=True, explicit_prefetch=True), _nothing),
    "unshard by hand": (Run(), _unshard_first),
    "prefetched for nothing": (Run(), _prefetch_for_nothing),
    "twice in a row": (Run(repeat=2), _nothing),
    "evaluated first": (Run(), _evaluate_first),
    "checkpointing outside": (Run(), _checkpoint_outside),
    "checkpointing inside, late": (Run(checkpointing=True, accumulation=2), _nothing),
    "kept, accumulated": (Run(reshard=False, accumulation=2, deferred=True), _nothing),
    "compiled": (Run(), _compile),
}


def _train_every_way(part: int) -> dict[str, tuple[float, dict[str, int]]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for index, (name, (run, prepare)) in enumerate(WAYS.items()):
        layers = 1 if name == "twice in a row" else 3
        transport = TRANSPORTS[(index + part) % len(TRANSPORTS)]
        run = replace(run, transport=transport, defer_release=(index + part) // 2 % 2 == 0)
        sharded = shard_toy(make_toy(layers=layers), mesh_of(1, ranks), run)
        prepare(sharded)
        left = {}
        for step in range(3):
            train(sharded, run, 1, rank, ranks, start=step)
            left |= allocated(sharded.model)
        oracle = train_oracle(3, run.accumulation, run.repeat, layers)
        found[f"{name}, {transport}"] = max_difference(sharded.model, oracle), left
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_left_allocated_and_training_is_exact(ranks: int) -> None:
    """Prefetch lists, gathers started by hand or in vain, forwards before training, recomputation
    and compiled blocks."""
    for found in run_ranks(_train_every_way, ranks, ranks):
        assert len(found) == len(WAYS)
        for what, (difference, left) in found.items():
            assert difference < TOLERANCE, what
            assert left == {}, what


class Stack(nn.Module):
    """A root without parameters of its own: FSDP2's groups do not survive inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _infer_first(transport: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    oracle = Stack().double()
    model = Stack().double()
    model.load_state_dict(oracle.state_dict())
    shard_toy(model, mesh_of(1, ranks), Run(transport=transport))
    data = torch.randn(12, DIM, dtype=torch.float64)
    with torch.inference_mode():
        assert torch.equal(model(data), oracle(data))
    assert allocated(model) == {}
    for _ in range(2):
        model(data[rows_of(rank, ranks)]).square().mean().backward()
        oracle(data).square().mean().backward()
    for name, param in owner_parameters(model).items():
        reference = oracle.get_parameter(name).grad
        torch.testing.assert_close(param.grad.full_tensor(), reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_after_a_forward_in_inference_mode(ranks: int) -> None:
    """The buffers are allocated in inference mode, and later saved for backward."""
    run_transports(_infer_first, ranks)


def _two_roots(transport: str) -> tuple[float, float]:
    """Two models with one context, as the stages of a pipeline on one rank: their forwards come
    before both backwards."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    context = OwnerContext(defer_release=True)
    run = Run(transport=transport)
    models = [
        shard_toy(make_toy(layers=n), mesh_of(1, ranks), run, context=context) for n in (2, 1)
    ]
    for step in range(2):
        losses = []
        for sharded in models:
            for optimizer in sharded.optimizers:
                optimizer.zero_grad()
            tokens, targets = batch(step)
            rows = rows_of(rank, ranks)
            losses.append(loss_of(sharded.model, tokens[rows], targets[rows]))
        for loss in losses:
            loss.backward()
        for sharded in models:
            for optimizer in sharded.optimizers:
                optimizer.step()
    assert all(allocated(sharded.model) == {} for sharded in models)
    return tuple(
        max_difference(sharded.model, train_oracle(2, 1, layers=len(sharded.model.layers)))
        for sharded in models
    )


def test_two_roots_may_share_a_context() -> None:
    for differences in run_transports(_two_roots, 2):
        assert max(differences) < TOLERANCE
