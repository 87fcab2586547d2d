"""CPU offload below the trainer. On the CPU itself the copies are no-ops: what runs here is the
bookkeeping around them, and that training stays exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.distributed.toy import (
    TRANSPORTS,
    Run,
    allocated,
    make_toy,
    max_difference,
    mesh_of,
    owner_groups,
    owner_parameters,
    shard_toy,
    train,
    train_oracle,
)
from tests.harness import run_ranks
from torchtitan_matrixfsdp.runtime import owner_group
from torchtitan_matrixfsdp.runtime.owner_param import OwnerParam

RUNS = [
    Run(offload=True),
    Run(offload=True, accumulation=2),
    Run(offload=True, accumulation=2, deferred=True, defer_release=True),
    Run(offload=True, accumulation=2, deferred_all_reduce=True),
]


def _train_all(replicas: int) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    differences = []
    for index, run in enumerate(RUNS):
        run = replace(run, transport=TRANSPORTS[(index + replicas) % len(TRANSPORTS)])
        sharded = shard_toy(make_toy(), mesh_of(replicas, ranks), run)
        for group in owner_groups(sharded.model):
            assert all(param.offload_to_cpu for param in group.fsdp_params)
        train(sharded, run, 3, rank, ranks)
        assert allocated(sharded.model) == {}
        assert all(p.grad.device.type == "cpu" for p in owner_parameters(sharded.model).values())
        differences.append(max_difference(sharded.model, train_oracle(3, run.accumulation)))
    return differences


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 2)])
def test_offloaded_training_is_exact(ranks: int, replicas: int) -> None:
    for differences in run_ranks(_train_all, ranks, replicas):
        assert max(differences) < 1e-13


class CopyStream:
    """Counts the events that a copy to the host records."""

    def __init__(self) -> None:
        self.events = 0

    def record_event(self) -> str:
        self.events += 1
        return f"event {self.events}"


def _copies() -> None:
    sharded = shard_toy(make_toy(), mesh_of(1, 2), Run(offload=True))
    params = [p for group in owner_groups(sharded.model) for p in group.fsdp_params]
    param = next(p for p in params if p.is_owner)
    assert isinstance(param, OwnerParam)
    local = torch.ones(param.sharded_size, dtype=torch.float64)
    assert param._offloaded(local) is local, "it is on the host"
    meta = local.to("meta")
    assert param._offloaded(meta) is meta, "nothing to copy yet"
    assert param.gather_source().data_ptr() == param._sharded_param_data.data_ptr()

    def accumulate(stream: CopyStream) -> object:
        param.grad_offload_event = None
        owner_group._accumulate(param, local.clone(), stream)
        return param.grad_offload_event

    def forget() -> None:
        param.sharded_param.grad = None

    stream = CopyStream()
    assert accumulate(stream) is None, "memory that is not pinned is copied before the host goes on"
    forget()
    param.pin_memory = True
    assert accumulate(stream) == "event 1", "the end of backward waits for it"
    assert accumulate(stream) is None, "the sum reads what was copied"
    assert torch.equal(param.sharded_param.grad.to_local(), local + local)
    forget()
    seen = []
    handle = param.sharded_param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    assert accumulate(stream) is None, "a hook reads what was copied"
    assert len(seen) == 1
    handle.remove()
    forget()
    param.offload_to_cpu = False
    assert accumulate(stream) is None and stream.events == 1


def test_only_the_optimizer_may_find_a_copy_in_flight() -> None:
    run_ranks(_copies, 2)
