"""Random initialisation that does not depend on the layout; see [Note: layout-independent weights]
in ``owner_dtensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_matrixfsdp.runtime.owner_dtensor import (
    RANDOM_INPLACE,
    any_of_the_whole,
    draw_whole,
    dtensors_in,
)


class whole_tensor_random(TorchDispatchMode):
    """Context in which random initialisation of DTensors is independent of their layout.

    See [Note: layout-independent weights]. The generators of all ranks must be equal on entry
    and are equal on exit.

    Raises:
        NotImplementedError: a random operator other than in-place ``normal_`` and
            ``uniform_`` is applied to a DTensor, which would make the weights depend on W.
    """

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        tensor_types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.any.default and isinstance(args[0], DTensor):
            return any_of_the_whole(args[0])
        if torch.Tag.nondeterministic_seeded in func.tags and dtensors_in(args):
            if func not in RANDOM_INPLACE:
                raise NotImplementedError(
                    f"{func} on a DTensor during weight initialisation draws a layout-dependent "
                    "amount of random numbers. Use normal_ or uniform_ (torch.nn.init)."
                )
            draw_whole(func, args, kwargs)
            return args[0]
        return func(*args, **kwargs)
