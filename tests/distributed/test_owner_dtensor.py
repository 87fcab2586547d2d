"""Owner DTensors on meshes of several dimensions: replicas, one replica's owner, and TP."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.harness import run_ranks
from torchtitan_matrixfsdp.cpu_device import clip_grad_norm_
from torchtitan_matrixfsdp.runtime import (
    Owner,
    OwnerDTensor,
    owner_local_shape,
    whole_tensor_random,
)

# name: (mesh shape over four ranks, placements)
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "shard": ((4,), [Owner(2)]),
    "replicate, shard": ((2, 2), [Replicate(), Owner(1)]),
    "one replica's owner": ((2, 2), [Owner(1), Owner(0)]),
    "shard, tp rows": ((2, 2), [Owner(1), Shard(0)]),
    "shard, tp last dimension": ((2, 2), [Owner(0), Shard(-1)]),
    "shard, tp replicated": ((2, 2), [Owner(0), Replicate()]),
    "replicate, shard 1, tp": ((2, 1, 2), [Replicate(), Owner(0), Shard(0)]),
    "replicate 1, shard, tp": ((1, 2, 2), [Replicate(), Owner(1), Shard(-1)]),
    "one replica's owner, tp": ((1, 2, 2), [Owner(0), Owner(1), Shard(0)]),
    "tp before shard": ((2, 2), [Shard(0), Owner(1)]),
}
# Uneven fragments (5 over 2), empty ones (1 over 2), one and three dimensions.
SHAPES = [(5, 4), (4, 5), (1, 3), (7,), (3, 3, 2)]


def _tensors() -> dict[str, tuple[OwnerDTensor, torch.Tensor]]:
    """Every layout and shape, with the whole tensor; float64, no element zero or repeated."""
    made = {}
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for name, (mesh_shape, placements) in LAYOUTS.items():
        if mesh_shape not in meshes:
            names = tuple(f"d{i}" for i in range(len(mesh_shape)))
            meshes[mesh_shape] = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        mesh = meshes[mesh_shape]
        for shape in SHAPES:
            spelt = [Shard(p.dim % len(shape)) if isinstance(p, Shard) else p for p in placements]
            size = torch.Size(shape)
            whole = torch.arange(1.0, 1 + size.numel(), dtype=torch.float64).view(size)
            local = _part(whole, mesh, spelt)
            made[f"{name} {shape}"] = (OwnerDTensor.wrap(local, mesh, spelt, size), whole)
    return made


def _part(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    """This rank's part, by torch.chunk: what the class computes from the spec."""
    part, owns = whole, True
    for dim, placement in enumerate(placements):
        rank = mesh.get_local_rank(dim)
        if isinstance(placement, Owner):
            owns = owns and rank == placement.owner
        elif isinstance(placement, Shard):
            chunks = part.chunk(mesh.size(dim), placement.dim)
            empty = part.narrow(placement.dim, 0, 0)
            part = chunks[rank] if rank < len(chunks) else empty
    return (part if owns else part[:0]).clone()


def _same(tensor: DTensor, whole: torch.Tensor) -> bool:
    return torch.equal(tensor.full_tensor(), whole)


def _algebra() -> list[str]:
    """Names of what went wrong."""
    wrong = []
    rank = dist.get_rank()
    for name, (tensor, whole) in _tensors().items():
        other = tensor.like(tensor.to_local() * 3)
        doubled = tensor.like(tensor.to_local().clone())
        torch._foreach_mul_([doubled], 2.0)
        placements = list(tensor.placements)
        checks = {
            "full": _same(tensor, whole),
            "full leaves the tensor alone": torch.equal(
                tensor.to_local(), _part(whole, tensor.device_mesh, placements)
            ),
            "add": _same(tensor + other, whole + 3 * whole),
            "lerp": _same(tensor.lerp(other, 0.25), whole.lerp(3 * whole, 0.25)),
            "foreach": _same(doubled, 2 * whole),
            "zeros": _same(torch.zeros_like(tensor, dtype=torch.float32), whole.float() * 0),
            "new_empty": tensor.new_empty(tensor.shape).placements == tensor.placements,
            "any": bool((tensor == whole.numel()).any()) and not bool((tensor < 0).any()),
            "local shape": tensor.to_local().shape
            == owner_local_shape(tensor.device_mesh, placements, tensor.shape),
        }
        for order in (1.0, 2.0, 3.0, math.inf):
            expected = torch.linalg.vector_norm(whole, order).item()
            one = torch.linalg.vector_norm(tensor, order)
            (several,) = torch._foreach_norm([tensor], order)
            for what, norm in (("norm", one), ("foreach norm", several)):
                value = norm.full_tensor().item()
                checks[f"{what} {order}"] = value == pytest.approx(expected, rel=1e-14)
        again = pickle.loads(pickle.dumps(tensor))
        checks["pickle"] = (
            type(again) is OwnerDTensor
            and again.placements == tensor.placements
            and torch.equal(again.to_local(), tensor.to_local())
        )
        wrong += [f"{name}: {what} on rank {rank}" for what, right in checks.items() if not right]
    return wrong


