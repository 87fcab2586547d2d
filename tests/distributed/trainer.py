"""Run the real TorchTitan trainer on the ranks of the harness, several jobs one after another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support import ROOT, CorpusPaths
from torchtitan_matrixfsdp.cpu_device import use_cpu_device
from torchtitan_matrixfsdp.layout import canonical_fqn

VOCABULARY = 2048  # of scripts/build_corpus.py
CONFIG = ROOT / "train_configs" / "debug_muon.toml"


@dataclass
class Record:
    """What one rank saw of a job."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    initial: dict[str, str] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's exact values, shape and dtype."""
    content = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16] + f" {tuple(tensor.shape)} {tensor.dtype}"


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole on every rank, by canonical name; a collective."""
    return {
        canonical_fqn(name): p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for name, p in model.named_parameters()
    }


def add_tiny_flavors() -> None:
    """A flavor ``tiny`` of each model: the debug model's depth of Newton-Schulz work is minutes.

    The vocabulary is the built tokenizer's. With that of the published models (over 128,000) the
    embedding and the head would be nine tenths of the work, and none of it ours.
    """
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args

    llama3_args.setdefault(
        "tiny",
        TransformerModelArgs(
            dim=64, n_layers=3, n_heads=4, n_kv_heads=2, multiple_of=32, vocab_size=VOCABULARY
        ),
    )
    llama3_args.setdefault(
        "tiny_1layer",
        TransformerModelArgs(dim=64, n_layers=1, n_heads=4, multiple_of=32, vocab_size=VOCABULARY),
    )
    # Every head with a key of its own, which the pointwise attention below needs.
    llama3_args.setdefault(
        "tiny_2k",
        TransformerModelArgs(
            dim=64, n_layers=3, n_heads=4, n_kv_heads=4, multiple_of=32, vocab_size=VOCABULARY
        ),
    )
    qwen3_args.setdefault(
        "tiny",
        Qwen3ModelArgs(
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            hidden_dim=160,
            qk_norm=True,
            enable_weight_tying=True,
            vocab_size=VOCABULARY,
        ),
    )


def add_bf16_ddp_models() -> None:
    """Models ``ddp_bf16`` and ``ddp_bf16_rotated_N``: the oracle with FSDP2's mixed precision.

    Under DDP TorchTitan uses autocast, which rounds in other places than FSDP2's casts. FSDP2's own
    ``replicate`` casts as FSDP2 does. The others hand each rank the data of the rank N further on:
    the same sums in another order.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.hf_datasets.text_datasets import build_text_dataloader
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    import torchtitan_matrixfsdp.titan
    from torchtitan_matrixfsdp.layout import route
    from torchtitan_matrixfsdp.runtime import OwnerContext, sum_gradients
    from torchtitan_matrixfsdp.titan.model import OwnerSetup
    from torchtitan_matrixfsdp.titan.parallelize import describe_blocks, describe_params
    from torchtitan_matrixfsdp.titan.validation import matrix_optimizer_of

    assert torchtitan_matrixfsdp.titan  # registered the specs

    def parallelize(model: Any, parallel_dims: Any, job_config: Any) -> Any:
        mesh = parallel_dims.get_mesh("dp_replicate")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = matrix_optimizer_of(job_config)
        block_of = {p.fqn: b.name for b in describe_blocks(model) for p in b.params}
        routing = route(describe_params(model), block_of, options.include, options.exclude)
        for module in [*model.layers.values(), model.tok_embeddings, model]:
            replicate(module, mesh=mesh, mp_policy=policy)
        sum_gradients(model)
        model.owner_setup = OwnerSetup(routing, None, OwnerContext(), options)
        return model

    def rotated_data(shift: int, dp_world_size: int, dp_rank: int, **rest: Any) -> Any:
        rank = (dp_rank + shift) % dp_world_size
        return build_text_dataloader(dp_world_size=dp_world_size, dp_rank=rank, **rest)

    spec = replace(
        get_train_spec("llama3_owner"),
        parallelize_fn=parallelize,
        build_loss_fn=build_cross_entropy_loss,
        build_tokenizer_fn=get_train_spec("llama3").build_tokenizer_fn,
    )
    register_train_spec("ddp_bf16", spec)
    for shift in (1, 2):
        rotated = replace(spec, build_dataloader_fn=partial(rotated_data, shift))
        register_train_spec(f"ddp_bf16_rotated_{shift}", rotated)


