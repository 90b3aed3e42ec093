"""Low-rank adapters (LoRA, arXiv:2106.09685) inside any module, by peft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def add_adapters(module: nn.Module, names: Sequence[str], rank: int, alpha: float) -> None:
    """Put float32 adapters into the linear layers of these names. At first they change nothing, and
    nothing but them learns."""
    from peft import LoraConfig, inject_adapter_in_model

    module.requires_grad_(False)
    make: Any = LoraConfig
    options = make(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=[*names])
    with repeatable():
        inject_adapter_in_model(options, module)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()


@contextmanager
def repeatable() -> Iterator[None]:
    """The half of an adapter that begins at random is the same however often a folder is loaded."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


@torch.no_grad()
def merged_weights(module: nn.Module) -> dict[str, Tensor]:
    """A module's state by its names without adapters, which are added to the weights that they
    change. The module stays as it is."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in module.state_dict().items()
        if ".lora_" not in name
    }
    for name, layer in module.named_modules():
        if isinstance(layer, BaseTunerLayer):
            weight, change = merged[f"{name}.weight"], _change(layer)
            merged[f"{name}.weight"] = (weight.float() + change).to(weight.dtype)
    return merged


def _change(layer: Any) -> Tensor:
    change: Tensor = layer.get_delta_weight("default")
    return change
