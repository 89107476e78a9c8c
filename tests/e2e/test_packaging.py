"""What a user installs: the source archive, the wheel made from it, and an import from the wheel alone."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("graphs", "placement", "stages")
BUILD_TIMEOUT_S = 240
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "mlruns", "mlflow.db")


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source archive and the wheel; built from a copy, so that the tree stays as it is."""
    tree = tmp_path_factory.mktemp("build") / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
    run(sys.executable, "-m", "build", "--no-isolation", ".", cwd=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("rollstream-*.whl")
    return path


@pytest.fixture(scope="module")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel, and sees what it depends on in the running one."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=venv.parent)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=venv.parent)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=venv.parent).strip()
    # A plain path: the running environment's own .pth files, such as its editable rollstream, are not read.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def modules_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for room in ROOMS for path in (root / room).rglob("*.py")}


def test_source_archive_holds_real_files_and_no_links(dist: Path):
    (path,) = dist.glob("rollstream-*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert {f"src/rollstream/{name}" for name in modules_of(ROOT)} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert [member.name for member in members if member.issym() or member.islnk()] == []


def test_wheel_holds_every_module_and_the_type_mark(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert "" not in {archive.read(f"rollstream/{room}/__init__.py").decode() for room in ROOMS}
    assert {f"rollstream/{name}" for name in modules_of(ROOT)} <= names
    assert "rollstream/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"rollstream"}


def test_entry_points_name_modules_of_the_wheel(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        points = configparser.ConfigParser()
        points.read_string(archive.read(file).decode())
        named = [target.partition(":")[0] for group in points.sections() for target in points[group].values()]
        lacking = [name for name in named if name.replace(".", "/") + ".py" not in archive.namelist()]
    assert {"console_scripts", "rollstream.rewards"} <= set(points.sections())
    assert lacking == []


def test_wheel_imports_in_a_bare_environment(bare_python: Path, tmp_path: Path):
    code = "import rollstream, rollstream.graphs, rollstream.placement, rollstream.stages.base as b; print(b.__file__)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = run(bare_python, "-c", code, cwd=tmp_path, env=env).splitlines()[-1]
    assert Path(shown).is_relative_to(bare_python.parents[1])


def test_entry_points_load_in_a_bare_environment(bare_python: Path, tmp_path: Path):
    code = """from importlib.metadata import distribution
print([callable(point.load()) for point in distribution("rollstream").entry_points])"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = run(bare_python, "-c", code, cwd=tmp_path, env=env).splitlines()[-1]
    assert shown == str([True] * 7)
