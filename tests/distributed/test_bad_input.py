"""Every row of the table in docs/configuration.md: a clear error on every rank, nothing hangs."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import torch.distributed as dist

from tests.distributed.trainer import CONFIG, add_tiny_flavors, run_job
from tests.harness import run_ranks, run_torchrun
from tests.support import ROOT, CorpusPaths
from torchtitan_matrixfsdp.cpu_device import use_cpu_device

# name: (replacement in the TOML file or command-line override, fragments of the message)
TOML_FAULTS: dict[str, tuple[tuple[str, str], list[str]]] = {
    "unknown planner": (
        ('planner = "cost_aware"', 'planner = "greedy"'),
        ["owner_fsdp.planner", "'greedy'", "role_greedy", "scope_greedy", "cost_aware"],
    ),
    "unknown transport": (
        ('transport = "auto"', 'transport = "carrier"'),
        ["owner_fsdp.transport", "'carrier'", "auto", "balanced", "broadcast", "p2p"],
    ),
    "unknown mode": (
        ('mode = "zero3"', 'mode = "zero2"'),
        ["owner_fsdp.mode", "'zero2'", "zero3", "zero1", "stock"],
    ),
    "unknown stock step": (
        ('mode = "zero3"', 'stock_step = "scatter"'),
        ["owner_fsdp.stock_step", "'scatter'", "gather", "gather_once", "all_to_all"],
    ),
    "a class that is not installed": (
        ('name = "Muon"', 'class = "nowhere_at_all:Muon"'),
        ["matrix_optimizer.class", "'nowhere_at_all:Muon'", "No module named", "install"],
    ),
    "arguments that a class does not take": (
        ("[optimizer]", "[matrix_optimizer.kwargs]\nns_step = 3\n[optimizer]"),
        ["matrix_optimizer.kwargs", "'ns_step': 3", "matrix_optimizer.class"],
    ),
    "a split of nothing": (
        ("[optimizer]", "[matrix_optimizer.split]\n'wq(' = \"heads\"\n[optimizer]"),
        ["matrix_optimizer.split", "wq(", "regular expressions"],
    ),
    "an option of SOAP out of range": (
        ("[optimizer]", "[matrix_optimizer.soap]\nbeta2 = 1.0\n[optimizer]"),
        ["matrix_optimizer.soap.beta2", "1.0", "< 1"],
    ),
    "a misspelt option of Shampoo": (
        ("[optimizer]", "[matrix_optimizer.shampoo]\nbeta3 = 1.0\n[optimizer]"),
        ["matrix_optimizer.shampoo.beta3", "unknown key", "did you mean"],
    ),
    "learning rate as a string": (
        ("lr = 0.02", 'lr = "3e-4"'),
        ["matrix_optimizer.lr", "'3e-4' (str)", "float", "without quotes"],
    ),
    "AdamW's learning rate as a string": (
        ("lr = 3e-4", 'lr = "3e-4"'),
        ["optimizer.lr", "'3e-4' (str)", "float"],
    ),
    "fractional steps": (
        ("ns_steps = 5", "ns_steps = 5.7"),
        ["matrix_optimizer.ns_steps", "5.7 (float)", "int"],
    ),
    "momentum out of range": (
        ("momentum = 0.95", "momentum = 1.0"),
        ["matrix_optimizer.momentum", "1.0", ">= 0", "< 1"],
    ),
    "a negative learning rate": (
        ("lr = 0.02", "lr = -1.0"),
        ["matrix_optimizer.lr", "-1.0", ">= 0"],
    ),
    "a learning rate that is no number": (
        ("lr = 0.02", "lr = nan"),
        ["matrix_optimizer.lr", "nan", "finite"],
    ),
    "a negative clipping norm": (
        ("max_norm = 1.0", "max_norm = -1.0"),
        ["training.max_norm", "-1.0", "> 0"],
    ),
    "an epsilon of zero": (("eps = 1e-8", "eps = 0.0"), ["optimizer.eps", "0.0", "> 0"]),
    "an invalid pattern": (
        ("exclude = []", 'exclude = ["layers["]'),
        ["matrix_optimizer.exclude", "layers[", "regular expression"],
    ),
    "an unknown dataset": (
        ('dataset = "local"', 'dataset = "lcoal"'),
        ["training.dataset", "'lcoal'", "'local'", "'c4'"],
    ),
    "a stock model": (
        ('name = "llama3_owner"', 'name = "llama3"'),
        ["model.name", "'llama3'", "llama3_owner", "qwen3_owner"],
    ),
    "misspelt key": (
        ("weight_decay = 0.1", "weigth_decay = 0.1"),
        ["matrix_optimizer.weigth_decay", "unknown key", "did you mean", "weight_decay"],
    ),
    "misspelt section": (
        ("[owner_fsdp]", "[owner_fspd]"),
        ["owner_fspd", "unknown section", "did you mean owner_fsdp?"],
    ),
    "misspelt key of TorchTitan's": (
        ("local_batch_size = 2", "local_batchsize = 2"),
        ["training.local_batchsize", "did you mean training.local_batch_size?"],
    ),
}
OVERRIDE_FAULTS: dict[str, tuple[list[str], list[str]]] = {
    "a pattern that matches nothing": (
        [r"--matrix_optimizer.include=blocks\..*"],
        ["matrix_optimizer.include", "blocks", "layers.0.attention.wq.weight"],
    ),
    "a pattern that takes the embedding": (
        [r"--matrix_optimizer.include=weight$"],
        ["tok_embeddings", "output", "matrix_optimizer.exclude"],
    ),
    "an exclude that matches nothing": (
        [r"--matrix_optimizer.exclude=blocks\..*"],
        ["matrix_optimizer.exclude", "blocks"],
    ),
    "momentum out of range, on the command line": (
        ["--matrix_optimizer.momentum=1.0"],
        ["matrix_optimizer.momentum", "1.0"],  # in a box that breaks lines, exit status 2
    ),
    "SOAP on rows": (
        ["--matrix_optimizer.name=SOAP", "--owner_fsdp.mode=stock"],
        ["matrix_optimizer.name", "'SOAP'", "rows of each matrix", '"zero3"'],
    ),
    "resident blocks in a pipeline": (
        ["--owner_fsdp.mode=zero1", "--parallelism.pipeline_parallel_degree=2"],
        ["parallelism.pipeline_parallel_degree", "received 2", '"zero1"', "legal: 1"],
    ),
    "a mesh that does not divide": (
        ["--parallelism.data_parallel_shard_degree=3"],
        ["2 processes", "data_parallel_shard_degree = 3"],
    ),
    "replicas that do not divide": (
        ["--parallelism.data_parallel_replicate_degree=3"],
        ["2 processes", "data_parallel_replicate_degree = 3"],
    ),
    "a global batch that does not divide": (
        ["--training.global_batch_size=5"],
        ["training.global_batch_size", "received 5", "multiple"],
    ),
    "a dataset that is not there": (
        ["--training.dataset_path=/nowhere/corpus"],
        ["training.dataset_path", "/nowhere/corpus", "does not exist", "build_corpus.py"],
    ),
    "a missing tokenizer": (
        ["--model.hf_assets_path=/nowhere/tokenizer"],
        ["model.hf_assets_path", "/nowhere/tokenizer", "tokenizer.json", "build_corpus.py"],
    ),
    "an expert flavor": (
        ["--model.name=qwen3_owner", "--model.flavor=30B-A3B"],
        ["model.flavor", "30B-A3B", "debugmodel", "Mixture-of-experts"],
    ),
    "an unknown flavor": (["--model.flavor=8b"], ["model.flavor", "'8b'", "'8B'"]),
    "expert parallel": (
        ["--parallelism.expert_parallel_degree=2"],
        ["parallelism.expert_parallel_degree", "received 2", "set it to 1"],
    ),
    "memory budget": (
        ["--activation_checkpoint.mode=memory_budget"],
        ["activation_checkpoint.mode", "'memory_budget'", "compile.enable"],
    ),
    "fault tolerance": (["--fault_tolerance.enable"], ["fault_tolerance.enable", "received True"]),
    "profiling on CPU": (
        ["--profiling.enable_profiling"],
        ["profiling.enable_profiling", "received True", "CPU"],
    ),
    "Hugging Face export": (
        ["--checkpoint.enable", "--checkpoint.last_save_in_hf"],
        ["checkpoint.last_save_in_hf", "received True", "last_save_model_only = true"],
    ),
    "tensor parallel": (
        ["--parallelism.tensor_parallel_degree=2"],
        ["parallelism.tensor_parallel_degree", "received 2", '= "gather"', "degree to 1"],
    ),
    "tensor parallel without shards": (
        ["--parallelism.tensor_parallel_degree=2", "--owner_fsdp.tensor_parallel=gather"],
        ["parallelism.tensor_parallel_degree", "shard degree of 1", "more processes"],
    ),
    "a tensor-parallel degree that does not divide": (
        ["--parallelism.tensor_parallel_degree=3"],
        ["2 processes", "tensor_parallel_degree = 3"],
    ),
    "a tensor-parallel degree below 1": (
        ["--parallelism.tensor_parallel_degree=0"],
        ["parallelism.tensor_parallel_degree", "received 0", ">= 1"],
    ),
    "context parallel on CPU": (
        ["--parallelism.context_parallel_degree=2"],
        ["parallelism.context_parallel_degree", "received 2", "set it to 1 on CPU"],
    ),
    "CPU offload": (
        ["--training.enable_cpu_offload"],
        ["training.enable_cpu_offload", "received True"],
    ),
    "stages that do not fit the ranks": (
        [
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_parallel_layers_per_stage=100",
        ],
        ["pipeline_parallel_layers_per_stage", "gives 1 stages to 2 pipeline ranks"],
    ),
    "float8": (["--model.converters=float8"], ["model.converters", "float8"]),
    "Adam for the rest": (["--optimizer.name=Adam"], ["optimizer.name", "'Adam'", "AdamW"]),
    "optimizer in backward": (
        ["--optimizer.early_step_in_backward"],
        ["optimizer.early_step_in_backward", "received True"],
    ),
}


def _refusals(corpus: CorpusPaths, tmp: Path) -> dict[str, str]:
    """The message of each fault, all in one process: no job gets as far as a collective."""
    use_cpu_device()
    # As in a job before its process group exists: whatever would communicate fails differently.
    rank = dist.get_rank()
    dist.destroy_process_group()
    from torchtitan.config import ConfigManager

    import torchtitan_matrixfsdp.titan  # registers the models
    from torchtitan_matrixfsdp.titan.trainer import OwnerTrainer
    from torchtitan_matrixfsdp.titan.validation import check_toml_file

    assert torchtitan_matrixfsdp.titan
    add_tiny_flavors()
    toml = CONFIG.read_text()
    messages = {}
    jobs = {name: (edit, []) for name, (edit, _) in TOML_FAULTS.items()}
    jobs |= {name: (("", ""), override) for name, (override, _) in OVERRIDE_FAULTS.items()}
    for name, ((old, new), override) in jobs.items():
        assert old in toml
        path = tmp / f"{rank}.toml"
        path.write_text(toml.replace(old, new, 1) if old else toml)
        arguments = [
            "--job.config_file",
            str(path),
            f"--training.dataset_path={corpus.corpus}",
            f"--model.hf_assets_path={corpus.tokenizer}",
            f"--job.dump_folder={tmp}",
            "--metrics.no-enable-tensorboard",
            "--checkpoint.no-enable",
            *override,
        ]
        printed = io.StringIO()
        try:
            check_toml_file(arguments)
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                config = ConfigManager().parse_args(arguments)
            OwnerTrainer(config)
        except ValueError as error:
            messages[name] = str(error)
        except SystemExit as stop:  # TorchTitan's command-line parser
            assert stop.code == 2
            messages[name] = printed.getvalue()
        else:
            raise AssertionError(f"{name}: nothing was refused")
        assert not dist.is_initialized(), name
    return messages


def test_every_fault_names_key_value_range_and_remedy(
    corpus_dir: CorpusPaths, tmp_path: Path
) -> None:
    """Cases 29 and 30. Each message is the same on both ranks."""
    first, second = run_ranks(_refusals, 2, corpus_dir, tmp_path, timeout_s=200)
    assert first == second
    expected = {**TOML_FAULTS, **OVERRIDE_FAULTS}
    assert first.keys() == expected.keys()
    for name, (_, fragments) in expected.items():
        for fragment in fragments:
            assert fragment in first[name], f"{name}: {fragment!r} not in {first[name]!r}"


def _few_roles(corpus: CorpusPaths, tmp: Path) -> list[str]:
    """One block with one matrix and a tail over four ranks: two ranks own nothing at all."""
    use_cpu_device()
    import logging

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname}: {record.getMessage()}")

    handler = Keep()
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    job = [
        "--training.seq_len=32",
        "--training.local_batch_size=1",
        "--training.steps=2",
        "--model.flavor=tiny_1layer",
        r"--matrix_optimizer.include=layers\.0\.attention\.wq",
        "--activation_checkpoint.mode=none",
    ]
    record = run_job(job, corpus, tmp)
    logging.getLogger().removeHandler(handler)
    assert record.final != record.initial
    return lines


def test_more_ranks_than_roles_works_and_says_so(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    """Case 20: trains, warns with gamma, names the ranks that own nothing; routing is logged."""
    for lines in run_ranks(_few_roles, 4, corpus_dir, tmp_path, timeout_s=200):
        text = "\n".join(lines)
        assert re.search(r"WARNING: 4 ranks share 2\.0 roles per block.*\(gamma up to 3\.", text)
        assert re.search(r"INFO: Transport \(auto\) of 1 blocks .* times FSDP's bytes\)", text)
        assert "gamma per block min 3." in text  # the tail has nearly all, so nearly W
        assert "WARNING: 2 of 4 ranks own no block parameter: 2, 3" in text
        assert text.count("Routing: 1 matrices on Muon") == 1
        assert text.count("[owner_fsdp] mode='zero3'") == 1


def test_the_entry_point_prints_one_line_per_rank_and_fails(
    corpus_dir: CorpusPaths, tmp_path: Path
) -> None:
    """Through torchrun: exit code, at most one line on each rank, and no hang. torchrun ends the
    other rank as soon as the first has said its line and left, perhaps before it says its own."""
    result = run_torchrun(
        [
            "-m",
            "torchtitan_matrixfsdp.train",
            "--job.config_file",
            str(CONFIG),
            f"--job.dump_folder={tmp_path}",
            "--training.dataset_path=/nowhere",
            f"--model.hf_assets_path={corpus_dir.tokenizer}",
        ],
        nproc=2,
        cwd=ROOT,
        env={"PYTHONPATH": os.fspath(ROOT)},
        timeout_s=120,
        check=False,
    )
    assert result.returncode != 0
    lines = [ln for ln in result.output.splitlines() if "error: ConfigError" in ln]
    assert {sum(f"[rank {rank}]" in ln for ln in lines) for rank in range(2)} <= {0, 1}
    assert lines and all("training.dataset_path" in ln for ln in lines)
    assert "in validate_job_config" not in result.output  # a frame of a traceback
