"""What the server that forks the test ranks imports, once: eight seconds that each rank would need.

Libraries only. TorchTitan is not among them: its device is chosen before it is imported, in the
ranks that need it; nor is this package, whose registrations belong to a rank as well.
"""

import datasets
import datasets.distributed
import tokenizers
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining.schedules
import torch.distributed.tensor.parallel
import torch.nn.attention.flex_attention
import torch.profiler
import torch.utils.tensorboard
import torchdata.stateful_dataloader
import triton
import typeguard
import tyro

__all__ = ["datasets", "tokenizers", "torch", "torchdata", "triton", "typeguard", "tyro"]
