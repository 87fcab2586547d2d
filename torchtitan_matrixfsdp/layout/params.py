"""What the layout needs to know of a parameter and of a block, without holding any tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Module names that activation checkpointing, torch.compile and FSDP put into a parameter's path.
# "module" is absent on purpose: models use it as a name of their own, so that stripping it could
# merge two different parameters.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_fqn(name: str) -> str:
    """Returns a dotted parameter or module name without the components that wrappers add.

    Wrapping happens after the model is built and differs between configurations, so every
    decision that hangs on a name (routing, planning, checkpoint keys) uses this form.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One parameter's logical (unsharded) metadata.

    ``fqn`` is the name from the model's root. It may be given wrapped and is stored canonical, so
    that no later step can see two spellings of one parameter. ``shape`` is the logical shape,
    never that of a local shard. ``dtype`` has no "torch." prefix ("float32"); ``itemsize`` is its
    size in bytes.

    Raises:
        ValueError: an empty name, a negative dimension, an item size below 1, a prefixed dtype.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "fqn", canonical_fqn(self.fqn))
        if not self.fqn:
            raise ValueError("ParamMeta.fqn is empty; give the parameter's name from the root")
        if any(dim < 0 for dim in self.shape):
            raise ValueError(
                f"{self.fqn}: shape {self.shape} has a negative dimension; legal: >= 0"
            )
        if self.itemsize < 1:
            raise ValueError(f"{self.fqn}: itemsize is {self.itemsize} bytes; legal: >= 1")
        if not self.dtype or "." in self.dtype:
            raise ValueError(f'{self.fqn}: dtype is {self.dtype!r}; legal: a bare name ("float32")')

    @property
    def numel(self) -> int:
        """Elements; 1 for a 0-D parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the stored dtype."""
        return self.numel * self.itemsize

    @property
    def ndim(self) -> int:
        """Dimensions of the logical shape."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """One FSDP unit: its name and its parameters, in the module's own order.

    The order matters: it breaks ties between equally large roles, so every rank must list the
    parameters as ``named_parameters`` yields them.
    """

    name: str
    params: tuple[ParamMeta, ...]
