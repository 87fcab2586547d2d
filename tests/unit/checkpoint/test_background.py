"""A background process ends with the process that it works for, however that one ends."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT

CHILD = """
import os, time
parent = os.getppid()
from torchtitan_matrixfsdp.checkpoint.background import end_with_parent
end_with_parent(parent)
print("watching", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""


def test_it_ends_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "watching\n"
        parent.kill()
        # Both have this pipe: it ends when the second one has ended.
        assert parent.communicate(timeout=30) == ("", None)
