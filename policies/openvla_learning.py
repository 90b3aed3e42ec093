"""What of OpenVLA's network learns, and whether it keeps activations for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from policies.lora import add_adapters

if TYPE_CHECKING:
    from policies.openvla_config import OpenVLACheckpointConfig
    from policies.openvla_model import OpenVLAModel


def choose_what_learns(model: OpenVLAModel, config: OpenVLACheckpointConfig) -> None:
    """Let exactly those weights learn that the options name and that are used; adapters are put
    in where they are asked for."""
    if config.gradient_checkpointing:
        model.checkpoint_vision()
    idle = [*model.idle()]
    if config.freeze_vision:
        idle.append(model.vision_backbone)
    left_out = {id(part) for module in idle for part in module.modules()}
    if config.trainable == "all":
        model.requires_grad_(True)
        for module in idle:
            module.requires_grad_(False)
        return
    left_out.add(id(model.language_model.lm_head))
    # What OFT adds is small, and is not adapted but learns itself.
    added = [m for m in (model.proprio_projector, model.action_head) if m is not None]
    left_out |= {id(part) for module in added for part in module.modules()}
    names = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and id(part) not in left_out
    ]
    add_adapters(model, names, config.lora_rank, config.lora_alpha)
    for module in added:
        module.requires_grad_(True)
