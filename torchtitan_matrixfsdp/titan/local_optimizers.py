"""The two optimizers of a model part, as the configuration asks: matrix and elementwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config import Optimizer as OptimizerConfig

from torchtitan_matrixfsdp.optim import (
    SOAP,
    ForeignOptimizer,
    LocalStepOptimizer,
    Muon,
    Shampoo,
    Split,
    TensorParallelMuon,
    create_adam_state,
    logical_shapes,
    stock_muon,
    tensor_parallel_cut,
)
from torchtitan_matrixfsdp.runtime import OwnerDTensor, PartitionedReplicas
from torchtitan_matrixfsdp.titan.custom_class import class_options, import_class
from torchtitan_matrixfsdp.titan.job_config import MatrixOptimizer
from torchtitan_matrixfsdp.titan.model import OwnerSetup

_DTYPES = {**TORCH_DTYPE_MAP, "float64": torch.float64}

Locals = Mapping[torch.Tensor, torch.Tensor]
"""The parameter of each local tensor."""


def build_matrix_optimizer(
    params: list[nn.Parameter],
    setup: OwnerSetup,
    elementwise: OptimizerConfig,
    partition: PartitionedReplicas,
    splits: Mapping[torch.Tensor, Split] = MappingProxyType({}),
) -> LocalStepOptimizer:
    """The optimizer of the routed matrices, stepping on local tensors.

    ``setup.counter`` counts what its step sends: with owner shards nothing, except under tensor
    parallelism. ``splits`` are the parameters that Muon cuts into blocks.
    """
    config = setup.matrix_optimizer

    def make(groups: list[dict[str, Any]], of_local: Locals) -> Optimizer:
        shapes = logical_shapes(of_local)
        if config.class_path:
            cls = import_class(config.class_path)
            options = class_options(cls, config.kwargs, config.lr, config.weight_decay)
            return ForeignOptimizer(groups, cls, options, shapes)
        common: dict[str, Any] = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "logical_shapes": shapes,
        }
        if config.name == "Shampoo":
            own: dict[str, Any] = asdict(config.shampoo)
            own["root_dtype"] = _DTYPES[own["root_dtype"]]
            return Shampoo(groups, **common, **own)
        if config.name == "SOAP":
            own = asdict(config.soap)
            return SOAP(groups, **common, **own)
        return _muon(groups, of_local, setup, splits)

    if config.name == "AdamW" and not config.class_path:
        factory = _adamw_factory(config.lr, config.weight_decay, elementwise)
        return LocalStepOptimizer(params, factory, partition.step_view)
    return LocalStepOptimizer(params, make, partition.step_view)


def _muon(
    groups: list[dict[str, Any]],
    of_local: Locals,
    setup: OwnerSetup,
    splits: Mapping[torch.Tensor, Split],
) -> Muon:
    options = _muon_options(setup.matrix_optimizer)
    options["split"] = {local: splits[p] for local, p in of_local.items() if p in splits}
    is_row_sharded = any(
        isinstance(p, DTensor) and not isinstance(p, OwnerDTensor) for p in of_local.values()
    )
    if is_row_sharded:
        return stock_muon(setup.stock_step, groups, of_local, setup.counter, **options)
    if any(tensor_parallel_cut(param) is not None for param in of_local.values()):
        return TensorParallelMuon(groups, of_local, setup.counter, **options)
    return Muon(groups, logical_shapes=logical_shapes(of_local), **options)


def _muon_options(config: MatrixOptimizer) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "ns_steps": config.ns_steps,
        "ns_dtype": _DTYPES[config.ns_dtype],
        "coefficients": config.ns_coefficients,
        "adjust_lr": config.adjust_lr,
    }


def build_elementwise_optimizer(
    params: list[nn.Parameter], config: OptimizerConfig
) -> LocalStepOptimizer:
    """AdamW with TorchTitan's own ``[optimizer]`` options, stepping on local tensors."""
    return LocalStepOptimizer(params, _adamw_factory(config.lr, config.weight_decay, config))


def _adamw_factory(
    lr: float, weight_decay: float, config: OptimizerConfig
) -> Callable[[list[dict[str, Any]], Mapping[torch.Tensor, torch.Tensor]], Optimizer]:
    def adamw(
        groups: list[dict[str, Any]], of_local: Mapping[torch.Tensor, torch.Tensor]
    ) -> Optimizer:
        optimizer = AdamW(
            groups,
            lr=lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=weight_decay,
            fused=config.implementation == "fused",
            foreach=config.implementation == "foreach",
        )
        create_adam_state(optimizer)
        return optimizer

    return adamw