def _mixed_norm() -> list[float]:
    """Errors of the total norm over owners and FSDP2's own shards on one (shard, tp) mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    layouts = [
        [Owner(1), Shard(0)],
        [Owner(0), Replicate()],
        [Shard(0), Replicate()],
        strided,
        [Owner(1), Shard(1)],
        [Shard(0), Shard(1)],
    ]
    generator = torch.Generator().manual_seed(5)
    wholes, params = [], []
    for placements in layouts:
        whole = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        if any(isinstance(p, Owner) for p in placements):
            grad = OwnerDTensor.wrap(_part(whole, mesh, placements), mesh, placements, whole.shape)
        else:
            grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        wholes.append(whole)
        params.append(param)
    flat = torch.cat([w.flatten() for w in wholes])
    errors = []
    for order in (2.0, math.inf):
        total = torch.nn.utils.get_total_norm([p.grad for p in params], order, False, True)
        expected = torch.linalg.vector_norm(flat, order).item()
        errors.append(abs(total.full_tensor().item() / expected - 1))
    for order in (2.0, math.inf):
        total = clip_grad_norm_(params, math.inf, order)  # an infinite limit scales by 1
        expected = torch.linalg.vector_norm(flat, order).item()
        errors.append(abs(total.item() / expected - 1))
    clip_grad_norm_(params, 0.5, foreach=True)
    factor = 0.5 / (torch.linalg.vector_norm(flat).float() + 1e-6)
    clipped = [p.grad.full_tensor() for p in params]
    errors += [
        (c / (w * factor) - 1).abs().max().item() for c, w in zip(clipped, wholes, strict=True)
    ]
    return errors


def _draws() -> list[str]:
    wrong = []
    for fill in (lambda t: t.normal_(), lambda t: nn.init.trunc_normal_(t, a=-1.0, b=1.0)):
        for name, (tensor, whole) in _tensors().items():
            torch.manual_seed(3)
            expected = [fill(torch.empty_like(whole)) for _ in range(2)]
            end = torch.get_rng_state()
            torch.manual_seed(3)
            with whole_tensor_random(), torch.no_grad():
                drawn = [fill(torch.zeros_like(tensor)) for _ in range(2)]
            same = all(_same(d, e) for d, e in zip(drawn, expected, strict=True))
            if not (same and torch.equal(end, torch.get_rng_state())):
                wrong.append(name)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    strided = [_StridedShard(0, split_factor=2), Shard(0)]  # FSDP2 over row-parallel weights
    target = distribute_tensor(torch.zeros(10, 3), mesh, strided, src_data_rank=None)
    torch.manual_seed(3)
    expected_row = nn.init.trunc_normal_(torch.empty(10, 3), a=-1.0, b=1.0)
    torch.manual_seed(3)
    with whole_tensor_random():
        nn.init.trunc_normal_(target, a=-1.0, b=1.0)
    if not _same(target, expected_row):
        wrong.append("strided")
    return wrong


def _checkpoint(folder: str) -> list[str]:
    """Chunks by rank, what the planner keeps of them, and a load into the other layouts."""
    wrong = []
    made = _tensors()
    chunks: list[Any] = [None] * dist.get_world_size()
    mine = {name: t.__create_chunk_list__() for name, (t, _) in made.items()}
    dist.all_gather_object(chunks, mine)
    for name, (tensor, whole) in made.items():
        listed = Counter((tuple(c.offsets), tuple(c.sizes)) for rank in chunks for c in rank[name])
        covered = torch.zeros_like(whole)
        for offsets, sizes in listed:
            covered[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        replicas = math.prod(
            tensor.device_mesh.size(d) for d, p in enumerate(tensor.placements) if p.is_replicate()
        )
        if not (covered == 1).all() or set(listed.values()) != {replicas}:
            wrong.append(f"{name}: {listed}")
    dcp.save({n: t for n, (t, _) in made.items()}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for name in made:
        kept = [(tuple(c.offsets)) for c in metadata.state_dict_metadata[name].chunks]
        stored = sum(index.fqn == name for index in metadata.storage_data)
        if len(set(kept)) != len(kept) or stored != len(kept):
            wrong.append(f"{name}: kept {kept}, stored {stored} times")
    # Each name is read back into the layout of the next one that has its shape.
    names = list(made)
    step = len(SHAPES)
    after = {n: made[names[(i + step) % len(names)]][0] for i, n in enumerate(names)}
    target: dict[str, Any] = {n: torch.zeros_like(t) for n, t in after.items()}
    plain = {n: torch.zeros_like(whole) for n, (_, whole) in made.items()}
    dcp.load(target, checkpoint_id=folder)
    dcp.load(plain, checkpoint_id=folder)
    for name, (_, whole) in made.items():
        if not _same(target[name], whole) or not torch.equal(plain[name], whole):
            wrong.append(f"{name}: loaded wrongly")
    return wrong


def _refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    size = torch.Size([4, 6])
    said = {}
    for name, placements, local in (
        ("no owner", [Shard(0), Replicate()], torch.zeros(2, 6)),
        ("one placement", [Owner(0)], torch.zeros(4, 6)),
        ("owner outside", [Owner(2), Replicate()], torch.zeros(4, 6)),
        ("dimension outside", [Owner(0), Shard(2)], torch.zeros(4, 6)),
        ("strided", [Owner(0), _StridedShard(0, split_factor=2)], torch.zeros(2, 6)),
        ("local shape", [Owner(0), Shard(0)], torch.zeros(4, 6)),
    ):
        with pytest.raises(ValueError) as refusal:
            OwnerDTensor.wrap(local, mesh, placements, size)
        said[name] = str(refusal.value)

    def filled(placements: list[Any]) -> OwnerDTensor:
        shape = owner_local_shape(mesh, placements, size)
        return OwnerDTensor.wrap(torch.zeros(shape), mesh, placements, size)

    with pytest.raises(NotImplementedError) as refusal:
        filled([Owner(0), Shard(0)]) + filled([Owner(0), Shard(1)])
    said["other fragments"] = str(refusal.value)
    return said


def _all(folder: Path) -> dict[str, Any]:
    return {
        "algebra": _algebra(),
        "mixed norm": _mixed_norm(),
        "draws": _draws(),
        "checkpoint": _checkpoint(str(folder)),
        "refusals": _refusals(),
    }


def test_every_layout_is_a_tensor(tmp_path: Path) -> None:
    """Operators, norms (case 5), random draws (case 23), chunks (case 12) and pickling of owner
    DTensors on one, two and three mesh dimensions, uneven and empty fragments included."""
    for found in run_ranks(_all, 4, tmp_path, timeout_s=180):
        assert found["algebra"] == []
        exact, rounded = found["mixed norm"][:2], found["mixed norm"][2:]
        assert max(exact) < 1e-14  # float64
        assert max(rounded) < 1e-6  # the CPU's clipping returns its norm in float32
        assert found["draws"] == []
        assert found["checkpoint"] == []
        said = found["refusals"]
        for name in ("no owner", "one placement", "owner outside", "dimension outside", "strided"):
            assert "at least one Owner" in said[name] and "(2, 2)" in said[name], name
        assert "(4, 6), expected" in said["local shape"]
        assert "owner-shaped alike" in said["other fragments"]
