"""Optimizers that step on local tensors. Without tensor parallelism they use no collective.

Imports ``layout``, ``comm`` and ``runtime``.
"""

from torchtitan_matrixfsdp.optim.local_step import LocalStepOptimizer, create_adam_state
from torchtitan_matrixfsdp.optim.muon import ADJUST_LR, Muon, lr_scale
from torchtitan_matrixfsdp.optim.newton_schulz import QUINTIC, newton_schulz
from torchtitan_matrixfsdp.optim.stock import (
    STOCK_STEP,
    STOCK_STEPS,
    GatherMuon,
    RowShardMuon,
    stock_muon,
)
from torchtitan_matrixfsdp.optim.tp_exchange import (
    TP_STEP,
    TensorParallelMuon,
    tensor_parallel_cut,
)

__all__ = [
    "ADJUST_LR",
    "QUINTIC",
    "STOCK_STEP",
    "STOCK_STEPS",
    "TP_STEP",
    "GatherMuon",
    "LocalStepOptimizer",
    "Muon",
    "RowShardMuon",
    "TensorParallelMuon",
    "create_adam_state",
    "lr_scale",
    "newton_schulz",
    "stock_muon",
    "tensor_parallel_cut",
]
