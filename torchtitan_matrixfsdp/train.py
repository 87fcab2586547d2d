"""``python -m torchtitan_matrixfsdp.train``: TorchTitan's trainer, also where there is only a CPU.

This is ``python -m torchtitan.train`` with checks before a process group exists and this package's
checkpoint manager. Without an accelerator it first puts TorchTitan on the CPU. Start it as that
one, with ``torchrun`` or with ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT`` set; ``--job.config_file`` and ``--section.key value`` are the same.
"""

import logging
import os
import sys
import traceback

# What this package, TorchTitan and `datasets` raise for a user's mistake.
_MISTAKES = (ValueError, FileNotFoundError)
# TorchTitan's own checks raise these as well: a mesh that does not fit the world size, an unknown
# flavor, a feature it lacks. From anywhere else they are faults of the program.
_MISTAKES_IN_TORCHTITAN = (AssertionError, KeyError, NotImplementedError)


class _NoTraceback(logging.Filter):
    """Keeps the line that names an unreadable config file, and drops the traceback below it.

    `main` reports the error behind it in one line.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("Error while loading config file"):
            record.exc_info = None
        return True


def main() -> int:
    """Train as the command line says; returns the exit status: 2, after one line, if it asks the
    impossible or a checkpoint cannot be saved or loaded."""
    from torchtitan.tools import utils

    if not utils.device_module.is_available():
        from torchtitan_matrixfsdp.cpu_device import use_cpu_device

        use_cpu_device()

    from torchtitan import train
    from torchtitan.tools.logging import logger

    from torchtitan_matrixfsdp.titan.trainer import OwnerTrainer
    from torchtitan_matrixfsdp.titan.validation import check_toml_file

    logger.addFilter(_NoTraceback())
    try:
        check_toml_file(sys.argv[1:])
        train.main(OwnerTrainer)
    except Exception as error:
        message = _mistake(error, train.__file__)
        if message is None:
            raise
        rank = os.environ.get("RANK", "0")
        print(f"[rank {rank}] error: {message}", file=sys.stderr, flush=True)
        return 2
    return 0


def _mistake(error: Exception, train_file: str) -> str | None:
    """One line about a user's mistake; None for anything that deserves its traceback.

    ``train_file`` is the path of TorchTitan's trainer, within its package's folder.
    """
    # Here and not above: torch is imported after the device is chosen.
    from torchtitan_matrixfsdp.checkpoint import CheckpointError

    if isinstance(error, CheckpointError):
        return str(error)  # a file or a folder, at any time; it names them
    if isinstance(error, KeyError) and error.args[:1] in (("LOCAL_RANK",), ("WORLD_SIZE",)):
        return f"{error.args[0]} is not set; start with torchrun, or with scripts/run_train.sh"
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == "train" and frame.filename == train_file for frame in frames):
        return None  # training had begun, so the configuration was accepted
    raised = frames[-1]
    where = f"{os.path.basename(raised.filename)}:{raised.lineno}"
    if isinstance(error, _MISTAKES):
        return f"{type(error).__name__}: {error} ({where})"
    in_torchtitan = raised.filename.startswith(os.path.dirname(train_file) + os.sep)
    if in_torchtitan and isinstance(error, _MISTAKES_IN_TORCHTITAN):
        if isinstance(error, KeyError) or not str(error):
            where += f": {raised.line}"  # only the source says what was looked up or compared
        return f"{type(error).__name__}: {error} ({where})"
    return None


def _leave(status: int) -> None:
    """End the process without finalizing the interpreter, once training is over and saved, or
    given up.

    A thread of gloo may hold the last reference to a finished collective's tensor; letting go of
    it while the interpreter finalizes aborts the process (pytorch/pytorch#190489), and torchrun
    would report a job that has trained to its end as failed, and a user's mistake as a crash.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__mp_main__":
    # The process in which DCP saves in the background imports this module as it starts. Until the
    # first save it waits for those of the other ranks, half an hour if they are gone.
    parent_process = os.getppid()  # before the import, which takes seconds
    from torchtitan_matrixfsdp.checkpoint.background import end_with_parent

    end_with_parent(parent_process)

if __name__ == "__main__":
    exit_status = main()
    from torchtitan.tools.utils import device_type

    if device_type == "cpu":
        _leave(exit_status)
    sys.exit(exit_status)
