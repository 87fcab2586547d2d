"""`convert`: nothing is lost, DCP's own reader agrees, and each rank's file is its own."""

import json
import math

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.unit.checkpoint.stored_state import (
    load_stock,
    make_state,
    save_model,
    save_owner,
    save_stock,
)
from torchtitan_matrixfsdp.checkpoint.__main__ import main
from torchtitan_matrixfsdp.checkpoint.placement import Piece, blocks_of_plans, row_pieces
from torchtitan_matrixfsdp.checkpoint.stored import CheckpointReader, StoredTensor
from torchtitan_matrixfsdp.layout import make_plan

LLAMA = ["--model", "llama3_owner", "--flavor", "tiny"]


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert status == 0, printed
    return printed


def values(state, prefix=""):
    """A nested state by dotted keys."""
    flat = {}
    for key, value in state.items():
        if isinstance(value, dict):
            flat |= values(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def bits(value):
    if not isinstance(value, torch.Tensor):
        return value
    content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content, value.shape, value.dtype


def tensors_bitwise(path):
    reader = CheckpointReader(path)
    return {key: bits(reader.tensor(key)) for key in reader.tensors} | {
        key: reader.object_bytes(key) for key in reader.objects
    }


@pytest.mark.parametrize("save", [save_owner, save_stock])
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_are_read_by_stock_dcp(tmp_path, capsys, save, ranks):
    state = make_state()
    state["output.weight"][0, 0] = math.nan
    source = save(state, tmp_path / "source")
    target = tmp_path / "new" / "rows"
    printed = run(capsys, "convert", source, target, "--to", "rows", "--world-size", ranks)
    assert "convert" in printed.err and "100%" in printed.err
    assert "note: the position in the data is still that of 2" in printed.out
    expected, loaded = values(state), values(load_stock(target))
    assert expected.keys() == loaded.keys()
    assert all(bits(value) == bits(loaded[key]) for key, value in expected.items())
    run(capsys, "verify", target, "--no-finite")
    run(capsys, "diff", source, target)
    names = {path.name for path in target.glob("*.distcp")}
    assert names == {f"__{rank}_0.distcp" for rank in range(ranks)}


def test_rows_are_those_of_fsdp2(tmp_path, capsys):
    source = save_owner(make_state(), tmp_path / "source")
    target = tmp_path / "rows"
    run(capsys, "convert", source, target, "--to", "rows", "--world-size", "4")
    metadata = FileSystemReader(target).read_metadata()
    # 17 and 7 rows in chunks of 5 and 2; 6 in chunks of 2, none for the last rank.
    for key, sizes in [
        ("output.weight", [5, 5, 5, 2]),
        ("optimizer.state.layers.1.attention.wq.weight.momentum", [2, 2, 2, 1]),
        ("layers.1.attention_norm.weight", [2, 2, 2]),
    ]:
        chunks = metadata.state_dict_metadata[key].chunks
        assert [chunk.sizes[0] for chunk in chunks] == sizes
        for chunk, rows in zip(torch.empty(sum(sizes)).chunk(4), sizes, strict=False):
            assert len(chunk) == rows
    for index, info in metadata.storage_data.items():
        if index.fqn == "output.weight":
            assert info.relative_path == f"__{index.offset[0] // 5}_0.distcp"
    owners = {i.fqn: info.relative_path for i, info in metadata.storage_data.items()}
    assert owners["dataloader.dp_rank_1"] == "__1_0.distcp"


def test_owner_files_follow_the_plan_of_a_job(tmp_path, capsys):
    source, model = save_model(tmp_path / "source")
    target = tmp_path / "owner"
    run(capsys, "convert", source, target, "--to", "owner", "--world-size", "3", *LLAMA)
    run(capsys, "verify", target)
    run(capsys, "diff", source, target)
    reader = CheckpointReader(target)
    blocks = model.blocks()
    expected = make_plan("cost_aware", blocks.blocks, blocks.matrices, 3)
    assert reader.manifest.plans == (json.loads(expected.to_json()),)
    assert reader.manifest.job["model"] == "llama3_owner"
    owned = {shard.fqn: shard.owner for block in expected.blocks for shard in block.shards}
    assert set(owned.values()) == {0, 1, 2}
    found = {}
    for index, info in reader.metadata.storage_data.items():
        found.setdefault(index.fqn, []).append(info.relative_path)
    for fqn, owner in owned.items():
        assert found[fqn] == [f"__{owner}_0.distcp"]
        assert found[f"optimizer.state.{fqn}.momentum"] == found[fqn]
    assert len(found["tok_embeddings.weight"]) == 3
    printed = run(capsys, "inspect", target).out
    assert "cost_aware" in printed and "over 3 ranks" in printed


def test_owner_to_rows_to_owner_is_bitwise_the_same(tmp_path, capsys):
    source, _ = save_model(tmp_path / "source")
    first, rows, again = (tmp_path / name for name in ("first", "rows", "again"))
    run(capsys, "convert", source, first, "--to", "owner", "--world-size", "2", *LLAMA)
    run(capsys, "convert", first, rows, "--to", "rows", "--world-size", "3")
    # The manifest says what the model is.
    run(capsys, "convert", rows, again, "--to", "owner", "--world-size", "2")
    assert CheckpointReader(rows).manifest.plans == ()
    assert CheckpointReader(first).manifest.plans == CheckpointReader(again).manifest.plans
    assert tensors_bitwise(first) == tensors_bitwise(again) == tensors_bitwise(source)
    for name in ("__0_0.distcp", "__1_0.distcp", "__0_0.json", "__1_0.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    run(capsys, "diff", first, again)


def test_saved_plan_is_the_source_of_the_new_one(tmp_path, capsys):
    """Routing that was not the default's is kept, and no model is asked for."""
    source, model = save_model(tmp_path / "source")
    blocks = model.blocks()
    without_wo = {fqn for fqn in blocks.matrices if "wo" not in fqn}
    plan = make_plan("role_greedy", blocks.blocks, without_wo, 2)
    manifest = json.loads((source / "matrixfsdp.json").read_text())
    manifest["plans"] = [json.loads(plan.to_json())]
    (source / "matrixfsdp.json").write_text(json.dumps(manifest))
    target = tmp_path / "owner"
    options = ["--to", "owner", "--world-size", "3", "--planner", "role_greedy"]
    run(capsys, "convert", source, target, *options)
    expected = make_plan("role_greedy", blocks.blocks, without_wo, 3)
    assert CheckpointReader(target).manifest.plans == (json.loads(expected.to_json()),)


def test_plans_of_interleaved_stages_are_joined(tmp_path):
    _, model = save_model(tmp_path / "source")
    blocks = model.blocks()
    plans = [
        json.loads(
            make_plan(
                "cost_aware",
                part,
                {p.fqn for block in part for p in block.params} & blocks.matrices,
                2,
            ).to_json()
        )
        for part in (blocks.blocks[::2], blocks.blocks[1::2])
    ]
    assert blocks_of_plans(plans) == blocks


def test_target_is_never_replaced(tmp_path, capsys):
    source = save_owner(make_state(), tmp_path / "source")
    for target in (source, tmp_path / "empty", tmp_path / "file"):
        if target.name == "empty":
            target.mkdir()
        elif target.name == "file":
            target.write_text("mine")
        before = sorted(path.name for path in target.iterdir()) if target.is_dir() else None
        arguments = ["convert", source, target, "--to", "rows", "--world-size", "2"]
        assert main([str(a) for a in arguments]) == 2
        assert "exists; legal: a new folder" in capsys.readouterr().err
        assert before == (sorted(p.name for p in target.iterdir()) if target.is_dir() else None)


def test_damaged_source_leaves_no_target(tmp_path, capsys):
    source = save_owner(make_state(), tmp_path / "source")
    content = bytearray((source / "__0_0.distcp").read_bytes())
    content[-1000] ^= 1
    (source / "__0_0.distcp").write_bytes(content)
    target = tmp_path / "target"
    assert main(["convert", str(source), str(target), "--to", "rows", "--world-size", "2"]) == 2
    assert "checksum differs" in capsys.readouterr().err and not target.exists()


def test_model_must_be_known_and_fit(tmp_path, capsys):
    source = save_stock(make_state(), tmp_path / "source")
    convert = ["convert", str(source), str(tmp_path / "target"), "--to", "owner"]
    for options, said in [
        ([], "--model and --flavor: received neither"),
        (["--model", "gpt", "--flavor", "x"], "legal: llama3_owner, qwen3_owner"),
        (["--model", "llama3_owner", "--flavor", "x"], "legal for llama3_owner: debugmodel"),
        (LLAMA, "received shape (7, 6); legal: shape (64, 64)"),
    ]:
        assert main([*convert, "--world-size", "2", *options]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "rows"], "needs --world-size"),
        (["--to", "owner"], "needs --world-size"),
        (["--to", "rows", "--world-size", "0"], "received 0; legal: >= 1"),
        (["--to", "rows", "--world-size", "2", "--planner", "cost_aware"], "no meaning"),
        (["--to", "csv", "--world-size", "2"], "invalid choice"),
    ],
)
def test_usage_errors(tmp_path, capsys, options, said):
    with pytest.raises(SystemExit) as raised:
        main(["convert", str(tmp_path), str(tmp_path / "target"), *options])
    assert raised.value.code == 2 and said in capsys.readouterr().err


def test_chunks_of_rows():
    assert row_pieces((5, 3), 4) == [
        Piece(0, (0, 0), (2, 3)),
        Piece(1, (2, 0), (2, 3)),
        Piece(2, (4, 0), (1, 3)),
    ]
    assert row_pieces((0, 3), 2) == [Piece(0, (0, 0), (0, 3))]
    assert [p.sizes for p in row_pieces((4,), 2)] == [(2,), (2,)]


def test_layout_is_named():
    def named(*chunks):
        return StoredTensor("w", (4, 3), torch.float32, chunks).layout

    assert named(((0, 0), (4, 3))) == "whole"
    assert named(((0, 0), (2, 3)), ((2, 0), (2, 3))) == "2 row chunks"
    assert named(((0, 0), (4, 1)), ((0, 1), (4, 2))) == "2 chunks"
