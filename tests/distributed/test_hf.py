"""Weights to and from Hugging Face's format, for every layout of the real models.

Every tensor is filled with numbers that depend on its name alone, so one process knows what the
files must hold, and every layout must agree with it.
"""

from __future__ import annotations

import resource
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tests.distributed.trainer import build_trainer
from tests.harness import run_ranks
from tests.support import CorpusPaths
from torchtitan_matrixfsdp.bench.memory import LiveStorages
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.hf import export_hf, import_hf
from torchtitan_matrixfsdp.checkpoint.parts import part_here
from torchtitan_matrixfsdp.cpu_device import use_cpu_device

State = dict[str, torch.Tensor]
JOB = ["--training.seq_len=32", "--training.local_batch_size=2"]
QWEN = ["--model.name=qwen3_owner"]
SINGLE = "model-00001-of-00001.safetensors"
MAX_FILE_BYTES = 300_000  # several files: embedding and head have 524,288 bytes each
TWO_RANKS = {
    "zero3": [],
    "zero1": ["--owner_fsdp.mode=zero1"],
    "stock": ["--owner_fsdp.mode=stock"],
    "ddp": [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=1",
    ],
    "pipeline": ["--parallelism.pipeline_parallel_degree=2"],
    "qwen zero3": QWEN,
}
REPLICAS = ["--parallelism.data_parallel_replicate_degree=2"]
TENSOR = ["--parallelism.tensor_parallel_degree=2", "--owner_fsdp.tensor_parallel=gather"]
FOUR_RANKS = {
    "replicas": REPLICAS,
    "partitioned": [*REPLICAS, "--owner_fsdp.replicas=partitioned"],
    "replicas stock": [*REPLICAS, "--owner_fsdp.mode=stock"],
    "tensor parallel": TENSOR,
    "tensor parallel stock": [*TENSOR, "--owner_fsdp.mode=stock"],
    "pipeline zero3": ["--parallelism.pipeline_parallel_degree=2"],
}


def whole_of(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that belong to a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(fqn.encode()))
    return torch.randn(tensor.shape, generator=generator)


def fill(state: State) -> None:
    """Give every tensor its numbers; of two names for one tensor, those of the first."""
    seen = set()
    with torch.no_grad():
        for fqn in sorted(state, reverse=True):  # tok_embeddings before output
            part = part_here(state[fqn])
            if part is None or (part.local.numel() and part.local.data_ptr() in seen):
                continue
            seen.add(part.local.data_ptr())
            part.local.copy_(whole_of(fqn, state[fqn])[part.index])


