"""The shell scripts, as far as they can be tried without installing anything."""

import itertools
import os
import subprocess
import sys
import tomllib

import pytest

from tests.support import ROOT, load_script

SHELL_SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]

# Stands for an installed environment's interpreter: python -c asks for the version or for a GPU.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *cuda*) exit "${FAKE_NO_GPU:-1}" ;;
    *version_info*) exit 0 ;;
    *summarize_run*) echo "last line: $*" ;;
    *) echo "argv: $*"; echo "OMP_NUM_THREADS=$OMP_NUM_THREADS"; pwd ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A copy of the scripts, with an environment that claims to be set up."""
    root = tmp_path / "a clone"
    (root / "scripts").mkdir(parents=True)
    (root / "train_configs").mkdir()
    (root / "train_configs" / "debug_muon.toml").touch()
    for path in [*(ROOT / "scripts").iterdir(), ROOT / "pyproject.toml"]:
        if path.is_file():
            copy = root / path.relative_to(ROOT)
            copy.write_bytes(path.read_bytes())
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    result = run(root, "_setup.sh")
    assert result.returncode == 0, result.stderr
    return root


def run(root, name, *args, cwd=None, **env):
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in {"VENV_DIR", "NGPU", "CONFIG_FILE", "LOG_RANK", "OMP_NUM_THREADS"}
    }
    return subprocess.run(
        ["bash", str(root / "scripts" / name), *args],
        cwd=cwd or root,
        env={**inherited, **env},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_script_parses_and_fails_early(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "\nset -euo pipefail\n" in script.read_text()


def test_entry_scripts_are_executable():
    for script in SHELL_SCRIPTS:
        assert os.access(script, os.X_OK) == (script.name != "_setup.sh"), script


def test_setup_runs_once_and_from_any_folder(clone, tmp_path):
    assert run(clone, "_setup.sh", cwd=tmp_path).stdout == ""
    with (clone / "pyproject.toml").open("a") as file:
        file.write("\n")
    assert "Installing" in run(clone, "_setup.sh").stdout
    assert run(clone, "_setup.sh").stdout == ""


def test_setup_with_dev_extras_is_enough_for_setup_without(clone):
    assert run(clone, "_setup.sh", SETUP_DEV="1").stdout != ""
    assert run(clone, "_setup.sh", SETUP_DEV="1").stdout == ""
    (clone / ".venv" / ".matrixfsdp-setup").unlink()
    assert run(clone, "_setup.sh").stdout == ""


def test_setup_shows_the_log_of_a_failure(clone):
    python = clone / ".venv" / "bin" / "python"
    python.write_text(
        FAKE_PYTHON.replace("*cuda*", "*install*) echo no such package; exit 1 ;; *cuda*")
    )
    (clone / ".venv" / ".matrixfsdp-setup").unlink()
    result = run(clone, "_setup.sh")
    assert result.returncode == 1
    assert "no such package" in result.stderr
    assert "Set-up failed at: " in result.stderr
    assert not (clone / ".venv" / ".matrixfsdp-setup").exists()


def test_setup_says_which_pythons_it_found(clone, tmp_path):
    old = tmp_path / "python3.9"
    old.write_text(
        "#!/bin/sh\ncase $2 in *version_info*) exit 1 ;; *) echo Python 3.9.18 ;; esac\n"
    )
    old.chmod(0o755)
    result = run(clone, "_setup.sh", VENV_DIR=str(tmp_path / "new"), PYTHON=str(old))
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed" in result.stderr
    assert f"{old}: Python 3.9.18" in result.stderr
    result = run(clone, "_setup.sh", VENV_DIR=str(tmp_path / "new"), PYTHON="python0")
    assert "python0: not found" in result.stderr
    assert not (tmp_path / "new").exists()


def test_setup_refuses_an_environment_without_interpreter(clone):
    (clone / ".venv" / "pyvenv.cfg").touch()
    (clone / ".venv" / "bin" / "python").unlink()
    result = run(clone, "_setup.sh")
    assert result.returncode == 1
    assert "interpreter is gone" in result.stderr


def test_run_train_starts_torchrun_like_torchtitan(clone, tmp_path):
    result = run(
        clone, "run_train.sh", "--training.steps", "3", "--job.description=a b", cwd=tmp_path
    )
    assert result.stdout.splitlines() == [
        "argv: -m torch.distributed.run --nproc_per_node=4 --rdzv_backend c10d "
        "--rdzv_endpoint=localhost:0 --local-ranks-filter 0 --role rank --tee 3 "
        "-m torchtitan_matrixfsdp.train --job.config_file train_configs/debug_muon.toml "
        "--training.steps 3 --job.description=a b",
        "OMP_NUM_THREADS=1",
        str(clone),
    ]


def test_run_train_reads_the_environment(clone, tmp_path):
    (tmp_path / "mine.toml").touch()
    result = run(
        clone,
        "run_train.sh",
        cwd=tmp_path,
        NGPU="2",
        LOG_RANK="0,1",
        CONFIG_FILE="mine.toml",
        OMP_NUM_THREADS="5",
        FAKE_NO_GPU="0",
    )
    argv, threads, _ = result.stdout.splitlines()
    assert "--nproc_per_node=2 " in argv
    assert "--local-ranks-filter 0,1 " in argv
    assert argv.endswith(f"-m torchtitan_matrixfsdp.train --job.config_file {tmp_path}/mine.toml")
    assert threads == "OMP_NUM_THREADS=5"
    other = run(clone, "run_train.sh", TRAIN_FILE="some.module")
    assert " -m some.module --job" in other.stdout


def test_run_train_refuses_a_missing_config(clone):
    result = run(clone, "run_train.sh", CONFIG_FILE="nowhere.toml")
    assert result.returncode == 1
    assert "no such file: nowhere.toml" in result.stderr


def test_quickstart_takes_the_next_free_folder(clone):
    first = run(clone, "quickstart.sh", "--training.steps", "5", "--owner_fsdp.mode=stock")
    assert "--job.dump_folder outputs/quickstart-1 --training.steps 5 --owner_fsdp" in first.stdout
    assert first.stdout.splitlines()[-1] == (
        "last line: scripts/summarize_run.py outputs/quickstart-1 --ranks 4 --resume-command "
        "NGPU=4 bash scripts/run_train.sh --job.dump_folder outputs/quickstart-1 "
        "--owner_fsdp.mode=stock"
    )
    second = run(clone, "quickstart.sh", NGPU="2")
    assert "outputs/quickstart-2 --ranks 2" in second.stdout.splitlines()[-1]


@pytest.mark.parametrize("args", [("--job.dump_folder", "x y"), ("--job.dump-folder=x y",)])
def test_quickstart_keeps_the_folder_it_is_given(clone, args):
    result = run(clone, "quickstart.sh", *args)
    assert "summarize_run.py x y --ranks" in result.stdout.splitlines()[-1]
    assert not (clone / "outputs").exists()


class TestSummary:
    summarize_run = load_script("summarize_run")
    clock = itertools.count()

    def write_events(self, folder, losses, rate):
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder)) as writer:
            for step, loss in losses.items():
                writer.add_scalar("loss_metrics/global_avg_loss", loss, step)
                writer.add_scalar("throughput(tps)", rate if step > 1 else 1.0, step)
        # What is written later is newer, however coarse the file system's clock.
        now = next(self.clock)
        for path in folder.glob("events*"):
            os.utime(path, (now, now))

    def finished_run(self, root):
        self.write_events(root / "tb" / "20240101-0000", {1: 9.0, 2: 8.0}, 50.0)
        self.write_events(root / "tb" / "20240102-0000", {1: 7.5, 2: 6.0, 10: 5.25}, 1234.0)
        for step in (2, 10):
            (root / "checkpoint" / f"step-{step}").mkdir(parents=True)
            (root / "checkpoint" / f"step-{step}" / ".metadata").touch()
        (root / "checkpoint" / "step-99").mkdir()  # interrupted before it wrote anything
        (root / "checkpoint" / "step-final").mkdir()

    def test_line(self, tmp_path, capsys):
        self.finished_run(tmp_path)
        assert self.summarize_run.main([str(tmp_path), "--ranks", "4"]) == 0
        assert capsys.readouterr().out == (
            "Done: loss 7.5000 at step 1, 5.2500 at step 10; 4,936 tokens/s on 4 ranks; outputs in "
            f"{tmp_path} (checkpoint: checkpoint/step-10, TensorBoard: tb/20240102-0000); go on: "
            f"bash scripts/run_train.sh --job.dump_folder {tmp_path} --training.steps 20\n"
        )

    def test_a_run_that_logged_one_step(self, tmp_path):
        self.finished_run(tmp_path)
        self.write_events(tmp_path / "tb" / "20240103-0000", {1: 7.5}, 0.0)
        line = self.summarize_run.summary(tmp_path, None, "train")
        assert "loss 7.5000 at step 1, 7.5000 at step 1; 1 tokens/s per rank" in line

    def test_what_is_missing_is_named(self, tmp_path):
        script = str(ROOT / "scripts" / "summarize_run.py")
        result = subprocess.run(
            [sys.executable, script, str(tmp_path)], capture_output=True, text=True
        )
        assert result.returncode == 1
        assert "no TensorBoard run under" in result.stderr
        assert "Traceback" not in result.stderr
        self.write_events(tmp_path / "tb", {}, 0.0)
        with pytest.raises(self.summarize_run.NoRunError, match="has no loss_metrics/global_avg"):
            self.summarize_run.summary(tmp_path, 4, "train")
        self.write_events(tmp_path / "tb" / "later", {1: 2.0}, 0.0)
        with pytest.raises(self.summarize_run.NoRunError, match="no checkpoint/step-N under"):
            self.summarize_run.summary(tmp_path, 4, "train")


def test_torch_pin_of_the_setup_is_in_the_package_range():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    (torch,) = [requirement for requirement in requirements if requirement.name == "torch"]
    assert '"torch==2.13.0"' in (ROOT / "scripts" / "_setup.sh").read_text()
    assert torch.specifier.contains("2.13.0")
    assert not torch.specifier.contains("2.14.0")
