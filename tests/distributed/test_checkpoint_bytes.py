"""How much a save and a load hold in memory, write and read, on four ranks: exact counts."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.harness import run_ranks
from torchtitan_matrixfsdp.bench.memory import LiveStorages
from torchtitan_matrixfsdp.checkpoint import (
    Manifest,
    OwnerStorageReader,
    OwnerStorageWriter,
    read_metadata,
)
from torchtitan_matrixfsdp.checkpoint.manifest import PIECE
from torchtitan_matrixfsdp.checkpoint.reader import BUFFER
from torchtitan_matrixfsdp.runtime import Owner, OwnerDTensor, owner_local_shape

RANKS = 4
MATRIX = torch.Size((1536, 2048))  # 12 MiB: twelve pieces
BYTES = MATRIX.numel() * 4
MATRICES = 8
ROWS = torch.Size((3000, 1024))
ROW_BYTES = ROWS.numel() * 4


def _state(mesh: DeviceMesh, shift: int, fill: bool) -> dict[str, DTensor]:
    """Matrices on owners, ``shift`` ranks further on, and one tensor in row shards."""
    state: dict[str, DTensor] = {}
    for index in range(MATRICES):
        placement = Owner((index + shift) % RANKS)
        shape = owner_local_shape(mesh, (placement,), MATRIX)
        local = torch.full(shape, float(index + 1)) if fill else torch.zeros(shape)
        state[f"matrix{index}"] = OwnerDTensor.wrap(local, mesh, (placement,), MATRIX)
    rows = _rows() if fill else torch.zeros(ROWS)
    state["rows"] = _row_shards(rows, mesh)
    return state


def _row_shards(rows: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    cut = distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None)
    # A storage of its own, as FSDP2's shards have it: not a view of all rows.
    return DTensor.from_local(
        cut.to_local().clone(), mesh, [Shard(0)], shape=rows.shape, stride=rows.stride()
    )


class Peak:
    """The most bytes alive beyond those of ``state`` while entered: of tensors and of Python, each
    at its own highest, which can only overstate."""

    def __init__(self, state: dict[str, DTensor]) -> None:
        self._shards = [value.to_local() for value in state.values()]
        self._meter = LiveStorages()
        self._python = 0
        self.bytes = 0

    def __enter__(self) -> Peak:
        self._meter.__enter__()
        for shard in self._shards:
            shard.sum()  # what passes through an operator is seen by the meter
        self._meter.reset()
        tracemalloc.reset_peak()
        self._python = tracemalloc.get_traced_memory()[0]
        return self

    def __exit__(self, *exc: Any) -> None:
        python = tracemalloc.get_traced_memory()[1] - self._python
        tensors = self._meter.peak() - sum(s.untyped_storage().nbytes() for s in self._shards)
        self._meter.__exit__(*exc)
        self.bytes = tensors + python


def _save_and_load(tmp: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    three = DeviceMesh("cpu", [0, 1, 2])
    found: dict[str, Any] = {}
    # Never stopped: in Python 3.11 that can crash threads that allocate meanwhile, as gloo does.
    tracemalloc.start()
    # What DCP imports when it is first used is memory too.
    dcp.async_save({"nothing": torch.zeros(())}, checkpoint_id=tmp / "nothing").result()
    saving = _state(mesh, 0, fill=True)
    found["shards"] = sum(value.to_local().numel() * 4 for value in saving.values())
    with Peak(saving) as peak:
        dcp.save(saving, storage_writer=OwnerStorageWriter(tmp / "step-1", Manifest()))
    found["save"] = peak.bytes
    stager = DefaultStager(StagingOptions(False, False, False, False))
    with Peak(saving) as peak:
        dcp.async_save(
            saving,
            storage_writer=OwnerStorageWriter(tmp / "step-2", Manifest()),
            async_stager=stager,
        ).result()
    found["async save"] = peak.bytes
    stager.close()
    # Another owner for every matrix, and the rows on three ranks: other chunks than were saved.
    loading = _state(mesh, 1, fill=False)
    del loading["rows"]
    if dist.get_rank() < 3:
        loading["rows"] = _row_shards(torch.zeros(ROWS), three)
    reader = OwnerStorageReader(tmp / "step-1")
    with Peak(loading) as peak:
        dcp.load(loading, storage_reader=reader)
    found["load"] = peak.bytes
    found["read"] = reader.bytes_read
    found["needed"] = sum(value.to_local().numel() * 4 for value in loading.values())
    found["streams"] = sum(value.to_local().numel() > 0 for value in loading.values())
    expected = _state(mesh, 1, fill=True)
    found["right"] = all(
        torch.equal(loading[name].to_local(), expected[name].to_local())
        for name in loading
        if name != "rows"
    )
    if "rows" in loading:
        rows = _row_shards(_rows(), three).to_local()
        found["right"] &= torch.equal(loading["rows"].to_local(), rows)
    return found


def _rows() -> torch.Tensor:
    return torch.arange(ROWS.numel(), dtype=torch.float32).reshape(ROWS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of what was saved, and what each rank found."""
    tmp = tmp_path_factory.mktemp("bytes")
    return tmp, run_ranks(_save_and_load, RANKS, tmp)


def test_memory_and_bytes_of_a_save_and_a_load(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    """[Note: memory of a save] and the reader's promise: a save holds no copy, an asynchronous one
    a copy of the shards, a load one buffer; a load reads the pieces that it needs."""
    noise = 1 << 20  # DCP's plans and indices
    for rank, found in enumerate(saved[1]):
        assert found["right"]
        assert found["save"] < noise
        # DCP's stager allocates, and never touches, a whole row-sharded tensor as it copies one.
        assert found["shards"] <= found["async save"] < found["shards"] + ROW_BYTES + 2 * noise
        # The buffer counts twice: as Python's, and as a tensor over the same memory.
        assert 2 * BUFFER <= found["load"] < 2 * BUFFER + noise
        # At each end of a range a piece may be read for a part; rows cross up to two streams.
        streams = found["streams"] + (rank < 3)
        assert found["needed"] <= found["read"] <= found["needed"] + 2 * PIECE * streams
        assert found["read"] < (2 * BYTES + ROW_BYTES) * 1.1  # never what other ranks need


def test_each_tensor_is_written_once_by_its_owner(saved: tuple[Path, list[Any]]) -> None:
    """Case 12: no placeholder of a rank that owns nothing; files are as long as what is owned."""
    folder = saved[0] / "step-1"
    metadata = read_metadata(folder)
    for index in range(MATRICES):
        (chunk,) = metadata.state_dict_metadata[f"matrix{index}"].chunks
        assert chunk.sizes == MATRIX
        (stored,) = [v for k, v in metadata.storage_data.items() if k.fqn == f"matrix{index}"]
        assert stored.relative_path == f"__{index % RANKS}_0.distcp"
    for rank in range(RANKS):
        owned = 2 * BYTES + ROW_BYTES // RANKS
        size = (folder / f"__{rank}_0.distcp").stat().st_size
        assert owned < size < owned + 3 * 2048
