"""What tests and fixtures share besides the rank harness."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class CorpusPaths:
    """What training needs in place of the repository's own `data/`."""

    root: Path
    corpus: Path
    """Folder of the JSONL file, for `--training.dataset_path`."""
    tokenizer: Path
    """Folder of `tokenizer.json`, for `--model.hf_assets_path`."""


def load_script(name: str) -> ModuleType:
    """Import `scripts/NAME.py`, which belongs to no package."""
    spec = importlib.util.spec_from_file_location(
        f"scripts.{name}", ROOT / "scripts" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    sys.path.insert(0, str(ROOT / "scripts"))  # as `python scripts/NAME.py` has it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return module
