"""No option that no code reads."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator, Mapping

import pytest

from embodied_rl.config import Config
from source_tree import modules

DISCRIMINATOR = "type"
"""Chooses the class, so that it has done its work before anything could read it."""


def config_classes() -> list[type[Config]]:
    """Every class of options in our five packages."""
    found = {}
    for name, tree in modules().items():
        if not any(isinstance(node, ast.ClassDef) for node in tree.body):
            continue
        if not name.endswith("config"):
            assert not _derives_from_config(tree), f"{name}: options belong in a config module"
            continue
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and issubclass(value, Config) and value is not Config:
                found[f"{value.__module__}.{value.__name__}"] = value
    return [found[name] for name in sorted(found)]


def _derives_from_config(tree: ast.Module) -> bool:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return any(isinstance(b, ast.Name) and b.id == "Config" for c in classes for b in c.bases)


def attributes_read(trees: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Reads of attributes: (what it is read from, attribute), such as `config.chunk`.

    The first part is the last name before the dot; a `getattr` with a literal name counts too.
    """
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield _last_name(node.value), node.attr
            elif isinstance(node, ast.Call) and _last_name(node.func) == "getattr":
                holder, name = node.args[:2]
                if isinstance(name, ast.Constant):
                    yield _last_name(holder), str(name.value)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_")
    return node.id.lstrip("_") if isinstance(node, ast.Name) else ""


OWNERS = {
    *("config", "options", "run", "rollout", "simulator", "policy", "algorithm"),
    *("demonstrations", "imitation", "evaluation", "logging", "checkpoint", "given", "stored"),
    *("convention",),
}
"""Names under which our code holds options: `torch.seed` or `Path.name` do not count."""


def read_in_properties(tree: ast.AST) -> Iterator[str]:
    """Options that a config class turns into something; merely checking them does not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not _is_validator(method):
                    yield from (n for owner, n in attributes_read([method]) if owner == "self")


def _is_validator(method: ast.FunctionDef) -> bool:
    return any("validator" in ast.unparse(decorator) for decorator in method.decorator_list)


def unread(fields: Iterable[str], trees: Mapping[str, ast.AST]) -> list[str]:
    """Fields that no code reads from something that holds options."""
    read = {name for owner, name in attributes_read(trees.values()) if owner in OWNERS}
    for module, tree in trees.items():
        if module.endswith("config"):
            read |= set(read_in_properties(tree))
    return [field for field in fields if field not in read and field != DISCRIMINATOR]


@pytest.mark.parametrize("options", config_classes(), ids=lambda options: options.__name__)
def test_every_option_is_read(options: type[Config]) -> None:
    forgotten = unread(options.model_fields, modules())
    assert not forgotten, f"no code reads {options.__name__}.{', '.join(forgotten)}"


def test_an_option_that_no_code_reads_is_seen() -> None:
    options = """
class AConfig(Config):
    chunk: int = 1
    idle: int = 2
    checked: int = 3
    used: int = 4
    @model_validator(mode="after")
    def _rule(self): return self.checked
    @property
    def twice(self): return 2 * self.used
"""
    code = """
def f(config, torch):
    config.idle = torch.idle
    return config.chunk + getattr(config, "late") + self.checked
"""
    trees = {"a.config": ast.parse(options), "a.code": ast.parse(code)}
    fields = ["chunk", "idle", "checked", "used", "late", "type"]
    assert unread(fields, trees) == ["idle", "checked"]


def test_all_kinds_of_options_were_looked_at() -> None:
    names = {options.__name__ for options in config_classes()}
    assert {"RunConfig", "RolloutConfig", "PPOConfig", "FlowMLPConfig", "ManiSkillConfig"} <= names
