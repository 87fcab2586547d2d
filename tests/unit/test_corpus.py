"""scripts/build_corpus.py: the same bytes every time, and readable by what will read it."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from tests.support import ROOT, load_script

builder = load_script("build_corpus")
SCRIPT = ROOT / "scripts" / "build_corpus.py"


def run_script(*args, **env):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, args)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def hashes(root):
    paths = builder.Outputs(root).results
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_two_builds_are_identical(tmp_path, corpus_dir):
    result = run_script("--output-dir", tmp_path, "--max-bytes", 400_000, PYTHONHASHSEED="7")
    assert result.returncode == 0, result.stderr
    assert hashes(tmp_path) == hashes(corpus_dir.root)


def test_corpus_is_jsonl_within_the_cap(corpus_dir):
    documents = texts(corpus_dir.corpus / "train.jsonl")
    size = sum(len(text.encode()) for text in documents)
    assert len(documents) > 10
    assert 300_000 < size <= 400_000
    assert [path.name for path in corpus_dir.corpus.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_reads_the_corpus(corpus_dir, tmp_path, streaming):
    from datasets import load_dataset

    path = corpus_dir.corpus / "train.jsonl"
    dataset = load_dataset(
        "json",
        data_files=str(path),
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path),
    )
    assert [sample["text"] for sample in dataset] == texts(path)


def test_torchtitan_loads_the_tokenizer(corpus_dir):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(str(corpus_dir.tokenizer))
    assert tokenizer.get_vocab_size() == 2048
    assert sorted(tokenizer.get_vocab().values()) == list(range(2048))
    assert (tokenizer.bos_token, tokenizer.bos_id) == (builder.BOS, 0)
    assert (tokenizer.eos_token, tokenizer.eos_id) == (builder.EOS, 1)

    text = 'def f(x):\n\treturn "naïve 数 \\N{SNOWMAN} ☃" if x else None  # \x00\r\n'
    plain = tokenizer.encode(text, add_bos=False, add_eos=False)
    assert tokenizer.encode(text, add_bos=True, add_eos=True) == [0, *plain, 1]
    assert tokenizer.decode(plain) == text
    for text in texts(corpus_dir.corpus / "train.jsonl"):
        ids = tokenizer.encode(text, add_bos=True, add_eos=True)
        assert ids.count(0) == ids.count(1) == 1
        assert tokenizer.decode(ids) == text


def test_second_run_builds_nothing(tmp_path):
    args = ("--output-dir", tmp_path, "--max-bytes", 200_000, "--vocab-size", 512)
    first = run_script(*args)
    assert first.stdout.startswith("built: ")
    assert "512 tokens in the vocabulary" in first.stdout
    before = hashes(tmp_path)
    assert run_script(*args).stdout == first.stdout.replace("built", "up to date")
    assert run_script(*args, "--force").stdout == first.stdout
    assert hashes(tmp_path) == before
    # A file that someone changed, another option, a build that never got to its stamp.
    outputs = builder.Outputs(tmp_path)
    with outputs.corpus.open("a") as corpus:
        corpus.write("{}\n")
    assert run_script(*args).stdout == first.stdout
    assert run_script(*args[:-1], 300).stdout.startswith("built: ")
    outputs.stamp.unlink()
    assert run_script(*args).stdout == first.stdout
    assert hashes(tmp_path) == before
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "corpus_stamp.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "train.jsonl",
    ]


def test_selection_of_sources(tmp_path):
    for name, content in {
        "b.py": b"b = 1\n",
        "pkg/a.py": "a = 'ä'\n".encode(),
        "pkg/latin.py": b"# -*- coding: latin-1 -*-\n# \xe4\n",
        "pkg/empty.py": b"\n",
        "large.py": b"# " + b"x" * 100,
        "notes.txt": b"not a source",
        "site-packages/other.py": b"",
        "test/test_b.py": b"",
        "pkg/tests/data/bad.py": b"",
        "pkg/__pycache__/a.py": b"",
        "_sysconfigdata__linux_.py": b"",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    names = builder.find_sources(tmp_path)
    assert sorted(names) == ["b.py", "large.py", "pkg/a.py", "pkg/empty.py", "pkg/latin.py"]
    documents = builder.read_documents(tmp_path, sorted(names), max_bytes=50)
    assert [(d.name, d.text, d.size) for d in documents] == [
        ("b.py", "b = 1\n", 6),
        ("pkg/a.py", "a = 'ä'\n", 9),
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--max-bytes", 0), "--max-bytes is 0, must be at least 1"),
        (("--vocab-size", 257), "--vocab-size is 257, must be at least 258"),
        (("--max-bytes", 3000), "raise --max-bytes or lower --vocab-size"),
        (("--max-bytes", 1), "no Python source of at most 1 bytes"),
    ],
)
def test_bad_options_get_a_clear_error(tmp_path, args, said):
    result = run_script("--output-dir", tmp_path, *args)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not any(tmp_path.iterdir())
