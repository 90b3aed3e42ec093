"""The transformer layers of lerobot's flow models, run by ourselves: the weights stay lerobot's.

lerobot's own loop makes masks and positions anew and copies all keys and values in every denoising
step. Here they are made once for all steps, and attention is PyTorch's fused one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

type Pair = tuple[Tensor, Tensor]
"""Keys and values, each [B, heads, L, D]."""


class View(NamedTuple):
    """Where S tokens stand, and what they attend to."""

    mask: Tensor
    """Added to the scores, [B, 1, 1 or S, keys]: 0, or almost -infinity where nothing is seen."""
    cos: Tensor
    """Of the angles that positions turn queries and keys by, float32 [B, 1, S, D / 2]."""
    sin: Tensor

    def repeat(self, times: int) -> View:
        """Every row this many times in succession."""
        return View(*(tensor.repeat_interleave(times, 0) for tensor in self))


class Memory(NamedTuple):
    """All that the denoising steps of B observations share."""

    pairs: tuple[Pair, ...]
    """What each layer of the action expert attends to, besides its own tokens."""
    view: View
    """Of layers that also attend to their own tokens."""
    cross: View | None
    """Of layers that attend to nothing but `pairs`."""
    first: Tensor | None
    """A token [B, 1, width] that stands before the actions."""

    def repeat(self, times: int) -> Memory:
        """Every row this many times in succession."""
        if times == 1:
            return self
        pairs = tuple(
            (k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)) for k, v in self.pairs
        )
        cross = self.cross and self.cross.repeat(times)
        first = None if self.first is None else self.first.repeat_interleave(times, 0)
        return Memory(pairs, self.view.repeat(times), cross, first)


def hiding(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores so that only keys where `seen` is true count."""
    # Finite, because a row of padding that sees nothing must not become NaN.
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, torch.finfo(dtype).min
    )


def turns(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, S, D / 2] of positions [B, S] times frequencies [D / 2]."""
    angles = positions[:, None, :, None].float() * frequencies.float()
    return angles.cos(), angles.sin()


def turned(x: Tensor, view: View) -> Tensor:
    """Queries or keys [B, heads, S, D] with their positions in them (arXiv:2104.09864)."""
    low, high = x.chunk(2, dim=-1)
    both = torch.cat([low * view.cos - high * view.sin, high * view.cos + low * view.sin], dim=-1)
    return both.to(x.dtype)


def heads_of(attention: Any, x: Tensor) -> Tensor:
    """[B, L, heads * D] as [B, heads, L, D]."""
    return x.view(*x.shape[:2], -1, attention.head_dim).transpose(1, 2)


def run(
    layers: Sequence[Any],
    tokens: Tensor,
    view: View,
    condition: Tensor | None = None,
    checkpointed: bool = False,
) -> tuple[Tensor, list[Pair]]:
    """Tokens [B, S, width] through layers that attend to those tokens alone; also the keys and
    values of each layer."""
    pairs = []
    for layer in layers:
        tokens, pair = block(layer, tokens, view, None, condition, checkpointed)
        pairs.append(pair)
    return tokens, pairs


def block(
    layer: Any,
    tokens: Tensor,
    view: View,
    memory: Pair | None,
    condition: Tensor | None,
    checkpointed: bool,
    crosses: bool = False,
) -> tuple[Tensor, Pair]:
    """One layer on tokens [B, S, width], which attend to the memory and, unless the layer crosses
    over, to each other; also the keys and values of the tokens, or the memory itself.

    Checkpointed, its activations are computed again for the backward pass instead of kept.
    """
    if checkpointed and torch.is_grad_enabled():
        found: tuple[Tensor, Pair] = checkpoint(
            _block,
            layer,
            tokens,
            view,
            memory,
            condition,
            crosses,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return found
    return _block(layer, tokens, view, memory, condition, crosses)


def _block(
    layer: Any,
    tokens: Tensor,
    view: View,
    memory: Pair | None,
    condition: Tensor | None,
    crosses: bool,
) -> tuple[Tensor, Pair]:
    attention = layer.self_attn
    seen, gate = normed(layer.input_layernorm, tokens, condition)
    query = turned(heads_of(attention, attention.q_proj(seen)), view)
    if crosses:
        assert memory is not None
        own = both = memory
    else:
        keys = turned(heads_of(attention, attention.k_proj(seen)), view)
        own = both = (keys, heads_of(attention, attention.v_proj(seen)))
        if memory is not None:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(memory, own, strict=True))
            both = (keys, values)
    mixed = attention.o_proj(attend(query, both, view.mask))
    tokens = _added(tokens, mixed, gate)
    seen, gate = normed(layer.post_attention_layernorm, tokens, condition)
    return _added(tokens, layer.mlp(seen), gate), own


def attend(query: Tensor, pair: Pair, mask: Tensor) -> Tensor:
    """[B, S, heads * D] of queries [B, heads, S, D]; keys and values may have fewer heads, each for
    several in succession."""
    keys, values = (_shared(tensor, query.shape[1]) for tensor in pair)
    found = scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=1.0 / math.sqrt(query.shape[-1])
    )
    return found.transpose(1, 2).flatten(2)


def _shared(x: Tensor, heads: int) -> Tensor:
    batch, own, length, size = x.shape
    each = x[:, :, None].expand(batch, own, heads // own, length, size)
    # Of a single head this is no copy.
    return each[:, 0] if own == 1 else each.reshape(batch, heads, length, size)


def normed(norm: Any, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x normalised, and the gate that a conditional norm gives for what is made of it."""
    found = norm(x) if condition is None else norm(x, cond=condition)
    return found if isinstance(found, tuple) else (found, None)


def _added(x: Tensor, change: Tensor, gate: Tensor | None) -> Tensor:
    return x + change if gate is None else x + change * gate
