"""Reading and writing folders of OpenVLA's and OpenVLA-OFT's releases. Nothing in them is run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied_rl.files import write_json
from embodied_rl.weights import misfit
from policies.checkpoints import BadCheckpoint, local_folder, pickled_in
from policies.openvla_model import HeadSizes, OpenVLAModel

_CONFIG, _STATISTICS = "config.json", "dataset_statistics.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CARRIED = (
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Kept as they are; those that a folder has not are not needed."""

_PARTS = ("action_head", "proprio_projector")
_REFUSED_PARTS = {
    "noisy_action_projector": "its diffusion head is not supported; take one with L1 regression "
    "or with tokens",
    "vision_backbone": "its FiLM-conditioned vision (OFT+) is not supported; take one without FiLM",
}


@dataclass(frozen=True)
class Description:
    """What config.json says of the network."""

    text: dict[str, Any]
    """Sizes of the language model, in transformers' words."""
    timm_model_ids: list[str]
    act_layers: list[str | None]
    image_sizes: list[int]
    timm_model_args: list[dict[str, Any]]
    """Sizes other than those that the names of the vision transformers stand for; not in releases,
    which are of those sizes."""
    first_action_id: int
    num_action_tokens: int
    pad_id: int


@dataclass(frozen=True)
class Part:
    """Weights of OFT beside the model's, in a file of their own."""

    file: str
    """Its name without the ending, such as action_head--150000_checkpoint."""
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A folder, but for the model's weights."""

    folder: Path
    config: dict[str, Any]
    description: Description
    statistics: dict[str, Any]
    """Per data set, what its `action` and `proprio` look like."""
    files: dict[str, bytes]
    """Of the tokenizer and the image processor."""
    parts: dict[str, Part]

    def require_file(self, name: str) -> bytes:
        """The content of a file; raises BadCheckpoint if the folder has none of that name."""
        if name not in self.files:
            raise BadCheckpoint(
                f"the checkpoint {self.folder} has no {name}; download all its files"
            )
        return self.files[name]


def resolve(path: str) -> Path:
    """The local folder of a checkpoint, downloaded if `path` names one on the Hub."""
    return local_folder(path, ["*.json", "*.safetensors", "*.model", "*--*_checkpoint.*"])


def read(folder: Path) -> Checkpoint:
    """All but the model's weights. Raises BadCheckpoint naming what is missing or not supported."""
    config = _json(folder / _CONFIG)
    statistics = config.get("norm_stats") or {}
    if (folder / _STATISTICS).is_file():
        statistics = _json(folder / _STATISTICS)
    files = {name: (folder / name).read_bytes() for name in _CARRIED if (folder / name).is_file()}
    for name, reason in _REFUSED_PARTS.items():
        if found := sorted(folder.glob(f"{name}--*")):
            raise BadCheckpoint(f"{found[0]} belongs to another kind of policy: {reason}")
    parts = {name: part for name in _PARTS if (part := _part(folder, name))}
    return Checkpoint(folder, config, _describe(config, folder), statistics, files, parts)


def _describe(config: dict[str, Any], folder: Path) -> Description:
    where = folder / _CONFIG
    if config.get("model_type") != "openvla":
        raise BadCheckpoint(
            f"{where} has model_type {config.get('model_type')!r}; this policy reads 'openvla'"
        )
    needed = ("timm_model_ids", "image_sizes", "text_config", "pad_to_multiple_of", "pad_token_id")
    if missing := [name for name in needed if config.get(name) is None]:
        raise BadCheckpoint(f"{where} lacks {', '.join(missing)}")
    if not config.get("use_fused_vision_backbone") or len(config["timm_model_ids"]) != 2:
        raise BadCheckpoint(
            f"{where} is not of a model with two vision transformers "
            f"(use_fused_vision_backbone=true), which alone are supported"
        )
    text = config["text_config"]
    if text.get("model_type", "llama") != "llama":
        raise BadCheckpoint(
            f"{where} has a language model of type {text['model_type']!r}; only llama is supported"
        )
    count = config.get("n_action_bins", 256)
    return Description(
        text={key: value for key, value in text.items() if key != "model_type"},
        timm_model_ids=config["timm_model_ids"],
        act_layers=config.get("timm_override_act_layers") or [None, None],
        image_sizes=config["image_sizes"],
        timm_model_args=config.get("timm_model_args") or [{}, {}],
        first_action_id=text.get("vocab_size", 32000) - config["pad_to_multiple_of"] - count,
        num_action_tokens=count,
        pad_id=config["pad_token_id"],
    )


