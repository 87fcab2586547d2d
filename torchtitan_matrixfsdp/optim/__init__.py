"""Optimizers that step on local tensors. Without tensor parallelism they use no collective.

Imports ``layout``, ``comm`` and ``runtime``.
"""

from torchtitan_matrixfsdp.optim.base import MatrixOptimizerBase, logical_shapes
from torchtitan_matrixfsdp.optim.foreign import EXTRAS, ForeignOptimizer
from torchtitan_matrixfsdp.optim.foreign_state import ForeignStateError
from torchtitan_matrixfsdp.optim.local_step import LocalStepOptimizer, create_adam_state
from torchtitan_matrixfsdp.optim.muon import ADJUST_LR, Muon, Split, lr_scale
from torchtitan_matrixfsdp.optim.newton_schulz import (
    COEFFICIENTS,
    POLAR_EXPRESS,
    QUINTIC,
    newton_schulz,
    newton_schulz_each,
)
from torchtitan_matrixfsdp.optim.shampoo import GRAFTING, Shampoo
from torchtitan_matrixfsdp.optim.soap import SOAP
from torchtitan_matrixfsdp.optim.stagger import refresh_load, refresh_phases
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
    "COEFFICIENTS",
    "EXTRAS",
    "GRAFTING",
    "POLAR_EXPRESS",
    "QUINTIC",
    "SOAP",
    "STOCK_STEP",
    "STOCK_STEPS",
    "TP_STEP",
    "ForeignOptimizer",
    "ForeignStateError",
    "GatherMuon",
    "LocalStepOptimizer",
    "MatrixOptimizerBase",
    "Muon",
    "RowShardMuon",
    "Shampoo",
    "Split",
    "TensorParallelMuon",
    "create_adam_state",
    "logical_shapes",
    "lr_scale",
    "newton_schulz",
    "newton_schulz_each",
    "refresh_load",
    "refresh_phases",
    "stock_muon",
    "tensor_parallel_cut",
]
