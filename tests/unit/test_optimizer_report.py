"""What scripts/compare_optimizers.sh makes of its runs."""

from __future__ import annotations

import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.support import load_script

report = load_script("optimizer_report")


def write_run(folder, losses, complete=True):
    with SummaryWriter(str(folder / "tb")) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.add_scalar(report.LOSS, loss, step)
    if complete:
        (folder / "complete").touch()


@pytest.fixture
def folder(tmp_path):
    def falling(by):
        return [10 - by * step for step in range(1, 41)]

    write_run(tmp_path / "AdamW-0.001", falling(0.1))
    write_run(tmp_path / "AdamW-0.01", [float("nan")] * 40)
    write_run(tmp_path / "SOAP-0.003", falling(0.2))
    write_run(tmp_path / "Muon-0.02", falling(0.05))
    write_run(tmp_path / "Muon-0.3", falling(0.2), complete=False)
    return tmp_path


def test_the_best_rate_is_that_of_the_lowest_last_losses(folder, capsys):
    assert report.main(["best", str(folder), "AdamW"]) == 0
    assert capsys.readouterr().out.strip() == "0.001"
    assert report.main(["sweep", str(folder)]) == 0
    printed = capsys.readouterr().out
    # The mean of steps 21 to 40.
    assert "| AdamW | **0.001** | 6.9500 |" in printed
    assert "| AdamW | 0.01 | inf |" in printed
    assert "0.3" not in printed, "a run that was interrupted"


def test_the_comparison(folder, capsys):
    assert report.main(["compare", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| optimizer | rate | loss at step 40 ")
    assert lines[2] == "| AdamW | 0.001 | 6.9500 | 40 |"
    # SOAP's mean of 20 steps is at most 6.95 when the steps' own mean is at least 15.25.
    assert "| SOAP | 0.003 | 3.9000 | 25 |" in lines
    assert "| Muon | 0.02 | 8.4750 | not reached |" in lines
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_report(tmp_path, capsys):
    assert report.main(["compare", str(tmp_path)]) == 1
    assert "no complete run" in capsys.readouterr().err
    write_run(tmp_path / "Muon-0.02", [1.0] * 30)
    assert report.main(["best", str(tmp_path), "SOAP"]) == 1
    assert "no run of SOAP; there are ['Muon']" in capsys.readouterr().err
