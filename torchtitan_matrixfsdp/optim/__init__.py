"""Optimizers that step on local tensors. Without tensor parallelism they use no collective.

Imports ``layout``, ``comm`` and ``runtime``.
"""

from torchtitan_matrixfsdp.optim.base import MatrixOptimizerBase
from torchtitan_matrixfsdp.optim.foreign import ForeignOptimizer
from torchtitan_matrixfsdp.optim.foreign_state import ForeignStateError
from torchtitan_matrixfsdp.optim.local_step import LocalStepOptimizer, create_adam_state
from torchtitan_matrixfsdp.optim.muon import ADJUST_LR, Muon, lr_scale
from torchtitan_matrixfsdp.optim.newton_schulz import QUINTIC, newton_schulz
from torchtitan_matrixfsdp.optim.shampoo import GRAFTING, Shampoo
from torchtitan_matrixfsdp.optim.soap import SOAP
from torchtitan_matrixfsdp.optim.stagger import refresh_load, refresh_phases
from torchtitan_matrixfsdp.optim.stock import GatherMuon
from torchtitan_matrixfsdp.optim.tp_exchange import (
    TP_STEP,
    TensorParallelMuon,
    tensor_parallel_cut,
)

__all__ = [
    "ADJUST_LR",
    "GRAFTING",
    "QUINTIC",
    "SOAP",
    "TP_STEP",
    "ForeignOptimizer",
    "ForeignStateError",
    "GatherMuon",
    "LocalStepOptimizer",
    "MatrixOptimizerBase",
    "Muon",
    "Shampoo",
    "TensorParallelMuon",
    "create_adam_state",
    "lr_scale",
    "newton_schulz",
    "refresh_load",
    "refresh_phases",
    "tensor_parallel_cut",
]
