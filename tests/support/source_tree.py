"""Our own source files as syntax trees, for tests about the code itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("embodied_rl", "policies", "simulators", "rewards", "real_robot")

_TARGET = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)*(:\w+)?")


def module_name(path: Path) -> str:
    """`embodied_rl.cli` for embodied_rl/cli/__init__.py."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, ast.Module]:
    """Every module of the five packages, by name."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_name(path): ast.parse(path.read_text(), str(path)) for path in files}


def imports(name: str, tree: ast.AST, known: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """Modules that a module names, with line numbers: imports anywhere in it, and strings such as
    `policies.flow_mlp:FlowMLP`, by which the catalogue imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: -node.level]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                below = f"{base}.{alias.name}"
                yield (below if below in known else base), node.lineno
        elif isinstance(node, ast.Constant) and _is_target(node.value):
            yield str(node.value).partition(":")[0], node.lineno


def targets() -> list[str]:
    """All `module:Attribute` strings in our code."""
    found = {
        str(node.value)
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and _is_target(node.value)
    }
    return sorted(target for target in found if ":" in target)


def _is_target(value: object) -> bool:
    return isinstance(value, str) and "." in value and bool(_TARGET.fullmatch(value))
