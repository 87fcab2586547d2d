"""Any checkpoint into any job: world sizes, layouts, planners, transports, optimizers, wrappers.

Jobs of four ranks save once, each in another layout; then every kind of job, at several world
sizes, loads every one of these checkpoints that its optimizer can continue, after zeroing its own
weights and states. Compared are digests of the whole tensors in their stored dtypes, and all
options, rates and counters: bitwise equality in each cell. Cases 9 (two learning rates), 11, 16 and
25 (tied weights stay one parameter).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.checkpoints import SAVING, erase, load, whole_state
from tests.distributed.trainer import add_tiny_flavors, build_trainer, digest, run_job
from tests.harness import run_ranks
from tests.support import CorpusPaths
from torchtitan_matrixfsdp.checkpoint import read_manifest

SMALL = [
    "--training.seq_len=64",
    "--training.local_batch_size=1",
    "--matrix_optimizer.ns_dtype=float32",
    "--activation_checkpoint.mode=none",
]
STOCK = ["--owner_fsdp.mode=stock"]
ZERO1 = ["--owner_fsdp.mode=zero1"]
BF16 = ["--training.dtype=bfloat16"]
QWEN = ["--model.name=qwen3_owner"]
SHAMPOO = ["--matrix_optimizer.name=Shampoo"]
SOAP = ["--matrix_optimizer.name=SOAP"]
COMPILED = ["--compile.enable", "--compile.components=model", "--compile.backend=aot_eager"]

# TorchTitan's own model, optimizer and checkpoint manager; the import is for the local dataset.
PLAIN_CONFIG = """
[model]
name = "llama3"
[training]
dataset = "local"
[experimental]
custom_import = "torchtitan_matrixfsdp.titan"
"""

# Saved by `python -m torchtitan.train`: by TorchTitan's own manager, without checksums.
BY_TORCHTITAN = "torchtitan's manager"

# Per kind of state, the jobs that save it, on four ranks.
SOURCES: dict[str, dict[str, list[str]]] = {
    "muon": {
        "zero3": [],
        "role_greedy, p2p": ["--owner_fsdp.planner=role_greedy", "--owner_fsdp.transport=p2p"],
        "stock": STOCK,
        "zero1": ZERO1,
        "ddp": [
            "--parallelism.data_parallel_replicate_degree=4",
            "--parallelism.data_parallel_shard_degree=1",
        ],
        "hsdp": ["--parallelism.data_parallel_replicate_degree=2"],
        "full AC": ["--activation_checkpoint.mode=full"],
        BY_TORCHTITAN: [],
    },
    "muon bf16": {"zero3 bf16": BF16},
    "qwen": {"zero3 qwen": QWEN},
    "shampoo": {"zero3 shampoo": SHAMPOO},
    "soap": {"zero3 soap": SOAP},
}


def _targets(world_size: int) -> dict[str, tuple[str, list[str]]]:
    """The jobs that load: the kind of state they continue, and their options."""
    replicated = [
        f"--parallelism.data_parallel_replicate_degree={world_size}",
        "--parallelism.data_parallel_shard_degree=1",
    ]
    targets = {
        "zero3": ("muon", []),
        "bf16": ("muon bf16", BF16),
        "qwen": ("qwen", QWEN),
        "shampoo": ("shampoo", SHAMPOO),
        "soap": ("soap", SOAP),
    }
    if world_size == 1:
        return targets
    targets |= {
        "stock": ("muon", STOCK),
        "zero1": ("muon", ZERO1),
        "ddp": ("muon", replicated),
        "qwen stock": ("qwen", [*QWEN, *STOCK]),
        "ddp soap": ("soap", [*SOAP, *replicated]),
        "zero1 shampoo": ("shampoo", [*SHAMPOO, *ZERO1]),
        "another planner and transport": (
            "muon",
            ["--owner_fsdp.planner=scope_greedy", "--owner_fsdp.transport=broadcast"],
        ),
        "compiled": ("muon", [*COMPILED, "--activation_checkpoint.mode=full"]),
    }
    if world_size % 2 == 0 and world_size > 2:
        targets["hsdp"] = ("muon", ["--parallelism.data_parallel_replicate_degree=2"])
    return targets


def _save(corpus: CorpusPaths, tmp: Path) -> dict[str, dict[str, Any]]:
    saved = {}
    for sources in SOURCES.values():
        for name, options in sources.items():
            job = [*SMALL, *SAVING, *options]
            trainer = build_trainer(job, corpus, tmp / name, is_stock=name == BY_TORCHTITAN)
            trainer.train()
            saved[name] = whole_state(trainer)
            trainer.close()
    # One more kind: the weights alone.
    trainer = build_trainer(
        [*SMALL, *SAVING, "--checkpoint.last_save_model_only"], corpus, tmp / "model only"
    )
    trainer.train()
    saved["model only"] = _model(whole_state(trainer))
    trainer.close()
    return saved


def _model(state: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in state.items() if isinstance(v, str) and "optimizer." not in name}


def _load(corpus: CorpusPaths, tmp: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By target and source, what a job of this world size holds after loading."""
    loading = [*SMALL, *SAVING, "--checkpoint.exclude_from_loading=dataloader"]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for target, (kind, options) in _targets(dist.get_world_size()).items():
        scratch = tmp / f"{target} {dist.get_world_size()}"
        trainer = build_trainer([*loading, *options], corpus, scratch)
        found[target] = {source: loaded(trainer, tmp, source) for source in SOURCES[kind]}
        if kind == "qwen":
            model = trainer.model_parts[0]
            assert model.output.weight is model.tok_embeddings.weight
        if target == "zero3":
            state = loaded(trainer, tmp, "model only", model_only=True)
            found[target]["model only"] = _model(state)
        trainer.close()
    return found


