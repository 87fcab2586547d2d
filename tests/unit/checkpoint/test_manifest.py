"""The manifest: what it says, and what a damaged one gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchtitan_matrixfsdp.checkpoint import CheckpointError, Manifest, read_manifest
from torchtitan_matrixfsdp.checkpoint.manifest import FORMAT, MANIFEST

SAID = Manifest({"step": 3, "mode": "zero3"}, ({"blocks": [1, 2]},), "ab" * 32, "some id")


def test_it_says_what_it_was_told(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / MANIFEST).write_text(SAID.to_json())
    assert read_manifest(tmp_path) == SAID


@pytest.mark.parametrize("length", [0, 1, 40, len(SAID.to_json()) - 3])
def test_a_truncated_one(tmp_path: Path, length: int) -> None:
    (tmp_path / MANIFEST).write_text(SAID.to_json()[:length])
    with pytest.raises(CheckpointError, match=rf"{MANIFEST}: damaged.*checkpoint\.load_step"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": FORMAT + 1}, f"received format {FORMAT + 1}; legal: 1 to {FORMAT}.*newer"),
        ({"format": 0}, "received format 0"),
        ({"format": None}, "received format None"),
        ({"job": 3}, "not a manifest"),
        ({"job": "step"}, "not a manifest"),
        ({"plans": None}, "not a manifest"),
        ({"plans": [5]}, "not a manifest"),
    ],
)
def test_a_wrong_one(tmp_path: Path, change: dict[str, object], said: str) -> None:
    record = json.loads(SAID.to_json())
    (tmp_path / MANIFEST).write_text(json.dumps(record | change))
    with pytest.raises(CheckpointError, match=said):
        read_manifest(tmp_path)


@pytest.mark.parametrize("key", ["format", "job", "plans", "metadata_sha256", "save_id"])
def test_one_without_a_key(tmp_path: Path, key: str) -> None:
    record = json.loads(SAID.to_json())
    del record[key]
    (tmp_path / MANIFEST).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=key):
        read_manifest(tmp_path)
