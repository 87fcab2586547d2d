"""Export and import by one process, with TorchTitan's own adapters."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError
from torchtitan_matrixfsdp.checkpoint.folder import HF_INDEX
from torchtitan_matrixfsdp.checkpoint.hf import _divide, _Offer, export_hf, import_hf
from torchtitan_matrixfsdp.checkpoint.safetensors import TensorMeta

SINGLE = "model-00001-of-00001.safetensors"
State = dict[str, torch.Tensor]
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 40}
QWEN_SIZES = SIZES | {"head_dim": 16, "hidden_dim": 48, "max_seq_len": 8}


def llama() -> tuple[State, Any]:
    """The state of a model with random weights, and its adapter."""
    args = TransformerModelArgs(**SIZES, multiple_of=16, max_seq_len=8)
    return randomised(Transformer(args)), Llama3StateDictAdapter(args, None)


def qwen(tied: bool) -> tuple[State, Any]:
    args = Qwen3ModelArgs(**QWEN_SIZES, enable_weight_tying=tied)
    return randomised(Qwen3Model(args)), Qwen3StateDictAdapter(args, None)


def randomised(model: torch.nn.Module) -> State:
    torch.manual_seed(5)
    for param in model.parameters():
        torch.nn.init.normal_(param)
    return model.state_dict()


def clones(state: State) -> State:
    return {fqn: tensor.clone() for fqn, tensor in state.items()}


def are_equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def zero(state: State) -> None:
    for tensor in state.values():
        tensor.zero_()


MODELS = [llama, lambda: qwen(False), lambda: qwen(True)]


@pytest.mark.parametrize("make", MODELS, ids=["llama3", "qwen3", "qwen3 tied"])
def test_the_files_are_the_adapters_conversion_and_come_back(make: Any, tmp_path: Path) -> None:
    state, adapter = make()
    before = clones(state)
    export_hf(state, adapter.to_hf, tmp_path / "new" / "folder")
    assert are_equal(load_file(tmp_path / "new" / "folder" / SINGLE), adapter.to_hf(state))
    assert are_equal(state, before)
    zero(state)
    import_hf(state, adapter.to_hf, adapter.from_hf, tmp_path / "new" / "folder")
    assert are_equal(state, before)


def test_a_tied_head_is_written_once_and_loaded_with_the_embedding(tmp_path: Path) -> None:
    state, adapter = qwen(True)
    export_hf(state, adapter.to_hf, tmp_path)
    weights = load_file(tmp_path / SINGLE)
    assert "lm_head.weight" not in weights
    # Tensors that share no storage, as where a stage has the head alone.
    separate = clones(state)
    zero(separate)
    import_hf(separate, adapter.to_hf, adapter.from_hf, tmp_path)
    assert are_equal(separate, state)


def test_a_tied_head_may_be_in_the_files_if_it_is_the_embedding(tmp_path: Path) -> None:
    state, adapter = qwen(True)
    weights = {name: t.clone() for name, t in adapter.to_hf(state).items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    before = clones(state)
    zero(state)
    import_hf(state, adapter.to_hf, adapter.from_hf, tmp_path)
    assert are_equal(state, before)
    weights["lm_head.weight"][39, 31] += 1
    save_file(weights, tmp_path / "model.safetensors")
    zero(state)
    said = r"lm_head\.weight differs from model\.embed_tokens\.weight.*without tied"
    with pytest.raises(CheckpointError, match=said):
        import_hf(state, adapter.to_hf, adapter.from_hf, tmp_path)
    assert not any(tensor.any() for tensor in state.values())


def test_dtypes_are_converted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, adapter = llama()
    export_hf(state, adapter.to_hf, tmp_path, dtype=torch.bfloat16)
    rounded = {fqn: tensor.to(torch.bfloat16) for fqn, tensor in state.items()}
    assert are_equal(load_file(tmp_path / SINGLE), adapter.to_hf(rounded))
    zero(state)
    with caplog.at_level(logging.INFO, "torchtitan_matrixfsdp"):
        import_hf(state, adapter.to_hf, adapter.from_hf, tmp_path)
    assert are_equal(state, {fqn: tensor.float() for fqn, tensor in rounded.items()})
    said = "Imported weights are converted from bfloat16 to float32"
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize("make", MODELS[:2], ids=["llama3", "qwen3"])
def test_old_rotary_buffers_are_ignored(make: Any, tmp_path: Path) -> None:
    state, adapter = make()
    before = clones(state)
    weights = adapter.to_hf(state)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, tmp_path / "model.safetensors")
    zero(state)
    import_hf(state, adapter.to_hf, adapter.from_hf, tmp_path)
    assert are_equal(state, before)


def _without(weights: State, folder: Path) -> None:
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors")


def _misshapen(weights: State, folder: Path) -> None:
    weights["model.layers.1.self_attn.q_proj.weight"] = torch.ones(32, 31)
    save_file(weights, folder / "model.safetensors")


def _surplus(weights: State, folder: Path) -> None:
    bias = torch.ones(32)
    weights |= {f"model.layers.{i}.self_attn.q_proj.bias": bias.clone() for i in range(2)}
    save_file(weights, folder / "model.safetensors")


def _deeper(weights: State, folder: Path) -> None:
    weights["model.layers.2.input_layernorm.weight"] = torch.ones(32)
    save_file(weights, folder / "model.safetensors")


def _file_missing(weights: State, folder: Path) -> None:
    save_file(weights, folder / "a.safetensors")
    weight_map = dict.fromkeys(weights, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    (folder / HF_INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _index_wrong(weights: State, folder: Path) -> None:
    save_file({"other": torch.ones(1)}, folder / "b.safetensors")
    _file_missing(weights, folder)


def _cut_short(weights: State, folder: Path) -> None:
    save_file(weights, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-4])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without, r"{folder} lacks tensor model\.norm\.weight.*flavor"),
        (_misshapen, r"{folder}/model\.safetensors: .*q_proj.* shape \(32, 31\), .* \(32, 32\)"),
        (
            _surplus,
            r"{folder}/model\.safetensors has tensor .*0\.self_attn\.q_proj\.bias and 1 more",
        ),
        (_deeper, r"tensor model\.layers\.2\.input_layernorm\.weight, without a place"),
        (_file_missing, r"{folder}/b\.safetensors cannot be read: No such file"),
        (_index_wrong, r"{folder}/b\.safetensors lacks tensor lm_head\.weight, which .*index"),
        (_cut_short, r"{folder}/model\.safetensors is cut short"),
    ],
)
def test_a_fault_is_found_before_anything_changes(spoil: Any, said: str, tmp_path: Path) -> None:
    state, adapter = llama()
    spoil(adapter.to_hf(state), tmp_path)
    zero(state)
    with pytest.raises(CheckpointError, match=said.format(folder=tmp_path)):
        import_hf(state, adapter.to_hf, adapter.from_hf, tmp_path)
    assert not any(tensor.any() for tensor in state.values())


def test_a_tensor_without_counterpart_is_named(tmp_path: Path) -> None:
    state, adapter = llama()
    state["layers.0.attention.gate.weight"] = torch.ones(2, 2)
    said = r"layers\.0\.attention\.gate\.weight of shape \(2, 2\) has no counterpart.*KeyError"
    with pytest.raises(CheckpointError, match=said):
        export_hf(state, adapter.to_hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="holds neither"):
        import_hf(state, adapter.to_hf, adapter.from_hf, tmp_path)


def test_what_cannot_be_written_leaves_no_export(tmp_path: Path) -> None:
    state, adapter = llama()
    (tmp_path / "config.json").mkdir()
    said = f"cannot write {tmp_path / 'config.json'}: Is a directory.*choose a folder"
    with pytest.raises(CheckpointError, match=said):
        export_hf(state, adapter.to_hf, tmp_path, extra_files={"config.json": b"{}"})
    assert not list(tmp_path.glob("*.safetensors")) and not (tmp_path / HF_INDEX).exists()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path / 'file'}"):
        export_hf(state, adapter.to_hf, tmp_path / "file")
    (tmp_path / "config.json").rmdir()
    export_hf(state, adapter.to_hf, tmp_path, extra_files={"config.json": b"{}"})
    assert (tmp_path / "config.json").read_bytes() == b"{}"
    with pytest.raises(CheckpointError, match="never replaces weights"):
        export_hf(state, adapter.to_hf, tmp_path)


def test_an_export_can_be_the_assets_of_a_next_run(tmp_path: Path) -> None:
    state, adapter = llama()
    export_hf(state, adapter.to_hf, tmp_path)
    again = Llama3StateDictAdapter(adapter.model_args, str(tmp_path))
    assert again.fqn_to_index_mapping == dict.fromkeys(adapter.to_hf(state), 1)


def test_writing_is_divided_among_those_who_can() -> None:
    """Rank 0 owns a large tensor; the others are on both ranks, or on rank 1."""

    def offer(name: str, size: int, can_write: bool) -> _Offer:
        return _Offer((TensorMeta(name, torch.float32, (size,)),), can_write)

    sizes = {"a": 10, "b": 4, "c": 4, "d": 1, "e": 2}
    holders = {"a": {0}, "b": {0, 1}, "c": {0, 1}, "d": {1}, "e": {0, 1}}
    offers = [
        {f: offer(f.upper(), size, rank in holders[f]) for f, size in sizes.items()}
        for rank in range(2)
    ]
    offers[1]["tied"] = _Offer((), True)
    writer_of, tensors = _divide(offers, 2)
    assert writer_of == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 1}
    assert [meta.name for meta in tensors] == ["A", "B", "C", "D", "E"]
    offers[1]["b"] = offer("B", 5, True)
    with pytest.raises(CheckpointError, match=r"b is .*\(4,\).* on rank 1\. Start every rank"):
        _divide(offers, 2)


def test_a_surplus_tensor_is_named_for_a_tied_model_too(tmp_path: Path) -> None:
    """Its adapter insists on the embedding in every dict that it is given."""
    state, adapter = qwen(True)
    _surplus(adapter.to_hf(state), tmp_path)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias and 1 more, without a place"):
        import_hf(state, adapter.to_hf, adapter.from_hf, tmp_path)
