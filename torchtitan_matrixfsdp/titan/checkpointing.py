"""TorchTitan's checkpoint manager over this package's reader and writer.

:class:`OwnerCheckpointManager` keeps TorchTitan's keys, its folders and DCP's files, and changes
what a run must be able to rely on: nothing saved is overwritten or purged before its successor is
complete, incomplete folders are named and skipped, what is loaded is checked, and every rank
reports the same error.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpoint import (
    DATALOADER,
    MODEL,
    AsyncMode,
    CheckpointManager,
    ModelWrapper,
)
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config import Checkpoint as CheckpointConfig
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection
from torchtitan.train import Trainer

from torchtitan_matrixfsdp import __version__
from torchtitan_matrixfsdp.checkpoint import (
    CheckpointError,
    ConvertingSavePlanner,
    FolderLock,
    Manifest,
    OwnerStorageReader,
    OwnerStorageWriter,
    StrictLoadPlanner,
    data_degree,
    describe_os_error,
    export_hf,
    import_hf,
    move_aside,
    read_manifest,
    read_metadata,
    step_folders,
    together,
)
from torchtitan_matrixfsdp.titan.hf_config import hf_extra_files
from torchtitan_matrixfsdp.titan.model import OwnerModelMixin
from torchtitan_matrixfsdp.titan.validation import matrix_optimizer_of, owner_fsdp_of

_DELETING = "deleting-"


@dataclass(frozen=True)
class Source:
    """What to load, the same on every rank."""

    path: Path
    model_only: bool
    in_hf: bool = False


class LiveModel(ModelWrapper):
    """The model's state as it is now: TorchTitan's keeps what it saw when it was built."""

    def state_dict(self) -> dict[str, Any]:
        """By FQN, over all parts."""
        self.cache_state_dict = self._get_state_dict()
        return self.cache_state_dict


class OwnerCheckpointManager(CheckpointManager):
    """See the module's notes.

    Args:
        model_parts: as TorchTitan's.
        checkpoint_config: as TorchTitan's.
        describe: says what the manifest shall say of the run, at each save.
        plans: the owner plans of all pipeline stages, as records.
        hf_files: what an export to Hugging Face holds beside the weights, by name.
        rest: TorchTitan's other arguments.

    Raises:
        CheckpointError: here and in all methods, on every rank, with file, key and remedy.
    """

    def __init__(
        self,
        *,
        model_parts: list[nn.Module],
        checkpoint_config: CheckpointConfig,
        describe: Callable[[], Mapping[str, Any]],
        plans: tuple[Mapping[str, Any], ...],
        hf_files: Callable[[], Mapping[str, bytes]],
        **rest: Any,
    ) -> None:
        self._hf_files = hf_files
        self._describe = describe
        self._plans = plans
        self._lock: FolderLock | None = None
        self._pending: tuple[Path, Future[Any]] | None = None
        self._step = 0
        super().__init__(model_parts=model_parts, checkpoint_config=checkpoint_config, **rest)
        self.states[MODEL] = LiveModel(model_parts)
        if not self.enable:
            return
        if self.async_mode != AsyncMode.DISABLED:
            self.stager = _make_stager(self.async_mode)
        if not self.load_only:
            together(self._take_folder)

    def _take_folder(self) -> None:
        if dist.get_rank() == 0:
            self._lock = FolderLock(Path(self.folder))
            if not self._lock.acquire():
                logger.warning(
                    f"{self.folder}: this file system has no locks; nothing keeps a second run "
                    "from saving to the same folder"
                )

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """As TorchTitan's: save step ``curr_step`` if it is due, then purge."""
        self._step = curr_step
        super().save(curr_step, last_step)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
        planner: SavePlanner | None = None,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Save to ``checkpoint_id``, as TorchTitan's; what is there is moved aside first."""
        assert not to_hf  # see _save_last_step
        path = Path(checkpoint_id)
        if dist.get_rank() == 0 and path.exists():
            logger.warning(f"{path} is there already; it is moved aside, to a name beside it")
        writer = OwnerStorageWriter(path, Manifest(job=self._describe(), plans=self._plans))
        result: Future[Any] | AsyncSaveResponse | None = None
        if async_mode == AsyncMode.DISABLED:
            with explained():
                dcp.save(state_dict, storage_writer=writer, planner=planner)
            logger.info(f"{path} is complete")
        else:
            is_process = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            kind = AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD
            result = dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=kind,
                async_stager=self.stager,
            )
            done = result.upload_completion if isinstance(result, AsyncSaveResponse) else result
            self._pending = (path, done)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def _async_wait(self) -> None:
        """Wait for the save under way, if any: only then has it been reported complete."""
        if self._pending is None:
            return
        path, future = self._pending
        self._pending = self.save_future = None
        with explained():
            future.result()
        logger.info(f"{path} is complete")

    def _save_last_step(self, curr_step: int) -> None:
        checkpoint_id = self._create_checkpoint_id(curr_step)
        states = self._flattened_model_states_sd()
        planner = None
        if self.last_save_in_hf:
            self._export(Path(checkpoint_id))
            return
        if self.last_save_model_only:
            logger.info(f"Saving the model alone, in {self.export_dtype}, at step {curr_step}")
            states = self.states[MODEL].state_dict()
            # As TorchTitan: float32 means as it is.
            if self.export_dtype != torch.float32:
                planner = ConvertingSavePlanner(self.export_dtype)
        self.dcp_save(states, checkpoint_id, AsyncMode.DISABLED, True, planner=planner)

    def _export(self, path: Path) -> None:
        """The weights in Hugging Face's format."""
        assert self.sd_adapter is not None  # both models have one
        extra_files = together(self._hf_files)
        together(lambda: self._make_room(path))
        state = self.states[MODEL].state_dict()
        export_hf(state, self.sd_adapter.to_hf, path, self.export_dtype, extra_files=extra_files)
        logger.info(f"{path} is complete: an export in {self.export_dtype}")

    def _make_room(self, path: Path) -> None:
        if dist.get_rank() == 0 and (aside := move_aside(path)) is not None:
            logger.warning(f"{path} was there already; it is now {aside}")

    def _purge_stale_checkpoints(self) -> None:
        """Delete all but the newest ``keep_latest_k`` complete checkpoints.

        TorchTitan counts incomplete ones as well, so that a few crashes in a row would delete every
        complete one. Steps that are yet to come, saved before ``checkpoint.load_step`` went back,
        are left alone: counted, they would have the steps deleted that replace them. A folder is
        renamed before it is deleted: half deleted, it is no checkpoint.
        """
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        found = step_folders(Path(self.folder))
        saved = [f for f in found if (f.is_complete or f.is_export) and f.step <= self._step]
        for entry in saved[: -self.keep_latest_k]:
            doomed = entry.path.with_name(f"{_DELETING}{entry.path.name.replace('-', '_')}")
            if doomed.exists():  # left by a run that was killed while it deleted
                shutil.rmtree(doomed)
            entry.path.rename(doomed)
            self.purge_queue.put(str(doomed))

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load step ``step`` of the run's folder (-1: the newest that is complete), or what
        ``checkpoint.initial_load_*`` names where the folder has none; whether there was any."""
        if not self.enable:
            return False
        source = _of_first_rank(lambda: self._choose(step))
        if source is None:
            return False
        logger.info(f"Loading {source.path}")
        states = self._states_to_load(source.model_only)
        if source.in_hf:
            self._load_hf(source.path)
        else:
            together(lambda: self._check(source, states))
            self._load_dcp(source, states)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        logger.info(f"Loaded {source.path}")
        return True

    def _choose(self, step: int) -> Source | None:
        found = step_folders(Path(self.folder))
        complete = [entry for entry in found if entry.is_complete]
        for entry in found:
            if entry.is_export:
                logger.info(f"{entry.path} is a Hugging Face export, which no run resumes from")
            elif not entry.is_complete:
                logger.warning(
                    f"{entry.path} is incomplete: the run that wrote it ended before it was saved. "
                    "It is skipped, and stays until you delete it."
                )
        if step != -1:
            later = [entry.step for entry in complete if entry.step > step]
            complete = [entry for entry in complete if entry.step == step]
            if complete and later:
                logger.warning(
                    f"{self.folder} has steps after {step}: {later}. They stay until this run "
                    "comes to them, and a restart without checkpoint.load_step resumes from the "
                    "last of them: move them away unless that is what you want."
                )
            if not complete:
                raise CheckpointError(
                    f"checkpoint.load_step: received {step}; legal: -1 (the newest) or a complete "
                    f"step in {self.folder}: {[e.step for e in found if e.is_complete]}."
                )
        if complete:
            if self.initial_load_path or self.initial_load_in_hf:
                logger.warning(
                    f"{self.folder} has a checkpoint of this run; checkpoint.initial_load_path and "
                    "initial_load_in_hf are not used."
                )
            # Step 0 is a seed: initial weights.
            return Source(complete[-1].path, model_only=complete[-1].step == 0)
        return self._initial()

    def _initial(self) -> Source | None:
        if self.initial_load_in_hf:
            assets = self.sd_adapter.hf_assets_path if self.sd_adapter is not None else None
            return Source(Path(self.initial_load_path or assets or ""), True, in_hf=True)
        if not self.initial_load_path:
            return None
        return Source(Path(self.initial_load_path), self.initial_load_model_only)

    def _check(self, source: Source, states: Mapping[str, Any]) -> None:
        metadata = read_metadata(source.path)
        manifest = read_manifest(source.path)
        if manifest is None:
            logger.info(f"{source.path} has no checksums: it was not saved by this package")
        if DATALOADER in states:
            saved = data_degree(metadata)
            degree = states[DATALOADER].dp_world_size
            if saved not in (0, degree):
                read = manifest.job.get("tokens_seen") if manifest is not None else None
                again = "what it had read is"
                if read is not None:
                    again = f"the {read:,} tokens it had read are"
                raise CheckpointError(
                    f"{source.path}: saved by {saved} data-parallel ranks; this job has {degree}, "
                    "and a position in the data cannot be divided anew. Go on without it by "
                    "adding dataloader to checkpoint.exclude_from_loading: the data then starts "
                    f"from its beginning, so that {again} read again, and nothing is skipped."
                )

    def _load_dcp(self, source: Source, states: dict[str, Any]) -> None:
        ignored = self.states.keys() - {MODEL} - states.keys()
        planner = StrictLoadPlanner(str(source.path), ignored)
        with explained():
            dcp.load(states, storage_reader=OwnerStorageReader(source.path), planner=planner)
        self.states[MODEL].load_state_dict(states)

    def _load_hf(self, folder: Path) -> None:
        assert self.sd_adapter is not None  # both models have one
        state = self.states[MODEL].state_dict()
        import_hf(state, self.sd_adapter.to_hf, self.sd_adapter.from_hf, folder)
        self.states[MODEL].load_state_dict(state)

    def close(self) -> None:
        """Wait for the save under way, then end threads and give the folder back."""
        try:
            self._async_wait()
        finally:
            super().close()
            if self._lock is not None:
                self._lock.release()


def build_checkpoint_manager(trainer: Trainer) -> OwnerCheckpointManager:
    """The manager of ``trainer``, in place of the one that it built for itself; a collective."""
    stock = trainer.checkpointer
    stock.close()
    if (group := vars(stock).get("pg")) is not None:
        dist.destroy_process_group(group)
    config = trainer.job_config
    adapter = trainer.train_spec.state_dict_adapter
    return OwnerCheckpointManager(
        dataloader=trainer.dataloader,
        model_parts=trainer.model_parts,
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        states={"train_state": trainer},
        checkpoint_config=config.checkpoint,
        sd_adapter=adapter and adapter(trainer.model_args, config.model.hf_assets_path),
        base_folder=config.job.dump_folder,
        describe=lambda: describe_run(trainer),
        plans=_plans(trainer),
        hf_files=lambda: hf_extra_files(
            trainer.model_args,
            Path(config.model.hf_assets_path),
            TORCH_DTYPE_MAP[config.checkpoint.export_dtype],
        ),
    )


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """What the manifest says of a run at its present step; plain values."""
    config = trainer.job_config
    owner_fsdp, matrix = owner_fsdp_of(config), matrix_optimizer_of(config)
    dims, data = trainer.parallel_dims, trainer.dataloader
    degree = data.dp_world_size if isinstance(data, ParallelAwareDataloader) else 1
    return {
        "step": trainer.step,
        "tokens_seen": trainer.ntokens_seen * degree,
        "model": config.model.name,
        "flavor": config.model.flavor,
        "mode": owner_fsdp.mode,
        "planner": owner_fsdp.planner,
        "transport": owner_fsdp.transport,
        "matrix_optimizer": matrix.class_path or matrix.name,
        "world_size": dist.get_world_size(),
        "data_parallel_replicate": dims.dp_replicate,
        "data_parallel_shard": dims.dp_shard,
        "context_parallel": dims.cp,
        "tensor_parallel": dims.tp,
        "pipeline_parallel": dims.pp,
        "dataset": config.training.dataset,
        "seq_len": config.training.seq_len,
        "torch": torch.__version__,
        "torchtitan_matrixfsdp": __version__,
    }


def _plans(trainer: Trainer) -> tuple[Mapping[str, Any], ...]:
    """The owner plan of each pipeline stage, the same tuple on every rank; a collective."""
    setups = [part.owner_setup for part in trainer.model_parts if isinstance(part, OwnerModelMixin)]
    # The parts of a rank share their setup.
    plan = setups[0].plan if setups and setups[0] is not None else None
    mine = None if plan is None else plan.to_json()
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return tuple(json.loads(text) for text in dict.fromkeys(everyone) if text is not None)


@contextmanager
def explained() -> Iterator[None]:
    """Context in which DCP's report of all ranks becomes the :class:`CheckpointError` behind it.

    DCP raises a ``BaseException`` with every rank's traceback, on every rank.
    """
    try:
        yield
    except CheckpointException as error:
        for rank, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, CheckpointError):
                raise CheckpointError(f"{cause} (rank {rank})") from None
            if isinstance(cause, OSError):
                raise CheckpointError(f"{describe_os_error(cause)} (rank {rank})") from None
        raise


def _of_first_rank(choose: Callable[[], Source | None]) -> Source | None:
    """Rank 0's answer on every rank: a network's file system may show others another state."""
    chosen: list[Source | None] = [None]

    def on_first() -> None:
        if dist.get_rank() == 0:
            chosen[0] = choose()

    together(on_first)
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _make_stager(mode: AsyncMode) -> DefaultStager:
    """DCP's stager; pages can be pinned, and copies overlap, only where there is a device."""
    is_process = mode == AsyncMode.ASYNC_WITH_PINNED_MEM
    on_device = is_process and torch.accelerator.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_device,
            use_shared_memory=is_process,
            use_async_staging=is_process,
            use_non_blocking_copy=on_device,
        )
    )
