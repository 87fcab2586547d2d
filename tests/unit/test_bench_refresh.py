"""The account of refreshes: exact numbers of Llama 8B, and how flat phases make the worst step."""

from __future__ import annotations

import inspect
import json

import pytest

from torchtitan_matrixfsdp.bench.__main__ import main
from torchtitan_matrixfsdp.bench.refresh import REFRESHED, refresh_account
from torchtitan_matrixfsdp.bench.results import SCHEMA
from torchtitan_matrixfsdp.optim import SOAP, Shampoo


def test_defaults_are_the_optimizers() -> None:
    for kind, side in ((Shampoo, "max_preconditioner_dim"), (SOAP, "max_precond_dim")):
        options = inspect.signature(kind).parameters
        refreshed = REFRESHED[kind.__name__]
        assert refreshed.max_dim == options[side].default
        assert refreshed.frequency == options["precondition_frequency"].default


def test_shampoo_on_llama_8b() -> None:
    """8 ranks. w1, w2 and w3 are 7 x 2 blocks of 2048 x 2048: 28 factors of 11 * 2048^3 FLOPs. The
    worst step has a single one of them, which no phases could better; together it is 15 times that.
    """
    account = refresh_account("8B", "Shampoo", 8)
    assert account.largest_matrix == 28 * 11 * 2048**3 == 2_645_699_854_336
    assert account.busiest_owner == 40_465_034_379_264
    assert account.staggered == account.largest_matrix
    assert account.busiest_owner // account.frequency == 809_300_687_585  # its mean step
    assert account.state_bytes == 21_592_276_992


def test_soap_on_llama_8b() -> None:
    """8 ranks. wq and wo have two bases of 4096, w1, w2 and w3 one; an owner's 28 matrices make its
    worst step 1.6 times its mean one."""
    account = refresh_account("8B", "SOAP", 8)
    cube = 4096**3
    assert account.largest_matrix == 2 * (4 * cube + 8 * cube // 3 + 2 * cube)
    assert account.busiest_owner == 26_991_006_143_798
    assert account.staggered == 4_337_916_968_954
    assert account.staggered < 1.61 * account.busiest_owner / account.frequency


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 12, 16, 32, 64])
@pytest.mark.parametrize("frequency", [8, 10, 16, 50])
@pytest.mark.parametrize("optimizer", REFRESHED)
def test_staggering_flattens(optimizer: str, frequency: int, world_size: int) -> None:
    """No owner's step has four times what some step of its must have: its mean, or one matrix."""
    account = refresh_account("8B", optimizer, world_size, frequency)
    least = max(account.largest_matrix, account.busiest_owner // frequency)
    assert account.staggered < 4 * least
    assert account.staggered <= account.busiest_owner
    if world_size <= 8:
        assert account.staggered < account.busiest_owner / 3


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["refresh", "--json", "--world-sizes", "8"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["command"], document["model"]) == (SCHEMA, "refresh", "8B")
    shampoo, soap = document["accounts"]
    assert (shampoo["optimizer"], soap["optimizer"]) == ("Shampoo", "SOAP")
    assert shampoo["staggered"] == 2_645_699_854_336
    assert main(["refresh", "--model", "debugmodel", "--frequency", "7"]) == 0
    text = capsys.readouterr().out
    assert "Llama debugmodel" in text and "| SOAP      | 64    | 7 " in text
