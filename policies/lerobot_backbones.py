"""lerobot's flow models: how each makes its prefix, and what its action expert reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policies.lerobot_denoising import TOKENS, Backbone, Prefix
from policies.lerobot_layers import Memory, Pair, View, hiding, normed, run, turns

if TYPE_CHECKING:
    from policies.lerobot_config import LerobotFlowConfig

_TOKEN_MASK = "observation.language.attention_mask"


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

    def round_vision_language(self) -> None:
        """To bfloat16, but for what lerobot keeps in float32."""
        both = self.model.paligemma_with_expert
        both.to_bfloat16_for_selected_params("bfloat16")
        both.gemma_expert.float()

    def expert(self) -> Any:
        """Gemma."""
        return self.model.paligemma_with_expert.gemma_expert.model

    def tokens(self, memory: Memory, x: Tensor, wave: Tensor) -> tuple[Tensor, Tensor | None]:
        """The state and the actions with the time in them (pi0), or the actions, with the time as
        condition (pi0.5)."""
        actions, model = self.model.action_in_proj(x), self.model
        if memory.first is None:
            silu = nn.functional.silu
            return actions, silu(model.time_mlp_out(silu(model.time_mlp_in(wave))))
        tokens = _with_time(model, actions, wave)
        return torch.cat([memory.first.to(tokens.dtype), tokens], dim=1), None

    def _prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """Images and words through PaliGemma; real tokens see all real tokens."""
        from lerobot.policies.common.vla_utils import pad_vector

        images, present = self.native._preprocess_images(dict(batch))
        both, language = self.model.paligemma_with_expert, self._language
        patches = self._remade(both.embed_image, torch.cat(images)).chunk(len(images))
        words = both.embed_language_tokens(batch[TOKENS])
        shown = [there[:, None].expand(-1, patches[0].shape[1]) for there in present]
        real = torch.cat([*shown, batch[_TOKEN_MASK]], dim=1)
        dtype = language.layers[0].self_attn.q_proj.weight.dtype
        tokens = torch.cat([*patches, words], dim=1).to(dtype)
        where = turns(torch.cumsum(real, dim=1) - 1, language.rotary_emb.inv_freq)
        view = View(hiding(real[:, None, None], dtype), *where)
        tokens, pairs = run(language.layers, tokens, view, checkpointed=self.checkpointed)
        outputs, _ = normed(language.norm, tokens, None)
        state = pad_vector(batch["observation.state"], self.max_state_dim)
        return Prefix(tuple(pairs), real, _pooled(outputs, real), state)

    def _memory(self, prefix: Prefix) -> Memory:
        # pi0.5 reads the state as words.
        first = None
        if self.native.name == "pi0":
            first = self.model.state_proj(prefix.state)[:, None]
        before, real = int(first is not None), prefix.mask
        own = torch.arange(self.chunk_size + before, device=real.device)
        # The state does not see the actions; they see it and one another.
        seen = (own[None] < before) | (own[:, None] >= before)
        mask = torch.cat([_to_all(real, len(own)), _for_all(seen, len(real))], dim=2)
        positions = real.sum(dim=1, keepdim=True) + own
        view = self._view(mask, positions, self.expert().rotary_emb.inv_freq)
        pairs = tuple((k.to(self._dtype), v.to(self._dtype)) for k, v in prefix.pairs)
        return Memory(pairs, view, None, first)


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

    def round_vision_language(self) -> None:
        """To bfloat16, as lerobot does when it begins with a pretrained SmolVLM."""
        self.model.vlm_with_expert.vlm.to(torch.bfloat16)

    def expert(self) -> Any:
        """A narrower copy of SmolVLM's language model."""
        return self.model.vlm_with_expert.lm_expert

    def crosses(self, number: int) -> bool:
        """Most layers do, where the checkpoint has cross-attention."""
        both = self.model.vlm_with_expert
        every = both.self_attn_every_n_layers
        own = every > 0 and (number * self._stride) % every == 0
        return "cross" in both.attention_mode and not own

    def tokens(self, memory: Memory, x: Tensor, wave: Tensor) -> tuple[Tensor, None]:
        """The actions with the time in them."""
        return _with_time(self.model, self.model.action_in_proj(x), wave), None

    @property
    def _stride(self) -> int:
        """Layers of SmolVLM to one of the expert."""
        both = self.model.vlm_with_expert
        stride: int = max(1, both.num_vlm_layers // both.num_expert_layers)
        return stride

    def _frequencies(self, device: torch.device) -> Tensor:
        size: int = self.model.vlm_with_expert.config.text_config.head_dim
        share = torch.arange(size // 2, dtype=torch.float32, device=device) * (2.0 / size)
        return 10_000.0**-share

    def _prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """Images, words and the state through SmolVLM."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        images, present = self.native.prepare_images(dict(batch))
        state = self.native.prepare_state(batch)
        embedded, real, blocks = self._remade(
            self.model.embed_prefix, images, present, batch[TOKENS], batch[_TOKEN_MASK], state
        )
        text = self.model.vlm_with_expert.vlm.model.text_model
        dtype = text.layers[0].self_attn.q_proj.weight.dtype
        mask = hiding(make_att_2d_masks(real, blocks)[:, None], dtype)
        view = View(mask, *turns(torch.cumsum(real, 1) - 1, self._frequencies(real.device)))
        tokens, pairs = run(text.layers, embedded.to(dtype), view, checkpointed=self.checkpointed)
        return Prefix(tuple(pairs), real, _pooled(text.norm(tokens), real), state)

    def _memory(self, prefix: Prefix) -> Memory:
        real, frequencies = prefix.mask, self._frequencies(prefix.mask.device)
        own = torch.arange(self.chunk_size, device=real.device)
        # Actions see themselves and earlier ones.
        seen = own[None] <= own[:, None]
        mask = torch.cat([_to_all(real, len(own)), _for_all(seen, len(real))], dim=2)
        view = self._view(mask, real.sum(dim=1, keepdim=True) + own, frequencies)
        cross = self._view(real[:, None], own.expand(len(real), -1), frequencies)
        given = prefix.pairs[:: self._stride]
        pairs = tuple(
            self._projected(layer, pair) if self.crosses(number) else pair
            for number, (layer, pair) in enumerate(zip(self.expert().layers, given, strict=True))
        )
        pairs = tuple((k.to(self._dtype), v.to(self._dtype)) for k, v in pairs)
        return Memory(pairs, view, cross, None)

    def _projected(self, layer: Any, pair: Pair) -> Pair:
        """Keys and values of the prefix as a layer that crosses over reads them."""
        attention = layer.self_attn

        def read(projection: Any, x: Tensor) -> Tensor:
            joined = x.transpose(1, 2).flatten(2).to(projection.weight.dtype)
            found: Tensor = projection(joined)
            return found.view(*joined.shape[:2], -1, attention.head_dim).transpose(1, 2)

        return read(attention.k_proj, pair[0]), read(attention.v_proj, pair[1])


def backbone_of(native: Any, options: LerobotFlowConfig) -> PiBackbone | SmolBackbone:
    """The backbone that fits a policy of lerobot."""
    kind = SmolBackbone if native.name == "smolvla" else PiBackbone
    return kind(native, options)


def _with_time(model: Any, actions: Tensor, wave: Tensor) -> Tensor:
    """Embedded actions [B, H, width] with the time in them."""
    wave = wave[:, None].to(actions.dtype).expand_as(actions)
    mixed = model.action_time_mlp_in(torch.cat([actions, wave], dim=2))
    tokens: Tensor = model.action_time_mlp_out(nn.functional.silu(mixed))
    return tokens


def _to_all(real: Tensor, count: int) -> Tensor:
    """[B, L] as [B, count, L]."""
    return real[:, None].expand(-1, count, -1)


def _for_all(seen: Tensor, batch: int) -> Tensor:
    """[S, S] as [B, S, S]."""
    return seen.expand(batch, -1, -1)


def _after_keys_and_values(layer: Any) -> list[nn.Module]:
    """What of a transformer layer only its output depends on."""
    attention = layer.self_attn
    return [attention.q_proj, attention.o_proj, layer.post_attention_layernorm, layer.mlp]


def _pooled(outputs: Tensor, real: Tensor) -> Tensor:
    weight = real[..., None].float()
    return (outputs.float() * weight).sum(1) / weight.sum(1)
