"""The real TorchTitan trainer over gloo ranks: zero3 against stock FSDP2 and DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.trainer import (
    Record,
    add_bf16_ddp_models,
    build_trainer,
    digest,
    run_job,
    whole_weights,
)
from tests.harness import run_ranks
from tests.support import CorpusPaths
from torchtitan_matrixfsdp.cpu_device import use_cpu_device

SMALL = [
    "--training.seq_len=64",
    "--training.local_batch_size=1",
    "--activation_checkpoint.mode=none",
    "--matrix_optimizer.ns_dtype=float32",
]
STOCK = ["--owner_fsdp.mode=stock"]
HSDP = ["--parallelism.data_parallel_replicate_degree=2"]


def ddp() -> list[str]:
    """The oracle: shard degree 1, everything replicated."""
    return [
        f"--parallelism.data_parallel_replicate_degree={dist.get_world_size()}",
        "--parallelism.data_parallel_shard_degree=1",
    ]


def relative(values: list[float], reference: list[float]) -> float:
    pairs = zip(values, reference, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def _initial_weights(corpus: CorpusPaths, tmp: Path) -> dict[str, dict[str, str]]:
    ranks = dist.get_world_size()
    layouts: dict[str, list[str]] = {"zero3": []}
    if ranks > 1:
        layouts |= {"stock": STOCK, "ddp": ddp()}
    if ranks == 4:
        layouts |= {"hsdp": HSDP, "hsdp stock": [*HSDP, *STOCK]}
    found = {}
    for name in ("llama3_owner", "qwen3_owner"):
        for layout, overrides in layouts.items():
            trainer = build_trainer([*SMALL, f"--model.name={name}", *overrides], corpus, tmp)
            weights = whole_weights(trainer.model_parts[0])
            found[f"{name} {layout}"] = {n: digest(w) for n, w in weights.items()}
            trainer.close()
    return found


def test_initial_weights_do_not_depend_on_the_layout(
    corpus_dir: CorpusPaths, tmp_path: Path
) -> None:
    """Case 23: bit-equal for W = 1, 2, 3, 4 and HSDP, owner, row-sharded and replicated, with the
    embedding and the head; Qwen3's are tied."""
    reference: dict[str, dict[str, str]] = {}
    for ranks in (1, 2, 3, 4):
        for found in run_ranks(_initial_weights, ranks, corpus_dir, tmp_path, timeout_s=240):
            for job, weights in found.items():
                model = job.split()[0]
                assert weights == reference.setdefault(model, weights), f"{job}, W={ranks}"
    llama, qwen = reference["llama3_owner"], reference["qwen3_owner"]
    assert {"tok_embeddings.weight", "output.weight", "norm.weight"} < llama.keys()
    assert "output.weight" not in qwen  # tied: one parameter
    assert len(set(llama.values())) > len(llama) / 2  # digests do tell tensors apart


def _three_modes(corpus: CorpusPaths, tmp: Path, steps: int) -> dict[str, Record]:
    job = [*SMALL, f"--training.steps={steps}"]
    return {
        "zero3": run_job(job, corpus, tmp),
        "stock": run_job([*job, *STOCK], corpus, tmp),
        "ddp": run_job([*job, *ddp()], corpus, tmp),
    }


def test_two_ranks_are_bitwise_equal_to_ddp_and_stock(
    corpus_dir: CorpusPaths, tmp_path: Path
) -> None:
    """float32, W=2: a sum of two terms has one rounding whatever its order, so 30 losses, 30 norms
    and all final weights of zero3, stock FSDP2-Muon and DDP-Muon are the same bits."""
    records = run_ranks(_three_modes, 2, corpus_dir, tmp_path, 30, timeout_s=280)
    for record in records:
        ours = record["zero3"]
        assert len(ours.losses) == len(ours.norms) == 30
        assert ours.final != ours.initial
        assert ours.losses[-1] < ours.losses[0]
        for other in ("stock", "ddp"):
            assert record[other].losses == ours.losses, other
            assert record[other].norms == ours.norms, other
            assert record[other].final == ours.final, other


