"""Conversions against what two ranks save: the same chunks in the files of the same ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.toy import Run, batch, loss_of, make_toy, rows_of, shard_toy
from tests.harness import run_ranks
from torchtitan_matrixfsdp.checkpoint import Manifest, OwnerStorageWriter
from torchtitan_matrixfsdp.checkpoint.__main__ import main


def save_both(folder: Path) -> None:
    """Save the toy after a step, with owner shards by this package and with row shards by stock
    DCP. With SGD's momentum, for the state of every parameter to have its shape."""
    for mode in ("zero3", "stock"):
        sharded = shard_toy(make_toy(torch.float32), init_device_mesh("cpu", (2,)), Run(mode=mode))
        model = sharded.model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        mine = rows_of(torch.distributed.get_rank(), 2)
        tokens, targets = batch(0)
        loss_of(model, tokens[mine], targets[mine]).backward()
        optimizer.step()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state: dict[str, Any] = dict(get_model_state_dict(model))
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
        writer: Any = dcp.FileSystemWriter(folder / mode)
        if sharded.plan is not None:
            plans = (json.loads(sharded.plan.to_json()),)
            writer = OwnerStorageWriter(folder / mode, Manifest(plans=plans))
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, storage_writer=writer)


def places(path: Path) -> dict[tuple[str, tuple[int, ...]], Any]:
    """Size and file of every chunk of a tensor."""
    metadata = FileSystemReader(path).read_metadata()
    found = {}
    for index, info in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        if not hasattr(entry, "chunks"):
            continue
        chunk = next(c for c in entry.chunks if c.offsets == index.offset)
        found[index.fqn, tuple(index.offset)] = (tuple(chunk.sizes), info.relative_path)
    return found


def test_conversions_give_what_two_ranks_save(tmp_path, capsys):
    run_ranks(save_both, 2, tmp_path)
    owner, stock = tmp_path / "zero3", tmp_path / "stock"
    to = ["--world-size", "2", "--to"]
    for arguments in (
        ["verify", owner],
        ["verify", stock],
        ["convert", owner, tmp_path / "rows", *to, "rows"],
        ["convert", owner, tmp_path / "again", *to, "owner"],
        ["convert", tmp_path / "rows", tmp_path / "wide", "--world-size", "5", "--to", "rows"],
        ["diff", owner, tmp_path / "rows"],
        ["diff", owner, tmp_path / "again"],
        ["diff", stock, tmp_path / "wide", "--tolerance", "1e-5"],
        ["verify", tmp_path / "again"],
    ):
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr()
    assert places(tmp_path / "rows") == places(stock)
    assert places(tmp_path / "again") == places(owner)
    assert places(owner) != places(stock)
    capsys.readouterr()
    assert main(["inspect", str(owner)]) == 0
    printed = capsys.readouterr().out
    assert "21 parameters of 3 blocks over 2 ranks" in printed
    assert "owner plan: cost_aware" in printed and "__1_0.distcp" in printed
    assert "momentum_buffer" in printed
