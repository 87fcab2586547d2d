"""The benchmarks without ranks: the command line, the account, the reports, the two counters."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_matrixfsdp.titan
from tests.support import ROOT
from torchtitan_matrixfsdp.bench import results
from torchtitan_matrixfsdp.bench.__main__ import main
from torchtitan_matrixfsdp.bench.account import account_model
from torchtitan_matrixfsdp.bench.blocks import (
    LAYOUTS,
    MODELS,
    LlamaBlocks,
    block_layout,
    model_blocks,
    scaled_model,
)
from torchtitan_matrixfsdp.bench.memory import LiveStorages
from torchtitan_matrixfsdp.bench.newton_schulz import Products
from torchtitan_matrixfsdp.bench.plot import plot_step
from torchtitan_matrixfsdp.bench.ranks import RanksFailedError, on_ranks
from torchtitan_matrixfsdp.bench.results import Ratio, Spread
from torchtitan_matrixfsdp.bench.sent import SentBytes
from torchtitan_matrixfsdp.bench.step_modes import MODES, OPTIMIZERS
from torchtitan_matrixfsdp.bench.tables import (
    comm_text,
    memory_text,
    newton_schulz_text,
    step_text,
)
from torchtitan_matrixfsdp.layout import (
    BASELINE_STEPS,
    TRANSPORT_MODELS,
    StepShape,
    gamma,
    newton_schulz_flops,
)
from torchtitan_matrixfsdp.optim import newton_schulz

assert torchtitan_matrixfsdp.titan  # registers the models


def test_account_only_prints_one_document(capsys):
    assert main(["comm", "--account-only", "--account-world-sizes", "2", "64", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 2
    assert document["command"] == "comm"
    assert document["setting"] is None
    assert document["layouts"] == document["measured_steps"] == []
    assert [a["world_size"] for a in document["accounts"]] == [2, 64]
    for account in document["accounts"]:
        assert account["model"] == "8B"
        systems = {system["system"]: system for system in account["systems"]}
        assert list(systems) == [
            *(f"owner, {name}" for name in (*TRANSPORT_MODELS, "auto")),
            *(f"fsdp2, {name}" for name in BASELINE_STEPS),
        ]
        for name, system in systems.items():
            is_ours = name.startswith("owner")
            assert (system["exposed"] == {"min": 0, "median": 0, "max": 0}) is is_ours
            assert system["exposed"] == system["step"]
            if not is_ours:
                assert system["prefetched_over_fsdp2"] == {"min": 0, "median": 0, "max": 0}


def test_account_of_the_8b_model():
    """M = 32 layers of 2 d^2 + 2 d k + 3 d h elements, in float32."""
    d, k, h = 4096, 1024, 14336
    account = account_model("8B", 8, StepShape(2, 4, 4))
    elements = 32 * (2 * d * d + 2 * d * k + 3 * d * h)
    assert account.matrix_bytes == 4 * elements
    systems = {system.system: system for system in account.systems}
    stock = systems["fsdp2, gather"]
    norms = 32 * 2 * d
    gather = 7 * (elements + norms) // 8 * 2  # every dimension divides by 8
    assert stock.forward == Spread(gather, gather, gather)
    assert stock.backward.max == gather + 2 * gather
    assert stock.exposed.max == 7 * elements // 8 * 4
    auto = systems["owner, auto"]
    assert auto.prefetched_over_fsdp2.max <= 3 * account.matrix_bytes // 8


@pytest.mark.parametrize("name", MODELS)
def test_models_are_torchtitans(name):
    with torch.device("meta"):
        model = get_train_spec("llama3_owner").model_cls(
            get_train_spec("llama3_owner").model_args[name]
        )
    layers = list(model.get_submodule("layers").children())
    blocks = model_blocks(MODELS[name])
    assert len(blocks) == len(layers)
    theirs = sorted(tuple(param.shape) for param in layers[0].parameters())
    assert sorted(param.shape for param in blocks[0].params) == theirs


def test_the_measured_model_is_what_was_planned():
    shape = scaled_model(64, 2)
    model = LlamaBlocks(shape)
    planned = {p.fqn: p.shape for block in model_blocks(shape) for p in block.params}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == planned
    x = torch.randn(2, 5, 64)
    assert model(x).shape == x.shape


@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
def test_layouts_of_a_block(world_size):
    blocks = {name: block_layout(name, 64, world_size, torch.float32) for name in LAYOUTS}
    assert blocks["balanced"].gamma == 1.0
    assert len(blocks["balanced"].owners) == world_size
    assert blocks["one_owner"].gamma == world_size
    assert blocks["one_owner"].owners == (0,)
    sparse = blocks["sparse"]
    assert sparse.nbytes == blocks["one_owner"].nbytes
    if world_size > 5:  # of 5 roles, each alone on its rank
        largest = max(shard.nbytes for shard in sparse.shards)
        assert len(sparse.owners) == 5
        assert sparse.gamma == gamma(world_size, [largest], sparse.nbytes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["comm", "--world-size", "1"], "--world-size: received '1'; legal: 2 to 64"),
        (["memory", "--world-size", "two"], "--world-size: received 'two'; legal: 2 to 64"),
        (["comm", "--layer-dim", "100"], "received '100'; legal: 64 to 65536, a multiple of 64"),
        (["comm", "--repeats", "0"], "--repeats: received '0'; legal: 1 to"),
        (["comm", "--transports", "pigeon"], "invalid choice: 'pigeon' (choose from"),
        (["memory", "--transport", "pigeon"], "invalid choice: 'pigeon' (choose from"),
        (["comm", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["comm", "--model", "9B"], "invalid choice: '9B'"),
        (["comm", "--account-world-sizes", "0"], "--account-world-sizes: received '0'; legal: 1"),
        (
            ["newton-schulz", "--shapes", "8x256"],
            "received '8x256'; legal: as 8x256x768, each >= 1",
        ),
        (["newton-schulz", "--shapes", "8x0x4"], "received '8x0x4'; legal: as"),
        (["newton-schulz", "--threads", "0"], "--threads: received '0'; legal: 1 to 1024"),
        (["newton-schulz", "--coefficients", "cubic"], "invalid choice: 'cubic'"),
        (["step", "--dim", "100"], "received '100'; legal: 64 to 65536, a multiple of 64"),
        (["step", "--modes", "pigeon"], "invalid choice: 'pigeon' (choose from"),
        (["step", "--optimizer", "pigeon"], "invalid choice: 'pigeon' (choose from"),
        (
            ["step", "--optimizer", "adamw", "--modes", "zero3", "gather"],
            "--modes: received ['gather']; legal with --optimizer adamw: ['ideal', 'zero3',",
        ),
        ([], "the following arguments are required: command"),
    ],
)
def test_mistakes_are_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launched", "arguments", "said"),
    [
        ("4", ["--world-size", "2"], "received 2; legal under torchrun: 4"),
        ("1", [], "torchrun has started 1 rank; legal: 2 or more"),
    ],
)
def test_mistakes_under_torchrun_are_named(launched, arguments, said, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", launched)
    with pytest.raises(SystemExit):
        main(["comm", *arguments])
    assert said in capsys.readouterr().err


def test_spread_and_ratio():
    assert Spread.of([5, 1, 3, 9]) == Spread(1, 3, 9)
    assert Ratio.of([(2.0, 1.0), (1.0, 3.0), (4.0, 4.0)]) == Ratio(1.0, 0.5, 3.0)


def test_every_field_is_documented():
    """docs/bench.md has one row per field of the JSON document, and no other."""
    text = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, flags=re.MULTILINE)
    classes = [c for c in vars(results).values() if dataclasses.is_dataclass(c)]
    fields = [(c.__name__, field.name) for c in classes for field in dataclasses.fields(c)]
    assert sorted(documented) == sorted(fields)


def test_tables_say_what_the_report_holds():
    sent = results.Sent(Spread(1_000_000, 2_000_000, 3_000_000), Spread(7, 7, 7))
    operation = results.Operation(sent, sent, Ratio(0.5, 0.25, 1.5), Ratio(2.0, 1.0, 4.0))
    phase = results.Phase(Spread(0, 0, 0), Spread(0, 0, 0))
    setting = results.Setting("2.13", "gloo", "cpu", 2, "float32", 64, 3)
    layout = results.LayoutResult(
        "sparse",
        1.5,
        4_000_000,
        2_000_000,
        (results.TransportResult("p2p", True, operation, operation),),
    )
    step = results.MeasuredStep("owner, p2p", phase, phase, phase)
    account = account_model("debugmodel", 2, StepShape())
    text = comm_text(results.CommReport(2, "comm", setting, (layout,), (step,), (account,)))
    assert "torch 2.13, gloo on cpu, 2 ranks, float32, width 64, 3 repetitions" in text
    assert "| p2p (auto) | gather    | 1.00 / 2.00 / 3.00" in text
    assert "0.50 (0.25 to 1.50)" in text
    assert "| fsdp2, gather each matrix" in text
    stock = results.SystemMemory(
        "fsdp2",
        1_000_000,
        results.MemoryPhase(2_000_000, 2_000_000),
        results.MemoryPhase(None, 4_000_000),
        results.MemoryPhase(None, 4_000_000),
        500_000,
    )
    ours = dataclasses.replace(stock, system="owner", gather=results.MemoryPhase(None, 1_000_000))
    text = memory_text(results.MemoryReport(2, "memory", setting, 2_000_000, 2, 16, (stock, ours)))
    assert re.search(r"\| owner +\| 1.00 +\| 1.00 \(0.50\) \| 4.00 \(1.00\)", text)


def test_newton_schulz_prints_one_document(capsys):
    threads = torch.get_num_threads()
    shapes = ["3x4x10", "2x12x5", "1x8x8"]
    arguments = ["newton-schulz", "--json", "--repeats", "2", "--steps", "6", "--shapes", *shapes]
    assert main([*arguments, "--coefficients", "polar_express"]) == 0
    assert torch.get_num_threads() == threads
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == results.SCHEMA and document["command"] == "newton-schulz"
    setting = document["setting"]
    assert (setting["threads"], setting["steps"], setting["repeats"]) == (1, 6, 2)
    found = document["results"]
    sizes = [f"{r['matrices']}x{r['rows']}x{r['cols']}" for r in found]
    assert sizes == shapes * 2
    assert [r["dtype"] for r in found] == ["float32"] * 3 + ["bfloat16"] * 3
    for result in found:
        shape = result["rows"], result["cols"]
        assert result["flops"] == result["matrices"] * newton_schulz_flops(*shape, steps=6)
        for name in ("time_to_products", "time_to_float32_products", "stacked_to_each"):
            assert 0 < result[name]["min"] <= result[name]["median"] <= result[name]["max"]
        # The bounds of test_newton_schulz.py; Gaussian matrices have values below 1e-3 of the norm.
        assert result["relative_error"] < (1e-4 if result["dtype"] == "float32" else 0.04)
        assert 0 < result["smallest_singular_value"] <= result["largest_singular_value"] < 1.05


def test_the_baseline_multiplies_what_newton_schulz_multiplies():
    """Counted in the dispatcher: the same FLOPs, those of the formula, one by one or stacked."""
    batch = torch.randn(3, 20, 8)
    predicted = 3 * newton_schulz_flops(20, 8, steps=4)
    for stacked in (False, True):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(batch, steps=4, compute_dtype=torch.float32, stacked=stacked)
        assert counter.get_total_flops() == predicted
    assert Products(batch, 4, torch.float32).flops == predicted


def test_newton_schulz_as_a_table():
    ratio = Ratio(1.0, 0.5, 2.0)
    setting = results.NewtonSchulzSetting("2.13", "cpu", 1, 5, "quintic", 7)
    result = results.NewtonSchulzResult(
        "float32", 8, 768, 256, 10, 12.345, ratio, ratio, ratio, 1.24e-6, 0.5, 1.25
    )
    text = newton_schulz_text(results.NewtonSchulzReport(1, "newton-schulz", setting, (result,)))
    assert "torch 2.13 on cpu, 1 thread(s): 5 steps of quintic, 7 repetitions" in text
    assert "| float32 | 8 of 768 x 256 | 12.3 | 1.00 (0.50 to 2.00) |" in text
    assert "| 1.2e-06 | 0.500 to 1.250" in text


def _step_report() -> results.StepReport:
    setting = results.Setting("2.13", "gloo", "cpu", 2, "float32", 64, 3)
    nothing = results.Sent(Spread(0, 0, 0), Spread(0, 0, 0))
    ideal = results.ModeResult(
        mode="ideal",
        steps_per_sample=4,
        seconds_here=0.5,
        to_ideal=Ratio(1.0, 1.0, 1.0),
        to_zero3=None,
        to_adamw_foreach=Ratio(2.0, 1.5, 2.5),
        to_adamw_fused=None,
        predicted=nothing,
        counted=nothing,
        steady_bytes=3_000_000,
        peak_bytes=4_500_000,
    )
    sent = results.Sent(Spread(10, 20, 2000), Spread(7, 7, 7))
    gather = dataclasses.replace(
        ideal, mode="gather", to_ideal=Ratio(17.5, 16.0, 19.0), predicted=sent, counted=sent
    )
    measured = results.StepResults(setting, 7, 1_000_000, 1e-6, 1.0, 1.25, (ideal, gather))
    return results.StepReport(2, "step", "muon", 1, 192, "bfloat16", 2e-5, measured)


def test_the_step_as_a_table():
    text = step_text(_step_report())
    assert "The step of muon (bfloat16) on 7 matrices, 1.00 MB" in text
    assert "ideal 1.000, owners 1.250" in text
    ideal = r"\| ideal +\| 1.00 \(1.00 to 1.00\) +\| +\| 2.00 \(1.50 to 2.50\) +\| +\| 0 "
    assert re.search(ideal, text)
    assert re.search(r"\| gather +\| 17.50 \(16.00 to 19.00\).*\| 10 / 20 / 2,000 \| 7 ", text)
    assert "3.00 / 4.50" in text


def test_the_step_as_a_picture(tmp_path):
    path = tmp_path / "step.png"
    plot_step(_step_report(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # makes the import fail
    with pytest.raises(SystemExit):
        main(["step", "--plot", "step.png"])
    assert "matplotlib is not installed: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_has_the_modes_that_are_compared(optimizer):
    modes = OPTIMIZERS[optimizer].modes
    assert {"ideal", "zero3", "zero1"} <= set(modes) <= set(MODES)


def test_live_storages_follows_resizing_and_counts_each_storage_once():
    with LiveStorages() as live:
        flat = torch.zeros(100)
        views = [flat[:50], flat[50:]]
        assert live.live() == 400
        flat.untyped_storage().resize_(0)
        live.reset()
        assert live.live() == live.peak() == 0
        flat.untyped_storage().resize_(400)
        views[0].zero_()
        del flat, views  # the views' storage goes with the last of them
        torch.zeros(10)
        assert live.peak() == 400
        assert live.live() == 0


def _raise() -> None:
    raise ValueError("not today")


def test_a_rank_that_raises_is_told(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with pytest.raises(RanksFailedError, match="not today"):
        on_ranks(_raise, 1)
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_sent_bytes_refuses_what_it_cannot_count(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with SentBytes(), pytest.raises(NotImplementedError, match="no rule for what c10d::allre"):
            dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()
