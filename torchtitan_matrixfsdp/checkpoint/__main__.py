"""``python -m torchtitan_matrixfsdp.checkpoint``: look at checkpoints, check, compare and convert
them, in one process, without a GPU and without a process group.

Exit status: 0; 1 where ``verify`` found a problem or ``diff`` a difference; 2 for an error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from torchtitan_matrixfsdp.checkpoint.difference import compare
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError, describe_os_error
from torchtitan_matrixfsdp.checkpoint.inspection import inspect_dcp, inspect_run
from torchtitan_matrixfsdp.checkpoint.stored import (
    CheckpointReader,
    Kind,
    checkpoint_kind,
    kind_of,
    part_of,
)
from torchtitan_matrixfsdp.checkpoint.text import (
    checkpoint_text,
    difference_text,
    run_text,
    verification_text,
)
from torchtitan_matrixfsdp.checkpoint.verification import Progress, data_bytes, verify_dcp


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    options = _parser().parse_args(arguments)
    commands = {"inspect": _inspect, "verify": _verify, "diff": _diff}
    try:
        return commands[options.command](options)
    except CheckpointError as error:
        message = str(error)
    except OSError as error:
        message = describe_os_error(error)
    print(f"error: {message}", file=sys.stderr)
    return 2


def _inspect(options: argparse.Namespace) -> int:
    kind = kind_of(options.path)
    if kind is Kind.RUN:
        run = inspect_run(options.path)
        print(json.dumps(asdict(run), indent=1) if options.json else run_text(run))
        return 0
    summary = inspect_dcp(CheckpointReader(options.path))
    if options.json:
        print(json.dumps(asdict(summary), indent=1))
    else:
        print(checkpoint_text(summary, options.tensors))
    return 0


def _verify(options: argparse.Namespace) -> int:
    checkpoint_kind(options.path)
    with _bar("verify", data_bytes(options.path)) as progress:
        found = verify_dcp(options.path, options.finite, progress)
    print(verification_text(options.path, found, options.finite))
    return 1 if found.problems else 0


def _diff(options: argparse.Namespace) -> int:
    if not options.tolerance >= 0 or math.isinf(options.tolerance):
        raise CheckpointError(
            f"--tolerance: received {options.tolerance}; legal: >= 0, the largest difference of "
            "two values that counts as none."
        )
    a, b = _open(options.a), _open(options.b)
    keys = [key for key in a.tensors if not options.model_only or part_of(key) == "model"]
    with _bar("diff", sum(a.tensors[key].nbytes for key in keys if key in b.tensors)) as progress:
        difference = compare(a, b, progress, options.model_only, options.tolerance)
    print(difference_text(difference, (str(options.a), str(options.b))))
    return 0 if difference.is_equal else 1


def _open(path: Path) -> CheckpointReader:
    checkpoint_kind(path)
    return CheckpointReader(path)


@contextmanager
def _bar(title: str, total: int) -> Iterator[Progress]:
    """A progress bar by bytes on stderr."""
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, mininterval=0.5) as bar:
        yield bar.update


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_matrixfsdp.checkpoint", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what is in a run's folder or in a checkpoint")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--json", action="store_true", help="print everything as JSON")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = commands.add_parser("verify", help="whether every byte is there, as saved, and finite")
    verify.add_argument("path", type=Path)
    verify.add_argument(
        "--no-finite", dest="finite", action="store_false", help="accept NaN and infinities"
    )
    diff = commands.add_parser("diff", help="how two checkpoints differ, whatever their layouts")
    diff.add_argument("a", type=Path)
    diff.add_argument("b", type=Path)
    diff.add_argument("--model-only", action="store_true", help="compare the model's tensors alone")
    diff.add_argument(
        "--tolerance", type=float, default=0.0, help="largest difference of values that is none"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
