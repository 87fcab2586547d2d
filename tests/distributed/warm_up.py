"""Imported by a fork server: what every job imports, so that a forked rank starts at once."""

import torch

from torchtitan_matrixfsdp.cpu_device import use_cpu_device

torch.set_num_threads(1)
use_cpu_device()

import torchtitan.train  # noqa: E402

import tests.distributed.trainer  # noqa: E402
import torchtitan_matrixfsdp.titan.trainer  # noqa: E402

assert torchtitan.train and tests.distributed.trainer and torchtitan_matrixfsdp.titan.trainer
