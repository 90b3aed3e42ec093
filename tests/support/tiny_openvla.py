"""Folders in the layout of OpenVLA's releases: the real architecture, random and tiny.

Ids are those of the release, so that the vocabulary is as large as there.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from policies.openvla_checkpoint import Description
from policies.openvla_model import ActionHead, OpenVLAModel, ProprioProjector

SIZE = 28
"""Side of the images: 2 x 2 patches."""

MASK = [True] * 6 + [False]
"""The gripper is not scaled."""


def statistics(action_dim: int = 7, state_dim: int = 8, width: float = 0.5) -> dict[str, Any]:
    """What a data set says of actions and states."""
    mask = (MASK + [True] * action_dim)[:action_dim]
    return {
        "action": {"q01": [-width] * action_dim, "q99": [width] * action_dim, "mask": mask},
        "proprio": {"q01": [-2.0] * state_dim, "q99": [2.0] * state_dim},
        "num_transitions": 1,
        "num_trajectories": 1,
    }


def config_json(norm_stats: dict[str, Any] | None) -> dict[str, Any]:
    """config.json of openvla-7b, with other sizes."""
    vit = {"embed_dim": 32, "num_heads": 2}
    return {
        "arch_specifier": "no-align+fused-gelu-mlp",
        "architectures": ["OpenVLAForActionPrediction"],
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [SIZE, SIZE],
        "llm_backbone_id": "llama2-7b-pure",
        "llm_max_length": 2048,
        "model_type": "openvla",
        "n_action_bins": 256,
        "norm_stats": norm_stats,
        "output_projector_states": False,
        "pad_to_multiple_of": 64,
        "pad_token_id": 32000,
        "text_config": {
            "model_type": "llama",
            "pad_token_id": 32000,
            "torch_dtype": "float32",
            "vocab_size": 32064,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "timm_model_ids": [
            "vit_large_patch14_reg4_dinov2.lvd142m",
            "vit_so400m_patch14_siglip_224",
        ],
        "timm_model_args": [vit | {"depth": 3}, vit | {"depth": 3, "mlp_ratio": 2.0}],
        "timm_override_act_layers": [None, None],
        "torch_dtype": "float32",
        "transformers_version": "4.40.1",
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
    }


def preprocessor_json() -> dict[str, Any]:
    """preprocessor_config.json of openvla-7b, with another image size."""
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, SIZE, SIZE], [3, SIZE, SIZE]],
        "interpolations": ["bicubic", "bicubic"],
        "means": [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]],
        "processor_class": "PrismaticProcessor",
        "stds": [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]],
        "use_fused_vision_backbone": True,
    }


def description_of(config: dict[str, Any]) -> Description:
    """Of a tiny model, or of any other config.json."""
    return Description(
        text={key: value for key, value in config["text_config"].items() if key != "model_type"},
        timm_model_ids=config["timm_model_ids"],
        act_layers=[None, None],
        image_sizes=config["image_sizes"],
        timm_model_args=config.get("timm_model_args", [{}, {}]),
        first_action_id=31744,
        num_action_tokens=256,
        pad_id=32000,
    )


def write_tokenizer(folder: Path) -> None:
    """A small byte-level spelling that begins sentences as Llama's does."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["In: What action should the robot take to pick up the cube?\nOut:"] * 4, trainer=trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))


def write_openvla(
    folder: Path,
    *,
    norm_stats: dict[str, Any] | None = None,
    shards: int = 1,
    state_dim: int | None = None,
    head_for: int | None = None,
    seed: int = 0,
) -> Path:
    """A checkpoint with random weights that make it see and decide differently from image to image.

    With `state_dim` it has OFT's projector of the state, with `head_for` (action dimensions) OFT's
    regression head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_json({"tiny": statistics()} if norm_stats is None else norm_stats)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_json()))
    (folder / "modeling_prismatic.py").write_text("raise RuntimeError('never run')\n")
    write_tokenizer(folder)
    torch.manual_seed(seed)
    model = OpenVLAModel(description_of(config), None, None)
    weights = {name: lively(name, tensor) for name, tensor in model.state_dict().items()}
    _write_weights(folder, weights, shards)
    if state_dim is not None:
        projector = ProprioProjector(state_dim, 32).state_dict()
        save_file(projector, folder / "proprio_projector--100_checkpoint.safetensors")
    if head_for is not None:
        head = {
            f"module.{name}": tensor
            for name, tensor in ActionHead(32 * head_for, 32, 2, head_for).state_dict().items()
        }
        save_file(head, folder / "action_head--100_checkpoint.safetensors")
    return folder


def lively(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Weights of trained size: new ones are so small that nothing would depend on anything."""
    if tensor.ndim >= 2 and "lm_head" not in name:
        inputs = tensor[0].numel() if "embed" not in name else 1
        return torch.randn_like(tensor) / math.sqrt(inputs)
    if "lm_head" in name:
        return torch.randn_like(tensor) * 0.3
    if "scale_factor" in name:
        return torch.full_like(tensor, 0.5)
    return tensor


def _write_weights(folder: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    names = sorted(weights)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = {name: weights[name] for name in names[number::shards]}
        save_file(mine, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(mine, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
