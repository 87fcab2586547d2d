"""The command line of the benchmarks; ``docs/bench.md`` explains what they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

import torch

from torchtitan_matrixfsdp.bench.blocks import MODELS, WIDTH_MULTIPLE, LlamaShape
from torchtitan_matrixfsdp.bench.checkpoint import CheckpointOptions
from torchtitan_matrixfsdp.bench.comm import CommOptions
from torchtitan_matrixfsdp.bench.memory import MemoryOptions
from torchtitan_matrixfsdp.bench.newton_schulz import (
    SHAPES,
    NewtonSchulzOptions,
    newton_schulz_report,
)
from torchtitan_matrixfsdp.bench.optimizer_step import StepOptions
from torchtitan_matrixfsdp.bench.plot import NoPlotError, plot_step, require_matplotlib
from torchtitan_matrixfsdp.bench.ranks import (
    RanksFailedError,
    is_under_torchrun,
    launched_world_size,
    leave,
)
from torchtitan_matrixfsdp.bench.refresh import RefreshReport, refresh_report
from torchtitan_matrixfsdp.bench.reports import (
    checkpoint_report,
    comm_report,
    memory_report,
    step_report,
)
from torchtitan_matrixfsdp.bench.results import (
    CheckpointReport,
    CommReport,
    MemoryReport,
    NewtonSchulzReport,
    StepReport,
)
from torchtitan_matrixfsdp.bench.step_modes import MODES, OPTIMIZERS
from torchtitan_matrixfsdp.bench.tables import (
    checkpoint_text,
    comm_text,
    memory_text,
    newton_schulz_text,
    refresh_text,
    step_text,
)
from torchtitan_matrixfsdp.comm import TRANSPORT_NAMES, TRANSPORTS
from torchtitan_matrixfsdp.layout import StepShape
from torchtitan_matrixfsdp.optim import COEFFICIENTS

Report: TypeAlias = (
    CheckpointReport | CommReport | MemoryReport | NewtonSchulzReport | RefreshReport | StepReport
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAX_OWN_RANKS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark and print its report; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command in _ON_RANKS:
        options.world_size = _world_size(parser, options)
    if options.command == "step":
        options.modes = _modes(parser, options)
    try:
        report = _COMMANDS[options.command](options)
    except RanksFailedError as error:
        print(error, file=sys.stderr)
        return 1
    if report is None:
        return 0
    if options.json:
        print(json.dumps(asdict(report), indent=1))
    else:
        print(_text(report))
    return 0


def _text(report: Report) -> str:
    match report:
        case CheckpointReport():
            return checkpoint_text(report)
        case CommReport():
            return comm_text(report)
        case MemoryReport():
            return memory_text(report)
        case RefreshReport():
            return refresh_text(report)
        case NewtonSchulzReport():
            return newton_schulz_text(report)
    return step_text(report)


def _checkpoint(options: argparse.Namespace) -> CheckpointReport | None:
    folder = None if options.folder is None else str(options.folder)
    checkpoint = CheckpointOptions(options.layer_dim, options.blocks, options.repeats, folder)
    return checkpoint_report(options.world_size, checkpoint)


def _comm(options: argparse.Namespace) -> CommReport | None:
    measured = None
    if not options.account_only:
        measured = CommOptions(
            tuple(options.transports), options.repeats, options.layer_dim, _DTYPES[options.dtype]
        )
    shape = StepShape(
        gather_itemsize=_DTYPES[options.gather_dtype].itemsize,
        reduce_itemsize=_DTYPES[options.reduce_dtype].itemsize,
        step_itemsize=_DTYPES[options.step_dtype].itemsize,
        microbatches=options.microbatches,
    )
    sizes = options.account_world_sizes or sorted({options.world_size, 64})
    return comm_report(options.world_size, measured, options.model, sizes, shape)


def _memory(options: argparse.Namespace) -> MemoryReport | None:
    memory = MemoryOptions(
        options.transport, options.layer_dim, options.blocks, options.tokens, options.repeats
    )
    return memory_report(options.world_size, memory)


def _refresh(options: argparse.Namespace) -> RefreshReport:
    return refresh_report(options.model, options.world_sizes, options.frequency)


def _newton_schulz(options: argparse.Namespace) -> NewtonSchulzReport:
    return newton_schulz_report(
        NewtonSchulzOptions(
            tuple(options.shapes),
            tuple(_DTYPES[name] for name in options.dtype),
            options.steps,
            options.coefficients,
            options.repeats,
            options.threads,
        )
    )


def _step(options: argparse.Namespace) -> StepReport | None:
    width = options.layer_dim
    hidden = 3 * width if options.hidden is None else options.hidden
    shape = LlamaShape(options.layers, width, width, hidden)
    dtype = _DTYPES[options.ns_dtype]
    step = StepOptions(options.optimizer, options.modes, shape, options.repeats, dtype)
    report = step_report(options.world_size, step)
    if report is not None and options.plot is not None:
        plot_step(report, options.plot)
    return report


_COMMANDS: dict[str, Callable[[argparse.Namespace], Report | None]] = {
    "checkpoint": _checkpoint,
    "comm": _comm,
    "memory": _memory,
    "newton-schulz": _newton_schulz,
    "refresh": _refresh,
    "step": _step,
}
_ON_RANKS = ("checkpoint", "comm", "memory", "step")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_matrixfsdp.bench",
        description="What owner shards move, how fast, and in how much memory, beside FSDP2.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    checkpoint = commands.add_parser("checkpoint", help="saving and loading: time, bytes and peaks")
    _add_common(checkpoint, world_size=4, repeats=5)
    checkpoint.add_argument("--blocks", type=_integer(1, 64), default=8, help="default: 8")
    checkpoint.add_argument(
        "--folder", type=Path, help="an existing folder to write to (default: the system's own)"
    )

    comm = commands.add_parser("comm", help="bytes and times of gathers and reductions")
    _add_common(comm, world_size=8, repeats=10)
    comm.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORT_NAMES,
        default=list(TRANSPORTS),
        help="transports to measure; auto is the one that it chooses (default: all)",
    )
    comm.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the measured blocks")
    comm.add_argument(
        "--model", choices=MODELS, default="8B", help="Llama flavor of the account (default: 8B)"
    )
    comm.add_argument(
        "--account-world-sizes",
        type=_integer(1, 1 << 16),
        nargs="+",
        metavar="W",
        help="ranks that the account is for (default: --world-size and 64)",
    )
    comm.add_argument("--gather-dtype", choices=_DTYPES, default="bfloat16", help="in the account")
    comm.add_argument("--reduce-dtype", choices=_DTYPES, default="float32", help="in the account")
    comm.add_argument(
        "--step-dtype", choices=_DTYPES, default="float32", help="of momentum, in the account"
    )
    comm.add_argument(
        "--microbatches",
        type=_integer(1, 1 << 16),
        default=1,
        help="forwards and backwards per step, in the account (default: 1)",
    )
    comm.add_argument("--account-only", action="store_true", help="formulas alone; starts no rank")

    memory = commands.add_parser("memory", help="peak memory of a block's materialisation")
    _add_common(memory, world_size=2, repeats=3)
    memory.add_argument("--transport", choices=TRANSPORT_NAMES, default="auto")
    memory.add_argument("--blocks", type=_integer(1, 64), default=2, help="blocks (default: 2)")
    memory.add_argument(
        "--tokens", type=_integer(1, 1 << 16), default=16, help="tokens per rank (default: 16)"
    )

    refresh = commands.add_parser("refresh", help="FLOPs of roots and bases; starts no rank")
    refresh.add_argument("--model", choices=MODELS, default="8B", help="default: 8B")
    refresh.add_argument(
        "--world-sizes", type=_integer(1, 1 << 16), nargs="+", metavar="W", default=[8, 64]
    )
    refresh.add_argument(
        "--frequency", type=_integer(1, 1 << 16), help="default: each optimizer's own"
    )
    refresh.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    _add_newton_schulz(commands.add_parser("newton-schulz", help="its time beside its products"))
    step = commands.add_parser("step", help="the optimizer step: time, bytes and memory")
    _add_common(step, world_size=8, repeats=10)
    step.add_argument("--optimizer", choices=OPTIMIZERS, default="muon")
    step.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        help="what to measure, ideal in any case (default: all that the optimizer has)",
    )
    step.add_argument("--layers", type=_integer(1, 64), default=8, help="blocks (default: 8)")
    step.add_argument(
        "--hidden", type=_integer(1, 1 << 16), help="feed-forward width (default: 3 --layer-dim)"
    )
    step.add_argument("--ns-dtype", choices=_DTYPES, default="bfloat16", help="of Newton-Schulz")
    step.add_argument("--plot", metavar="PNG", type=Path, help="a bar chart, needs matplotlib")
    return parser


def _add_newton_schulz(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shapes",
        type=_shape,
        nargs="+",
        metavar="KxMxN",
        default=SHAPES,
        help="K matrices of M rows and N columns (default: as in docs/bench.md)",
    )
    command.add_argument("--dtype", choices=_DTYPES, nargs="+", default=list(_DTYPES))
    command.add_argument("--steps", type=_integer(1, 20), default=5, help="default: 5")
    command.add_argument("--coefficients", choices=COEFFICIENTS, default="quintic")
    command.add_argument("--repeats", type=_integer(1, 1 << 16), default=5, help="default: 5")
    command.add_argument("--threads", type=_integer(1, 1 << 10), default=1, help="default: 1")
    command.add_argument("--json", action="store_true", help="one JSON document instead of tables")


def _add_common(parser: argparse.ArgumentParser, world_size: int, repeats: int) -> None:
    parser.set_defaults(default_world_size=world_size)
    parser.add_argument(
        "--world-size",
        type=_integer(2, _MAX_OWN_RANKS),
        help=f"gloo ranks to start here (default: {world_size}; under torchrun: its ranks)",
    )
    parser.add_argument(
        "--repeats", type=_integer(1, 1 << 16), default=repeats, help=f"default: {repeats}"
    )
    parser.add_argument(
        "--layer-dim",
        "--dim",
        type=_integer(WIDTH_MULTIPLE, 1 << 16, WIDTH_MULTIPLE),
        default=256,
        help="width of the blocks (default: 256)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")


def _shape(text: str) -> tuple[int, int, int]:
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split("x")]
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"received {text!r}; legal: as 8x256x768, each >= 1")
    return sizes[0], sizes[1], sizes[2]


def _integer(low: int, high: int, multiple: int = 1) -> Callable[[str], int]:
    legal = f"legal: {low} to {high}" + (f", a multiple of {multiple}" if multiple > 1 else "")

    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not low <= value <= high or value % multiple:
            raise argparse.ArgumentTypeError(f"received {text!r}; {legal}")
        return value

    return parse


def _modes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, ...]:
    legal = OPTIMIZERS[options.optimizer].modes
    asked = options.modes or legal
    unknown = [mode for mode in asked if mode not in legal]
    if unknown:
        parser.error(
            f"argument --modes: received {unknown}; legal with --optimizer {options.optimizer}: "
            f"{list(legal)}"
        )
    if options.plot is not None:
        try:
            require_matplotlib()
        except NoPlotError as error:
            parser.error(f"argument --plot: {error}")
    return tuple(dict.fromkeys(("ideal", *asked)))


def _world_size(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    asked: int | None = options.world_size
    if not is_under_torchrun():
        default: int = options.default_world_size
        return asked or default
    launched = launched_world_size()
    if asked not in (None, launched):
        parser.error(
            f"argument --world-size: received {asked}; legal under torchrun: {launched}, the ranks "
            "that it has started; leave the argument out"
        )
    if launched < 2:
        parser.error(f"torchrun has started {launched} rank; legal: 2 or more")
    return launched


if __name__ == "__main__":
    status = main()
    if is_under_torchrun():
        leave(status)
    sys.exit(status)
