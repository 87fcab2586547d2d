"""The shard as the rest of PyTorch sees it.

[Note: owner DTensors]
An owner-shaped tensor is a DTensor with the placement ``Owner(rank)`` on at least one dimension
of its mesh; the other dimensions have ``Replicate()`` or, under tensor parallelism, ``Shard(d)``.
A rank whose coordinate is the owner's in *every* ``Owner`` dimension stores its *fragment*: what
the ``Shard`` dimensions leave of the tensor, the whole of it where there are none. All other ranks
store numel 0, of shape ``[0, *fragment[1:]]``. The layouts in use:

| mesh              | placements                 | the tensor lives                         |
|-------------------|----------------------------|------------------------------------------|
| shard             | Owner(k)                   | whole on one rank                        |
| replicate, shard  | Replicate, Owner(k)        | whole on one rank of each replica        |
| replicate, shard  | Owner(i), Owner(k)         | whole on one rank of one replica         |
| shard, tp         | Owner(k), Shard(d)         | in fragments on rank k's column          |
| shard, tp         | Owner(k), Replicate        | whole on every rank of that column       |

``Owner`` is not a ``Shard``: DTensor and DCP compute a Shard's chunks from the spec, which would
not match these. So it is a placement of its own, and DTensor's sharding propagation knows nothing
about it; :class:`OwnerDTensor` answers each operator itself:

- elementwise operators and copies run on the local tensors (they are right for any shard
  shape, provided all operands have the same layout);
- norms spell ``Owner`` as an uneven ``Shard(0)`` of the same local tensors, so that the result is
  an ordinary DTensor which adds up over ranks with those of row-sharded parameters: each element
  once, whatever the mesh (``Replicate`` dimensions count once, fragments add up);
- in-place random operators draw at full size on every rank and keep the owner's part, so
  every generator advances as for the unsharded tensor ([Note: layout-independent weights]);
- ``any`` is that of the whole tensor, on every rank (the rejection loop of ``trunc_normal_``);
- everything else raises. A silent redistribution would be a hidden collective on one rank.

[Note: layout-independent weights]
The same seed must give bit-equal weights for every world size and layout. Stock DTensors on
CPU consume the generator by their local size, so a mixed model (owned blocks, row-sharded
embedding) would depend on W. Inside ``whole_tensor_random`` every in-place random
operator on any DTensor draws the whole tensor on every rank, exactly as a single process
would, and keeps this rank's part. Rejection loops (``trunc_normal_``) must end on all ranks
when they end for the whole tensor, so ``any`` is made global there: on a stock DTensor it
answers for the local shard alone, ranks would leave the loop after different draws, and all
later weights would differ. Cost: one transient full-size tensor per call, at start-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from torch.utils._pytree import tree_flatten, tree_map

from torchtitan_matrixfsdp.runtime.fsdp_compat import (
    DispatchingDTensor,
    DTensorSpec,
    local_of,
    local_shape_and_offset,
    make_spec,
    spec_of,
)
from torchtitan_matrixfsdp.runtime.owner_placement import (
    Owner,
    check_owner_layout,
    is_owner_in,
    owner_local_shape,
)

_aten = torch.ops.aten


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
_ALIASES = frozenset({_aten.detach.default, _aten.alias.default})
# Staging an asynchronous checkpoint makes an empty copy of the same global shape.
_NEW_LIKE = frozenset({_aten.new_empty.default, _aten.new_zeros.default})
_NORMS = frozenset({_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar})
# The elementwise foreach operators of torch's optimizers and gradient clipping.
_FOREACH = frozenset(
    f"aten::_foreach_{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "copy")
    for suffix in ("", "_")
) | {"aten::_foreach_zero_"}
RANDOM_INPLACE = frozenset({_aten.normal_.default, _aten.uniform_.default})
"""The random operators of weight initialisation that are answered for the whole tensor."""


@dataclass(eq=False)
class _Count:
    writes: int = 0


class OwnerDTensor(DispatchingDTensor):
    """A DTensor that lives on one rank of some mesh dimensions and is empty on the others.

    See [Note: owner DTensors] for the layouts and for the operators it answers.
    """

    _arriving: dist.Work | None = None
    _written: _Count | None = None  # shared by all that alias one local tensor

    def arrives_with(self, work: dist.Work) -> None:
        """Say that ``work`` is writing the local tensor; whoever reads it here waits first."""
        self._arriving = work
        self._shared_count().writes += 1

    @property
    def writes(self) -> int:
        """Grows with every write by an operator on this tensor, an alias (``detach``, ``data``) or
        its local tensor, and with what another rank sends; not with a write to the local tensor
        that moves no version counter: of a fused optimizer, a collective, ``to_local().data``."""
        # Operators on this class run below the layer of torch that moves version counters.
        return local_of(self)._version + self._shared_count().writes

    def _shared_count(self) -> _Count:
        self._written = self._written or _Count()
        return self._written

    def wait_arrival(self) -> None:
        """Order the current stream (on CPU, the host) behind the write under way, if any."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    @property
    def owner(self) -> int:
        """The owner in the shard group: the rank of the last ``Owner`` dimension of the mesh."""
        return [p.owner for p in self.placements if isinstance(p, Owner)][-1]

    @property
    def is_owner(self) -> bool:
        """Whether this rank stores a fragment: it is the owner in every ``Owner`` dimension."""
        return is_owner_in(self.device_mesh, self.placements)

    @classmethod
    def wrap(
        cls,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: torch.Size,
    ) -> OwnerDTensor:
        """An owner DTensor of global ``shape`` over ``local``, sharing its storage.

        ``local`` has the shape that :func:`owner_local_shape` gives, and any dtype.

        Raises:
            ValueError: the placements fit neither the mesh nor ``shape``, or ``local`` has
                another shape.
        """
        check_owner_layout(mesh, placements, shape)
        expected = owner_local_shape(mesh, placements, shape)
        if local.shape != expected:
            raise ValueError(
                f"owner DTensor of shape {tuple(shape)} with placements {tuple(placements)}: the "
                f"local tensor is {tuple(local.shape)}, expected {tuple(expected)} on this rank"
            )
        return cls.from_spec(local, make_spec(mesh, tuple(placements), shape, local.dtype))

    @classmethod
    def from_spec(cls, local: torch.Tensor, spec: DTensorSpec) -> OwnerDTensor:
        """An owner DTensor over ``local`` with an existing spec, unchecked."""
        return cls(local, spec, requires_grad=False)

    def like(self, local: torch.Tensor) -> OwnerDTensor:
        """``local`` (of this tensor's local shape, any dtype) as a tensor of the same layout."""
        spec = make_spec(self.device_mesh, self.placements, self.shape, local.dtype)
        return OwnerDTensor.from_spec(local, spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        tensor_types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for written in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(written, OwnerDTensor):
                    written._shared_count().writes += 1
        if func in RANDOM_INPLACE:
            draw_whole(func, args, kwargs)
            return args[0]
        if func is _aten.any.default:
            return any_of_the_whole(args[0])
        if func in _NORMS:
            return _norm(func, args, kwargs)
        if func in _NEW_LIKE and tuple(args[1]) == tuple(args[0].shape):
            local = _settled(args[0])
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

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, as :meth:`DTensor.to_local`."""
        self.wait_arrival()
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank of the mesh: an explicit broadcast over each ``Owner``
        dimension, then an all-gather of the fragments where there are ``Shard`` dimensions.

        Not differentiable; every rank of the mesh must call it.
        """
        mesh, local = self.device_mesh, _settled(self).detach()
        sizes, _ = local_shape_and_offset(self.shape, mesh, self.placements)
        if self.is_owner:
            fragment = local.clone(memory_format=torch.contiguous_format)
        else:
            fragment = local.new_empty(sizes)
        # After each dimension a whole line of the mesh holds the fragment, so that the last
        # broadcast reaches everyone. Whoever is off the line of a later dimension waits for that.
        waiting = [(d, p.owner) for d, p in enumerate(self.placements) if isinstance(p, Owner)]
        while waiting:
            dim, owner = waiting.pop(0)
            has_source = all(mesh.get_local_rank(d) == o for d, o in waiting)
            if has_source and fragment.numel() > 0:  # the same on all ranks of this group
                dist.broadcast(fragment, group=mesh.get_group(dim), group_src=owner)
        if not any(isinstance(p, Shard) for p in self.placements):
            return fragment
        placements = tuple(Replicate() if isinstance(p, Owner) else p for p in self.placements)
        spec = make_spec(mesh, placements, self.shape, local.dtype)
        return DTensor(fragment, spec, requires_grad=False).full_tensor()

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

    # Distributed checkpoint's protocol: only owners have a chunk, and it is their fragment. Ranks
    # of a Replicate dimension list the same chunk, of which DCP's planner keeps one.
    def _chunks(self) -> list[ChunkStorageMetadata]:
        sizes, offsets = local_shape_and_offset(self.shape, self.device_mesh, self.placements)
        is_empty_fragment = 0 in sizes and 0 not in self.shape
        if not self.is_owner or is_empty_fragment:
            return []
        return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(_settled(self))
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
        return _settled(self)


def _settled(tensor: DTensor) -> torch.Tensor:
    """The local tensor, once what another rank is sending has arrived."""
    if isinstance(tensor, OwnerDTensor):
        tensor.wait_arrival()
    return local_of(tensor)


def draw_whole(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run an in-place random operator on the DTensor ``args[0]`` as a single process would:
    draw the whole tensor, keep this rank's part. Meta tensors draw nothing."""
    target: DTensor = args[0]
    local = _settled(target)
    if local.is_meta:
        return
    whole = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    func(whole, *args[1:], **kwargs)
    if isinstance(target, OwnerDTensor):
        if not target.is_owner:
            return
        part = whole
        sizes, offsets = local_shape_and_offset(whole.shape, target.device_mesh, target.placements)
        for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, start, length)
    else:
        # src_data_rank=None: every rank slices its own copy, no communication.
        part = _settled(
            distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        )
    local.copy_(part)


def dtensors_in(args: Any) -> list[DTensor]:
    """The DTensors among nested arguments."""
    return [a for a in tree_flatten(args)[0] if isinstance(a, DTensor)]


def _shapes(args: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in dtensors_in(args)]


def _to_local(value: Any) -> Any:
    return _settled(value) if isinstance(value, DTensor) else value


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
            same = same and other.device_mesh == first.device_mesh
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
    if func in _ALIASES:
        alias = like.like(out)
        alias._written = like._shared_count()
        return alias
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


def wrap_like(
    local: torch.Tensor, like: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """``local`` as a tensor of ``like``'s layout (owner, any other DTensor, or plain), sharing
    storage. ``local`` must have the shape of ``like``'s local tensor; its dtype is kept.

    ``shape`` is the global shape where it is not that of ``like``: a tensor that belongs to the
    same owner, as a preconditioner does. It is whole on ``like``'s owner and has numel 0 elsewhere.

    Raises:
        ValueError: another ``shape``, and ``like`` is cut into fragments.
    """
    if shape is not None and tuple(shape) != tuple(like.shape):
        return _beside(local, like, torch.Size(shape))
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


def _beside(local: torch.Tensor, like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return local
    if not isinstance(like, OwnerDTensor) or any(isinstance(p, Shard) for p in like.placements):
        raise ValueError(
            f"a tensor of shape {tuple(shape)} beside a {type(like).__name__} of shape "
            f"{tuple(like.shape)} with placements {tuple(like.placements)}: legal beside tensors "
            "that are whole on an owner, or plain"
        )
    return OwnerDTensor.wrap(local, like.device_mesh, like.placements, shape)


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
        local = _settled(value)
        if local.numel() == 0:
            # The infinity norm of nothing raises; one zero is neutral for every p > 0.
            local = local.new_zeros((1,) * value.ndim)
        spec = spec_of(value)
        placements = tuple(Shard(0) if isinstance(p, Owner) else p for p in spec.placements)
        row_spec = make_spec(spec.mesh, placements, value.shape, value.dtype)
        return DTensor(local, row_spec, requires_grad=False)

    return func(*tree_map(as_row_shards, args), **tree_map(as_row_shards, kwargs))


def any_of_the_whole(tensor: DTensor) -> torch.Tensor:
    """``any`` over the whole tensor, the same on every rank; empty local tensors say False."""
    local = _settled(tensor)
    if local.is_meta:
        return local.any()
    verdict = local.any().to(torch.uint8)
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            group = tensor.device_mesh.get_group(dim)
            dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)
    return verdict.bool()
