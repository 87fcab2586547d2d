"""Checkpoints of owner shards, in DCP's own format; see docs/checkpoint.md."""

from torchtitan_matrixfsdp.checkpoint.errors import CheckpointError, describe_os_error
from torchtitan_matrixfsdp.checkpoint.folder import FolderLock, StepFolder, move_aside, step_folders
from torchtitan_matrixfsdp.checkpoint.hf import export_hf, import_hf
from torchtitan_matrixfsdp.checkpoint.manifest import Manifest, read_manifest
from torchtitan_matrixfsdp.checkpoint.planners import ConvertingSavePlanner, StrictLoadPlanner
from torchtitan_matrixfsdp.checkpoint.reader import OwnerStorageReader, read_metadata
from torchtitan_matrixfsdp.checkpoint.stored import data_degree
from torchtitan_matrixfsdp.checkpoint.verdict import together
from torchtitan_matrixfsdp.checkpoint.writer import OwnerStorageWriter

__all__ = [
    "CheckpointError",
    "ConvertingSavePlanner",
    "FolderLock",
    "Manifest",
    "OwnerStorageReader",
    "OwnerStorageWriter",
    "StepFolder",
    "StrictLoadPlanner",
    "data_degree",
    "describe_os_error",
    "export_hf",
    "import_hf",
    "move_aside",
    "read_manifest",
    "read_metadata",
    "step_folders",
    "together",
]
