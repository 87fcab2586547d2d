"""The arguments of ``python -m torchtitan_matrixfsdp.checkpoint``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan_matrixfsdp.layout import PLANNERS

OWNER, ROWS, HF = "owner", "rows", "hf"
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DEFAULT_PLANNER = "cost_aware"
"""As that of ``owner_fsdp.planner``."""


def parse(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The options of one command; exits with status 2 and one line if they are not legal."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_matrixfsdp.checkpoint",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_inspect(commands.add_parser("inspect", help="what is in a run's folder or a checkpoint"))
    _add_verify(
        commands.add_parser("verify", help="whether every byte is there, as saved, and finite")
    )
    _add_diff(commands.add_parser("diff", help="how two checkpoints differ, whatever their layout"))
    convert = commands.add_parser("convert", help="write a checkpoint anew in another layout")
    _add_convert(convert)
    options = parser.parse_args(arguments)
    if options.command == "convert":
        _check_convert(convert, options)
    return options


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--no-finite", dest="finite", action="store_false", help="accept NaN and infinities"
    )


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--model-only", action="store_true", help="compare the model's tensors")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        help="largest difference of two values that is none; above 0 dtypes may differ as well",
    )
    _add_model(parser, "to compare Hugging Face weights with a checkpoint")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument(
        "--to",
        required=True,
        choices=(OWNER, ROWS, HF),
        help="owner: whole matrices in their owner's file; rows: row chunks, as stock FSDP2 has "
        "them; hf: Hugging Face weights",
    )
    parser.add_argument("--world-size", type=int, help="owner, rows: ranks of the shard group")
    parser.add_argument(
        "--planner", choices=sorted(PLANNERS), help=f"owner: default {DEFAULT_PLANNER}"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="hf: of the weights; default: as stored"
    )
    parser.add_argument("--hf-assets", type=Path, help="hf: folder of the tokenizer's files")
    _add_model(parser, "where the manifest does not have it")


def _add_model(parser: argparse.ArgumentParser, when: str) -> None:
    parser.add_argument("--model", help=f"model.name of the job, {when}")
    parser.add_argument("--flavor", help="model.flavor of the job, likewise")


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"received {text}; legal: a number >= 0")
    return value


def _check_convert(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What one target needs, another has no use for."""
    if options.to != HF and options.world_size is None:
        parser.error(f"--to {options.to} needs --world-size: how many ranks' files to write")
    if options.world_size is not None and options.world_size < 1:
        parser.error(f"--world-size: received {options.world_size}; legal: >= 1")
    targets = {
        "world_size": (OWNER, ROWS),
        "planner": (OWNER,),
        "dtype": (HF,),
        "hf_assets": (HF,),
    }
    for name, legal in targets.items():
        if vars(options)[name] is not None and options.to not in legal:
            parser.error(f"--{name.replace('_', '-')} has no meaning with --to {options.to}")
    if options.hf_assets is not None and not options.hf_assets.is_dir():
        parser.error(f"--hf-assets: received {options.hf_assets}; legal: an existing folder")
