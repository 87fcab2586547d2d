"""Optimizers that step on local tensors, without a collective.

Imports ``layout``, ``comm`` and ``runtime``.
"""

from torchtitan_matrixfsdp.optim.local_step import LocalStepOptimizer, create_adam_state
from torchtitan_matrixfsdp.optim.muon import ADJUST_LR, Muon, lr_scale
from torchtitan_matrixfsdp.optim.newton_schulz import QUINTIC, newton_schulz
from torchtitan_matrixfsdp.optim.stock import GatherMuon

__all__ = [
    "ADJUST_LR",
    "QUINTIC",
    "GatherMuon",
    "LocalStepOptimizer",
    "Muon",
    "create_adam_state",
    "lr_scale",
    "newton_schulz",
]
