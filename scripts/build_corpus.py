"""Build a text corpus and a BPE tokenizer from the Python standard library's own sources.

Nothing is downloaded: the text is the `.py` files that the running interpreter came with. The same
interpreter and options give the same bytes on every run. What is written, under the output folder:

    corpus/train.jsonl               one {"text": ...} per source file, for datasets' JSON loader
    tokenizer/tokenizer.json         byte-level BPE
    tokenizer/tokenizer_config.json  which tokens begin and end a document
    corpus_stamp.json                what it was built from; a second run finds it and stops
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
_BYTES = 256  # symbols that byte-level BPE starts from

DEFAULT_OUTPUT_DIR = Path(__file__).resolve().parents[1] / "data"
DEFAULT_MAX_BYTES = 6_000_000
# The vocabulary of TorchTitan's debug models.
DEFAULT_VOCAB_SIZE = 2048

# Raise when the same inputs would give other files than before.
_FORMAT = 1

_SKIPPED_FOLDERS = frozenset(
    {
        # installed, not part of the standard library
        "site-packages",
        "dist-packages",
        # tests and their data, which hold deliberately broken sources
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        # generated tables of numbers
        "encodings",
    }
)
# Written when Python was built or installed, so different on every machine.
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Document:
    name: str
    """Path of the source file below the standard library's folder, with forward slashes."""
    text: str
    size: int
    """Bytes of the text in UTF-8."""


