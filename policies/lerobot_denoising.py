"""What lerobot's flow models have in common: a prefix that is made once, and a velocity on it.

The weights and what is embedded are lerobot's own; the layers are run by `lerobot_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policies.lerobot_layers import Memory, Pair, View, block, hiding, normed, turns
from policies.lerobot_speed import compiled

if TYPE_CHECKING:
    from policies.lerobot_config import LerobotFlowConfig

TOKENS = "observation.language.tokens"


@dataclass(frozen=True)
class Prefix:
    """B observations as the vision-language model leaves them for the action expert."""

    pairs: tuple[Pair, ...]
    """Keys and values of each layer, in the type that they were computed in."""
    mask: Tensor
    """bool [B, L]: tokens that are real."""
    pooled: Tensor
    """float32 [B, width]: the mean of its outputs at the real tokens."""
    state: Tensor
    """float32 [B, S]: the state as the model sees it, padded."""

    def tensors(self) -> dict[str, Tensor]:
        """All of it as tensors whose first dimension is the row."""
        keys, values = zip(*self.pairs, strict=True)
        return {
            "keys": torch.stack(keys, dim=1),
            "values": torch.stack(values, dim=1),
            "mask": self.mask,
            "pooled": self.pooled,
            "state": self.state,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Prefix:
        """The prefix whose `tensors` these are, or rows of them."""
        pairs = zip(tensors["keys"].unbind(1), tensors["values"].unbind(1), strict=True)
        rest = (tensors[name] for name in ("mask", "pooled", "state"))
        return cls(tuple(pairs), *rest)


class Backbone:
    """One of lerobot's flow policies, which stays the owner of the weights."""

    def __init__(self, native: Any, options: LerobotFlowConfig) -> None:
        self.native, self.model = native, native.model
        config = native.config
        self.chunk_size: int = config.chunk_size
        self.max_action_dim: int = config.max_action_dim
        self.max_state_dim: int = config.max_state_dim
        self.feature_size: int = self.model.action_out_proj.in_features
        self.images = [key for key in config.image_features if ".empty_camera_" not in key]
        self.checkpointed = options.gradient_checkpointing
        self._rounds_prefix = options.dtype == "bfloat16"
        self._dtype: torch.dtype = getattr(torch, options.precision)
        self._compiled = compiled(_denoise, options.compile)

    @property
    def pooled_size(self) -> int:
        """Width of the vision-language model."""
        raise NotImplementedError

    def vision_language(self) -> list[nn.Module]:
        """All that the prefix is made with."""
        raise NotImplementedError

    def unused(self) -> list[nn.Module]:
        """What neither prefix keys and values nor the velocity depend on: the last layer of the
        vision-language model after its keys and values, and heads that speak words."""
        raise NotImplementedError

    def round_vision_language(self) -> None:
        """To bfloat16."""
        raise NotImplementedError

    def prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """What is made of a batch as the preprocessor leaves it, once for all denoising steps."""
        with _autocast(batch[TOKENS].device, self._rounds_prefix):
            return self._prefix(batch)

    def memory(self, prefix: Prefix) -> Memory:
        """What all denoising steps share; gradients flow into what the expert makes it with."""
        with _autocast(prefix.mask.device, self._rounds):
            return self._memory(prefix)

    def velocity(self, memory: Memory, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity at x_t [B, H, A] and time [B], and the features [B, H, F] it is read from, both
        float32."""
        with _autocast(x.device, self._rounds):
            features = self._compiled(self, memory, x, self._wave(time)).float()
        velocity: Tensor = self.model.action_out_proj(features)
        return velocity, features

    def tokens(self, memory: Memory, x: Tensor, wave: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the expert reads, [B, S, width], of x_t [B, H, A] and the time as a wave [B, width],
        and what its norms are conditioned on."""
        raise NotImplementedError

    def expert(self) -> Any:
        """The transformer that denoises."""
        raise NotImplementedError

    def crosses(self, number: int) -> bool:
        """Whether a layer of the expert attends to nothing but the prefix."""
        return False

    def imitation_times(self, batch: int, generator: torch.Generator) -> Tensor:
        """Times [B] as lerobot draws them to train this model."""
        device = generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        # lerobot takes no generator.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            times: Tensor = self.model.sample_time(batch, device)
        return times

    def _prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        raise NotImplementedError

    def _memory(self, prefix: Prefix) -> Memory:
        raise NotImplementedError

    @property
    def _rounds(self) -> bool:
        return self._dtype != torch.float32

    def _wave(self, time: Tensor) -> Tensor:
        from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding

        config, width = self.native.config, self.model.action_in_proj.out_features
        wave: Tensor = create_sinusoidal_pos_embedding(
            time, width, config.min_period, config.max_period, device=time.device
        )
        return wave.float()

    def _remade[T](self, make: Callable[..., T], *arguments: object) -> T:
        """What `make` gives; its activations are not kept if they can be computed again."""
        if not (self.checkpointed and torch.is_grad_enabled()):
            return make(*arguments)
        found: T = checkpoint(make, *arguments, use_reentrant=False, preserve_rng_state=False)
        return found

    def _view(self, mask: Tensor, positions: Tensor, frequencies: Tensor) -> View:
        """Of the expert's tokens at positions [B, S]; mask [B, S or 1, keys] is what they see."""
        return View(hiding(mask[:, None], self._dtype), *turns(positions, frequencies))


def _denoise(backbone: Backbone, memory: Memory, x: Tensor, wave: Tensor) -> Tensor:
    """The expert's outputs [B, H, F]. A plain function, so that a copy of a policy that compiles it
    runs its own weights."""
    tokens, condition = backbone.tokens(memory, x, wave)
    expert = backbone.expert()
    for number, (layer, pair) in enumerate(zip(expert.layers, memory.pairs, strict=True)):
        crosses = backbone.crosses(number)
        view = memory.cross if crosses and memory.cross else memory.view
        tokens, _ = block(layer, tokens, view, pair, condition, backbone.checkpointed, crosses)
    features, _ = normed(expert.norm, tokens, condition)
    return features[:, -x.shape[1] :]


def _autocast(device: torch.device, enabled: bool) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)
