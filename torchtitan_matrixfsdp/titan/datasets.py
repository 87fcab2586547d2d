"""The dataset ``local``: text files of the user's own, read by Hugging Face ``datasets``.

``training.dataset_path`` names a file or a folder of JSON Lines (a ``text`` field per line),
Parquet (a ``text`` column) or plain text (one sample per line).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_matrixfsdp.titan.checks import ConfigError

LOCAL_DATASET = "local"
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}


def local_files(key: str, path: str | None) -> list[Path]:
    """The data files of ``path`` (a file or a folder), sorted, all of one format.

    Raises:
        ConfigError: naming ``key``, if there is none, or the formats are mixed.
    """
    remedy = "Build the default corpus with: python scripts/build_corpus.py"
    if not path:
        raise ConfigError(
            f"{key}: not set, but the dataset is {LOCAL_DATASET!r}; legal: a file or folder of "
            f"{sorted(_BUILDERS)}. {remedy}"
        )
    root = Path(path)
    candidates = sorted(root.iterdir()) if root.is_dir() else [root] if root.is_file() else []
    files = [file for file in candidates if file.suffix in _BUILDERS]
    if not files:
        what = "exists but holds no data file" if root.exists() else "does not exist"
        raise ConfigError(
            f"{key}: received {path!r}, which {what}; legal: a file or folder of "
            f"{sorted(_BUILDERS)}. {remedy}"
        )
    if len({_BUILDERS[file.suffix] for file in files}) > 1:
        raise ConfigError(
            f"{key}: received {path!r}, which mixes formats {sorted({f.suffix for f in files})}; "
            "legal: one format. Name a single file, or move the others."
        )
    return files


def _load_local(path: str) -> Dataset:
    files = local_files("training.dataset_path", path)
    builder = _BUILDERS[files[0].suffix]
    dataset = load_dataset(builder, data_files=[str(file) for file in files], split="train")
    if "text" not in dataset.column_names:
        raise ConfigError(
            f"training.dataset_path: {path!r} has the columns {dataset.column_names}; legal: a "
            "column named 'text'. Rename the column that holds the text."
        )
    return dataset


def _sample_text(sample: dict[str, Any]) -> str:
    return str(sample["text"])


def register_datasets() -> None:
    """Add ``local`` to TorchTitan's dataset registry. Idempotent."""
    DATASETS.setdefault(
        LOCAL_DATASET,
        DatasetConfig(path="", loader=_load_local, sample_processor=_sample_text),
    )
