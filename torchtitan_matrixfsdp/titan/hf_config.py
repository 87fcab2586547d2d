"""What stands beside exported weights, so that ``transformers`` loads the folder by its name alone.

``config.json`` is written from TorchTitan's model arguments; the tokenizer's files are copied. So
an exported folder can also be the ``model.hf_assets_path`` of a next run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols.model import BaseModelArgs

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError

CONFIG_FILE = "config.json"
ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""The files that are copied from ``model.hf_assets_path`` where they are present."""


def hf_extra_files(
    model_args: BaseModelArgs,
    hf_assets_path: Path | None,
    dtype: torch.dtype,
    seq_len: int | None = None,
) -> dict[str, bytes]:
    """``config.json`` and the files of the tokenizer, by name.

    Args:
        hf_assets_path: the tokenizer's folder; ``None`` or a missing one gives no copies.
        dtype: of the exported weights; ``transformers`` loads them in it by default.
        seq_len: tokens; the longest sequence that the model was trained on. ``None``: what
            ``model_args`` say, which TorchTitan sets to ``training.seq_len``.

    Raises:
        CheckpointError: ``transformers`` has no counterpart of the model.
        OSError: a file cannot be read.
    """
    assets = {}
    if hf_assets_path is not None:
        paths = [hf_assets_path / name for name in ASSETS]
        assets = {path.name: path.read_bytes() for path in paths if path.is_file()}
    config = hf_config(model_args, dtype, seq_len) | _special_ids(assets)
    return {CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(), **assets}


def hf_config(
    model_args: BaseModelArgs, dtype: torch.dtype, seq_len: int | None = None
) -> dict[str, Any]:
    """The content of ``config.json``, without the ids of special tokens; see
    :func:`hf_extra_files`.

    Rotary embeddings are given as ``rope_theta`` and ``rope_scaling``, as in the published weights
    of both models: every version of ``transformers`` reads these.
    """
    if isinstance(model_args, TransformerModelArgs):
        config = _llama3(model_args)
    elif isinstance(model_args, Qwen3ModelArgs):
        config = _qwen3(model_args)
    else:
        raise CheckpointError(
            f"no config.json is known for {type(model_args).__name__}, only for Llama 3 and Qwen3. "
            "Use a checkpoint in TorchTitan's own format."
        )
    heads = model_args.n_heads
    return config | {
        "vocab_size": model_args.vocab_size,
        "hidden_size": model_args.dim,
        "num_hidden_layers": model_args.n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if model_args.n_kv_heads is None else model_args.n_kv_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": model_args.norm_eps,
        "rope_theta": model_args.rope_theta,
        "max_position_embeddings": seq_len or model_args.max_seq_len,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _llama3(args: TransformerModelArgs) -> dict[str, Any]:
    # TorchTitan scales the frequencies as Llama 3.1 does in every flavor.
    scaling = args.rope_scaling_args
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": llama3_hidden_size(args),
        "head_dim": args.dim // args.n_heads,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": scaling.scaling_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
    }


def llama3_hidden_size(args: TransformerModelArgs) -> int:
    """The width of TorchTitan's feed-forward layer."""
    hidden = int(2 * (4 * args.dim) / 3)
    if args.ffn_dim_multiplier is not None:
        hidden = int(args.ffn_dim_multiplier * hidden)
    return -(-hidden // args.multiple_of) * args.multiple_of


def _qwen3(args: Qwen3ModelArgs) -> dict[str, Any]:
    if args.moe_enabled or not args.qk_norm:
        raise CheckpointError(
            f"Qwen3 with moe_enabled = {args.moe_enabled} and qk_norm = {args.qk_norm} has no "
            "counterpart among the dense models of transformers, which normalise queries and keys. "
            "Use a checkpoint in TorchTitan's own format."
        )
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": args.hidden_dim,
        "head_dim": args.head_dim,
        "tie_word_embeddings": args.enable_weight_tying,
        "use_sliding_window": False,
        "rope_scaling": None,
    }


def _special_ids(assets: Mapping[str, bytes]) -> dict[str, int | None]:
    """The ids at which a generated text begins and ends, from the tokenizer's files.

    ``None`` where these do not say: the defaults of ``transformers`` belong to other tokenizers.
    """
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if "tokenizer.json" not in assets or "tokenizer_config.json" not in assets:
        return ids
    added = json.loads(assets["tokenizer.json"]).get("added_tokens", [])
    id_of = {token["content"]: token["id"] for token in added}
    config = json.loads(assets["tokenizer_config.json"])
    for role in ("bos_token", "eos_token"):
        token = config.get(role)
        content = token["content"] if isinstance(token, dict) else token
        ids[f"{role}_id"] = id_of.get(content)
    return ids
