"""Reading and writing checkpoints of lerobot: its own loading, but every failure is an error."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from embodied_rl.weights import misfit
from policies.checkpoints import BadCheckpoint, local_folder, pickled_in

CLASSES = {
    "lerobot_flow": {
        "pi0": ("lerobot.policies.pi0.modeling_pi0", "PI0Policy"),
        "pi05": ("lerobot.policies.pi05.modeling_pi05", "PI05Policy"),
        "smolvla": ("lerobot.policies.smolvla.modeling_smolvla", "SmolVLAPolicy"),
    },
    "lerobot_tokens": {
        "pi0_fast": ("lerobot.policies.pi0_fast.modeling_pi0_fast", "PI0FastPolicy"),
    },
}
"""By policy of ours: module and class of each type, as the checkpoint's config.json names it."""

VLM_FOLDER = "vlm"
"""In folders that we save: SmolVLA's configuration and processor of the vision-language model,
which lerobot looks up by name."""

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def resolve(path: str) -> Path:
    """The local folder of a checkpoint, downloaded if `path` names one on the Hub."""
    folder = local_folder(path, ["*.json", "*.safetensors", "*.model"])
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            pickled = pickled_in(folder)
            advice = (
                f"Pickled weights ({pickled}) are not read, because they can run code: convert "
                f"them with lerobot's own save_pretrained"
                if name == _WEIGHTS and pickled
                else "It must be as lerobot's save_pretrained writes it"
            )
            raise BadCheckpoint(f"the checkpoint {path} has no {name}. {advice}.")
    return folder


def type_of(folder: Path, policy: str) -> str:
    """Which of the types that a policy of ours knows a checkpoint holds, such as pi0."""
    try:
        kind = json.loads((folder / _CONFIG).read_text()).get("type")
    except ValueError as error:
        raise BadCheckpoint(f"{folder / _CONFIG} is not JSON: {error}") from None
    if kind not in CLASSES[policy]:
        others = [name for name, known in CLASSES.items() if kind in known]
        advice = f"; it is one for policy: {others[0]}" if others else ""
        raise BadCheckpoint(
            f"{folder / _CONFIG} has type {kind!r}; policy: {policy} knows "
            f"{', '.join(CLASSES[policy])}{advice}"
        )
    return str(kind)


def load_native(folder: Path, policy: str) -> Any:
    """lerobot's own policy on the CPU with the checkpoint's weights, all of them.

    Raises `BadCheckpoint` where lerobot would go on with random weights.
    """
    module, name = CLASSES[policy][type_of(folder, policy)]
    policy_class = getattr(importlib.import_module(module), name)
    from lerobot.configs import PreTrainedConfig

    config: Any = PreTrainedConfig.from_pretrained(folder)
    _require_supported(config, folder)
    said = io.StringIO()
    try:
        with _as_needed_here(config, folder), contextlib.redirect_stdout(said):
            # Not strict, because lerobot's pi policies would go on all the same: checked below.
            native = policy_class.from_pretrained(folder, config=config, strict=False)
    except Exception as error:
        raise BadCheckpoint(f"lerobot cannot load {folder}: {error}") from error
    _require_loaded(native, folder, said.getvalue())
    config.dtype = "float32"
    return native.eval()


@contextlib.contextmanager
def _as_needed_here(config: Any, folder: Path) -> Iterator[None]:
    """Load to the CPU in float32 without compiling; the configuration is as before afterwards."""
    wanted: dict[str, Any] = {"device": "cpu", "compile_model": False, "dtype": "float32"}
    if hasattr(config, "vlm_model_name"):
        # The checkpoint holds the whole model, so the one that it began with is not needed again.
        config.load_vlm_weights = False
        if (folder / VLM_FOLDER).is_dir():
            wanted["vlm_model_name"] = str(folder / VLM_FOLDER)
    before = {name: getattr(config, name) for name in wanted if hasattr(config, name)}
    for name in before:
        setattr(config, name, wanted[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _require_supported(config: Any, folder: Path) -> None:
    for name in ("use_relative_actions", "adapt_to_pi_aloha"):
        if getattr(config, name, False):
            raise BadCheckpoint(
                f"{folder / _CONFIG} has {name}=true: actions that depend on the state in this way "
                f"are not supported"
            )
    if not getattr(config, "use_cache", True):
        raise BadCheckpoint(f"{folder / _CONFIG} has use_cache=false, which cannot denoise")


def _require_loaded(native: nn.Module, folder: Path, said: str) -> None:
    """Every weight is in the file and nothing else is, in the right shapes."""
    path = folder / _WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}") from None
    stored = _names_here(native, shapes)
    held = native.state_dict(keep_vars=True)
    # Of tensors that share their memory only one is stored.
    there = {held[name].data_ptr() for name in stored if name in held}
    wanted = {
        name: tuple(tensor.shape)
        for name, tensor in held.items()
        if name in stored or tensor.data_ptr() not in there
    }
    problem = misfit(wanted, stored)
    if not problem:
        failed = [line for line in said.splitlines() if "ould not load state dict" in line]
        problem = failed[0] if failed else ""
    if problem:
        raise BadCheckpoint(f"{path} does not fit its {_CONFIG}: {problem}")


def _names_here(native: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The file's names as lerobot renames them on loading, with their shapes."""
    rename = getattr(native, "_fix_pytorch_state_dict_keys", None)
    if rename is None:
        return shapes
    hollow = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    found: dict[str, Any] = rename(hollow, native.config)
    return {
        name if name.startswith("model.") else f"model.{name}": tuple(tensor.shape)
        for name, tensor in found.items()
    }


def save_vlm_description(native: Any, folder: Path) -> None:
    """What SmolVLA looks up by name, so that our own loading needs no Hub."""
    whole = getattr(native.model, "vlm_with_expert", None)
    if whole is not None:
        whole.config.save_pretrained(folder / VLM_FOLDER)
        whole.processor.save_pretrained(folder / VLM_FOLDER)