def load_model(checkpoint: Checkpoint, dtype: torch.dtype) -> OpenVLAModel:
    """The network on the CPU, with the checkpoint's weights, all of them and nothing else."""
    proprio, head = (checkpoint.parts.get(name) for name in ("proprio_projector", "action_head"))
    # Without memory at first: seven billion random numbers would take longer than reading the file.
    with torch.device("meta"):
        state_dim = None if proprio is None else proprio.weights["fc1.weight"].shape[1]
        model = OpenVLAModel(checkpoint.description, state_dim, _head_sizes(head))
    files = _weight_files(checkpoint.folder)
    found = _shapes(files) | {
        f"{name}.{key}": tuple(tensor.shape)
        for name, part in checkpoint.parts.items()
        for key, tensor in part.weights.items()
    }
    _require_equal(model, found, checkpoint.folder)
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    for name, part in checkpoint.parts.items():
        weights |= {f"{name}.{key}": tensor.to(dtype) for key, tensor in part.weights.items()}
    model.load_state_dict(weights, assign=True)
    model.restore_buffers()
    return model.eval()


def save(
    checkpoint: Checkpoint, weights: dict[str, Tensor], statistics: dict[str, Any], folder: Path
) -> None:
    """Write the folder as it was read, with other weights (by the names in the model)."""
    from huggingface_hub import save_torch_state_dict

    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    write_json(folder / _CONFIG, checkpoint.config | {"torch_dtype": dtype})
    write_json(folder / _STATISTICS, statistics)
    for name, content in checkpoint.files.items():
        (folder / name).write_bytes(content)
    rest = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    for name, part in checkpoint.parts.items():
        mine = {key: rest.pop(f"{name}.{key}") for key in part.weights}
        save_file(mine, folder / f"{part.file}.safetensors")
    save_torch_state_dict(rest, folder, max_shard_size="5GB")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        names = sorted(set(_json(folder / _INDEX).get("weight_map", {}).values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise BadCheckpoint(
                f"{folder / _INDEX} names {', '.join(missing)}, which the folder has not; download "
                f"it again"
            )
        return [folder / name for name in names]
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    pickled = pickled_in(folder)
    advice = (
        f". Pickled weights ({pickled}) are not read, because they can run code: take the "
        f"checkpoint's safetensors"
        if pickled
        else ""
    )
    raise BadCheckpoint(f"the checkpoint {folder} has neither {_WEIGHTS} nor {_INDEX}{advice}")


def _shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    found[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{path} cannot be read: {error}") from None
    return found


def _require_equal(model: OpenVLAModel, found: dict[str, tuple[int, ...]], folder: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if problem := misfit(wanted, found):
        raise BadCheckpoint(f"the weights in {folder} do not fit its {_CONFIG}: {problem}")


def _part(folder: Path, name: str) -> Part | None:
    found = sorted(folder.glob(f"{name}--*"))
    whole = [path for path in found if path.suffix == ".safetensors"]
    if not found:
        return None
    if not whole:
        path = found[0]
        raise BadCheckpoint(
            f"{path} is pickled, and such files are not read, because they can run code. If you "
            f'trust its origin, convert it: python -c "import torch; from safetensors.torch import '
            f"save_file; save_file(torch.load('{path}', weights_only=True), "
            f"'{path.with_suffix('.safetensors')}')\""
        )
    if len(whole) > 1:
        names = ", ".join(path.name for path in whole)
        raise BadCheckpoint(f"{folder} has several of one kind: {names}; keep one of them")
    try:
        loaded = load_file(whole[0])
    except SafetensorError as error:
        raise BadCheckpoint(f"{whole[0]} cannot be read: {error}") from None
    # Trained on several GPUs, every name begins like this.
    weights = {key.removeprefix("module."): tensor for key, tensor in loaded.items()}
    needed = "fc1.weight" if name == "proprio_projector" else "model.fc1.weight"
    if needed not in weights:
        raise BadCheckpoint(f"{whole[0]} is no {name} of OpenVLA-OFT: it has no {needed}")
    return Part(whole[0].stem, weights)


def _head_sizes(part: Part | None) -> HeadSizes | None:
    if part is None:
        return None
    weights = part.weights
    width, inputs = weights["model.fc1.weight"].shape
    blocks = {name.split(".")[2] for name in weights if name.startswith("model.mlp_resnet_blocks")}
    return inputs, width, len(blocks), len(weights.get("model.fc2.bias", ()))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadCheckpoint(
            f"there is no {path}; policy.path must be a folder of OpenVLA or OpenVLA-OFT as "
            f"downloaded from the Hugging Face Hub"
        )
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not JSON: {error}") from None
    return data
