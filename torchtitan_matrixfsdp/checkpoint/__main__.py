"""Look at checkpoints, check, compare and convert them: in one process, without a GPU and without
a process group.

Exit status: 0; 1 where verify found a problem or diff a difference; 2 for an error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from torchtitan_matrixfsdp.checkpoint.arguments import DEFAULT_PLANNER, DTYPES, HF, OWNER, parse
from torchtitan_matrixfsdp.checkpoint.conversion import convert_to_dcp
from torchtitan_matrixfsdp.checkpoint.difference import compare
from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError, describe_os_error
from torchtitan_matrixfsdp.checkpoint.hf_conversion import HfFolder, HfModel, convert_to_hf
from torchtitan_matrixfsdp.checkpoint.hf_report import inspect_hf, verify_hf, weight_bytes
from torchtitan_matrixfsdp.checkpoint.inspection import inspect_dcp, inspect_run
from torchtitan_matrixfsdp.checkpoint.manifest import Manifest
from torchtitan_matrixfsdp.checkpoint.placement import Placement, as_stored, blocks_of_plans
from torchtitan_matrixfsdp.checkpoint.safetensors_reader import Reader
from torchtitan_matrixfsdp.checkpoint.stored import (
    MODEL,
    CheckpointReader,
    Kind,
    Source,
    StoredTensor,
    checkpoint_kind,
    data_degree,
    kind_of,
    part_of,
)
from torchtitan_matrixfsdp.checkpoint.text import (
    checkpoint_text,
    difference_text,
    hf_text,
    run_text,
    verification_text,
)
from torchtitan_matrixfsdp.checkpoint.verification import Progress, data_bytes, verify_dcp
from torchtitan_matrixfsdp.layout import OwnerPlan, make_plan

if TYPE_CHECKING:
    from torchtitan_matrixfsdp.titan.stored_models import StoredModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    options = parse(arguments, __doc__)
    commands = {"inspect": _inspect, "verify": _verify, "diff": _diff, "convert": _convert}
    try:
        return commands[options.command](options)
    except CheckpointError as error:
        message = str(error)
    except BrokenPipeError:
        # The reader of the output has seen enough, as `| head` does; nor may the interpreter's end
        # write to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        message = describe_os_error(error)
    print(f"error: {message}", file=sys.stderr)
    return 2


def _inspect(options: argparse.Namespace) -> int:
    kind = kind_of(options.path)
    if kind is Kind.RUN:
        run = inspect_run(options.path)
        record, text = asdict(run), run_text(run)
    elif kind is Kind.HF:
        weights = inspect_hf(options.path)
        record, text = asdict(weights), hf_text(weights, options.tensors)
    else:
        summary = inspect_dcp(CheckpointReader(options.path))
        record, text = asdict(summary), checkpoint_text(summary, options.tensors)
    print(json.dumps(record, indent=1) if options.json else text)
    return 0


def _verify(options: argparse.Namespace) -> int:
    if checkpoint_kind(options.path) is Kind.HF:
        with _bar("verify", weight_bytes(options.path)) as progress:
            found = verify_hf(options.path, options.finite, progress)
    else:
        with _bar("verify", data_bytes(options.path)) as progress:
            found = verify_dcp(options.path, options.finite, progress)
    print(verification_text(options.path, found, options.finite))
    return 1 if found.problems else 0


def _diff(options: argparse.Namespace) -> int:
    a, b = _open_both(options)
    keys = [key for key in a.tensors if not options.model_only or part_of(key) == MODEL]
    total = sum(a.tensors[key].nbytes for key in keys if key in b.tensors)
    with _bar("diff", total) as progress:
        difference = compare(a, b, progress, options.model_only, options.tolerance)
    print(difference_text(difference, (str(options.a), str(options.b))))
    return 0 if difference.is_equal else 1


def _open_both(options: argparse.Namespace) -> tuple[Source, Source]:
    """Both sides under the same names: two folders of weights by their own, else the model's."""
    paths = (options.a, options.b)
    kinds = [checkpoint_kind(path) for path in paths]
    if kinds == [Kind.HF, Kind.HF]:
        return HfFolder(Reader(options.a)), HfFolder(Reader(options.b))
    readers = {
        path: CheckpointReader(path)
        for path, kind in zip(paths, kinds, strict=True)
        if kind is Kind.DCP
    }
    job = _job(options, next(iter(readers.values())).manifest)
    one, two = (readers[p] if p in readers else _open_hf(p, _model(job)) for p in paths)
    return one, two


