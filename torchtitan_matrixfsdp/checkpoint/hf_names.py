"""A state-dict adapter, applied to one tensor at a time.

TorchTitan's adapters (``to_hf``, ``from_hf``) convert dicts of any size, but are written for whole
models. Here each tensor passes through them alone, so that nobody holds the others; on meta tensors
they tell names and shapes to ranks that hold no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.safetensors import TensorMeta

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""``to_hf`` or ``from_hf`` of an adapter: tensors by name to tensors by name."""


def to_hf_alone(
    to_hf: Convert, fqn: str, tensor: torch.Tensor, dtype: torch.dtype
) -> tuple[TensorMeta, ...]:
    """The Hugging Face tensors that ``tensor`` becomes in ``dtype``; computed on meta.

    Empty if the format has none for it, as for a head that is tied to the embedding.

    Raises:
        CheckpointError: the adapter does not know the name, or not this shape.
    """
    meta = torch.empty(tensor.shape, dtype=dtype, device="meta")
    try:
        converted = to_hf({fqn: meta})
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{fqn} of shape {tuple(tensor.shape)} has no counterpart in Hugging Face's format: "
            f"the model's state-dict adapter raised {type(error).__name__}: {error}. Use a "
            "checkpoint in TorchTitan's own format for this model."
        ) from error
    return tuple(TensorMeta(name, t.dtype, tuple(t.shape)) for name, t in converted.items())


@dataclass(frozen=True)
class Source:
    """Where the values of one tensor of the model are.

    Attributes:
        tensors: the Hugging Face tensors that it is made of.
        is_verbatim: whether they are one tensor with the same elements at the same places, so that
            a part of it can be read alone.
    """

    tensors: tuple[TensorMeta, ...]
    is_verbatim: bool


class Reverse:
    """``from_hf``, one tensor of the model at a time.

    A tied head has no tensor of its own in the format, and ``from_hf`` of a tied model makes it of
    the embedding, which it insists on finding in every dict. So the tensors that serve several of
    the model's accompany every call, on meta.

    Attributes:
        sources: where the values of each tensor of the model are, by its FQN.

    Raises:
        CheckpointError: the adapter knows no source of a tensor.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], to_hf: Convert, from_hf: Convert) -> None:
        self._from_hf = from_hf
        wanted = {fqn: to_hf_alone(to_hf, fqn, t, t.dtype) for fqn, t in state.items()}
        metas = {
            meta.name: torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            for tensors in wanted.values()
            for meta in tensors
        }
        by_name = {meta.name: meta for tensors in wanted.values() for meta in tensors}
        converted = from_hf(dict(metas)) if metas else {}
        self._context: dict[str, torch.Tensor] = {}
        self._tied: dict[str, str] = {}  # name of the source by FQN
        for fqn, tensors in wanted.items():
            if not tensors:
                name = next((n for n, meta in metas.items() if converted.get(fqn) is meta), None)
                if name is None:
                    raise CheckpointError(
                        f"{fqn}: the model's state-dict adapter knows no tensor in Hugging Face's "
                        "format for it. Use a checkpoint in TorchTitan's own format."
                    )
                self._tied[fqn] = name
                self._context[name] = metas[name]
        self.sources: dict[str, Source] = {}
        for fqn, tensors in wanted.items():
            own = tensors or (by_name[self._tied[fqn]],)
            verbatim = len(own) == 1 and converted[fqn] is metas[own[0].name]
            self.sources[fqn] = Source(own, verbatim)

    def convert(self, fqn: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The model's tensor ``fqn`` from all the tensors of its source."""
        return self._from_hf({**self._context, **values})[fqn]

    def duplicates(self, names: Iterable[str]) -> dict[str, str]:
        """Those of ``names`` that ``from_hf`` takes for a tied tensor of the model, each with the
        tensor of the format that it must equal. Some published weights hold a tied head too."""
        found = {}
        for name in names:
            probe = torch.empty(0, device="meta")
            try:
                converted = self._from_hf({**self._context, name: probe})
            except (KeyError, AttributeError, RuntimeError):
                continue  # no name that the adapter knows
            for fqn, original in self._tied.items():
                if converted.get(fqn) is probe:
                    found[name] = original
        return found
