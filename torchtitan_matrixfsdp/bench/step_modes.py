"""The ways to run one optimizer step on the same matrices and gradients, ours and others'.

Each mode is what one rank does. ``ideal`` is no system but the bound for any: each rank steps 1 / W
of the work on plain tensors, with the same optimizer, and nobody needs the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

from torchtitan_matrixfsdp.bench.blocks import LlamaShape, ShapeBlock, matrix_blocks, plan_blocks
from torchtitan_matrixfsdp.bench.ranks import rank_device, rank_mesh
from torchtitan_matrixfsdp.comm import Traffic, TrafficCounter, TransportFactory, view_segment
from torchtitan_matrixfsdp.layout import (
    largest_first,
    muon_flops,
    shampoo_root_flops,
    soap_basis_flops,
)
from torchtitan_matrixfsdp.optim import (
    SOAP,
    LocalStepOptimizer,
    Muon,
    RowShardMuon,
    Shampoo,
    create_adam_state,
    logical_shapes,
    stock_muon,
)
from torchtitan_matrixfsdp.runtime import OwnerContext, OwnerDTensor, owner_shard

DTYPE = torch.float32  # of weights, gradients and state
_MUON: Mapping[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
# Every step refreshes every matrix, so that all steps cost the same, and the most.
_REFRESHED: Mapping[str, Any] = {"lr": 1e-3, "precondition_frequency": 1, "stagger": False}
_SIDE = 2048  # with these sides no matrix here is cut or left without a basis
_ADAMW: Mapping[str, Any] = {"lr": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}

Params: TypeAlias = Sequence[torch.Tensor] | list[dict[str, Any]]
LogicalShapes: TypeAlias = Mapping[torch.Tensor, tuple[int, ...]]


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer to measure.

    Attributes:
        build: makes it from plain parameters or groups of them, its state included; its costly part
            computes in the given dtype. The shapes are those of parameters that are empty here.
        cost: work on a matrix of a shape, in units of its own; the ideal's shares are even in it.
        modes: those that have a meaning for it.
    """

    build: Callable[[Params, torch.dtype, LogicalShapes], Optimizer]
    cost: Callable[[Sequence[int]], int]
    modes: tuple[str, ...]


class Problem:
    """The matrices of all modes: weights and gradients are drawn by name, alike on every rank."""

    def __init__(self, shape: LlamaShape, choice: OptimizerChoice, compute: torch.dtype) -> None:
        self.choice = choice
        self.compute = compute
        self.plan = plan_blocks(matrix_blocks(shape), dist.get_world_size())
        self.shards = [shard for block in self.plan.blocks for shard in block.shards]
        self._seeds = {shard.fqn: index for index, shard in enumerate(self.shards)}
        self._shapes = {shard.fqn: shard.shape for shard in self.shards}
        self._costs = [choice.cost(shard.shape) for shard in self.shards]

    def weight(self, fqn: str) -> torch.Tensor:
        """The whole weight before the first step: normal, of standard deviation 1."""
        return self._draw(fqn, 2 * self._seeds[fqn])

    def gradient(self, fqn: str) -> torch.Tensor:
        """The whole gradient, the same in every step."""
        return self._draw(fqn, 2 * self._seeds[fqn] + 1)

    def ideal_workers(self) -> tuple[int, ...]:
        """Who steps which matrix in ``ideal``: the most expensive first, each to the rank with the
        least so far."""
        return largest_first(self._costs, self.plan.world_size)

    def imbalance(self, workers: Sequence[int]) -> float:
        """The busiest rank's work over the mean."""
        loads = [0] * self.plan.world_size
        for worker, cost in zip(workers, self._costs, strict=True):
            loads[worker] += cost
        return max(loads) * len(loads) / sum(loads)

    def _draw(self, fqn: str, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self._shapes[fqn], generator=generator, dtype=DTYPE).to(rank_device())


class StepMode(ABC):
    """One rank's part of one way to step."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abstractmethod
    def step(self) -> None:
        """One optimizer step. What it has started is done when it returns (on a GPU: queued)."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, torch.Tensor, slice]]:
        """This rank's part of the weights: name, local tensor, and the rows that these are."""

    def predict(self) -> Traffic:
        """What this rank sends in one step."""
        return Traffic()

    def take(self) -> Traffic:
        """What this rank's counters have counted since the last call."""
        return Traffic()


class _Counted(StepMode):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.counter = TrafficCounter()

    def take(self) -> Traffic:
        total = sum(self.counter.totals.values(), start=Traffic())
        self.counter.reset()
        return total