def _open_hf(path: Path, model: StoredModel) -> HfModel:
    return HfModel(Reader(path), model.state, model.adapter.to_hf, model.adapter.from_hf)


def _job(options: argparse.Namespace, manifest: Manifest | None) -> dict[str, Any]:
    """What the manifest says of the job, and what the command line adds."""
    named = {"model": options.model, "flavor": options.flavor}
    job = manifest.job if manifest is not None else {}
    return {**job, **{key: value for key, value in named.items() if value is not None}}


def _convert(options: argparse.Namespace) -> int:
    if checkpoint_kind(options.source) is Kind.HF:
        if options.to == HF:
            raise CheckpointError(
                f"{options.source}: holds Hugging Face weights already; legal with --to hf: a "
                "checkpoint in DCP's format."
            )
        job = _job(options, None)
        source = _open_hf(options.source, _model(job))
        _to_dcp(options, source, Manifest(job), {fqn: (fqn,) for fqn in source.tensors})
        return 0
    reader = CheckpointReader(options.source)
    job = _job(options, reader.manifest)
    if options.to == HF:
        _to_hf(options, reader, job)
        return 0
    plans = reader.manifest.plans if reader.manifest is not None else ()
    _to_dcp(options, reader, Manifest(job, plans), reader.metadata.planner_data)
    degree = data_degree(reader.metadata)
    if degree not in (0, options.world_size):
        print(
            f"note: the position in the data is still that of {degree} data-parallel ranks; a job "
            "of another degree loads the rest with checkpoint.exclude_from_loading = dataloader"
        )
    return 0


def _to_dcp(
    options: argparse.Namespace, source: Source, saved: Manifest, planner_data: Any
) -> None:
    parameters = {key: t for key, t in source.tensors.items() if part_of(key) == MODEL}
    plan = None
    if options.to == OWNER:
        plan = _plan(options, saved, parameters)
    job = {**saved.job, "converted": f"to {options.to}, {options.world_size} ranks"}
    manifest = Manifest(job, () if plan is None else (json.loads(plan.to_json()),))
    placement = Placement(options.world_size, parameters, plan)
    with _bar("convert", sum(tensor.nbytes for tensor in source.tensors.values())) as progress:
        convert_to_dcp(source, options.target, placement, manifest, planner_data, progress)
    print(f"{options.target}: {len(source.tensors):,} tensors, {len(source.objects):,} objects")


def _plan(
    options: argparse.Namespace, saved: Manifest, parameters: Mapping[str, StoredTensor]
) -> OwnerPlan:
    """The plan of a job of the new world size: of the blocks that the saved plans have, else of
    the model's."""
    blocks = blocks_of_plans(saved.plans) if saved.plans else _model(saved.job).blocks()
    blocks = as_stored(blocks, parameters, str(options.source))
    planner = options.planner or DEFAULT_PLANNER
    return make_plan(planner, blocks.blocks, blocks.matrices, options.world_size)


def _to_hf(options: argparse.Namespace, source: CheckpointReader, job: Mapping[str, Any]) -> None:
    model = _model(job)
    parameters = [tensor for key, tensor in source.tensors.items() if part_of(key) == MODEL]
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    elements: Counter[torch.dtype] = Counter()
    for tensor in parameters:
        elements[tensor.dtype] += tensor.numel
    # config.json has one dtype for all.
    common = dtype or max(elements, key=lambda dtype: elements[dtype], default=torch.float32)
    extra = model.extra_files(options.hf_assets, common, job.get("seq_len"))
    with _bar("convert", sum(tensor.nbytes for tensor in parameters)) as progress:
        convert_to_hf(
            source,
            options.target,
            model.state,
            model.adapter.to_hf,
            model.adapter.from_hf,
            dtype,
            extra,
            progress,
        )
    print(f"{options.target}: {len(parameters):,} tensors and {', '.join(sorted(extra))}")


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


@contextmanager
def _bar(title: str, total: int) -> Iterator[Progress]:
    """A progress bar by bytes on stderr."""
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, mininterval=0.5) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
