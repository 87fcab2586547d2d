"""The package's rules on imports, checked on the syntax tree of every module.

`RULES` in words:

- layout -> comm -> runtime -> {optim, checkpoint} -> titan: a room imports itself and what stands
  before it. layout is pure Python; only titan and the entry points know TorchTitan; the rooms
  between know torch and nothing else, but for checkpoint, which reads safetensors.
- Nothing imports an entry point. `cpu_device` is for entry points only.
- FSDP2's private names are imported in runtime/fsdp_compat.py alone, in runtime/fsdp_check.py,
  which looks whether torch has them, and in runtime/fsdp_older.py, which adds what old versions
  lack; no module asks by string whether something has a private attribute.
- Environment variables are read by titan and the entry points only.
- No file is longer than 500 lines.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = "torchtitan_matrixfsdp"
MAX_LINES = 500
ANYTHING = None

# Per room: the rooms it may import besides itself, and the libraries besides the standard one.
ROOMS = {
    "layout": (set(), set()),
    "comm": ({"layout"}, {"torch"}),
    "runtime": ({"layout", "comm"}, {"torch"}),
    "optim": ({"layout", "comm", "runtime"}, {"torch"}),
    "checkpoint": ({"layout", "comm", "runtime"}, {"torch", "numpy", "xxhash", "safetensors"}),
    "titan": ({"layout", "comm", "runtime", "optim", "checkpoint"}, ANYTHING),
}
# Module or package names below the package; each may import its own parts.
ENTRY_POINTS = ("train", "plan", "bench", "checkpoint.__main__")
# Stand beside the entry points, which alone may import them.
ENTRY_HELPERS = ("cpu_device",)

FSDP_COMPAT = ("runtime.fsdp_compat", "runtime.fsdp_check", "runtime.fsdp_older")
# The second is FSDP2's former home, where old imports still work.
FSDP_PRIVATE = re.compile(
    r"torch\.distributed\.(fsdp(\.\w+)*\._|_composable\.(fsdp|fully_shard)\b)[\w.]*"
)
NO_POSTPONED_ANNOTATIONS = "titan.job_config"


@dataclass(frozen=True)
class Module:
    """One source file. `name` is dotted, below the package, "" for the package itself."""

    path: Path
    name: str
    is_package: bool
    source: str

    @property
    def entry_point(self) -> str | None:
        return _inside(self.name, ENTRY_POINTS)

    @property
    def is_above_rooms(self) -> bool:
        return bool(self.entry_point or _inside(self.name, ENTRY_HELPERS))

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


def _inside(name: str, packages: tuple[str, ...]) -> str | None:
    """The one of `packages` that `name` is or lies in."""
    for package in packages:
        if name == package or name.startswith(package + "."):
            return package
    return None


def find_modules(package_dir: Path) -> list[Module]:
    modules = []
    for path in sorted(package_dir.rglob("*.py")):
        parts = path.relative_to(package_dir).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(path, name, is_package, path.read_text(encoding="utf-8")))
    return modules


def find_violations(package_dir: Path) -> list[str]:
    """Every breach of the rules in the package at `package_dir`, as "FILE:LINE: what"."""
    modules = find_modules(package_dir)
    names = {module.name for module in modules}
    found = []
    for module in modules:
        tree = ast.parse(module.source, str(module.path))
        breaches = [
            *_check_imports(module, tree, names),
            *_check_private_fsdp(module, tree),
            *_check_probing(module, tree),
            *_check_environment(module, tree),
            *_check_length(module),
        ]
        where = module.path.relative_to(package_dir)
        found += [f"{where}:{line}: {what}" for line, what in sorted(breaches)]
    return found


Breaches = Iterator[tuple[int, str]]


def _imports(module: Module, tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Line, absolute module name and, for `from module import name`, the name."""
    package = module.name.split(".") if module.name else []
    if not module.is_package:
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                base = [PACKAGE, *package][: len(package) + 2 - node.level]
                origin = ".".join([*base, origin] if origin else base)
            for alias in node.names:
                yield node.lineno, origin, alias.name


