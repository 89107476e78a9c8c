"""Guards of the house: where things lie, who may import whom, what an import may load, and that every wait ends."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollstream

ROOT = Path(__file__).resolve().parents[2]
#: A room may import itself and the rooms before it.
ROOMS = ("stages", "placement", "graphs")
MAX_FILE_LINES = 400
#: Modules that may load torch and its like when imported; stages import them in `setup` or later.
MAY_BE_HEAVY = re.compile(r"rollstream\.stages\.(megatron(\..*)?|loss(\..*)?|rollout\.(hf_\w+|vllm_\w+|sampler))$")
HEAVY = ("torch", "vllm", "megatron", "transformers", "mlflow")
IMPORT_TIMEOUT_S = 240


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def modules(*rooms: str) -> list[str]:
    names = [".".join(("rollstream", *path.relative_to(ROOT).with_suffix("").parts)) for path in python_files(*rooms)]
    return [name.removesuffix(".__init__") for name in names]


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ([f"{module}.{a.name}" for a in node.names] if module == "rollstream" else [module])


def backward_imports(source: str, room: str) -> list[str]:
    """Imports of a later room, of the package's front (which may be one), or by a relative name."""
    allowed = tuple(f"rollstream.{name}" for name in ROOMS[: ROOMS.index(room) + 1])
    ours = [name for name in imported(ast.parse(source)) if name.split(".")[0] in ("rollstream", "")]
    return [name for name in ours if not re.match(rf"({'|'.join(map(re.escape, allowed))})(\.|$)", name)]


def endless_waits(source: str) -> list[str]:
    """Calls that may wait for ever: `ray.get(x)`, `thread.join()`, `process.communicate()`, `subprocess.run(...)`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(k.arg in ("timeout", None) for k in node.keywords):
            continue
        name = ast.unparse(node.func)
        no_arguments = not node.args and not node.keywords
        is_wait = name in ("ray.get", "ray.wait") or re.fullmatch(
            r"subprocess\.(run|call|check_call|check_output)", name
        )
        if is_wait or name.endswith(".communicate") or (name.endswith(".join") and no_arguments):
            found.append(f"{name}, line {node.lineno}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str):
    found = {str(path): backward_imports(path.read_text(), room) for path in python_files(room)}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("stages", "from rollstream.graphs.edge import Edge"),
        ("stages", "def f():\n    import rollstream.placement"),
        ("placement", "from rollstream import graphs"),
        ("graphs", "from rollstream import Graph"),
        ("graphs", "from .edge import Edge"),
    ],
)
def test_guard_sees_an_import_that_points_back(room: str, source: str):
    assert len(backward_imports(source, room)) == 1


def test_guard_allows_earlier_rooms():
    source = "from rollstream.stages.base import Stage\nfrom rollstream import placement\nimport ray"
    assert backward_imports(source, "graphs") == []


def test_stages_do_not_know_ray():
    importing = [str(path) for path in python_files("stages") if "ray" in imported(ast.parse(path.read_text()))]
    assert importing == []


def test_links_are_relative_and_resolve():
    package = ROOT / "src" / "rollstream"
    links = {path.name: os.readlink(path) for path in package.iterdir() if path.is_symlink()}
    assert links == {room: f"../../{room}" for room in ROOMS}
    assert all((package / room).resolve() == ROOT / room for room in ROOMS)


def test_no_file_hides_a_standard_module():
    named = {path.stem: path for room in ROOMS for path in (ROOT / room).rglob("*") if path.name != "__pycache__"}
    assert {str(path) for stem, path in named.items() if stem in sys.stdlib_module_names} == set()


def test_every_folder_of_code_is_a_package():
    folders = {path.parent for path in python_files(*ROOMS)}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_files_are_small():
    lines = {path: len(path.read_text().splitlines()) for path in python_files(*ROOMS, "src", "tests", "examples")}
    assert {str(path): n for path, n in lines.items() if n >= MAX_FILE_LINES} == {}


def test_every_wait_has_a_deadline():
    found = {str(path): endless_waits(path.read_text()) for path in python_files(*ROOMS, "examples", "benchmarks")}
    assert {path: waits for path, waits in found.items() if waits} == {}


@pytest.mark.parametrize("call", ["ray.get(x)", "ray.wait([x], num_returns=1)", "t.join()", "p.communicate(b'')"])
def test_guard_sees_a_wait_without_a_deadline(call: str):
    assert len(endless_waits(call)) == 1


@pytest.mark.parametrize("call", ["ray.get(x, timeout=5)", "','.join(names)", "t.join(5)", "ray.get_actor('a')"])
def test_guard_allows_a_wait_with_a_deadline(call: str):
    assert endless_waits(call) == []


def loaded_by(names: list[str], heavy: tuple[str, ...]) -> dict[str, list[str]]:
    """For each module the heavy ones, or the error, that importing it in this order first brought in."""
    code = f"""
import importlib, json, sys
found, seen = {{}}, set()
for name in {names!r}:
    try:
        importlib.import_module(name)
    except Exception as error:
        found[name] = [f"{{type(error).__name__}}: {{error}}"]
    new = [h for h in {heavy!r} if h in sys.modules and h not in seen]
    seen.update(new)
    if new:
        found[name] = new
print(json.dumps(found))"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("room", ROOMS)
def test_import_is_light(room: str):
    light = [name for name in modules(room) if not MAY_BE_HEAVY.match(name)]
    assert len(light) >= 1
    assert loaded_by(["rollstream", *light], HEAVY) == {}


def test_public_names_resolve():  # ruff keeps them sorted
    assert [name for name in rollstream.__all__ if not hasattr(rollstream, name)] == []


def test_the_readme_shows_the_example_as_it_is():
    example = (ROOT / "examples/arithmetic.py").read_text().partition('"""\n\n')[2]
    assert example in (ROOT / "README.md").read_text()


def test_licence_is_named_and_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "Apache License" in (ROOT / "LICENSE").read_text().splitlines()[1]