def loaded(trainer: Any, tmp: Path, source: str, model_only: bool = False) -> dict[str, Any]:
    """What ``trainer`` holds once it has loaded the checkpoint of ``source``."""
    erase(trainer)
    load(trainer, tmp / source / "checkpoint" / "step-2", model_only)
    return whole_state(trainer)


@pytest.fixture(scope="module")
def saved(
    corpus_dir: CorpusPaths, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The checkpoints' folder, and what each of them holds."""
    tmp = tmp_path_factory.mktemp("matrix")
    states = run_ranks(_save, 4, corpus_dir, tmp, timeout_s=280)
    assert all(state == states[0] for state in states)
    return tmp, states[0]


@pytest.mark.parametrize(
    "world_size",
    [
        1,
        2,
        3,
        *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.timeout(600)]) for n in (4, 8)),
    ],
)
def test_every_checkpoint_into_every_job(
    saved: tuple[Path, dict[str, dict[str, Any]]], corpus_dir: CorpusPaths, world_size: int
) -> None:
    tmp, expected = saved
    for found in run_ranks(_load, world_size, corpus_dir, tmp, timeout_s=500):
        assert found.keys() == _targets(world_size).keys()
        for target, sources in found.items():
            for source, state in sources.items():
                assert _different(state, expected[source]) == [], f"{source} into {target}"


def _different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    names = sorted(found.keys() | expected.keys())
    return [n for n in names if n not in found or n not in expected or found[n] != expected[n]]