def _check_imports(module: Module, tree: ast.AST, names: set[str]) -> Breaches:
    for line, origin, name in _imports(module, tree):
        if origin == "__future__":
            if name == "annotations" and module.name == NO_POSTPONED_ANNOTATIONS:
                yield line, "postponed annotations break TorchTitan's merge of this configuration"
            continue
        library = origin.partition(".")[0]
        if library != PACKAGE:
            if library not in sys.stdlib_module_names and not _library_allowed(module, library):
                yield line, f"{module.room or 'the package itself'} must not import {library}"
            continue
        target = origin.removeprefix(PACKAGE).removeprefix(".")
        # `from package import module` names a module in its second half.
        if name is not None and f"{target}.{name}".removeprefix(".") in names:
            target = f"{target}.{name}".removeprefix(".")
        if (problem := _target_problem(module, target)) is not None:
            yield line, problem


def _library_allowed(module: Module, library: str) -> bool:
    if module.is_above_rooms:
        return True
    _, libraries = ROOMS.get(module.room, (set(), set()))
    return libraries is ANYTHING or library in libraries


def _target_problem(module: Module, target: str) -> str | None:
    """Why `module` must not import `target` of this package, None if it may."""
    entry_point = _inside(target, ENTRY_POINTS)
    if entry_point is not None and entry_point != module.entry_point:
        return f"nothing may import the entry point {entry_point}"
    if module.is_above_rooms or not target:
        return None
    if not module.name:
        return "the package itself imports nothing"
    if module.room not in ROOMS:
        return f"{module.room} is neither a room nor an entry point: give it a rule in this test"
    rooms, _ = ROOMS[module.room]
    room = target.partition(".")[0]
    if room not in {module.room, *rooms}:
        return f"{module.room} must not import {room}"
    return None


def _check_private_fsdp(module: Module, tree: ast.AST) -> Breaches:
    if module.name in FSDP_COMPAT:
        return
    what = "only runtime/fsdp_compat.py may use FSDP2's private "
    for line, origin, name in _imports(module, tree):
        full = origin if name is None else f"{origin}.{name}"
        if FSDP_PRIVATE.match(full):
            yield line, what + full
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and FSDP_PRIVATE.fullmatch(_dotted(node))
            # `a._b` inside `a._b.c` is told once.
            and not FSDP_PRIVATE.fullmatch(_dotted(node.value))
        ):
            yield node.lineno, what + _dotted(node)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and FSDP_PRIVATE.fullmatch(node.value)
        ):
            yield node.lineno, what + node.value


def _check_probing(module: Module, tree: ast.AST) -> Breaches:
    # fsdp_compat asks whether torch still has what it needs, so that it can say what is gone.
    functions = {"getattr"} if module.name in FSDP_COMPAT else {"getattr", "hasattr"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in functions
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and isinstance(node.args[1].value, str)
            and re.match(r"_(?!_)", node.args[1].value)
        ):
            yield node.lineno, f'{node.func.id}(..., "{node.args[1].value}") probes a private name'


def _check_environment(module: Module, tree: ast.AST) -> Breaches:
    if module.is_above_rooms or module.room == "titan":
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    what = "only titan and the entry points may use environment variables"
    for line, origin, name in _imports(module, tree):
        if origin == "os" and name in names:
            yield line, what
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _dotted(node) in {f"os.{name}" for name in names}:
            yield node.lineno, what


def _check_length(module: Module) -> Breaches:
    lines = module.source.count("\n")
    if lines > MAX_LINES:
        yield lines, f"{lines} lines, at most {MAX_LINES}: split it by role"


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, "" if it starts from anything but a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def test_package_keeps_the_rules():
    assert find_violations(ROOT / PACKAGE) == []


