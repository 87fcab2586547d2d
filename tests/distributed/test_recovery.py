"""Training goes on after a fault: reset_iter_state leaves nothing of the failed iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.toy import (
    ObservedFactory,
    Run,
    Sharded,
    allocated,
    batch,
    loss_of,
    make_toy,
    max_difference,
    mesh_of,
    rows_of,
    run_transports,
    shard_toy,
    train,
    train_oracle,
)
from torchtitan_matrixfsdp.runtime import reset_iter_state


class FaultError(Exception):
    pass


def fail(*_: Any) -> None:
    raise FaultError


class Saboteur:
    """Observes transports, and fails at the ``countdown``-th ``operation`` of layer 1."""

    def __init__(self) -> None:
        self.operation = ""
        self.countdown = 0

    def __call__(self, operation: str, block: str) -> None:
        if operation == self.operation and block == "layers.1":
            self.countdown -= 1
            if self.countdown == 0:
                raise FaultError


Arm = Callable[[Sharded, Saboteur], Callable[[], None]]
"""Prepares a fault; returns what takes it away."""


def _in_forward(sharded: Sharded, _: Saboteur) -> Callable[[], None]:
    return sharded.model.layers[1].mix.register_forward_hook(fail).remove


def _in_backward(sharded: Sharded, _: Saboteur) -> Callable[[], None]:
    return sharded.model.layers[1].mix.register_full_backward_hook(fail).remove


def _in_transport(operation: str, countdown: int) -> Arm:
    def arm(_: Sharded, saboteur: Saboteur) -> Callable[[], None]:
        saboteur.operation, saboteur.countdown = operation, countdown
        return lambda: None

    return arm


FAULTS: dict[str, Arm] = {
    "forward": _in_forward,
    "backward": _in_backward,
    "gather in forward": _in_transport("gather", 1),
    "gather in backward": _in_transport("gather", 2),
    "reduce": _in_transport("reduce", 1),
}
# Released at once, and late with other gathers under way when the fault comes.
RUNS = [Run(), Run(defer_release=True, explicit_prefetch=True, accumulation=2, deferred=True)]


def _recover(transport: str, replicas: int) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, targets = batch(99)
    rows = rows_of(rank, ranks)
    differences = []
    # One shard has nothing to gather.
    faults = {n: arm for n, arm in FAULTS.items() if ranks > replicas or "gather" not in n}
    for run in RUNS:
        saboteur = Saboteur()
        run = replace(run, transport=ObservedFactory(transport, saboteur))
        sharded = shard_toy(make_toy(), mesh_of(replicas, ranks), run)
        model = sharded.model
        for step, (name, arm) in enumerate(faults.items()):
            disarm = arm(sharded, saboteur)
            with pytest.raises(FaultError):
                for _ in range(run.accumulation):
                    loss_of(model, tokens[rows], targets[rows]).backward()
            disarm()
            reset_iter_state(model)
            assert allocated(model) == {}, name
            # A wrong step would still be seen at the end.
            train(sharded, run, 1, rank, ranks, start=step)
        differences.append(max_difference(model, train_oracle(len(faults), run.accumulation)))
    return differences


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2)])
def test_training_recovers_from_a_fault(ranks: int, replicas: int) -> None:
    """In a forward, in a backward, and in each operation of each transport: the next step is that
    of a run without the fault."""
    for differences in run_transports(_recover, ranks, replicas):
        assert max(differences) < 1e-13


def test_only_the_root_of_a_sharded_model_is_reset() -> None:
    with pytest.raises(TypeError, match="Toy is not an FSDP2 module"):
        reset_iter_state(make_toy())