@dataclass(frozen=True)
class Outputs:
    """Where the results lie."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "corpus" / "train.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer" / "tokenizer.json"

    @property
    def tokenizer_config(self) -> Path:
        return self.root / "tokenizer" / "tokenizer_config.json"

    @property
    def stamp(self) -> Path:
        # Not inside corpus/: datasets would read it as data if it were given that folder.
        return self.root / "corpus_stamp.json"

    @property
    def results(self) -> tuple[Path, ...]:
        return self.corpus, self.tokenizer, self.tokenizer_config


@dataclass(frozen=True)
class Summary:
    files: int
    bytes: int
    vocab_size: int


def find_sources(stdlib: Path) -> list[str]:
    """Names of the standard library's source files, in a fixed order that mixes the packages.

    The order is by a hash of the name: the first part of the list is then a cross-section of the
    library, and neighbouring documents seldom come from the same package.
    """
    names = []
    for path in stdlib.rglob("*.py"):
        name = path.relative_to(stdlib)
        if _SKIPPED_FOLDERS.isdisjoint(name.parts) and not name.name.startswith(_SKIPPED_PREFIXES):
            names.append(name.as_posix())
    return sorted(names, key=lambda name: (_sha256(name.encode()), name))


def read_documents(stdlib: Path, names: Iterable[str], max_bytes: int) -> list[Document]:
    """Read the sources in the order given, leaving out what would exceed `max_bytes` in total.

    Files that are empty or not valid UTF-8 are left out too.
    """
    documents = []
    left = max_bytes
    for name in names:
        content = (stdlib / name).read_bytes()
        if not content.strip() or len(content) > left:
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        documents.append(Document(name, text, len(content)))
        left -= len(content)
    return documents


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> str:
    """Train a byte-level BPE of exactly `vocab_size` tokens; return its `tokenizer.json`.

    Tokens 0 and 1 are `BOS` and `EOS`. Any text survives encoding and decoding unchanged.
    """
    # One thread: the order in which words are counted then is the order of the texts. The variable
    # is read by the library's native code and must be set before its first use.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives only {tokenizer.get_vocab_size()} tokens, --vocab-size asks for "
            f"{vocab_size}: raise --max-bytes or lower --vocab-size"
        )
    return str(tokenizer.to_str(pretty=True))


def build(
    output_dir: Path,
    max_bytes: int = DEFAULT_MAX_BYTES,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    force: bool = False,
) -> tuple[Summary, bool]:
    """Build the corpus and the tokenizer unless they are up to date.

    Args:
        output_dir: created if need be.
        max_bytes: upper bound of the corpus's text.
        vocab_size: tokens in the vocabulary, the two special ones included.
        force: build even when the stamp says that nothing has changed.

    Returns:
        what lies in the folder now, and whether it was built by this call.

    Raises:
        ValueError: an argument out of range, too little text for the vocabulary, or an interpreter
            without its sources.
    """
    if max_bytes < 1:
        raise ValueError(f"--max-bytes is {max_bytes}, must be at least 1")
    smallest = _BYTES + 2
    if vocab_size < smallest:
        raise ValueError(
            f"--vocab-size is {vocab_size}, must be at least {smallest}: {_BYTES} bytes, {BOS} and "
            f"{EOS}"
        )
    outputs = Outputs(output_dir)
    made_from = {
        "format": _FORMAT,
        "max_bytes": max_bytes,
        "vocab_size": vocab_size,
        "python": platform.python_version(),
        "tokenizers": _tokenizers_version(),
    }
    if not force and (found := _up_to_date(outputs, made_from)) is not None:
        return found, False

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    documents = read_documents(stdlib, find_sources(stdlib), max_bytes)
    if not documents:
        raise ValueError(
            f"no Python source of at most {max_bytes} bytes under {stdlib}: use an interpreter "
            "that has its standard library as .py files, or raise --max-bytes"
        )
    tokenizer = train_tokenizer([document.text for document in documents], vocab_size)
    contents = {
        outputs.corpus: "".join(
            json.dumps({"text": document.text}, ensure_ascii=False) + "\n" for document in documents
        ),
        outputs.tokenizer: tokenizer + "\n",
        outputs.tokenizer_config: _to_json(
            {
                "bos_token": BOS,
                "eos_token": EOS,
                "clean_up_tokenization_spaces": False,
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        ),
    }
    summary = Summary(len(documents), sum(document.size for document in documents), vocab_size)
    stamp = {
        "made_from": made_from,
        "summary": asdict(summary),
        "sha256": {
            path.relative_to(output_dir).as_posix(): _sha256(content.encode())
            for path, content in contents.items()
        },
    }
    # The stamp goes last, so that an interrupted build isn't taken for a complete one.
    for path, content in [*contents.items(), (outputs.stamp, _to_json(stamp))]:
        _write(path, content)
    return summary, True


def _up_to_date(outputs: Outputs, made_from: dict[str, Any]) -> Summary | None:
    """The summary of what lies there, None unless it was made from the same and is intact."""
    try:
        stamp = json.loads(outputs.stamp.read_text(encoding="utf-8"))
        if stamp["made_from"] != made_from:
            return None
        for path in outputs.results:
            name = path.relative_to(outputs.root).as_posix()
            if stamp["sha256"][name] != _sha256(path.read_bytes()):
                return None
        return Summary(**stamp["summary"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no stamp, or one that this program didn't write


def _tokenizers_version() -> str:
    from importlib.metadata import version

    return version("tokenizers")


def _write(path: Path, content: str) -> None:
    """Write the file whole or not at all, also when two builds run side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content.encode())
    part.replace(path)


def _to_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=DEFAULT_OUTPUT_DIR,
        help="where to write (default: data/ beside scripts/)",
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=DEFAULT_MAX_BYTES,
        help="upper bound of the corpus's text in bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=DEFAULT_VOCAB_SIZE,
        help="tokens, special ones included (default: %(default)s, as TorchTitan's debug models)",
    )
    parser.add_argument("--force", action="store_true", help="build even when up to date")
    options = parser.parse_args(argv)
    try:
        summary, built = build(
            options.output_dir, options.max_bytes, options.vocab_size, options.force
        )
    except ValueError as error:
        parser.error(str(error))
    state = "built" if built else "up to date"
    print(
        f"{state}: {options.output_dir}: {summary.files} source files, "
        f"{summary.bytes:,} bytes, {summary.vocab_size} tokens in the vocabulary"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
