"""``python -m torchtitan_matrixfsdp.checkpoint``: look at checkpoints, check, compare and convert
them, in one process, without a GPU and without a process group.

Exit status: 0; 1 where ``verify`` found a problem or ``diff`` a difference; 2 for an error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from torchtitan_matrixfsdp.checkpoint.conversion import convert_to_dcp
from torchtitan_matrixfsdp.checkpoint.difference import compare
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError, describe_os_error
from torchtitan_matrixfsdp.checkpoint.inspection import inspect_dcp, inspect_run
from torchtitan_matrixfsdp.checkpoint.manifest import Manifest
from torchtitan_matrixfsdp.checkpoint.placement import Placement, as_stored, blocks_of_plans
from torchtitan_matrixfsdp.checkpoint.stored import (
    DATA_RANK,
    MODEL,
    CheckpointReader,
    Kind,
    StoredTensor,
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
from torchtitan_matrixfsdp.layout import PLANNERS, OwnerPlan, make_plan

if TYPE_CHECKING:
    from torchtitan_matrixfsdp.titan.stored_models import StoredModel

OWNER, ROWS = "owner", "rows"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "convert":
        _check_convert(parser, options)
    commands = {"inspect": _inspect, "verify": _verify, "diff": _diff, "convert": _convert}
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
    keys = [key for key in a.tensors if not options.model_only or part_of(key) == MODEL]
    with _bar("diff", sum(a.tensors[key].nbytes for key in keys if key in b.tensors)) as progress:
        difference = compare(a, b, progress, options.model_only, options.tolerance)
    print(difference_text(difference, (str(options.a), str(options.b))))
    return 0 if difference.is_equal else 1


def _check_convert(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What one target needs, another has no use for."""
    if options.world_size is None:
        parser.error(f"--to {options.to} needs --world-size: how many ranks' files to write")
    if options.world_size < 1:
        parser.error(f"--world-size: received {options.world_size}; legal: >= 1")
    if options.planner is not None and options.to != OWNER:
        parser.error(f"--planner has no meaning with --to {options.to}")


def _convert(options: argparse.Namespace) -> int:
    source = _open(options.source)
    parameters = {key: t for key, t in source.tensors.items() if part_of(key) == MODEL}
    manifest = source.manifest or Manifest()
    named = {"model": options.model, "flavor": options.flavor}
    job = {**manifest.job, **{key: value for key, value in named.items() if value}}
    job["converted"] = f"to {options.to}, {options.world_size} ranks"
    plan = None
    if options.to == OWNER:
        plan = _plan(options, manifest.plans, job, parameters)
    placement = Placement(options.world_size, parameters, plan)
    target = Manifest(job, () if plan is None else (json.loads(plan.to_json()),))
    with _bar("convert", sum(tensor.nbytes for tensor in source.tensors.values())) as progress:
        data = source.metadata.planner_data
        convert_to_dcp(source, options.target, placement, target, data, progress)
    print(f"{options.target}: {len(source.tensors):,} tensors, {len(source.objects):,} objects")
    degree = sum(key.startswith(DATA_RANK) for key in source.metadata.state_dict_metadata)
    if degree not in (0, options.world_size):
        print(
            f"note: the position in the data is still that of {degree} data-parallel ranks; a job "
            "of another degree loads the rest with checkpoint.exclude_from_loading = dataloader"
        )
    return 0


def _plan(
    options: argparse.Namespace,
    plans: Sequence[Mapping[str, Any]],
    job: Mapping[str, Any],
    parameters: Mapping[str, StoredTensor],
) -> OwnerPlan:
    """The plan of a job of the new world size: of the blocks that the saved plans have, else of
    the model's."""
    blocks = blocks_of_plans(plans) if plans else _model(job).blocks()
    blocks = as_stored(blocks, parameters, str(options.source))
    planner = options.planner or "cost_aware"
    return make_plan(planner, blocks.blocks, blocks.matrices, options.world_size)


def _model(job: Mapping[str, Any]) -> StoredModel:
    if not (job.get("model") and job.get("flavor")):
        raise CheckpointError(
            "--model and --flavor: received neither, and the checkpoint does not say what it was "
            "saved from; legal: the model.name and model.flavor of a job, such as llama3_owner and "
            "debugmodel."
        )
    # TorchTitan takes seconds to import, and most commands do without it.
    from torchtitan_matrixfsdp.titan.stored_models import StoredModel

    return StoredModel(job["model"], job["flavor"])


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
    convert = commands.add_parser("convert", help="write a checkpoint anew in another layout")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path, help="a new folder")
    convert.add_argument(
        "--to",
        required=True,
        choices=(OWNER, ROWS),
        help="whole matrices by owner; or row chunks, as stock FSDP2 has them",
    )
    convert.add_argument("--world-size", type=int, help="ranks of the shard group")
    convert.add_argument("--planner", choices=sorted(PLANNERS), help="of owners; cost_aware")
    convert.add_argument("--model", help="model.name of the job, where the manifest has none")
    convert.add_argument("--flavor", help="model.flavor of the job, likewise")
    return parser


if __name__ == "__main__":
    sys.exit(main())