def test_a_plain_transformer_in_one_process(
    saved: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    """Without a process group, this package's reader or model classes: DCP's own loading."""
    add_tiny_flavors()
    from torchtitan.models.llama3 import Transformer, llama3_args

    tmp, expected = saved
    for source in ("zero3", "stock", "model only"):
        model = Transformer(llama3_args["tiny"])
        state = model.state_dict()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
            dcp.load(state, checkpoint_id=tmp / source / "checkpoint" / "step-2")
        model.load_state_dict(state)
        found = {name: digest(value.reshape(-1)) for name, value in model.state_dict().items()}
        assert found == {name: expected[source][name] for name in found}
        assert len(found) == sum("optimizer." not in n for n in _model(expected[source]))


def _load_with_torchtitan(corpus: CorpusPaths, tmp: Path) -> dict[str, dict[str, Any]]:
    """By source, what TorchTitan's own manager loads: all of it into a job of this plugin, and the
    weights into TorchTitan's own model and optimizer."""
    loading = [*SMALL, *SAVING, "--checkpoint.exclude_from_loading=dataloader"]
    found = {}
    job = build_trainer(loading, corpus, tmp / "by torchtitan", is_stock=True)
    for source in ("zero3", "stock"):
        found[source] = loaded(job, tmp, source)
    job.close()
    config = tmp / "torchtitan.toml"
    plain_options = ["--checkpoint.enable", "--training.seq_len=64"]
    plain = build_trainer(plain_options, corpus, tmp / "all torchtitan", config, is_stock=True)
    found["weights"] = _model(loaded(plain, tmp, "zero3", model_only=True))
    plain.close()
    return found


def test_torchtitan_alone_loads_what_this_package_saved(
    saved: tuple[Path, dict[str, dict[str, Any]]], corpus_dir: CorpusPaths
) -> None:
    tmp, expected = saved
    (tmp / "torchtitan.toml").write_text(PLAIN_CONFIG)
    for found in run_ranks(_load_with_torchtitan, 2, corpus_dir, tmp, timeout_s=240):
        assert _different(found["zero3"], expected["zero3"]) == []
        assert _different(found["stock"], expected["stock"]) == []
        assert _different(found["weights"], _model(expected["zero3"])) == []


def _seed(corpus: CorpusPaths, tmp: Path) -> dict[str, Any]:
    """What ``checkpoint.create_seed_checkpoint`` does, as TorchTitan's ``main`` does it."""
    trainer = build_trainer(
        [*SMALL, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--debug.seed=7"],
        corpus,
        tmp,
    )
    trainer.checkpointer.save(curr_step=0, last_step=True)
    state = whole_state(trainer)
    trainer.close()
    return _model(state)


def _start_from_seed(corpus: CorpusPaths, tmp: Path) -> tuple[dict[str, Any], int]:
    trainer = build_trainer([*SMALL, "--checkpoint.enable", "--training.steps=1"], corpus, tmp)
    assert trainer.checkpointer.load()
    state, step = _model(whole_state(trainer)), trainer.step
    trainer.close()
    return state, step


def test_seed_checkpoints(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """Case 23: initial weights that one process made, with another seed, start two ranks."""
    (seed,) = run_ranks(_seed, 1, corpus_dir, tmp_path)
    for state, step in run_ranks(_start_from_seed, 2, corpus_dir, tmp_path):
        assert step == 0
        assert state == seed


def _before_the_first_step(corpus: CorpusPaths, tmp: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for optimizer in ("Muon", "Shampoo", "SOAP"):
        job = [*SMALL, f"--matrix_optimizer.name={optimizer}", "--training.steps=1"]
        untouched = run_job(job, corpus, tmp / "untouched")
        saving = ["--checkpoint.enable", "--checkpoint.no-last-save-model-only"]
        trainer = build_trainer([*job, *saving], corpus, tmp / optimizer)
        before = whole_state(trainer)
        trainer.checkpointer.save(curr_step=0, last_step=True)
        found[optimizer] = {
            "before": before,
            "after": whole_state(trainer),
            "keys": list(trainer.optimizers.state_dict()),
            "untouched": untouched.final,
        }
        trainer.close()
        # Step 0 is loaded as a seed: its weights, and a first step as if nothing had happened.
        continued = run_job([*job, *saving], corpus, tmp / optimizer)
        found[optimizer]["continued"] = continued.final
    manifest = read_manifest(tmp / "Muon" / "checkpoint" / "step-1")
    assert manifest is not None
    found["manifest"] = manifest
    return found


def test_saving_before_the_first_step_changes_nothing(
    corpus_dir: CorpusPaths, tmp_path: Path
) -> None:
    """Cases 10 and 11: state is there before a step, reading it is no step, keys agree on all
    ranks. And the plan of the job is in the manifest, as plain JSON."""
    ranks = run_ranks(_before_the_first_step, 2, corpus_dir, tmp_path, timeout_s=240)
    for found in ranks:
        for optimizer in ("Muon", "Shampoo", "SOAP"):
            one = found[optimizer]
            assert one["after"] == one["before"]
            assert one["continued"] == one["untouched"]
            assert one["keys"] == ranks[0][optimizer]["keys"]
    manifest = ranks[0]["manifest"]
    assert manifest.job["step"] == 1
    assert manifest.job["world_size"] == 2
    assert manifest.job["tokens_seen"] == 2 * 64
    (plan,) = manifest.plans
    shards = [shard for block in plan["blocks"] for shard in block["shards"]]
    assert {shard["owner"] for shard in shards} == {0, 1}
    names = {shard["fqn"] for shard in shards}
    assert {f"layers.{n}.feed_forward.w1.weight" for n in range(3)} <= names


def _through_hugging_face(corpus: CorpusPaths, tmp: Path, model: str) -> dict[str, Any]:
    job = [*SMALL, f"--model.name={model}", "--checkpoint.enable", "--training.steps=1"]
    exporting = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
    saving = build_trainer([*job, *exporting], corpus, tmp / "saved")
    saving.train()
    found: dict[str, Any] = {"saved": _model(whole_state(saving))}
    saving.close()
    folder = tmp / "saved" / "checkpoint" / "step-1"
    importing = ["--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={folder}"]
    for name, mode in {"zero3": [], "stock": STOCK, "zero1": ZERO1}.items():
        trainer = build_trainer([*job, *importing, *mode], corpus, tmp / name)
        erase(trainer)
        assert trainer.checkpointer.load()
        found[name] = _model(whole_state(trainer))
        trainer.train()  # from there
        trainer.close()
    return found


@pytest.mark.parametrize("model", ["llama3_owner", "qwen3_owner"])
def test_hugging_face_out_and_in(corpus_dir: CorpusPaths, tmp_path: Path, model: str) -> None:
    """``last_save_in_hf`` and ``initial_load_in_hf``, through the trainer: the same weights in
    every mode, and training goes on from them."""
    for found in run_ranks(_through_hugging_face, 2, corpus_dir, tmp_path, model):
        for mode in ("zero3", "stock", "zero1"):
            assert found[mode] == found["saved"]
