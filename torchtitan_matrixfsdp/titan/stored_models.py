"""The model that a checkpoint was saved from, on meta: for tools that run without a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.placement import Blocks
from torchtitan_matrixfsdp.titan.hf_config import hf_extra_files
from torchtitan_matrixfsdp.titan.job_config import MatrixOptimizer
from torchtitan_matrixfsdp.titan.parallelize import describe_blocks, route_model
from torchtitan_matrixfsdp.titan.train_specs import MODEL_NAMES, dense_flavors


class StoredModel:
    """One flavor of one of our models.

    Attributes:
        args: TorchTitan's arguments of the model.
        adapter: to and from Hugging Face's names.
        state: the tensors of the model by FQN, on meta.

    Raises:
        CheckpointError: no such model or flavor.
    """

    def __init__(self, name: str, flavor: str) -> None:
        if name not in MODEL_NAMES:
            raise CheckpointError(f"--model: received {name!r}; legal: {', '.join(MODEL_NAMES)}.")
        flavors = dense_flavors(name)
        if flavor not in flavors:
            raise CheckpointError(
                f"--flavor: received {flavor!r}; legal for {name}: {', '.join(flavors)}."
            )
        spec = get_train_spec(name)
        self.args: Any = flavors[flavor]
        assert spec.state_dict_adapter is not None  # both models have one
        self.adapter = spec.state_dict_adapter(self.args, None)
        with torch.device("meta"):
            model = spec.model_cls(self.args)
        assert isinstance(model, nn.Module)
        self._model = model
        self.state: dict[str, torch.Tensor] = model.state_dict()

    def blocks(self) -> Blocks:
        """Its blocks, with the matrices that the defaults of ``[matrix_optimizer]`` take."""
        routing = route_model(self._model, MatrixOptimizer())
        return Blocks(tuple(describe_blocks(self._model)), frozenset(routing.matrices))

    def extra_files(
        self, hf_assets: Path | None, dtype: torch.dtype, seq_len: int | None
    ) -> dict[str, bytes]:
        """What stands beside exported weights, by file name; as
        :func:`~torchtitan_matrixfsdp.titan.hf_config.hf_extra_files`."""
        return hf_extra_files(self.args, hf_assets, dtype, seq_len)
