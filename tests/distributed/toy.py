"""A small residual model with odd shapes, its oracle run and its owner-sharded run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from tests.harness import run_ranks
from tests.oracle import OracleMuon
from torchtitan_matrixfsdp.comm import TRANSPORTS as TRANSPORT_CLASSES
from torchtitan_matrixfsdp.comm import TrafficCounter, Transport, TransportFactory, agree_on_plan
from torchtitan_matrixfsdp.layout import (
    BlockMeta,
    BlockPlan,
    OwnerPlan,
    ParamMeta,
    Routing,
    assign_replicas,
    canonical_fqn,
    make_plan,
    route,
)
from torchtitan_matrixfsdp.optim import (
    LocalStepOptimizer,
    Muon,
    create_adam_state,
    logical_shapes,
    stock_muon,
)
from torchtitan_matrixfsdp.runtime import (
    OwnerContext,
    OwnerDTensor,
    PartitionedReplicas,
    count_unused_parameters,
    owner_shard,
)
from torchtitan_matrixfsdp.runtime.buffers import BlockBuffer
from torchtitan_matrixfsdp.runtime.fsdp_compat import param_groups_of
from torchtitan_matrixfsdp.runtime.owner_group import OwnerParamGroup

INCLUDE = [r"layers\..*\.weight$"]
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
DIM, HIDDEN, VOCAB = 12, 33, 17
TRANSPORTS = ("p2p", "broadcast", "balanced", "auto")


class Block(nn.Module):
    """Matrices 33x12, 12x33, 12x12 and 7x12 (odd on purpose), biases and a norm."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.mix = nn.Linear(dim, dim)
        self.narrow = nn.Linear(dim, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        gate = torch.tanh(self.narrow(h)).mean(-1, keepdim=True)
        return x + gate * self.mix(h) + self.down(torch.nn.functional.silu(self.up(h)))


class Toy(nn.Module):
    """``repeat`` runs the stack of layers several times in one forward."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.repeat = 1
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(self.repeat):
            for layer in self.layers:
                x = layer(x)
        return self.head(self.norm(x))


def make_toy(dtype: torch.dtype = torch.float64, layers: int = 3) -> Toy:
    """The same weights on every rank, built on the real device."""
    torch.manual_seed(7)
    return Toy(layers).to(dtype)


def batch(step: int, samples: int = 12, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: tokens and targets ``[samples, length]``; 12 divides by 1..4."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCAB, (samples, length), generator=generator)
    return tokens, tokens.roll(-1, dims=1)


def rows_of(rank: int, ranks: int, micro: int = 0) -> slice:
    """This rank's samples of microbatch ``micro``."""
    return slice(micro * 12 + rank * 12 // ranks, micro * 12 + (rank + 1) * 12 // ranks)


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def metas_of(model: nn.Module) -> tuple[list[ParamMeta], list[BlockMeta]]:
    def meta(name: str, p: nn.Parameter) -> ParamMeta:
        dtype = str(p.dtype).removeprefix("torch.")
        return ParamMeta(
            canonical_fqn(name), tuple(p.shape), dtype, p.element_size(), p.requires_grad
        )

    params = [meta(n, p) for n, p in model.named_parameters()]
    blocks = [
        BlockMeta(
            f"layers.{i}",
            tuple(meta(f"layers.{i}.{n}", p) for n, p in layer.named_parameters()),
        )
        for i, layer in model.layers.named_children()
    ]
    return params, blocks


def route_toy(model: nn.Module, include: list[str] | None = None) -> Routing:
    params, blocks = metas_of(model)
    block_of = {p.fqn: b.name for b in blocks for p in b.params}
    return route(params, block_of, include or INCLUDE, [])


@dataclass
class Run:
    """One way to train the toy: ``mode`` is "zero3", "zero1" (resident blocks) or "stock"."""

    mode: str = "zero3"
    stock_step: str = "gather"
    planner: str = "cost_aware"
    transport: str | TransportFactory = "auto"
    defer_release: bool | None = None
    accumulation: int = 1
    deferred: bool = False
    checkpointing: bool = False
    reshard: bool | None = True
    mp_policy: MixedPrecisionPolicy | None = None
    offload: bool = False
    ns_dtype: torch.dtype = torch.float64
    explicit_prefetch: bool = False
    async_unshard: bool = False
    deferred_all_reduce: bool = False
    evaluate: bool = False
    repeat: int = 1
    partitioned: bool = False


@dataclass
class Sharded:
    """An owner-sharded toy with its optimizers."""

    model: Toy
    plan: OwnerPlan | None
    optimizers: list[LocalStepOptimizer]
    context: OwnerContext
    routing: Routing
    partition: PartitionedReplicas | None = None

    @property
    def counter(self) -> TrafficCounter:
        return self.context.counter


def shard_toy(
    model: nn.Module,
    mesh: DeviceMesh,
    run: Run,
    include: list[str] | None = None,
    context: OwnerContext | None = None,
) -> Sharded:
    """``model`` may be any with blocks in ``layers``; ``include`` are its matrices."""
    if run.checkpointing:
        for name, layer in list(model.layers.named_children()):
            model.layers.register_module(name, checkpoint_wrapper(layer))
    routing = route_toy(model, include)
    options = {
        "mesh": mesh,
        "mp_policy": run.mp_policy or MixedPrecisionPolicy(),
        # Pinned memory needs an accelerator.
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if run.offload else OffloadPolicy(),
    }
    context = context or OwnerContext(defer_release=run.defer_release)
    factory = run.transport
    if not isinstance(factory, TransportFactory):
        factory = TransportFactory(factory)
    plan = None
    if run.mode != "stock":
        _, blocks = metas_of(model)
        plan = make_plan(run.planner, blocks, set(routing.matrices), mesh.size(mesh.ndim - 1))
        agree_on_plan(plan)
    for name, layer in model.layers.named_children():
        if plan is None:
            fully_shard(layer, reshard_after_forward=run.reshard, **options)
        else:
            owner_shard(
                layer,
                plan.block(f"layers.{name}"),
                transport=factory,
                context=context,
                reshard_after_forward=run.reshard,
                resident=run.mode == "zero1",
                **options,
            )
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            if module is model or run.mode == "stock":  # owner groups have it on by themselves
                count_unused_parameters(module)
    if isinstance(model, Toy):
        model.repeat = run.repeat
    if run.async_unshard:
        for layer in model.layers:
            layer._set_unshard_async_op(True)
    if run.explicit_prefetch:
        for here, after in pairwise(model.layers):
            here.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([here])
    partition = None
    if run.partitioned and plan is not None:
        params = {canonical_fqn(n): p for n, p in model.named_parameters()}
        steppers = assign_replicas(plan, mesh.size(0))
        partition = PartitionedReplicas(
            {params[fqn]: replica for fqn, replica in steppers.items()}, context.counter
        )
    optimizers = make_optimizers(model, routing, run, partition)
    return Sharded(model, plan, optimizers, context, routing, partition)


def make_optimizers(
    model: nn.Module, routing: Routing, run: Run, partition: PartitionedReplicas | None = None
) -> list[LocalStepOptimizer]:
    named = [(canonical_fqn(n), p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if routing.is_matrix(n)]
    others = [p for n, p in named if not routing.is_matrix(n)]

    def muon(groups, of_local):
        options = {**MUON, "ns_dtype": run.ns_dtype}
        if run.mode == "stock":
            return stock_muon(run.stock_step, groups, of_local, TrafficCounter(), **options)
        return Muon(groups, logical_shapes=logical_shapes(of_local), **options)

    def adamw(groups, of_local):
        optimizer = torch.optim.AdamW(groups, **ADAMW)
        create_adam_state(optimizer)
        return optimizer

    view = {} if partition is None else {"step_view": partition.step_view}
    return [LocalStepOptimizer(matrices, muon, **view), LocalStepOptimizer(others, adamw)]


def train(sharded: Sharded, run: Run, steps: int, rank: int, ranks: int, start: int = 0) -> None:
    """``steps`` steps from step ``start`` on; each rank takes its slice of every microbatch of the
    global batch."""
    model = sharded.model
    for step in range(start, start + steps):
        for optimizer in sharded.optimizers:
            optimizer.zero_grad()
        tokens, targets = batch(step, 12 * run.accumulation)
        for micro in range(run.accumulation):
            rows = rows_of(rank, ranks, micro)
            last = micro == run.accumulation - 1
            if run.deferred:
                model.set_requires_gradient_sync(last)
            if run.deferred_all_reduce:
                model.set_requires_all_reduce(last)
            loss = loss_of(model, tokens[rows], targets[rows]) / run.accumulation
            loss.backward()
        for optimizer in sharded.optimizers:
            optimizer.step()
        if sharded.partition is not None:
            sharded.partition.publish()
        sharded.context.publish()  # of resident blocks
        if run.evaluate:
            # After the step, like TorchTitan's validation: FSDP2 leaves the root gathered after a
            # forward without backward, and the next forward uses what was gathered.
            with torch.no_grad():
                loss_of(model, tokens, targets)


OracleWeights = dict[tuple[int, int], dict[str, torch.Tensor]]


def train_oracle(
    steps: int, accumulation: int, repeat: int = 1, layers: int = 3, length: int = 5
) -> Toy:
    """One process, the whole batch, plain float64 tensors, independent maths."""
    model = make_toy(layers=layers)
    model.repeat = repeat
    matrices = [p for n, p in model.named_parameters() if n.startswith("layers") and p.ndim == 2]
    others = [
        p for n, p in model.named_parameters() if not (n.startswith("layers") and p.ndim == 2)
    ]
    muon = OracleMuon(matrices, **MUON)
    adamw = torch.optim.AdamW(others, **ADAMW)
    for step in range(steps):
        model.zero_grad()
        tokens, targets = batch(step, 12 * accumulation, length)
        loss_of(model, tokens, targets).backward()
        muon.step()
        adamw.step()
    return model


@functools.cache
def oracle_weights(steps: int, kinds: frozenset[tuple[int, int]], layers: int) -> OracleWeights:
    """Of :func:`train_oracle`, for each (accumulation, repeat): computed once, in the test's own
    process, and not by every rank of every spawn."""
    oracles = {kind: train_oracle(steps, *kind, layers=layers) for kind in sorted(kinds)}
    return {
        kind: {name: param.detach() for name, param in model.named_parameters()}
        for kind, model in oracles.items()
    }


def kinds_of(runs: Iterable[Run]) -> frozenset[tuple[int, int]]:
    """The (accumulation, repeat) whose oracles ``runs`` are compared with."""
    return frozenset((run.accumulation, run.repeat) for run in runs)


def owner_groups(model: nn.Module) -> list[OwnerParamGroup]:
    """Of every owner-sharded module, in module order."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in param_groups_of(module)]
    return [group for group in groups if isinstance(group, OwnerParamGroup)]


def buffers_of(model: nn.Module) -> list[BlockBuffer]:
    """The block buffers, in module order."""
    return [group._comm.buffer for group in owner_groups(model)]


def allocated(model: nn.Module) -> dict[str, int]:
    """The bytes behind every block buffer; blocks without storage are left out."""
    sizes = {
        buffer.name: buffer._flat.untyped_storage().nbytes()
        for buffer in buffers_of(model)
        if buffer._flat is not None
    }
    return {name: size for name, size in sizes.items() if size}


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank, by canonical name."""
    whole = {}
    for name, param in model.named_parameters():
        is_dtensor = hasattr(param, "full_tensor")
        whole[canonical_fqn(name)] = (param.full_tensor() if is_dtensor else param).detach().clone()
    return whole


def max_difference(model: nn.Module, oracle: nn.Module | Mapping[str, torch.Tensor]) -> float:
    reference = dict(oracle.named_parameters()) if isinstance(oracle, nn.Module) else oracle
    return max(
        (value - reference[name]).abs().max().item() for name, value in full_state(model).items()
    )


def run_transports(check: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Run ``check(transport, *args)`` for every transport, in one spawn; the results of all ranks
    and transports."""
    found = run_ranks(_each_transport, ranks, check, *args)
    return [result for of_rank in found for result in of_rank]


def _each_transport(check: Callable[..., Any], *args: Any) -> list[Any]:
    return [check(name, *args) for name in TRANSPORTS]


Observer = Callable[[str, str], None]


class ObservedFactory(TransportFactory):
    """Makes transports that call ``observer(operation, block name)`` before each operation."""

    def __init__(self, name: str, observer: Observer) -> None:
        super().__init__(name)
        self.observer = observer

    def __call__(
        self, name: str, block: BlockPlan, rank: int, counter: TrafficCounter
    ) -> Transport:
        observer = self.observer

        class Observed(TRANSPORT_CLASSES[name]):
            def gather(self, buffer, group):
                observer("gather", block.name)
                return super().gather(buffer, group)

            def reduce(self, buffer, group):
                observer("reduce", block.name)
                return super().reduce(buffer, group)

        return Observed(block, rank, counter)


def mesh_of(replicas: int, ranks: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    return init_device_mesh(
        "cpu", (replicas, ranks // replicas), mesh_dim_names=("dp_replicate", "fsdp")
    )


def owner_parameters(model: nn.Module) -> dict[str, OwnerDTensor]:
    return {canonical_fqn(n): p for n, p in model.named_parameters() if isinstance(p, OwnerDTensor)}
