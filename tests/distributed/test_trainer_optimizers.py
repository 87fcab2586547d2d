"""Every matrix optimizer in the real trainer: the same as on replicated weights, and resumed."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.distributed.contract import library_class
from tests.distributed.trainer import CONFIG, Record, run_job
from tests.harness import run_ranks
from tests.support import CorpusPaths

SMALL = [
    "--training.seq_len=32",
    "--training.local_batch_size=1",
    "--activation_checkpoint.mode=none",
    "--matrix_optimizer.ns_dtype=float32",
    "--matrix_optimizer.lr=0.003",
    "--lr_scheduler.total_steps=6",
    "--matrix_optimizer.shampoo.precondition_frequency=2",
    "--matrix_optimizer.soap.precondition_frequency=2",
]
# What only a TOML file can say.
TABLES = {
    "Shampoo": 'name = "Shampoo"',
    "SOAP": 'name = "SOAP"',
    "Polar Express by heads": """
        ns_coefficients = "polar_express"
        [matrix_optimizer.split]
        '\\.w[qkvo]\\.weight$' = "heads"
        '\\.w1\\.weight$' = "rows:2"
    """,
    "torch's Muon": """
        class = "torch.optim:Muon"
        [matrix_optimizer.kwargs]
        ns_steps = 3
        ns_coefficients = [3.4445, -4.775, 2.0315]
    """,
    "pytorch-optimizer's SOAP": """
        class = "pytorch_optimizer:SOAP"
        [matrix_optimizer.kwargs]
        betas = [0.9, 0.95]
        precondition_frequency = 2
    """,
    # Its step() adds to state_dict() by a hook.
    "heavyball's SOAP": """
        class = "heavyball:SOAP"
        [matrix_optimizer.kwargs]
        precondition_frequency = 2
    """,
}


def write_config(path: Path, table: str) -> Path:
    """The debug configuration with other lines in [matrix_optimizer], and after it."""
    before, rest = CONFIG.read_text().split("[matrix_optimizer]\n")
    kept, after = rest.split("\n[optimizer]")
    if "name = " in table or "class = " in table:
        kept = kept.replace('name = "Muon"\n', "")
    top, _, tables = table.partition("[matrix_optimizer.")
    subtable = f"[matrix_optimizer.{tables}" if tables else ""
    path.write_text(f"{before}[matrix_optimizer]\n{kept}\n{top}\n{subtable}\n[optimizer]{after}")
    return path


def _train(corpus: CorpusPaths, tmp: Path) -> dict[str, dict[str, Record]]:
    ddp = [
        f"--parallelism.data_parallel_replicate_degree={dist.get_world_size()}",
        "--parallelism.data_parallel_shard_degree=1",
    ]
    save = ["--checkpoint.enable", "--checkpoint.interval=3"]
    library_class("heavyball:SOAP")  # switches its compilation off
    found: dict[str, dict[str, Record]] = {}
    for number, (name, table) in enumerate(TABLES.items()):
        folder = tmp / f"rank{dist.get_rank()}-{number}"
        folder.mkdir()
        config = write_config(folder / "job.toml", table)

        def job(
            steps: int, extra: list[str], where: str, number: int = number, config: Path = config
        ) -> Record:
            arguments = [*SMALL, *extra, f"--training.steps={steps}"]
            shared = tmp / f"{number}-{where}"
            return run_job(arguments, corpus, shared, config_file=config)

        found[name] = {
            "zero3": job(6, [], "zero3"),
            "ddp": job(6, ddp, "ddp"),
            "first": job(3, save, "parts"),
            "second": job(6, save, "parts"),
        }
    return found


def test_zero3_equals_ddp_and_resumes_to_the_bit(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """W=2, float32: a sum of two terms has one rounding whatever its order, so losses, norms and
    weights are the same bits (case 15: also of a job that was interrupted)."""
    for found in run_ranks(_train, 2, corpus_dir, tmp_path, timeout_s=280):
        finals = set()
        for name, records in found.items():
            ours, ddp, first, second = (records[k] for k in ("zero3", "ddp", "first", "second"))
            assert len(ours.losses) == 6 and ours.final != ours.initial, name
            assert ours.losses == ddp.losses, name
            assert ours.norms == ddp.norms, name
            assert ours.final == ddp.final, name
            assert first.losses + second.losses == ours.losses, name
            assert second.final == ours.final, name
            finals.add(tuple(sorted(ours.final.items())))
        assert len(finals) == len(TABLES), "two optimizers did the same"
