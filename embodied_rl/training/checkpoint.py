"""Checkpoints: tensors as safetensors, everything else as JSON, whole or not there."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied_rl.files import new_folder, write_json

_TENSORS, _STATE = "tensors.safetensors", "state.json"
_OPTIMIZER = ("state", "param_groups")


class CheckpointStore:
    """Folders `step_000010` under one folder, the newest `keep` of them."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Write a checkpoint and drop the oldest ones."""
        path = self._directory / f"step_{step:06d}"
        self._directory.mkdir(parents=True, exist_ok=True)
        with new_folder(path) as folder:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(plain, folder / _TENSORS)
            digest = _digest_of_file(folder / _TENSORS)
            content = {"sha256": digest, "state_sha256": _digest(state), "step": step}
            write_json(folder / _STATE, {**content, "state": state})
        self._drop_superseded(step)
        return path

    def latest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and state of the newest undamaged checkpoint."""
        for path in reversed(self._steps()):
            try:
                data = json.loads((path / _STATE).read_text())
                if _digest_of_file(path / _TENSORS) != data["sha256"]:
                    raise ValueError("its tensors do not match their checksum")
                if _digest(data["state"]) != data["state_sha256"]:
                    raise ValueError("its state does not match its checksum")
                return load_file(path / _TENSORS), data["state"]
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                print(f"checkpoint {path} is damaged and skipped: {error}", file=sys.stderr)
        return None

    def clear(self) -> None:
        """Remove all checkpoints: the phase is over."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _drop_superseded(self, saved: int) -> None:
        # What is newer than the step just saved was too damaged to resume from; counted among the
        # newest, it would push out good checkpoints.
        steps = self._steps()
        good = [path for path in steps if _step_of(path) <= saved]
        keep = set(good[-self._keep :])
        for path in steps:
            if path not in keep:
                shutil.rmtree(path)
        for pattern in (".step_*.unfinished", ".step_*.replaced"):
            for leftover in self._directory.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)

    def _steps(self) -> list[Path]:
        found = (p for p in self._directory.glob("step_*") if p.name[len("step_") :].isdecimal())
        return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name[len("step_") :])


def _digest_of_file(path: Path) -> str:
    # Piece by piece: a checkpoint may be a large part of the memory.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def optimizer_to_state(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split an optimiser's `state_dict` into named tensors and JSON. Beside `state` and
    `param_groups` it may hold further tensors by name, under the name of what they belong to."""
    further = {name: entry for name, entry in state.items() if name not in _OPTIMIZER}
    tensors = {
        f"{index}/{name}": value
        for index, entry in [*state["state"].items(), *further.items()]
        for name, value in entry.items()
        if isinstance(value, Tensor)
    }
    numbers = {
        str(index): {n: v for n, v in entry.items() if not isinstance(v, Tensor)}
        for index, entry in state["state"].items()
    }
    return tensors, {"numbers": numbers, "param_groups": state["param_groups"]}


def optimizer_from_state(tensors: dict[str, Tensor], data: dict[str, Any]) -> dict[str, Any]:
    """The `state_dict` that `optimizer_to_state` split."""
    state: dict[int, dict[str, Any]] = {
        int(index): dict(numbers) for index, numbers in data["numbers"].items()
    }
    further: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        owner, _, key = name.partition("/")
        if owner.isdecimal():
            state[int(owner)][key] = value
        else:
            further.setdefault(owner, {})[key] = value
    groups = [
        {k: tuple(v) if k == "betas" else v for k, v in group.items()}
        for group in data["param_groups"]
    ]
    return {"state": state, "param_groups": groups, **further}


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix/`, without it."""
    start = f"{prefix}/"
    return {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under names that begin with `prefix/`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def generator_state(generator: torch.Generator) -> Tensor:
    """A generator's state as a tensor that can be saved."""
    return generator.get_state().clone()