def model_and_adapter(job: list[str], corpus: CorpusPaths, tmp: Path) -> tuple[Any, State, Any]:
    """A trainer, its model's state as TorchTitan saves it, and the adapter of the model."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    trainer = build_trainer([*JOB, *job], corpus, tmp)
    state = {
        fqn: tensor
        for part in trainer.model_parts
        for fqn, tensor in get_model_state_dict(part).items()
    }
    adapter = trainer.train_spec.state_dict_adapter(trainer.model_args, None)
    return trainer, state, adapter


def error_of(action: Callable[[], None]) -> str:
    """The message of the CheckpointError that ``action`` raises."""
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def digits(state: State) -> State:
    """Copies of what this rank stores."""
    parts = {fqn: part_here(tensor) for fqn, tensor in state.items()}
    return {fqn: part.local.clone() for fqn, part in parts.items() if part is not None}


def are_equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[fqn], other[fqn]) for fqn in one)


class HeldBytes(LiveStorages):
    """The storages that exist: a collective's handle claims one as large as its result's."""

    def _see(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, AsyncCollectiveTensor):
            super()._see(tensor)


def round_trip(name: str, job: list[str], corpus: CorpusPaths, tmp: Path) -> dict[str, Any]:
    """Export, import into the zeroed model, and what both held at most."""
    trainer, state, adapter = model_and_adapter(job, corpus, tmp)
    fill(state)
    folder = tmp / name
    with HeldBytes() as live:
        for tensor in state.values():
            tensor.detach()  # seen, so that shards belong to the baseline
        live.reset()
        before = live.live()
        export_hf(state, adapter.to_hf, folder, max_file_bytes=MAX_FILE_BYTES)
        export_bytes = live.peak() - before
    filled = digits(state)
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    with HeldBytes() as live:
        for tensor in state.values():
            tensor.detach()
        live.reset()
        before = live.live()
        import_hf(state, adapter.to_hf, adapter.from_hf, folder)
        import_bytes = live.peak() - before
    result = {
        "round trip": are_equal(filled, digits(state)),
        "export bytes": export_bytes,
        "import bytes": import_bytes,
        "layouts": sorted({f"{type(t).__name__}" for t in state.values()}),
        "names": sorted(state),
    }
    trainer.close()
    return result


def _two_ranks(corpus: CorpusPaths, tmp: Path) -> dict[str, Any]:
    use_cpu_device()
    found = {name: round_trip(name, job, corpus, tmp) for name, job in TWO_RANKS.items()}
    found["errors"] = provoke_errors(corpus, tmp)
    return found


def provoke_errors(corpus: CorpusPaths, tmp: Path) -> dict[str, Any]:
    """What each rank is told, and whether its weights are what they were."""
    trainer, state, adapter = model_and_adapter([], corpus, tmp)
    fill(state)
    before = digits(state)
    errors: dict[str, Any] = {}

    def export_to(name: str) -> None:
        export_hf(state, adapter.to_hf, tmp / name)

    def import_from(name: str) -> None:
        import_hf(state, adapter.to_hf, adapter.from_hf, tmp / name)

    errors["existing"] = error_of(lambda: export_to("zero3"))
    # Rank 1 alone cannot write: the system refuses it files of more than 4 KiB.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    errors["full"] = error_of(lambda: export_to("full"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # A matrix that one rank owns has another shape: only that rank can see it.
    mine = "layers.1.feed_forward.w2.weight"
    errors["owner"] = part_here(state[mine]) is not None
    if dist.get_rank() == 0:
        weights = load_all(tmp / "zero3")
        name = "model.layers.1.mlp.down_proj.weight"
        weights[name] = weights[name][:, :-1].contiguous()
        (tmp / "shape").mkdir()
        save_file(weights, tmp / "shape" / "model.safetensors")
        weights.pop(name)
        (tmp / "lacks").mkdir()
        save_file(weights, tmp / "lacks" / "model.safetensors")
    dist.barrier()
    errors["shape"] = error_of(lambda: import_from("shape"))
    errors["lacks"] = error_of(lambda: import_from("lacks"))
    errors["unchanged"] = are_equal(before, digits(state))
    export_to("full")  # once there is room
    trainer.close()
    return errors


def load_all(folder: Path) -> State:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def two_ranks(
    corpus_dir: CorpusPaths, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    tmp = tmp_path_factory.mktemp("two")
    return run_ranks(_two_ranks, 2, corpus_dir, tmp, timeout_s=200), tmp


def expected_files(model: str) -> State:
    """What the format holds, converted whole by one process."""
    from torchtitan.protocols.train_spec import get_train_spec

    from tests.distributed.trainer import add_tiny_flavors

    add_tiny_flavors()
    spec = get_train_spec(model)
    args = spec.model_args["tiny"]
    with torch.device("meta"):
        shapes = spec.model_cls(args).state_dict()
    assert spec.state_dict_adapter is not None
    whole = {fqn: whole_of(fqn, tensor) for fqn, tensor in shapes.items()}
    return spec.state_dict_adapter(args, None).to_hf(whole)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_folder(folder: Path, model: str) -> None:
    expected, found = expected_files(model), load_all(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert are_equal(expected, found)


def test_every_layout_writes_the_same_files(two_ranks) -> None:
    results, tmp = two_ranks
    for rank in results:
        assert rank["zero3"]["layouts"] == ["DTensor", "OwnerDTensor"]
        assert rank["stock"]["layouts"] == ["DTensor"]
        assert rank["ddp"]["layouts"] == ["Tensor"]
    assert results[0]["pipeline"]["names"] != results[1]["pipeline"]["names"]
    check_folder(tmp / "zero3", "llama3")
    check_folder(tmp / "qwen zero3", "qwen3")
    for name in TWO_RANKS:
        reference = "qwen zero3" if "qwen" in name else "zero3"
        assert contents(tmp / name) == contents(tmp / reference), name


def test_every_layout_reads_its_own_part(two_ranks) -> None:
    results, _ = two_ranks
    assert all(rank[name]["round trip"] for rank in results for name in TWO_RANKS)


def test_a_rank_holds_one_more_tensor(two_ranks) -> None:
    results, _ = two_ranks
    embedding, q = 4 * 2048 * 64, 4 * 64 * 64
    # A thread of gloo may hold the small tensors of a finished verdict for a moment longer.
    noise = 256
    for name in TWO_RANKS:
        # Whole on the rank: the adapter copies q twice. Else the gathered embedding is the largest.
        whole = name in ("ddp", "pipeline")
        held = max(rank[name]["export bytes"] for rank in results)
        assert 0 <= held - (2 * q if whole else embedding) < noise
        # Mapped from the file, of which a row shard touches its rows.
        held = max(rank[name]["import bytes"] for rank in results)
        assert 0 <= held - embedding < noise


def test_a_fault_of_one_rank_is_raised_on_all(two_ranks) -> None:
    results, tmp = two_ranks
    errors = [rank["errors"] for rank in results]
    for fault, said in {
        "existing": [
            "rank 0",
            str(tmp / "zero3"),
            "model.safetensors.index.json",
            "another folder",
        ],
        "full": ["rank 1", str(tmp / "full" / SINGLE), "too large", "Free space"],
        "shape": ["down_proj", "(64, 191)", "(64, 192)", "flavor"],
        "lacks": [str(tmp / "lacks"), "layers.1.mlp.down_proj.weight", "flavor"],
    }.items():
        assert errors[0][fault] == errors[1][fault]
        assert [word for word in said if word not in errors[0][fault]] == []
    assert errors[0]["owner"] != errors[1]["owner"]
    owner = 0 if errors[0]["owner"] else 1
    assert errors[0]["shape"].startswith(f"on rank {owner}: ")
    assert all(rank["unchanged"] for rank in errors)
    # The failed export left nothing that is taken for weights, and the next one replaced it.
    assert sorted(contents(tmp / "full")) == [SINGLE, "model.safetensors.index.json"]
    assert are_equal(load_all(tmp / "full"), load_all(tmp / "zero3"))


def _four_ranks(corpus: CorpusPaths, tmp: Path) -> dict[str, Any]:
    use_cpu_device()
    return {name: round_trip(name, job, corpus, tmp) for name, job in FOUR_RANKS.items()}


@pytest.mark.slow
def test_replicas_tensor_parallelism_and_pipelines(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """Slow: six trainers on four ranks."""
    results = run_ranks(_four_ranks, 4, corpus_dir, tmp_path, timeout_s=280)
    check_folder(tmp_path / "replicas", "llama3")
    for name in FOUR_RANKS:
        assert contents(tmp_path / name) == contents(tmp_path / "replicas"), name
        assert all(rank[name]["round trip"] for rank in results), name
