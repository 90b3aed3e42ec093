"""Which weights of a lerobot policy learn, and low-rank adapters (LoRA, arXiv:2106.09685) in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import Tensor

from policies.checkpoints import BadCheckpoint
from policies.lora import add_adapters, repeatable

if TYPE_CHECKING:
    from policies.lerobot_backbones import Backbone
    from policies.lerobot_config import LerobotFlowConfig, LerobotTokensConfig
    from policies.lerobot_speech import Speech

_LANGUAGE = r".*\.language_model\.layers\..*"
"""Names of the language model's attention and feed-forward layers."""


def set_trainable(backbone: Backbone, options: LerobotFlowConfig) -> None:
    """Let exactly those weights learn that the options name and that something depends on."""
    if options.trainable == "lora":
        _adapt(backbone.native, options)
        return
    backbone.native.requires_grad_(True)
    idle = list(backbone.unused())
    if options.trainable == "expert":
        idle += backbone.vision_language()
    used = {id(p) for p in _tied(backbone)}
    for module in idle:
        for parameter in module.parameters():
            if options.trainable == "expert" or id(parameter) not in used:
                parameter.requires_grad_(False)


def set_spoken_trainable(speech: Speech, options: LerobotTokensConfig) -> None:
    """The same for a policy that speaks, which has no action expert."""
    if options.trainable == "all":
        speech.native.requires_grad_(True)
        return
    try:
        wanted = re.compile(options.lora_targets or _LANGUAGE)
        names = [name for name in speech.adaptable() if wanted.fullmatch(name)]
        if not names:
            raise ValueError("no linear layer has such a name, or only the word head")
        add_adapters(speech.native, names, options.lora_rank, options.lora_alpha)
    except (ValueError, re.error) as error:
        raise BadCheckpoint(f"policy.lora_targets={options.lora_targets}: {error}") from None


def _tied(backbone: Backbone) -> list[Tensor]:
    """The word embeddings, which the word head may share."""
    found: list[Tensor] = []
    for module in backbone.vision_language():
        embeddings = getattr(module, "get_input_embeddings", None)
        if embeddings is not None:
            found += list(embeddings().parameters())
    return found


def _adapt(native: Any, options: LerobotFlowConfig) -> None:
    """Put adapters into the modules, in place. They change nothing at first."""
    given: dict[str, Any] = {
        "method_type": "lora",
        "r": options.lora_rank,
        "lora_alpha": options.lora_alpha,
    }
    if options.lora_targets:
        given["target_modules"] = options.lora_targets
    kept = native.config.pretrained_path
    native.config.pretrained_path = kept or "given"
    try:
        with repeatable():
            native.wrap_with_peft(peft_cli_overrides=given)
    except ValueError as error:
        raise BadCheckpoint(f"policy.lora_targets={options.lora_targets}: {error}") from None
    finally:
        # Saved weights are merged, so that nothing needs to know of adapters.
        native.config.pretrained_path, native.config.use_peft = kept, False
