"""What lerobot's flow models have in common: a prefix that is made once, and a velocity on it.

Both are lerobot's own: the prefix is what its `sample_actions` begins with, the velocity its
`denoise_step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_IMAGES, _TOKENS = "observation.images.", "observation.language.tokens"
_TOKEN_MASK = "observation.language.attention_mask"


@dataclass(frozen=True)
class Prefix:
    """B observations as the vision-language model leaves them for the action expert."""

    cache: Any
    """Its keys and values, a `DynamicCache` of transformers. Denoising must leave it as it was."""
    mask: Tensor
    """bool [B, L]: tokens that are real."""
    pooled: Tensor
    """float32 [B, width]: the mean of its outputs at the real tokens."""
    state: Tensor
    """float32 [B, S]: the state as the model sees it, padded."""

    def repeat(self, times: int) -> Prefix:
        """Every row this many times in succession."""
        if times == 1:
            return self
        pairs = [(k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)) for k, v in self]
        rest = (t.repeat_interleave(times, 0) for t in (self.mask, self.pooled, self.state))
        return Prefix(_cache_of(pairs), *rest)

    def __iter__(self) -> Any:
        """Keys and values [B, heads, L, D] of each layer."""
        return ((layer.keys, layer.values) for layer in self.cache.layers)

    def tensors(self) -> dict[str, Tensor]:
        """All of it as tensors whose first dimension is the row."""
        keys, values = zip(*self, strict=True)
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
        return cls(_cache_of(list(pairs)), *rest)


def _cache_of(pairs: list[tuple[Tensor, Tensor]]) -> Any:
    from transformers import DynamicCache

    # The third entry is a sliding window, which these models do not have.
    return DynamicCache(tuple((keys, values, None) for keys, values in pairs))


class Backbone:
    """One of lerobot's flow policies, which stays the owner of the weights."""

    def __init__(self, native: Any) -> None:
        self.native, self.model = native, native.model
        config = native.config
        self.chunk_size: int = config.chunk_size
        self.max_action_dim: int = config.max_action_dim
        self.max_state_dim: int = config.max_state_dim
        self.feature_size: int = self.model.action_out_proj.in_features
        self.images = [key for key in config.image_features if ".empty_camera_" not in key]

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

    def prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """What is made of a batch as the preprocessor leaves it, once for all denoising steps."""
        raise NotImplementedError

    def velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity at x_t [B, H, A] and time [B], and the features [B, H, F] it is read from, both
        float32."""
        found: list[Tensor] = []
        hook = self.model.action_out_proj.register_forward_pre_hook(
            lambda _, inputs: found.append(inputs[0])
        )
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(hook.remove)
            velocity = self.model.denoise_step(
                prefix_pad_masks=prefix.mask,
                past_key_values=prefix.cache,
                x_t=x,
                timestep=time,
                **self._more(prefix),
            )
        return velocity.float(), found[0].float()

    def _more(self, prefix: Prefix) -> dict[str, Tensor]:
        return {}

    def imitation_times(self, batch: int, generator: torch.Generator) -> Tensor:
        """Times [B] as lerobot draws them to train this model."""
        device = generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        # lerobot takes no generator.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            times: Tensor = self.model.sample_time(batch, device)
        return times


class PiBackbone(Backbone):
    """pi0 and pi0.5: PaliGemma with an action expert of Gemma."""

    @property
    def pooled_size(self) -> int:
        """Width of the vision-language model."""
        size: int = self._language.config.hidden_size
        return size

    @property
    def _language(self) -> Any:
        return self.model.paligemma_with_expert.paligemma.model.language_model

    def vision_language(self) -> list[nn.Module]:
        """PaliGemma."""
        return [self.model.paligemma_with_expert.paligemma]

    def unused(self) -> list[nn.Module]:
        """Both word heads, and what follows the last keys and values."""
        both = self.model.paligemma_with_expert
        last = self._language.layers[-1]
        heads = [both.gemma_expert.lm_head, both.paligemma.lm_head]
        return [*heads, self._language.norm, *_after_keys_and_values(last)]

    def prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """Images and words through PaliGemma."""
        from lerobot.policies.common.vla_utils import (
            make_att_2d_masks,
            pad_vector,
            prepare_attention_masks_4d,
        )

        images, image_masks = self.native._preprocess_images(dict(batch))
        embedded, real, blocks = self.model.embed_prefix(
            images, image_masks, batch[_TOKENS], batch[_TOKEN_MASK]
        )
        self._language.config._attn_implementation = "eager"
        weights = self._language.layers[0].self_attn.q_proj.weight
        (outputs, _), cache = self.model.paligemma_with_expert.forward(
            attention_mask=prepare_attention_masks_4d(make_att_2d_masks(real, blocks)),
            position_ids=torch.cumsum(real, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded.to(weights.dtype), None],
            use_cache=True,
        )
        state = pad_vector(batch["observation.state"], self.max_state_dim)
        return _finished(cache, real, outputs, state)

    def _more(self, prefix: Prefix) -> dict[str, Tensor]:
        # pi0.5 reads the state as words.
        return {"state": prefix.state} if self.native.name == "pi0" else {}

    def round_vision_language(self) -> None:
        """To bfloat16, but for what lerobot keeps in float32."""
        both = self.model.paligemma_with_expert
        both.to_bfloat16_for_selected_params("bfloat16")
        both.gemma_expert.float()


class SmolBackbone(Backbone):
    """SmolVLA: the first layers of SmolVLM with an expert that attends to them."""

    @property
    def pooled_size(self) -> int:
        """Width of the vision-language model."""
        size: int = self.model.vlm_with_expert.config.text_config.hidden_size
        return size

    def vision_language(self) -> list[nn.Module]:
        """SmolVLM, and the projection of the state, which is one of its tokens."""
        return [self.model.vlm_with_expert.vlm, self.model.state_proj]

    def unused(self) -> list[nn.Module]:
        """The word head, and what follows the last keys and values."""
        vlm = self.model.vlm_with_expert.vlm
        text = vlm.model.text_model
        return [vlm.lm_head, text.norm, *_after_keys_and_values(text.layers[-1])]

    def prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """Images, words and the state through SmolVLM."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        images, image_masks = self.native.prepare_images(dict(batch))
        state = self.native.prepare_state(batch)
        embedded, real, blocks = self.model.embed_prefix(
            images, image_masks, batch[_TOKENS], batch[_TOKEN_MASK], state=state
        )
        (outputs, _), cache = self.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(real, blocks),
            position_ids=torch.cumsum(real, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return _finished(cache, real, outputs, state)

    def round_vision_language(self) -> None:
        """To bfloat16, as lerobot does when it begins with a pretrained SmolVLM."""
        self.model.vlm_with_expert.vlm.to(torch.bfloat16)


def backbone_of(native: Any) -> PiBackbone | SmolBackbone:
    """The backbone that fits a policy of lerobot."""
    return SmolBackbone(native) if native.name == "smolvla" else PiBackbone(native)


def _after_keys_and_values(layer: Any) -> list[nn.Module]:
    """What of a transformer layer only its output depends on."""
    attention = layer.self_attn
    return [attention.q_proj, attention.o_proj, layer.post_attention_layernorm, layer.mlp]


def _finished(cache: Any, real: Tensor, outputs: Tensor, state: Tensor) -> Prefix:
    """In float32, which the expert computes in."""
    weight = real[..., None].float()
    pooled = (outputs.float() * weight).sum(1) / weight.sum(1)
    if cache.layers[0].keys.dtype != torch.float32:
        cache = _cache_of([(layer.keys.float(), layer.values.float()) for layer in cache.layers])
    return Prefix(cache, real, pooled, state)