def test_four_ranks_equal_ddp_and_stock(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """float32, W=4: p2p sums in rank order, gloo's ring in another; 30 steps stay within 1e-5
    (1.5e-7 is seen). Case 3: the norm would show a gradient scaled by W."""
    for record in run_ranks(_three_modes, 4, corpus_dir, tmp_path, 30, timeout_s=280):
        ours = record["zero3"]
        assert len(ours.losses) == 30
        for other in ("stock", "ddp"):
            assert relative(ours.losses, record[other].losses) < 1e-5, other
            assert relative(ours.norms, record[other].norms) < 1e-5, other


def _bf16(corpus: CorpusPaths, tmp: Path) -> dict[str, Record]:
    use_cpu_device()
    add_bf16_ddp_models()
    job = [*SMALL, "--training.steps=15", "--matrix_optimizer.ns_dtype=bfloat16"]
    bf16 = [*job, "--training.mixed_precision_param=bfloat16"]
    # float32 here switches autocast off: these models cast by themselves.
    oracle = [*job, *ddp(), "--training.mixed_precision_param=float32"]
    return {
        "zero3": run_job(bf16, corpus, tmp),
        "stock": run_job([*bf16, *STOCK], corpus, tmp),
        "ddp": run_job([*oracle, "--model.name=ddp_bf16"], corpus, tmp),
        "rotated 1": run_job([*oracle, "--model.name=ddp_bf16_rotated_1"], corpus, tmp),
        "rotated 2": run_job([*oracle, "--model.name=ddp_bf16_rotated_2"], corpus, tmp),
        "float32": run_job(job, corpus, tmp),
    }


def test_bfloat16_stays_within_ddps_own_noise(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """bf16 parameters and bf16 Newton-Schulz: zero3 differs from DDP by no more than DDP differs
    from itself when the ranks' sums are taken in another order."""
    for found in run_ranks(_bf16, 3, corpus_dir, tmp_path, timeout_s=280):
        rotations = ("rotated 1", "rotated 2")
        noise = max(relative(found[name].losses, found["ddp"].losses) for name in rotations)
        assert 0 < noise < 1e-3
        assert relative(found["zero3"].losses, found["ddp"].losses) <= noise
        assert relative(found["zero3"].losses, found["stock"].losses) <= noise
        # The comparison would be empty if the jobs had not run in bfloat16.
        assert relative(found["float32"].losses, found["ddp"].losses) > 10 * noise


def _options(corpus: CorpusPaths, tmp: Path) -> dict[str, Record]:
    job = [*SMALL, "--training.steps=6"]
    qwen = [*job, "--model.name=qwen3_owner"]
    accumulate = [*job, "--training.global_batch_size=6"]
    adamw = [*job, "--matrix_optimizer.name=AdamW", "--matrix_optimizer.lr=1e-3"]
    jobs = {
        "plain": job,
        "full AC": [*job, "--activation_checkpoint.mode=full"],
        "selective AC": [*job, "--activation_checkpoint.mode=selective"],
        "never reshard": [*job, "--parallelism.fsdp_reshard_after_forward=never"],
        "always reshard": [*job, "--parallelism.fsdp_reshard_after_forward=always"],
        "role_greedy": [*job, "--owner_fsdp.planner=role_greedy"],
        "zero1": [*job, "--owner_fsdp.mode=zero1"],
        "gather once": [*job, *STOCK, "--owner_fsdp.stock_step=gather_once"],
        "all to all": [*job, *STOCK, "--owner_fsdp.stock_step=all_to_all"],
        "accumulate zero1": [*accumulate, "--owner_fsdp.mode=zero1"],
        "qwen": qwen,
        "qwen stock": [*qwen, *STOCK],
        "qwen ddp": [*qwen, *ddp()],
        "accumulate": accumulate,
        "accumulate ddp": [*accumulate, *ddp()],
        "adamw": adamw,
        "adamw stock": [*adamw, *STOCK],
    }
    return {name: run_job(overrides, corpus, tmp) for name, overrides in jobs.items()}


def test_options_change_nothing_but_cost(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """W=2: activation checkpointing, resharding, planner, mode and the stock step leave every bit
    alone; tied Qwen3 (case 25), accumulation (case 2) and AdamW on owned matrices equal their
    baselines."""
    for found in run_ranks(_options, 2, corpus_dir, tmp_path, timeout_s=280):
        compared = list(found)[: list(found).index("accumulate zero1")]
        assert {"full AC", "never reshard", "zero1", "all to all"} < set(compared)
        for same in compared:
            assert found[same].final == found["plain"].final, same
            assert found[same].losses == found["plain"].losses, same
        for ours, other in (
            ("qwen", "qwen stock"),
            ("qwen", "qwen ddp"),
            ("accumulate", "accumulate ddp"),
            ("adamw", "adamw stock"),
        ):
            assert relative(found[ours].losses, found[other].losses) < 1e-5, other
            assert relative(found[ours].norms, found[other].norms) < 1e-5, other
        assert found["accumulate zero1"].final == found["accumulate"].final
        assert found["qwen"].final == found["qwen stock"].final
        assert found["adamw"].final == found["adamw stock"].final
        assert found["adamw"].final != found["plain"].final


def _hsdp(corpus: CorpusPaths, tmp: Path) -> dict[str, Record]:
    job = [*SMALL, "--training.steps=6"]
    return {
        "hsdp": run_job([*job, *HSDP], corpus, tmp),
        "ddp": run_job([*job, *ddp()], corpus, tmp),
    }


def test_hsdp_equals_ddp(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """Cases 5 and 24 through the trainer: replicas 2 x shards 2, group ranks are not global."""
    finals = []
    for found in run_ranks(_hsdp, 4, corpus_dir, tmp_path, timeout_s=240):
        assert relative(found["hsdp"].losses, found["ddp"].losses) < 1e-5
        assert relative(found["hsdp"].norms, found["ddp"].norms) < 1e-5
        finals.append(found["hsdp"].final)
    assert all(final == finals[0] for final in finals), "replicas drifted apart"


def _resume_async(corpus: CorpusPaths, tmp: Path, mode: str) -> dict[str, Record]:
    async_mode = f"--checkpoint.async_mode={mode}"
    checkpoint = ["--checkpoint.enable", async_mode, "--checkpoint.interval=2"]
    job = [*SMALL, "--lr_scheduler.total_steps=5"]
    whole = run_job([*job, "--training.steps=5"], corpus, tmp / "whole")
    run_job([*job, *checkpoint, "--training.steps=3"], corpus, tmp / "parts")
    # Step 2 was saved while step 3 trained on; step 3, the last, was saved synchronously.
    again = [*job, *checkpoint, "--training.steps=5", "--checkpoint.load_step=2"]
    return {"whole": whole, "second": run_job(again, corpus, tmp / "parts")}


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_asynchronous_checkpoints_hold_the_state_at_the_save(
    corpus_dir: CorpusPaths, tmp_path: Path, mode: str
) -> None:
    """Case 16: what is saved is the state at step 2, though training went on."""
    for found in run_ranks(_resume_async, 2, corpus_dir, tmp_path, mode, timeout_s=240):
        assert found["second"].losses == found["whole"].losses[2:]
        assert found["second"].final == found["whole"].final


def _resume(corpus: CorpusPaths, tmp: Path, mode: list[str]) -> dict[str, Record]:
    checkpoint = ["--checkpoint.enable", "--checkpoint.interval=3"]
    # One schedule for all runs: a job that stops at 3 must have the schedule of 6 steps.
    job = [*SMALL, *mode, "--lr_scheduler.total_steps=6"]
    whole = run_job([*job, "--training.steps=6"], corpus, tmp / "whole")
    first = run_job([*job, *checkpoint, "--training.steps=3"], corpus, tmp / "parts")
    second = run_job([*job, *checkpoint, "--training.steps=6"], corpus, tmp / "parts")
    return {"whole": whole, "first": first, "second": second}


@pytest.mark.parametrize(
    "mode", [[], STOCK, ["--model.name=qwen3_owner"]], ids=["zero3", "stock", "qwen"]
)
def test_resume_is_bit_exact(corpus_dir: CorpusPaths, tmp_path: Path, mode: list[str]) -> None:
    """Case 15: save at 3, resume, and steps 4 to 6 are those of the uninterrupted run, on every
    rank, optimizer state, both learning rates and data included. Case 25: Qwen3 stays tied."""
    for found in run_ranks(_resume, 2, corpus_dir, tmp_path, mode, timeout_s=240):
        whole, first, second = found["whole"], found["first"], found["second"]
        assert first.losses + second.losses == whole.losses
        assert first.norms + second.norms == whole.norms
        assert second.final == whole.final
        assert [m["lr"] for m in second.metrics] == [m["lr"] for m in whole.metrics[3:]]