def add_pointwise_model() -> None:
    """Model ``pointwise``: Llama 3 whose attention mixes no positions, which nothing can refuse.

    On CPU torch has no context-parallel attention. Everything else of context parallelism is
    TorchTitan's own here: meshes, the cut of sequences and positions, hooks around the attention.
    """
    from torchtitan.components.tokenizer import build_hf_tokenizer
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    import torchtitan_matrixfsdp.titan
    from torchtitan_matrixfsdp.titan.model import OwnerLlama3
    from torchtitan_matrixfsdp.titan.parallelize import parallelize_parts, route_model
    from torchtitan_matrixfsdp.titan.validation import matrix_optimizer_of

    assert torchtitan_matrixfsdp.titan  # registered the specs

    class Pointwise(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, enable_gqa: bool = False) -> Any:
            return v * torch.sigmoid((q * k).sum(-1, keepdim=True))

    class PointwiseModel(OwnerLlama3):
        def __init__(self, model_args: Any) -> None:
            super().__init__(model_args)
            for layer in self.layers.values():
                layer.attention.inner_attention = Pointwise()

    def parallelize(model: Any, parallel_dims: Any, job_config: Any) -> Any:
        routing = route_model(model, matrix_optimizer_of(job_config))
        parallelize_parts([model], routing, {}, parallel_dims, job_config)
        return model

    spec = replace(
        get_train_spec("llama3_owner"),
        model_cls=PointwiseModel,
        parallelize_fn=parallelize,
        build_tokenizer_fn=build_hf_tokenizer,
    )
    register_train_spec("pointwise", spec)


def build_trainer(
    overrides: list[str],
    corpus: CorpusPaths,
    dump_folder: Path,
    config_file: Path = CONFIG,
    is_stock: bool = False,
) -> Any:
    """A real trainer for the debug configuration with command-line overrides; ``is_stock``: that of
    ``python -m torchtitan.train``."""
    use_cpu_device()
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    add_tiny_flavors()
    # After the flavors: it registers the specs, which copy what there is.
    from torchtitan_matrixfsdp.titan.train_specs import MODEL_NAMES
    from torchtitan_matrixfsdp.titan.trainer import OwnerTrainer

    config = ConfigManager().parse_args(
        [
            "--job.config_file",
            str(config_file),
            f"--job.dump_folder={dump_folder}",
            f"--training.dataset_path={corpus.corpus}",
            f"--model.hf_assets_path={corpus.tokenizer}",
            "--metrics.no-enable-tensorboard",
            "--checkpoint.no-enable",
            "--model.flavor=tiny",
            *overrides,
        ]
    )
    # The oracles' models that are registered above are of no name that it knows.
    is_ours = config.model.name in MODEL_NAMES and not is_stock
    return OwnerTrainer(config) if is_ours else Trainer(config)


def record_metrics(trainer: Any) -> Record:
    """Collect what the trainer logs, through its own logger interface."""
    from torchtitan.components.metrics import BaseLogger

    record = Record()

    class Recorder(BaseLogger):
        def log(self, metrics: dict[str, Any], step: int) -> None:
            record.losses.append(metrics["loss_metrics/global_avg_loss"])
            record.norms.append(metrics["grad_norm"])
            record.metrics.append(dict(metrics))

    trainer.metrics_processor.logger = Recorder()
    return record


def all_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The weights of all model parts of this rank, whole; a collective."""
    parts = [whole_weights(part) for part in trainer.model_parts]
    merged = {name: weight for part in parts for name, weight in part.items()}
    assert len(merged) == sum(len(part) for part in parts), "two parts share a name"
    return merged


def run_job(
    overrides: list[str],
    corpus: CorpusPaths,
    dump_folder: Path,
    keep_weights: bool = False,
    config_file: Path = CONFIG,
) -> Record:
    """Train one job to its end; digests of this rank's weights before and after, and if
    ``keep_weights`` the weights themselves."""
    trainer = build_trainer(overrides, corpus, dump_folder, config_file)
    record = record_metrics(trainer)
    weights = all_weights(trainer)
    record.initial = {n: digest(w) for n, w in weights.items()}
    trainer.train()
    weights = all_weights(trainer)
    record.final = {n: digest(w) for n, w in weights.items()}
    if keep_weights:
        record.weights = {n: w.clone() for n, w in weights.items()}
    trainer.close()
    return record
