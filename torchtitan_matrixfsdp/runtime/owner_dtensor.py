"""The shard as the rest of PyTorch sees it.

[Note: owner DTensors]
An owner-shaped parameter is a DTensor whose last mesh dimension has the placement
``Owner(rank)``: the local tensor is the whole tensor on that group-local rank and has numel 0
elsewhere. It is not a ``Shard``: DTensor and DCP compute a Shard's chunks from the spec, which
would not match these. So ``Owner`` is a placement of its own, and DTensor's sharding
propagation knows nothing about it; :class:`OwnerDTensor` answers each operator itself:

- elementwise operators and copies run on the local tensors (they are right for any shard
  shape, provided all operands have the same owner);
- norms run on an uneven ``Shard(0)`` spelling of the same local tensors, so that the result is
  an ordinary DTensor which adds up over ranks with those of row-sharded parameters;
- in-place random operators draw at full size on every rank and keep the owner's copy, so
  every generator advances as for the unsharded tensor ([Note: layout-independent weights]);
- ``any`` is that of the whole tensor, on every rank (the rejection loop of ``trunc_normal_``);
- everything else raises. A silent redistribution would be a hidden collective on one rank.

[Note: layout-independent weights]
The same seed must give bit-equal weights for every world size and layout. Stock DTensors on
CPU consume the generator by their local size, so a mixed model (owned blocks, row-sharded
embedding) would depend on W. Inside :func:`whole_tensor_random` every in-place random
operator on any DTensor draws the whole tensor on every rank, exactly as a single process
would, and keeps this rank's part. Rejection loops (``trunc_normal_``) must end on all ranks
when they end for the whole tensor, so ``any`` is made global there: on a stock DTensor it
answers for the local shard alone, ranks would leave the loop after different draws, and all
later weights would differ. Cost: one transient full-size tensor per call, at start-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from torchtitan_matrixfsdp.runtime.fsdp_compat import (
    DispatchingDTensor,
    DTensorSpec,
    local_of,
    make_spec,
    spec_of,
)

_aten = torch.ops.aten


class Owner(Placement):
    """Placement: the whole tensor on group-local rank ``owner`` of a mesh dimension."""

    def __init__(self, owner: int) -> None:
        super().__init__()
        self.owner = owner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and other.owner == self.owner

    def __hash__(self) -> int:
        return hash(("Owner", self.owner))

    def __repr__(self) -> str:
        return f"Owner({self.owner})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[type[Owner], tuple[int]]:
        # The C++ base has no pickle support, and async checkpoint staging pickles specs.
        return (Owner, (self.owner,))


# Operators that make or fill a tensor of the same layout, and are not tagged pointwise.
_SAME_LAYOUT = frozenset(
    {
        _aten.detach.default,
        _aten.detach_.default,
        _aten.alias.default,
        _aten.clone.default,
        _aten._to_copy.default,
        _aten.copy_.default,
        _aten.fill_.Scalar,
        _aten.zero_.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.empty_like.default,
        _aten.full_like.default,
        _aten.lift_fresh.default,
    }
)
# Staging an asynchronous checkpoint makes an empty copy of the same global shape.
_NEW_LIKE = frozenset({_aten.new_empty.default, _aten.new_zeros.default})
_NORMS = frozenset({_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar})
# The elementwise foreach operators of torch's optimizers and gradient clipping.
_FOREACH = frozenset(
    f"aten::_foreach_{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "copy")
    for suffix in ("", "_")
) | {"aten::_foreach_zero_"}
_RANDOM_INPLACE = frozenset({_aten.normal_.default, _aten.uniform_.default})


class OwnerDTensor(DispatchingDTensor):
    """A DTensor that lives whole on one shard rank and is empty elsewhere.

    See [Note: owner DTensors] for the operators it answers.
    """

    @property
    def owner(self) -> int:
        """Group-local shard rank that holds the tensor."""
        placement = self.placements[-1]
        assert isinstance(placement, Owner)
        return placement.owner

    @property
    def is_owner(self) -> bool:
        """Whether this rank holds the tensor."""
        return self.device_mesh.get_local_rank(self.device_mesh.ndim - 1) == self.owner

    @classmethod
    def wrap(
        cls, local: torch.Tensor, mesh: DeviceMesh, owner: int, shape: torch.Size
    ) -> OwnerDTensor:
        """An owner DTensor of global ``shape`` over ``local`` (whole on the owner, numel 0
        elsewhere), sharing its storage. The leading mesh dimension of a 2D mesh replicates."""
        placements = (Replicate(),) * (mesh.ndim - 1) + (Owner(owner),)
        return cls.from_spec(local, make_spec(mesh, placements, shape, local.dtype))

    @classmethod
    def from_spec(cls, local: torch.Tensor, spec: DTensorSpec) -> OwnerDTensor:
        """An owner DTensor over ``local`` with an existing spec."""
        return cls(local, spec, requires_grad=False)

    def like(self, local: torch.Tensor) -> OwnerDTensor:
        """``local`` (of this tensor's local shape, any dtype) as a tensor of the same layout."""
        return OwnerDTensor.wrap(local, self.device_mesh, self.owner, self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        tensor_types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM_INPLACE:
            draw_whole(func, args, kwargs)
            return args[0]
        if func is _aten.any.default:
            return _any_of_the_whole(args[0])
        if func in _NORMS:
            return _norm(func, args, kwargs)
        if func in _NEW_LIKE and tuple(args[1]) == tuple(args[0].shape):
            local = local_of(args[0])
            return args[0].like(func(local, list(local.shape), *args[2:], **kwargs))
        name = func._schema.name
        if name in _FOREACH:
            return _foreach(func, args, kwargs)
        # A pointwise operator without a tensor result (equal) would answer for this rank alone.
        is_pointwise = torch.Tag.pointwise in func.tags and func is not _aten.equal.default
        if func in _SAME_LAYOUT or is_pointwise:
            return _elementwise(func, args, kwargs)
        raise NotImplementedError(
            f"{func} on an owner-shaped DTensor (shape {_shapes(args)}): this operator is not "
            "defined shard by shard, and running it would need a hidden collective. Use "
            ".to_local() for this rank's part or .full_tensor() to gather it on every rank."
        )

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank of the shard group: one explicit broadcast.

        Not differentiable; every rank of the group must call it.
        """
        local = local_of(self)
        whole = local.detach().clone() if self.is_owner else local.new_empty(self.shape)
        group = self.device_mesh.get_group(self.device_mesh.ndim - 1)
        dist.broadcast(whole, group=group, group_src=self.owner)
        return whole

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        """Only to its own placements; anything else raises.

        Raises:
            NotImplementedError: other placements are asked for.
        """
        if placements is None or tuple(placements) == self.placements:
            return self
        raise NotImplementedError(
            f"redistribute from {self.placements} to {tuple(placements)}: an owner-shaped "
            "DTensor never changes layout implicitly. Use .full_tensor() and "
            "torch.distributed.tensor.distribute_tensor."
        )

    # Distributed checkpoint's protocol: only the owner has a chunk, and it is the whole tensor.
    def _chunks(self) -> list[ChunkStorageMetadata]:
        if local_of(self).numel() == 0 and math.prod(self.shape) > 0:
            return []
        return [ChunkStorageMetadata(offsets=torch.Size([0] * self.ndim), sizes=self.shape)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_of(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return local_of(self)


def draw_whole(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run an in-place random operator on the DTensor ``args[0]`` as a single process would:
    draw the whole tensor, keep this rank's part. Meta tensors draw nothing."""
    target: DTensor = args[0]
    local = local_of(target)
    if local.is_meta:
        return
    whole = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    func(whole, *args[1:], **kwargs)
    if isinstance(target, OwnerDTensor):
        part = whole if target.is_owner else whole.new_empty(local.shape)
    else:
        # src_data_rank=None: every rank slices its own copy, no communication.
        part = local_of(
            distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        )
    local.copy_(part)


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
        if func is _aten.any.default and isinstance(args[0], DTensor):
            return _any_of_the_whole(args[0])
        if torch.Tag.nondeterministic_seeded in func.tags and _dtensors(args):
            if func not in _RANDOM_INPLACE:
                raise NotImplementedError(
                    f"{func} on a DTensor during weight initialisation draws a layout-dependent "
                    "amount of random numbers. Use normal_ or uniform_ (torch.nn.init)."
                )
            draw_whole(func, args, kwargs)
            return args[0]
        return func(*args, **kwargs)


def _dtensors(args: Any) -> list[DTensor]:
    return [a for a in tree_flatten(args)[0] if isinstance(a, DTensor)]


def _shapes(args: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in _dtensors(args)]


def _to_local(value: Any) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value


def _require_same_layout(
    func: torch._ops.OpOverload, tensors: Iterable[torch.Tensor]
) -> OwnerDTensor:
    """The first owner DTensor among the operands of one elementwise operation; raises if the
    others are not elementwise-compatible with its local tensor."""
    operands = list(tensors)
    first = next(t for t in operands if isinstance(t, OwnerDTensor))
    for other in operands:
        if isinstance(other, OwnerDTensor):
            same = other.placements == first.placements and other.shape == first.shape
        else:
            # A plain scalar tensor means the same on every rank; any other plain tensor
            # would broadcast against numel 0 on the ranks that own nothing.
            same = not isinstance(other, DTensor) and other.ndim == 0
        if not same:
            raise NotImplementedError(
                f"{func}: operands of one elementwise operation must be owner-shaped alike, got "
                f"{first.placements} {tuple(first.shape)} and {type(other).__name__} "
                f"{tuple(other.shape)}. Work on .to_local() or .full_tensor()."
            )
    return first


def _elementwise(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
    like = _require_same_layout(func, tensors)
    out = func(*tree_map(_to_local, args), **tree_map(_to_local, kwargs))
    if func._schema.is_mutable:
        return args[0]
    return tree_map(lambda o: like.like(o) if isinstance(o, torch.Tensor) else o, out)


def _foreach(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise foreach operator over lists that may mix owner and ordinary DTensors,
    position by position of one layout (the lists of one optimizer or of gradient clipping)."""
    lists = [a for a in args if isinstance(a, (list, tuple))]
    lists = [entry for entry in lists if any(isinstance(t, torch.Tensor) for t in entry)]
    for position in zip(*lists, strict=True):
        if any(isinstance(t, OwnerDTensor) for t in position):
            _require_same_layout(func, position)
        elif len({t.placements for t in position if isinstance(t, DTensor)}) > 1:
            raise NotImplementedError(f"{func}: operands of different placements in one position")
    out = func(*tree_map(_to_local, args), **tree_map(_to_local, kwargs))
    if func._schema.is_mutable:
        return None
    return [wrap_like(o, like) for o, like in zip(out, args[0], strict=True)]


def wrap_like(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``local`` as a tensor of ``like``'s layout (owner, any other DTensor, or plain), sharing
    storage. ``local`` must have the shape of ``like``'s local tensor; its dtype is kept."""
    if isinstance(like, OwnerDTensor):
        return like.like(local)
    if isinstance(like, DTensor):
        return DTensor.from_local(
            local,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
    return local


def _norm(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dim = args[2] if func is _aten.linalg_vector_norm.default and len(args) > 2 else None
    dim = kwargs.get("dim", dim)
    if dim is not None or not order > 0:
        raise NotImplementedError(
            f"{func} with dim={dim}, ord={order} on an owner-shaped DTensor: only norms of the "
            "whole tensor with ord > 0 are defined shard by shard. Use .full_tensor()."
        )

    def as_row_shards(value: Any) -> Any:
        if not isinstance(value, OwnerDTensor):
            return value
        local = local_of(value)
        if local.numel() == 0:
            # The infinity norm of nothing raises; one zero is neutral for every p > 0.
            local = local.new_zeros((1,) * value.ndim)
        spec = spec_of(value)
        placements = tuple(Shard(0) if isinstance(p, Owner) else p for p in spec.placements)
        row_spec = make_spec(spec.mesh, placements, value.shape, value.dtype)
        return DTensor(local, row_spec, requires_grad=False)

    return func(*tree_map(as_row_shards, args), **tree_map(as_row_shards, kwargs))


def _any_of_the_whole(tensor: DTensor) -> torch.Tensor:
    """``any`` over the whole tensor, the same on every rank; empty local tensors say False."""
    local = local_of(tensor)
    if local.is_meta:
        return local.any()
    verdict = local.any().to(torch.uint8)
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            group = tensor.device_mesh.get_group(dim)
            dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)
    return verdict.bool()
