"""Choosing tokens: the one way in which all policies with action tokens draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from embodied_rl.maths import tokens

if TYPE_CHECKING:
    from policies.config import SamplingConfig


class Chosen(NamedTuple):
    """Action tokens with their log-probability, and which ones there were to choose from."""

    token: Tensor
    """int64 [...]."""
    score: Tensor
    """float32 [...]."""
    kept: Tensor | None
    """bool [..., V]; None if every token was."""


def choose(options: SamplingConfig, logits: Tensor, uniform: Tensor | None) -> Chosen:
    """Tokens [...] of logits [..., V]: drawn with the numbers [...], or the likeliest if there are
    none."""
    kept = tokens.likeliest(logits, options.temperature, options.top_k, options.top_p)
    log_probs = tokens.token_log_probs(logits, options.temperature, kept)
    token = log_probs.argmax(-1) if uniform is None else tokens.draw(log_probs, uniform)
    return Chosen(token, log_probs.gather(-1, token[..., None])[..., 0], kept)


def together(parts: Sequence[Chosen]) -> Chosen:
    """Tokens [B] that were chosen one after the other, as [B, P]."""
    kept = [part.kept for part in parts if part.kept is not None]
    return Chosen(
        torch.stack([part.token for part in parts], 1),
        torch.stack([part.score for part in parts], 1),
        torch.stack(kept, 1) if kept else None,
    )