def test_scripts_are_short_enough():
    lengths = {
        path.name: path.read_text(encoding="utf-8").count("\n")
        for path in (ROOT / "scripts").iterdir()
        if path.is_file()
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("name", [PACKAGE, f"{PACKAGE}.layout"])
def test_import_brings_in_no_torch(name):
    if not (ROOT / Path(*name.split("."), "__init__.py")).exists():
        pytest.skip(f"no {name} yet")
    code = f"import sys, {name}; print([m for m in ('torch', 'torchtitan') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


CLEAN = {
    "__init__.py": '"""Doc naming torch.distributed.fsdp._fully_shard."""\n__version__ = "1"\n',
    "cpu_device.py": "import os\nimport torchtitan\nos.environ['A']\n",
    "train.py": "from torchtitan_matrixfsdp import cpu_device, titan\nimport os\nos.getenv('A')\n",
    "layout/__init__.py": "from torchtitan_matrixfsdp.layout.plan import Plan\n",
    "layout/plan.py": "import hashlib\nfrom . import roles\nfrom .. import __version__\n",
    "layout/roles.py": "getattr(1, '__class__')\n",
    "comm/__init__.py": "import torch.distributed as dist\nfrom ..layout import Plan\n",
    "runtime/__init__.py": "from torchtitan_matrixfsdp import comm, layout\n",
    "runtime/fsdp_compat.py": (
        "from torch.distributed.fsdp._fully_shard import _fsdp_param\nhasattr(_fsdp_param, '_x')\n"
    ),
    "checkpoint/__init__.py": "from torchtitan_matrixfsdp.runtime import fsdp_compat\n",
    "checkpoint/__main__.py": "import torchtitan_matrixfsdp.titan\n",
    "bench/__init__.py": "",
    "bench/run.py": "from torchtitan_matrixfsdp.bench import run\nimport numpy\n",
    "titan/__init__.py": "import os, numpy, torchtitan\nfrom .. import checkpoint\nos.environ\n",
    "titan/job_config.py": "from dataclasses import dataclass\n",
}

PLANTED = [
    ("__init__.py", "import torch", "the package itself must not import torch"),
    ("__init__.py", "from . import layout", "the package itself imports nothing"),
    ("layout/plan.py", "import torch", "layout must not import torch"),
    ("layout/plan.py", "from torchtitan_matrixfsdp import comm", "layout must not import comm"),
    ("layout/plan.py", "from ..comm import gather", "layout must not import comm"),
    ("layout/plan.py", "def f():\n    from .. import runtime", "layout must not import runtime"),
    ("comm/__init__.py", "import torchtitan", "comm must not import torchtitan"),
    ("comm/__init__.py", "from .. import runtime", "comm must not import runtime"),
    ("comm/__init__.py", "import os\nos.environ['A']", "may use environment variables"),
    ("comm/__init__.py", "from os import getenv", "may use environment variables"),
    ("runtime/__init__.py", "import numpy", "runtime must not import numpy"),
    ("runtime/__init__.py", "import torchtitan_matrixfsdp.optim", "runtime must not import optim"),
    ("runtime/__init__.py", "from .. import cpu_device", "runtime must not import cpu_device"),
    (
        "runtime/__init__.py",
        "from torch.distributed.fsdp import _fully_shard",
        "FSDP2's private torch.distributed.fsdp._fully_shard",
    ),
    (
        "runtime/__init__.py",
        "from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState",
        "FSDP2's private",
    ),
    (
        "runtime/__init__.py",
        "import torch\ntorch.distributed.fsdp._fully_shard.x",
        "FSDP2's private",
    ),
    (
        "runtime/__init__.py",
        "from torch.distributed._composable.fsdp import fully_shard",
        "FSDP2's private",
    ),
    ("titan/__init__.py", "m = 'torch.distributed.fsdp._fully_shard._x'", "FSDP2's private"),
    ("titan/__init__.py", "getattr(1, '_flag', None)", "probes a private name"),
    ("titan/__init__.py", "hasattr(1, '_flag')", "probes a private name"),
    ("runtime/fsdp_compat.py", "getattr(1, '_flag', None)", "probes a private name"),
    ("titan/__init__.py", "from .. import train", "nothing may import the entry point train"),
    ("titan/__init__.py", "from ..bench.run import x", "nothing may import the entry point bench"),
    ("train.py", "import torchtitan_matrixfsdp.bench", "the entry point bench"),
    ("titan/__init__.py", "from ..checkpoint import __main__", "entry point checkpoint.__main__"),
    ("checkpoint/__init__.py", "from .. import optim", "checkpoint must not import optim"),
    ("optim/__init__.py", "from .. import checkpoint", "optim must not import checkpoint"),
    ("extra/__init__.py", "from .. import layout", "neither a room nor an entry point"),
    ("titan/job_config.py", "from __future__ import annotations", "postponed annotations"),
    ("layout/plan.py", "x = 1\n" * 501, "at most 500"),
]


def _write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root / PACKAGE


def test_checker_passes_a_clean_tree(tmp_path):
    tree = {**CLEAN, "optim/__init__.py": "from .. import runtime\n"}
    assert find_violations(_write_tree(tmp_path, tree)) == []


@pytest.mark.parametrize(("name", "planted", "said"), PLANTED)
def test_checker_finds_a_planted_violation(tmp_path, name, planted, said):
    tree = {"optim/__init__.py": "", **CLEAN}
    tree[name] = planted + "\n"
    violations = find_violations(_write_tree(tmp_path, tree))
    assert len(violations) == 1, violations
    assert violations[0].startswith(f"{name}:")
    assert said in violations[0]
