"""Optimizers that step on local tensors. Without tensor parallelism they use no collective.

Imports ``layout``, ``comm`` and ``runtime``.
"""

from torchtitan_matrixfsdp.optim.local_step import LocalStepOptimizer, create_adam_state
from torchtitan_matrixfsdp.optim.muon import ADJUST_LR, Muon, Split, lr_scale
from torchtitan_matrixfsdp.optim.newton_schulz import (
    COEFFICIENTS,
    POLAR_EXPRESS,
    QUINTIC,
    newton_schulz,
    newton_schulz_each,
)
from torchtitan_matrixfsdp.optim.stock import GatherMuon
from torchtitan_matrixfsdp.optim.tp_exchange import (
    TP_STEP,
    TensorParallelMuon,
    tensor_parallel_cut,
)

__all__ = [
    "ADJUST_LR",
    "COEFFICIENTS",
    "POLAR_EXPRESS",
    "QUINTIC",
    "TP_STEP",
    "GatherMuon",
    "LocalStepOptimizer",
    "Muon",
    "Split",
    "TensorParallelMuon",
    "create_adam_state",
    "lr_scale",
    "newton_schulz",
    "newton_schulz_each",
    "tensor_parallel_cut",
]
