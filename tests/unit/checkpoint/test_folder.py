"""A run's folder: what counts as a step, moving aside, whole files, the lock."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from torchtitan_matrixfsdp.checkpoint import CheckpointError, FolderLock, step_folders
from torchtitan_matrixfsdp.checkpoint.folder import HF_INDEX, LOCK, move_aside, write_durably
from torchtitan_matrixfsdp.checkpoint.manifest import METADATA

HOLD = """
import sys, time
from pathlib import Path
from torchtitan_matrixfsdp.checkpoint import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def _step(folder: Path, name: str, **files: str) -> Path:
    path = folder / name
    path.mkdir()
    for file, text in files.items():
        (path / file).write_text(text)
    return path


def test_what_counts_as_a_step(tmp_path: Path) -> None:
    assert step_folders(tmp_path / "nowhere") == []
    _step(tmp_path, "step-10", **{METADATA: "", "__0_0.distcp": ""})
    _step(tmp_path, "step-9", **{"__0_0.distcp": "", METADATA + ".tmp": ""})
    _step(tmp_path, "step-11", **{HF_INDEX: ""})
    _step(tmp_path, "step-12")
    for name in ("aside-1-step_10", "deleting-step_3", "step-x", "xstep-4", "step-5.bak"):
        _step(tmp_path, name, **{METADATA: ""})
    (tmp_path / "step-6").touch()
    found = [(f.step, f.path.name, f.is_complete, f.is_export) for f in step_folders(tmp_path)]
    assert found == [
        (9, "step-9", False, False),
        (10, "step-10", True, False),
        (11, "step-11", False, True),
        (12, "step-12", False, False),
    ]


def test_moving_aside_loses_nothing(tmp_path: Path) -> None:
    assert move_aside(tmp_path / "step-5") is None
    places = []
    for content in ("first", "second", "third"):
        path = _step(tmp_path, "step-5", **{METADATA: content})
        places.append(move_aside(path))
        assert not path.exists()
    names = ["aside-1-step_5", "aside-2-step_5", "aside-3-step_5"]
    assert [place and place.name for place in places] == names
    texts = [(tmp_path / name / METADATA).read_text() for name in names]
    assert texts == ["first", "second", "third"]
    # Neither this package nor TorchTitan (r"step-(\d+)", anywhere in a name) takes them for steps.
    assert step_folders(tmp_path) == []
    assert not any("step-" in name for name in names)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_durably(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_durably(path, "new \ud800")
    assert path.read_text() == "old"
    write_durably(path, "new")
    assert path.read_text() == "new"


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """The first ends by SIGKILL, which runs none of its code."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(CheckpointError) as caught:
                FolderLock(tmp_path).acquire()
            said = str(caught.value)
            for fragment in (str(tmp_path / LOCK), f'"process": {holder.pid}', "job.dump_folder"):
                assert fragment in said
        finally:
            holder.send_signal(signal.SIGKILL)
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    lock.release()
    lock.release()


def test_a_released_folder_is_free(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "new" / "folder")
    assert lock.acquire()
    lock.release()
    check = "FolderLock(Path(sys.argv[1])).acquire()"
    code = HOLD.partition("lock = ")[0] + check
    command = [sys.executable, "-c", code, str(tmp_path / "new" / "folder")]
    subprocess.run(command, check=True, cwd=ROOT)
