"""The loss function, corrected for DDP.

TorchTitan 0.2.2 divides the loss by the global number of tokens, so gradients must be SUMMED over
data-parallel ranks. Its FSDP path says so (divide factor 1); its DDP path leaves DDP's mean over
ranks in place, and every gradient comes out W times too small. Muon's scale invariance hides that,
gradient clipping and the logged norm do not. A summing communication hook is no remedy: with
gradient accumulation DDP reduces the running total again in every microbatch, which only a mean
survives. So the backward of the loss is scaled by W instead, and the mean takes it out again
(exactly, for W a power of two).
"""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.components.loss import LossFunction, build_cross_entropy_loss
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.distributed import ParallelDims


class _ScaleGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def build_loss(job_config: TitanJobConfig, parallel_dims: ParallelDims, **_: Any) -> LossFunction:
    """TorchTitan's cross-entropy sum; under DDP with the gradient scaled by the replica count."""
    loss_fn = build_cross_entropy_loss(job_config)
    if parallel_dims.fsdp_enabled or not parallel_dims.dp_replicate_enabled:
        return loss_fn
    replicas = float(parallel_dims.dp_replicate)

    def summed_loss(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _ScaleGradient.apply(loss_fn(pred, labels), replicas)

    return summed_loss
