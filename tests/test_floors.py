"""Who may import whom. A room knows its own floor and those below, and there are no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from source_tree import PACKAGES, ROOT, imports, modules

GROUND = "the ground"
MATHS = "embodied_rl.maths"
PARTS = ("policies", "simulators", "rewards")
ENGINE = (
    "embodied_rl.algorithms",
    "embodied_rl.rollout",
    "embodied_rl.evaluation",
    "embodied_rl.training",
    "embodied_rl.correctness",
    "embodied_rl.memory",
)
DOORS = ("embodied_rl.cli", "embodied_rl.__main__", "real_robot")

MAY_KNOW: dict[str, set[str]] = {
    GROUND: {GROUND},
    MATHS: {GROUND, MATHS},
    **{part: {GROUND, MATHS, part} for part in PARTS},
    **{room: {GROUND, MATHS, *ENGINE} for room in ENGINE},
    **{door: {GROUND, MATHS, *PARTS, *ENGINE, *DOORS} for door in DOORS},
}

BY_NAME_ONLY = "embodied_rl.catalogue"
"""The one place that may name every part, as text."""


def room_of(module: str) -> str | None:
    """The room that a module lies in; None if it is not ours."""
    for room in (MATHS, *PARTS, *ENGINE, *DOORS):
        if module == room or module.startswith(f"{room}."):
            return room
    return GROUND if module.partition(".")[0] == "embodied_rl" else None


def broken_floors(trees: Mapping[str, ast.Module]) -> list[str]:
    """Each import that goes where it must not, in words."""
    found = []
    for name, tree in trees.items():
        room = room_of(name)
        assert room is not None, name
        if name == BY_NAME_ONLY:
            continue
        for imported, line in imports(name, tree, trees):
            other = room_of(imported)
            if other and other not in MAY_KNOW[room]:
                found.append(f"{name}:{line} is in {room} and must not import {imported} ({other})")
    return found


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """One circle of imports, or nothing."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def module_edges(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Imports between our modules, without those that only type checkers see or the catalogue
    does by name."""
    edges: dict[str, set[str]] = {}
    for name, tree in trees.items():
        copy = ast.parse(ast.unparse(tree))
        _Runtime().visit(copy)
        edges[name] = {other for other, _ in imports(name, copy, trees) if other in trees} - {name}
    return edges


class _Runtime(ast.NodeTransformer):
    """Drops blocks under TYPE_CHECKING, and strings."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def test_nothing_is_imported_upward() -> None:
    found = broken_floors(modules())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source", "culprit"),
    [
        ("policies.new", "def f():\n    import simulators.config\n", "simulators.config"),
        ("simulators.new", "from embodied_rl.training import loop\n", "embodied_rl.training.loop"),
        ("embodied_rl.maths.new", "from policies import layers\n", "policies.layers"),
        ("embodied_rl.rollout.new", "load('simulators.maniskill:make')\n", "simulators.maniskill"),
        ("embodied_rl.new", "from .maths import losses\n", "embodied_rl.maths.losses"),
        ("embodied_rl.training.new", "import embodied_rl.cli\n", "embodied_rl.cli"),
    ],
)
def test_a_broken_floor_is_seen(name: str, source: str, culprit: str) -> None:
    trees = {**modules(), name: ast.parse(source)}
    found = broken_floors(trees)
    assert len(found) == 1
    assert found[0].startswith(f"{name}:")
    assert f"must not import {culprit} " in found[0]


def test_there_are_no_circles_of_modules() -> None:
    found = circle(module_edges(modules()))
    assert not found, " -> ".join(found)


def test_there_are_no_circles_of_rooms() -> None:
    edges: dict[str, set[str]] = {}
    for name, others in module_edges(modules()).items():
        room = str(room_of(name))
        edges.setdefault(room, set()).update({str(room_of(other)) for other in others} - {room})
    found = circle(edges)
    assert not found, " -> ".join(found)


def test_a_circle_is_seen() -> None:
    trees = {
        "embodied_rl.a": ast.parse("import embodied_rl.b"),
        "embodied_rl.b": ast.parse("def f():\n    from embodied_rl import c"),
        "embodied_rl.c": ast.parse("from embodied_rl.a import x"),
    }
    assert set(circle(module_edges(trees))) == set(trees)
    trees["embodied_rl.c"] = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from embodied_rl.a import x"
    )
    assert circle(module_edges(trees)) == []


_IMPORT_EVERYTHING = """
import contextlib, importlib, os, sys, threading
others, ours, watched = (words.split(",") for words in sys.argv[1:])
for name in others:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

def state():
    files = {os.path.join(at, f) for folder in watched for at, _, fs in os.walk(folder) for f in fs}
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    return {
        "environment variables": dict(os.environ),
        "threads": {thread.name for thread in threading.enumerate()},
        "processes": set(children),
        "files": files,
        "working directory": os.getcwd(),
        "sys.path": list(sys.path),
    }

before = state()
for name in ours:
    importlib.import_module(name)
    after = state()
    for what in before:
        if before[what] != after[what]:
            print(f"importing {name} changes {what}: {before[what]} -> {after[what]}")
    before = after
"""


def run_imports(ours: list[str], others: list[str], folder: Path) -> str:
    """What importing these modules one after the other changes in a fresh interpreter."""
    watched = [folder / name for name in ("home", "work", "temporary")]
    for path in watched:
        path.mkdir()
    arguments = [",".join(names) for names in (others, ours, map(str, watched))]
    answer = subprocess.run(
        [sys.executable, "-B", "-W", "ignore", "-c", _IMPORT_EVERYTHING, *arguments],
        cwd=watched[1],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(watched[0]),
            "TMPDIR": str(watched[2]),
            "PYTHONPATH": f"{ROOT}:{folder}",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_importing_has_no_effects(tmp_path: Path) -> None:
    trees = modules()
    ours = [name for name in trees if not name.endswith("__main__")]
    foreign = {
        imported
        for name, tree in trees.items()
        for imported, _ in imports(name, tree, trees)
        if imported.partition(".")[0] not in PACKAGES and imported != "__future__"
    }
    assert {"torch", "numpy", "sapien"} <= foreign
    found = run_imports(ours, sorted(foreign), tmp_path)
    assert not found, found


def test_an_effect_at_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("import os\nos.environ['LOUD'] = '1'\nopen('left', 'w')\n")
    found = run_imports(["loud"], ["json"], tmp_path)
    assert "importing loud changes environment variables" in found
    assert "importing loud changes files" in found
