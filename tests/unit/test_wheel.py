"""The wheel that users install: all of the package, nothing else, and the pins."""

import email
import shutil
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement

import torchtitan_matrixfsdp
from tests.support import ROOT

PACKAGE = "torchtitan_matrixfsdp"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the clone gets no build folder, and without a download."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in (PACKAGE, "scripts", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-index"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source)),
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = target.iterdir()
    assert path.name == f"{PACKAGE}-{torchtitan_matrixfsdp.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == wanted
    assert f"{PACKAGE}/py.typed" in names


def test_wheel_metadata_has_the_pins(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "torchtitan-matrixfsdp"
    assert metadata["Version"] == torchtitan_matrixfsdp.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    needed = {r.name: r for r in requirements if "extra" not in str(r.marker)}
    assert set(needed) == {
        "torch",
        "torchtitan",
        "triton",
        "datasets",
        "tokenizers",
        "safetensors",
        "tensorboard",
        "typeguard",
    }
    assert str(needed["torchtitan"].specifier) == "==0.2.2"
    assert str(needed["triton"].marker) == 'sys_platform == "linux"'
    torch = needed["torch"].specifier
    versions = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.13.1", "2.14.0")
    assert [v for v in versions if torch.contains(v)] == list(versions[1:-1])
