"""The process that saves in the background ends with the process that it saves for.

DCP's own (``async_with_pinned_mem``) goes on until it wants to answer: after its trainer was
killed it would write on, while the restarted run already saves the same step, and put the index of
the one over the data of the other. The folder's lock does not stop it: the trainer held that.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from multiprocessing.process import BaseProcess

_POLL = 0.05  # seconds; a restarted run takes seconds to come to a save


@functools.cache
def end_with_parent(parent: int) -> None:
    """From now on this process ends, at once, when ``parent`` (a process id) is its parent no more.

    Not by a signal of the kernel (``PR_SET_PDEATHSIG``): that comes already when the thread ends
    which started this process, as a trainer's thread for saving does.
    """
    thread = threading.Thread(target=_watch, args=(parent,), name="end-with-parent", daemon=True)
    thread.start()


def _watch(parent: int) -> None:
    while os.getppid() == parent and _is_alive(multiprocessing.parent_process()):
        time.sleep(_POLL)
    os._exit(1)


def _is_alive(process: BaseProcess | None) -> bool:
    """Whether the process that started this one, as multiprocessing knows it, is still there;
    ``None`` until it knows. This also finds a parent that died before its id was asked for."""
    return process is None or process.is_alive()
