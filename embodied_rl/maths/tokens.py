"""Action tokens: from values to bins and back, and the distribution that tokens are drawn from.

Rollout and training both call `token_log_probs`; two versions of the same temperature and cut-off
would give a ratio that is not 1 before the first update. Which tokens a cut-off keeps is decided
once, when they are drawn: with another set at every update, a token that was drawn could become
impossible, and its ratio 0 without any gradient to bring it back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def to_bins(value: Tensor, num_bins: int) -> Tensor:
    """Bin 0 .. num_bins - 1 of values in [-1, 1]; what lies outside goes to the outermost bins."""
    scaled = (value.float().clamp(-1.0, 1.0) + 1.0) / 2.0 * num_bins
    return scaled.long().clamp_max(num_bins - 1)


def from_bins(bin_number: Tensor, num_bins: int) -> Tensor:
    """The middle of a bin, in [-1, 1]."""
    return (bin_number.float() + 0.5) / num_bins * 2.0 - 1.0


def cosine_transform(length: int) -> Tensor:
    """The orthonormal DCT-II as a matrix, float64 [length, length]: row k holds the k-th cosine.
    Its transpose is its inverse."""
    time = torch.arange(length, dtype=torch.float64) + 0.5
    rows = torch.arange(length, dtype=torch.float64)[:, None]
    matrix = torch.cos(torch.pi * rows * time / length) * math.sqrt(2.0 / length)
    matrix[0] /= math.sqrt(2.0)
    return matrix


def token_log_probs(logits: Tensor, temperature: float = 1.0, kept: Tensor | None = None) -> Tensor:
    """Log-probabilities [..., V], in float32 whatever the logits' type.

    Temperature first; then all but the `kept` tokens (bool [..., V]) get -inf, and the rest is
    normalised again.
    """
    scaled = logits.float() / temperature
    if kept is not None:
        scaled = scaled.masked_fill(~kept, -torch.inf)
    return scaled.log_softmax(dim=-1)


@torch.no_grad()
def likeliest(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> Tensor | None:
    """Which tokens may be drawn, bool [..., V]; None if all may.

    The `top_k` likeliest, then of those the fewest that together have `top_p` (Holtzman et al.
    2020, arXiv:1904.09751), at this temperature. The likeliest token is always among them.
    """
    if top_k is None and top_p >= 1.0:
        return None
    scaled = logits.float() / temperature
    if top_k is not None and top_k < scaled.shape[-1]:
        least = scaled.topk(top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True)
        share = ordered.softmax(dim=-1)
        # A token is dropped once those before it already have the share.
        drop = share.cumsum(dim=-1) - share >= top_p
        dropped = torch.zeros_like(drop).scatter(-1, order, drop)
        scaled = scaled.masked_fill(dropped, -torch.inf)
    return scaled > -torch.inf


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy [...] of distributions [..., V]; tokens of probability 0 add nothing."""
    terms = torch.where(log_probs.isfinite(), log_probs, torch.zeros_like(log_probs))
    return -(log_probs.exp() * terms).sum(dim=-1)


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """A token [...] of each distribution [..., V], from uniform numbers [...] in [0, 1): the first
    whose cumulative probability exceeds the number."""
    cumulative = log_probs.exp().cumsum(dim=-1)
    # Rounding may leave the sum a little short of 1; the last possible token is then meant.
    bounded = torch.minimum(uniform, cumulative[..., -1] * (1.0 - 1e-6))
    return (cumulative <= bounded[..., None]).sum(dim=-1)