class _Plain(StepMode):
    """An optimizer over plain parameters, which it makes of some rows of the matrices."""

    def __init__(
        self,
        problem: Problem,
        rows: Mapping[str, slice],
        build: Callable[[list[torch.Tensor]], Optimizer],
    ) -> None:
        super().__init__(problem)
        self._rows = rows
        self._params: dict[str, nn.Parameter] = {}
        for fqn, part in rows.items():
            self._params[fqn] = param = nn.Parameter(problem.weight(fqn)[part].clone())
            param.grad = problem.gradient(fqn)[part].clone()
        # A rank may have nothing to do, and torch has no optimizer of nothing.
        params: list[torch.Tensor] = list(self._params.values())
        self._optimizer = build(params) if params else None

    def step(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()

    def parts(self) -> Iterator[tuple[str, torch.Tensor, slice]]:
        for fqn, param in self._params.items():
            yield fqn, param.detach(), self._rows[fqn]


def single_device(problem: Problem) -> StepMode:
    """Every matrix whole on every rank: what all modes must agree with."""
    rows = {shard.fqn: slice(None) for shard in problem.shards}
    return _Plain(problem, rows, lambda params: problem.choice.build(params, problem.compute, {}))


def _ideal(problem: Problem) -> StepMode:
    mine = zip(problem.shards, problem.ideal_workers(), strict=True)
    rows = {shard.fqn: slice(None) for shard, worker in mine if worker == dist.get_rank()}
    return _Plain(problem, rows, lambda params: problem.choice.build(params, problem.compute, {}))


def _adamw(**implementation: Any) -> Callable[[Problem], StepMode]:
    """torch's AdamW on plain row shards, with no wrapper around it: the fastest it can be."""

    def make(problem: Problem) -> StepMode:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        chunks = {shard.fqn: -(-shard.shape[0] // ranks) for shard in problem.shards}
        rows = {fqn: slice(rank * n, (rank + 1) * n) for fqn, n in chunks.items()}
        return _Plain(problem, rows, lambda params: AdamW(params, **_ADAMW, **implementation))

    return make


class _Zero3(_Counted):
    """Ours: owner shards, stepped where they are."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        context = OwnerContext(counter=self.counter)
        self.params: dict[str, OwnerDTensor] = {}
        for block in problem.plan.blocks:
            module = owner_shard(
                _block(problem, block.name),
                block,
                mesh=rank_mesh(),
                transport=TransportFactory("auto"),
                context=context,
            )
            for shard, param in zip(block.shards, module.parameters(), strict=True):
                assert isinstance(param, OwnerDTensor)
                self.params[shard.fqn] = param
                whole = problem.gradient(shard.fqn)
                param.grad = param.like(whole if param.is_owner else whole[:0].clone())
        self._optimizer = LocalStepOptimizer(
            list(self.params.values()),
            lambda groups, of_local: problem.choice.build(
                groups, problem.compute, logical_shapes(of_local)
            ),
        )

    def step(self) -> None:
        self._optimizer.step()

    def parts(self) -> Iterator[tuple[str, torch.Tensor, slice]]:
        for fqn, param in self.params.items():
            if param.is_owner:
                yield fqn, param.to_local().detach(), slice(None)


class _Zero1(_Zero3):
    """Ours with weights that stay gathered: the owners' steps, and then every block once more."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._gather = _GatherAgain(problem, self.params, self.counter)

    def step(self) -> None:
        super().step()
        self._gather.run()

    def predict(self) -> Traffic:
        return self._gather.predict()

    def parts(self) -> Iterator[tuple[str, torch.Tensor, slice]]:
        for fqn, whole in self._gather.weights():
            yield fqn, whole, slice(None)


class _GatherAgain:
    """Every block's weights, whole on every rank, brought up to date by its transport."""

    def __init__(
        self, problem: Problem, params: Mapping[str, OwnerDTensor], counter: TrafficCounter
    ) -> None:
        factory = TransportFactory("auto")
        self._blocks = problem.plan.blocks
        self._params = params
        self._group = rank_mesh().get_group()
        self._transports = [
            factory(factory.choose(block), block, dist.get_rank(), counter)
            for block in self._blocks
        ]
        self._buffers = [
            torch.zeros(transport.layout.numel, dtype=DTYPE, device=rank_device())
            for transport in self._transports
        ]

    @torch.no_grad()
    def run(self) -> None:
        pending = []
        for block, transport, buffer in zip(
            self._blocks, self._transports, self._buffers, strict=True
        ):
            for shard in block.shards:
                param = self._params[shard.fqn]
                if param.is_owner:
                    place = view_segment(buffer, transport.layout.segments[shard.fqn])
                    place.copy_(param.to_local().view(-1))
            pending += transport.gather(buffer, self._group)
        for work in pending:
            work.wait()

    def predict(self) -> Traffic:
        gathers = (transport.predict_gather(DTYPE.itemsize) for transport in self._transports)
        return sum(gathers, start=Traffic())

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for block, transport, buffer in zip(
            self._blocks, self._transports, self._buffers, strict=True
        ):
            for shard in block.shards:
                flat = view_segment(buffer, transport.layout.segments[shard.fqn])
                yield shard.fqn, flat.view(shard.shape)


class _Stock(_Counted):
    """Muon on FSDP2's row shards."""

    def __init__(self, problem: Problem, stock_step: str) -> None:
        super().__init__(problem)
        mesh = rank_mesh()
        self._params: dict[str, DTensor] = {}
        for block in problem.plan.blocks:
            module = _block(problem, block.name)
            fully_shard(module, mesh=mesh)
            for shard, param in zip(block.shards, module.parameters(), strict=True):
                assert isinstance(param, DTensor)
                self._params[shard.fqn] = param
                param.grad = _rows_of(problem.gradient(shard.fqn), mesh)
        self._optimizer = LocalStepOptimizer(
            list(self._params.values()),
            lambda groups, of_local: stock_muon(
                stock_step, groups, of_local, self.counter, ns_dtype=problem.compute, **_MUON
            ),
        )

    def step(self) -> None:
        self._optimizer.step()

    def parts(self) -> Iterator[tuple[str, torch.Tensor, slice]]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for fqn, param in self._params.items():
            chunk = -(-param.size(0) // ranks)
            yield fqn, param.to_local().detach(), slice(rank * chunk, (rank + 1) * chunk)

    def predict(self) -> Traffic:
        inner = self._optimizer.inner
        assert isinstance(inner, RowShardMuon)
        return inner.predict()


def _stock(stock_step: str) -> Callable[[Problem], StepMode]:
    return lambda problem: _Stock(problem, stock_step)


def _rows_of(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def _block(problem: Problem, name: str) -> ShapeBlock:
    block = problem.plan.block(name)
    module = ShapeBlock(block, DTYPE, rank_device())
    with torch.no_grad():
        for shard, param in zip(block.shards, module.parameters(), strict=True):
            param.copy_(problem.weight(shard.fqn))
    return module


MODES: Mapping[str, Callable[[Problem], StepMode]] = MappingProxyType(
    {
        "ideal": _ideal,
        "zero3": _Zero3,
        "zero1": _Zero1,
        "gather": _stock("gather"),
        "gather_once": _stock("gather_once"),
        "all_to_all": _stock("all_to_all"),
        "adamw_foreach": _adamw(foreach=True),
        "adamw_fused": _adamw(fused=True),
    }
)
OTHER_MATHS = ("adamw_foreach", "adamw_fused")
"""Modes that run AdamW whatever the optimizer, to say how much a step costs beside one of those."""

_OURS = ("ideal", "zero3", "zero1")


def _build_muon(params: Params, compute: torch.dtype, shapes: LogicalShapes) -> Optimizer:
    return Muon(params, ns_dtype=compute, logical_shapes=shapes, **_MUON)


def _build_shampoo(params: Params, compute: torch.dtype, shapes: LogicalShapes) -> Optimizer:
    return Shampoo(params, logical_shapes=shapes, **_REFRESHED)


def _build_soap(params: Params, compute: torch.dtype, shapes: LogicalShapes) -> Optimizer:
    return SOAP(params, logical_shapes=shapes, **_REFRESHED)


def _build_adamw(params: Params, compute: torch.dtype, shapes: LogicalShapes) -> Optimizer:
    optimizer = AdamW(params, foreach=True, **_ADAMW)
    create_adam_state(optimizer)
    return optimizer


OPTIMIZERS: Mapping[str, OptimizerChoice] = MappingProxyType(
    {
        "muon": OptimizerChoice(_build_muon, lambda shape: muon_flops(shape, 5), tuple(MODES)),
        "shampoo": OptimizerChoice(
            _build_shampoo, lambda shape: shampoo_root_flops(shape, _SIDE), _OURS
        ),
        "soap": OptimizerChoice(_build_soap, lambda shape: soap_basis_flops(shape, _SIDE), _OURS),
        "adamw": OptimizerChoice(_build_adamw, lambda shape: shape[0] * shape[1], _OURS),
    }
)
