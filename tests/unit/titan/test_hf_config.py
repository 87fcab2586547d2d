"""transformers loads an exported folder by its name and computes TorchTitan's logits.

Not bit by bit: the two multiply by rotary embeddings in another order (Llama) and call other
kernels. Weights in float64 bring them no closer than 1e-6: TorchTitan's Llama rotates, and
transformers normalises, in float32 whatever the dtype of the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.model import FeedForward, Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support import CorpusPaths
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.hf import export_hf
from torchtitan_matrixfsdp.titan.hf_config import (
    CONFIG_FILE,
    hf_config,
    hf_extra_files,
    llama3_hidden_size,
)

LENGTH, VOCABULARY = 96, 64
TOLERANCE = 1e-5  # of the largest logit; 2e-6 is seen
# Bands of frequencies on both sides of the scaling's two limits, within the sequence.
SCALING = RoPEScalingArgs(4.0, 1.0, 4.0, original_max_position_embeddings=48)
LLAMA = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "max_seq_len": LENGTH}
QWEN = LLAMA | {"n_kv_heads": 2, "head_dim": 32, "hidden_dim": 80}
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "llama3": (
        Transformer,
        Llama3StateDictAdapter,
        TransformerModelArgs(**LLAMA, multiple_of=32, rope_theta=500_000),
    ),
    "llama3 with grouped heads and scaled frequencies": (
        Transformer,
        Llama3StateDictAdapter,
        TransformerModelArgs(
            **LLAMA,
            n_kv_heads=2,
            multiple_of=48,
            ffn_dim_multiplier=1.3,
            norm_eps=1e-2,
            rope_theta=2000,
            rope_scaling_args=SCALING,
        ),
    ),
    "qwen3": (
        Qwen3Model,
        Qwen3StateDictAdapter,
        Qwen3ModelArgs(**QWEN, rope_theta=2000, norm_eps=1e-2),
    ),
    "qwen3 tied": (
        Qwen3Model,
        Qwen3StateDictAdapter,
        Qwen3ModelArgs(**QWEN, enable_weight_tying=True),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_torchtitans(name: str, tmp_path: Path) -> None:
    model_cls, adapter_cls, args = MODELS[name]
    torch.manual_seed(11)
    model = model_cls(args)
    for param in model.parameters():
        # Sharp attention and norms that differ by channel, so that every convention matters.
        mean, std = (1.0, 0.3) if param.ndim == 1 else (0.0, 0.2)
        torch.nn.init.normal_(param, mean, std)
    extra = hf_extra_files(args, None, torch.float32)
    export_hf(model.state_dict(), adapter_cls(args, None).to_hf, tmp_path, extra_files=extra)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        ours, theirs = model(tokens), loaded(tokens).logits
    assert (ours - theirs).abs().max() < TOLERANCE * ours.abs().max()
    assert loaded.dtype == AutoConfig.from_pretrained(tmp_path).dtype == torch.float32


@pytest.mark.parametrize("flavor", ["debugmodel", "8B", "70B", "405B"])
def test_width_of_the_feed_forward_layer(flavor: str) -> None:
    args = llama3_args[flavor]
    with torch.device("meta"):
        layer = FeedForward(args.dim, 4 * args.dim, args.multiple_of, args.ffn_dim_multiplier)
    assert llama3_hidden_size(args) == layer.w1.out_features


def test_published_sizes() -> None:
    """Against what is published with Llama 3.1 8B and Qwen3 0.6B."""
    llama = hf_config(llama3_args["8B"], torch.bfloat16, seq_len=8192)
    assert llama["intermediate_size"] == 14336
    assert llama["num_key_value_heads"] == 8
    assert llama["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert (llama["rope_theta"], llama["rms_norm_eps"]) == (500_000, 1e-5)
    assert (llama["torch_dtype"], llama["max_position_embeddings"]) == ("bfloat16", 8192)
    qwen = hf_config(qwen3_args["0.6B"], torch.bfloat16)
    assert (qwen["head_dim"], qwen["intermediate_size"]) == (128, 3072)
    assert qwen["tie_word_embeddings"] is True and qwen["rope_theta"] == 1_000_000


def test_a_model_without_counterpart_is_refused() -> None:
    for args in (qwen3_args["debugmodel_moe"], Qwen3ModelArgs(qk_norm=False)):
        with pytest.raises(CheckpointError, match=r"moe_enabled = .*qk_norm = .*TorchTitan's own"):
            hf_config(args, torch.float32)


def test_the_tokenizers_files_are_copied(corpus_dir: CorpusPaths, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    for path in corpus_dir.tokenizer.iterdir():
        (tmp_path / "assets" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "assets" / "generation_config.json").write_text('{"do_sample": true}')
    (tmp_path / "assets" / "model.safetensors").write_bytes(b"not a tokenizer's")
    (tmp_path / "assets" / CONFIG_FILE).write_text("another model's")
    files = hf_extra_files(
        TransformerModelArgs(**LLAMA), tmp_path / "assets", torch.float32, seq_len=17
    )
    assert sorted(files) == [
        CONFIG_FILE,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads(files[CONFIG_FILE])
    assert config["max_position_embeddings"] == 17
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    titans = HuggingFaceTokenizer(str(tmp_path))
    assert theirs.encode("Two matrices.", add_special_tokens=False) == titans.encode(
        "Two matrices.", add_bos=False, add_eos=False
    )
    assert config["bos_token_id"] == theirs.bos_token_id == titans.bos_id
    assert config["eos_token_id"] == theirs.eos_token_id == titans.eos_id


@pytest.mark.parametrize("token", ["</s>", {"content": "</s>"}])
def test_special_tokens_are_found_in_both_spellings(token: Any, tmp_path: Path) -> None:
    added = [{"id": 7, "content": "</s>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    files = hf_extra_files(TransformerModelArgs(**LLAMA), tmp_path, torch.float32)
    config = json.loads(files[CONFIG_FILE])
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 7)
    none = json.loads(
        hf_extra_files(TransformerModelArgs(**LLAMA), None, torch.float32)[CONFIG_FILE]
    )
    assert (none["bos_token_id"], none["eos_token_id"]) == (None, None)
