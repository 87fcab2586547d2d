"""The benchmarks on two real ranks, through the command line: every byte, no time."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.harness import run_torchrun
from tests.support import ROOT
from torchtitan_matrixfsdp.bench.step_modes import MODES

WIDTH = 64
MODULE = "torchtitan_matrixfsdp.bench"


def _same(value: int) -> dict[str, int]:
    return {"min": value, "median": value, "max": value}


def test_comm_counts_what_it_predicts() -> None:
    """Ours and FSDP2's: on a balanced block the same bytes, in the optimizer step none."""
    command = [sys.executable, "-m", MODULE, "comm", "--world-size", "2", "--repeats", "1"]
    command += ["--layer-dim", str(WIDTH), "--account-world-sizes", "2", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert (document["setting"]["backend"], document["setting"]["world_size"]) == ("gloo", 2)
    layouts = {layout["layout"]: layout for layout in document["layouts"]}
    assert list(layouts) == ["balanced", "sparse", "one_owner"]
    for layout in layouts.values():
        assert [t["transport"] for t in layout["transports"]] == ["p2p", "broadcast", "balanced"]
        assert sum(t["is_auto"] for t in layout["transports"]) == 1
        for transport in layout["transports"]:
            for operation in (transport["gather"], transport["reduce"]):
                assert operation["counted"] == operation["predicted"]
                for time in (operation["time_to_collective"], operation["time_to_fsdp2"]):
                    assert 0 < time["min"] <= time["median"] <= time["max"]
    balanced = layouts["balanced"]
    block_bytes = 2 * (2 * WIDTH * WIDTH) * 4
    assert (balanced["gamma"], balanced["block_bytes"]) == (1.0, block_bytes)
    assert balanced["fsdp2_bytes"] == block_bytes // 2
    for transport in balanced["transports"]:
        for operation in (transport["gather"], transport["reduce"]):
            assert operation["counted"]["bytes"] == _same(block_bytes // 2)
    one_owner = layouts["one_owner"]
    assert one_owner["gamma"] == 2.0
    fan_out = {t["transport"]: t for t in one_owner["transports"]}["p2p"]
    everything = one_owner["block_bytes"]
    assert fan_out["gather"]["counted"]["bytes"] == {"min": 0, "median": 0, "max": everything}

    steps = {step["system"]: step for step in document["measured_steps"]}
    assert list(steps) == [
        *(f"owner, {name}" for name in ("p2p", "broadcast", "balanced", "auto")),
        "fsdp2, gather",
    ]
    for step in steps.values():
        for phase in (step["forward"], step["backward"], step["step"]):
            assert phase["counted"] == phase["predicted"]
    stock = steps.pop("fsdp2, gather")
    dim, layers = 128, 3
    matrices = layers * (2 * dim * dim + 2 * dim * dim // 4 + 3 * dim * 7 * dim // 2)
    half = 4 * (matrices + layers * 2 * dim) // 2
    assert stock["forward"]["counted"] == _same(half)
    assert stock["backward"]["counted"] == _same(2 * half)
    assert stock["step"]["counted"] == _same(4 * matrices // 2)
    for step in steps.values():
        assert step["step"]["counted"] == _same(0)
        assert step["forward"]["counted"]["max"] <= 2 * half


def test_the_step_sends_nothing_and_baselines_what_is_predicted() -> None:
    """Every mode, whose weights the command itself compares with one device's."""
    command = [sys.executable, "-m", MODULE, "step", "--world-size", "2", "--repeats", "2"]
    command += ["--dim", str(WIDTH), "--hidden", "96", "--layers", "2", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert (document["command"], document["optimizer"]) == ("step", "muon")
    results = document["results"]
    elements = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * 96)
    assert (results["matrices"], results["matrix_bytes"]) == (14, 4 * elements)
    assert results["largest_difference"] <= document["tolerance"]
    assert 1 <= results["ideal_imbalance"] <= results["owner_imbalance"] < 1.5
    modes = {mode["mode"]: mode for mode in results["modes"]}
    assert list(modes) == list(MODES)
    for name, mode in modes.items():
        assert mode["counted"] == mode["predicted"], name
        assert mode["steady_bytes"] <= mode["peak_bytes"]
        assert mode["steps_per_sample"] >= 1 and mode["seconds_here"] > 0
        for ratio in ("to_ideal", "to_zero3", "to_adamw_foreach", "to_adamw_fused"):
            assert 0 < mode[ratio]["min"] <= mode[ratio]["median"] <= mode[ratio]["max"]
    for name in ("ideal", "zero3", "adamw_foreach", "adamw_fused"):
        assert modes[name]["counted"] == {"bytes": _same(0), "messages": _same(0)}
    # Every number of rows divides by two: each rank sends its half of all matrices.
    for name, messages in (("gather", 14), ("gather_once", 1)):
        assert modes[name]["counted"] == {
            "bytes": _same(4 * elements // 2),
            "messages": _same(messages),
        }
    # Half of each matrix there in float32, half of its result back in bfloat16.
    dealt = modes["all_to_all"]["counted"]["bytes"]
    assert dealt["min"] + dealt["max"] == (4 + 2) * elements // 2
    # Weights that stay gathered cost their memory and one more gather.
    assert modes["zero1"]["counted"]["bytes"]["min"] > 0
    assert modes["zero1"]["steady_bytes"] > modes["zero3"]["steady_bytes"]
    assert modes["gather_once"]["peak_bytes"] > modes["gather"]["peak_bytes"]


def _phases(system: dict[str, Any]) -> dict[str, int]:
    return {phase: system[phase]["peak"] for phase in ("gather", "forward", "backward")}


def test_memory_is_no_more_than_fsdps() -> None:
    """Exact bytes of the gather, and every phase at most FSDP2's; as ranks of torchrun."""
    command = ["-m", MODULE, "memory", "--layer-dim", str(WIDTH), "--repeats", "2", "--json"]
    output = run_torchrun(command, 2, cwd=ROOT).output
    document = json.loads(output[output.index("{\n") : output.rindex("\n}") + 2])
    block = 4 * (
        2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 4 + 3 * WIDTH * 7 * WIDTH // 2 + 2 * WIDTH
    )
    assert document["block_bytes"] == block
    systems = {system["system"]: system for system in document["systems"]}
    assert list(systems) == ["fsdp2", "owner", "owner, deferred release"]
    stock = systems["fsdp2"]
    # The all-gather's output and the parameters at once; one flat buffer. No dimension is padded.
    assert stock["gather"] == {"predicted": 2 * block, "peak": 2 * block}
    # The two blocks of the model, divided evenly over two ranks.
    assert stock["steady"] == stock["steady_with_gradients"] == block
    for name in ("owner", "owner, deferred release"):
        ours = systems[name]
        assert ours["gather"] == {"predicted": block, "peak": block}
        theirs = _phases(stock)
        for phase, peak in _phases(ours).items():
            assert peak <= theirs[phase], phase
    # On the CPU a block is given back before the next one is gathered.
    assert systems["owner"]["forward"]["peak"] < 2 * block
    assert systems["owner, deferred release"]["forward"]["peak"] >= 2 * block
