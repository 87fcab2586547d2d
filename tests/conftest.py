"""Fixtures and settings for every test."""

import pytest
from hypothesis import settings

from tests.support import CorpusPaths, load_script

# No deadline: the machine's speed is no property of the code. Derandomized: a run that passed
# passes again; raise max_examples by hand to search for more.
settings.register_profile("matrixfsdp", deadline=None, derandomize=True)
settings.load_profile("matrixfsdp")


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> CorpusPaths:
    """A small corpus and the tokenizer trained on it, built once per session."""
    root = tmp_path_factory.mktemp("corpus")
    load_script("build_corpus").build(root, max_bytes=400_000)
    return CorpusPaths(root, root / "corpus", root / "tokenizer")
