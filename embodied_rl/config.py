"""Typed configuration: YAML files, parts by name, dotted overrides, one report of every mistake.

A main file names one part of each kind (`policy: flow_mlp`) and sets dotted keys where it differs
(`policy.denoise_steps: 8`). A part is `<kind>/NAME.yaml` beside the main file, or a bare part name
of the catalogue. Overrides on the command line have the same form: `policy.denoise_steps=8`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from embodied_rl import catalogue

GROUPS = Path(__file__).resolve().parent.parent / "configs"


class Config(BaseModel):
    """Base of all options: unknown keys are errors, values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ConfigError(ValueError):
    """A configuration that cannot be used, explained for a person."""


def part(kind: str) -> BeforeValidator:
    """Turn `{type: NAME, ...}` into the config class that is registered under NAME."""

    def choose(value: Any) -> Any:
        if isinstance(value, Config):
            return value
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise ValueError(f"needs a type; known: {', '.join(catalogue.names(kind))}")
        return catalogue.config_class(kind, value["type"]).model_validate(value)

    return BeforeValidator(choose)


def load[C: Config](model: type[C], file: Path | None, overrides: list[str]) -> C:
    """Read a configuration file, apply the overrides, validate.

    Raises `ConfigError` that lists all mistakes at once.
    """
    tree, problems = read_tree(file, overrides)
    broken = {problem.partition(":")[0] for problem in problems}
    try:
        config = model.model_validate(tree)
    except ValidationError as error:
        found = [e for e in error.errors(include_url=False) if _path(e) not in broken]
        problems += [_explain(model, tree, e) for e in found]
        config = None
    if problems or config is None:
        source = f" in {file}" if file else ""
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} configuration mistake(s){source}:\n{lines}")
    return config


def save(config: Config, file: Path) -> None:
    """Write a resolved configuration that `load` reads back as an equal object."""
    file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def read_tree(file: Path | None, overrides: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The nested options, with parts replaced by their files, and the mistakes found so far."""
    problems: list[str] = []
    items = list(_items_of(file, problems)) if file else []
    for text in overrides:
        key, equals, value = text.partition("=")
        if equals:
            items.append((key, _yaml_value(key, value, problems)))
        else:
            problems.append(f"{text}: write an override as key=value")
    groups = [file.parent, GROUPS] if file else [GROUPS]
    tree: dict[str, Any] = {}
    # Parts first, so that `policy.denoise_steps=8 policy=flow_mlp` means the same in either order.
    for key, value in sorted(items, key=lambda item: "." in item[0]):
        if key in catalogue.PARTS and isinstance(value, str):
            value = _read_part(groups, key, value, problems)
        _put(tree, key, value, problems)
    return tree, problems


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that occurs twice, of which plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A dictionary, as SafeLoader makes it."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} occurs twice", key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _items_of(file: Path, problems: list[str]) -> Iterator[tuple[str, Any]]:
    try:
        # A SafeLoader, so that a file can hold plain data only.
        content = yaml.load(file.read_text(), Loader=_UniqueKeys)
    except FileNotFoundError:
        near = sorted(str(p) for p in GROUPS.glob("*.yaml"))
        raise ConfigError(f"no file {file}; configurations here: {', '.join(near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a configuration file: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold `key: value` lines, got {type(content).__name__}")
    for key, value in content.items():
        yield str(key), value


def _yaml_value(key: str, text: str, problems: list[str]) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        problems.append(f"{key}: {text!r} is not a valid YAML value")
        return None


def _read_part(groups: list[Path], kind: str, name: str, problems: list[str]) -> Any:
    for group in groups:
        path = group / kind / f"{name}.yaml"
        if path.exists():
            return dict(_items_of(path, problems))
    if name in catalogue.names(kind):
        return {"type": name}
    files = {path.stem for group in groups for path in (group / kind).glob("*.yaml")}
    known = sorted({*files, *catalogue.names(kind)})
    problems.append(f"{kind}: no {kind} is called {name!r}{_near(name, known)}; known: "
                    f"{', '.join(known)}")  # fmt: skip
    return None


def _put(tree: dict[str, Any], key: str, value: Any, problems: list[str]) -> None:
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None or not isinstance(child, dict):
            if child is not None:
                problems.append(f"{key}: {parent} is {child!r} and has no options")
            return
        node = child
    node[leaf] = value


def _path(error: ErrorDetails) -> str:
    return ".".join(str(step) for step in error["loc"])


def _explain(model: type[Config], tree: Mapping[str, Any], error: ErrorDetails) -> str:
    path = [str(step) for step in error["loc"]]
    owner = _owner(model, tree, path[:-1])
    where = ".".join(path) or "the whole"
    if error["type"] == "extra_forbidden" and owner:
        known = sorted(set(owner.model_fields) - {"type"})
        return f"{where}: unknown option{_near(path[-1], known)}; allowed: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{where}: missing{_allowed(owner, path)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}: {message}"
    return f"{where}: got {error['input']!r}. {message}{_allowed(owner, path)}"


def _allowed(owner: type[BaseModel] | None, path: list[str]) -> str:
    field = owner.model_fields.get(path[-1]) if owner and path else None
    if field is None:
        return ""
    bounds = _bounds(field)
    meaning = f"; it is: {' '.join(field.description.split())}" if field.description else ""
    return f"{f' (allowed: {bounds})' if bounds else ''}{meaning}"


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    found = [
        f"{word} {getattr(rule, sign)}"
        for rule in field.metadata
        for sign, word in signs.items()
        if getattr(rule, sign, None) is not None
    ]
    return ", ".join(found)


def _owner(model: type[Config], tree: Mapping[str, Any], path: list[str]) -> type[BaseModel] | None:
    """The config class that holds the options under `path`."""
    owner: type[BaseModel] | None = model
    for depth, step in enumerate(path):
        if depth == 0 and step in catalogue.PARTS and step in model.model_fields:
            chosen = tree.get(step)
            name = chosen.get("type") if isinstance(chosen, dict) else None
            try:
                owner = catalogue.config_class(step, str(name))
            except catalogue.UnknownPart:
                return None
        else:
            field = owner.model_fields.get(step) if owner else None
            owner = _model_in(field.annotation) if field else None
    return owner


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The config class inside `Section`, `Section | None` or `Annotated[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is Annotated:
        return _model_in(get_args(annotation)[0])
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
