"""Losses of policy-gradient algorithms. Masks act before `exp`, so that neither a loss nor its
gradient can see a masked overflow or NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

type RatioLevel = Literal["chunk", "step", "token"]

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are cut here: exp(20) is far past any clip, and exp(90) is infinite in float32."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss with what its training curve should show."""

    loss: Tensor
    approx_kl: Tensor
    """Estimate of KL(old || new): mean of r - 1 - log r (Schulman 2020, the k3 estimator)."""
    clip_fraction: Tensor
    """Share of ratios outside the clip range."""


def executed_mask(executed: Tensor, num_steps: int) -> Tensor:
    """bool [N, H]: which of H control steps of each chunk were executed, from counts [N]."""
    return torch.arange(num_steps, device=executed.device) < executed[:, None]


def token_mask(token_step: Tensor, executed: Tensor) -> Tensor:
    """bool [N, P]: which tokens belong to executed control steps, from the step of each token
    [N, P] (-1 for padding) and counts [N]."""
    return (token_step >= 0) & (token_step < executed[:, None])


def log_ratio(new: Tensor, old: Tensor, mask: Tensor, level: RatioLevel) -> tuple[Tensor, Tensor]:
    """Log of the probability ratio new / old and the mask that belongs to it.

    `new`, `old` and `mask` are [N, H] per control step or, at level `token`, [N, P] per token.
    Level `chunk` adds up the masked steps of a chunk to the exact joint log-ratio [N]; the others
    keep the shape. Masked entries are 0.
    """
    parts = torch.where(mask, new - old, torch.zeros_like(new))
    if level == "chunk":
        return parts.sum(dim=1), mask.any(dim=1)
    return parts, mask


def per_ratio(weight: Tensor, change: Tensor) -> Tensor:
    """Weights [N], one per chunk, for each of its ratios [N], [N, H] or [N, P]."""
    return weight.view(-1, *(1 for _ in change.shape[1:])).expand_as(change)


def clipped_policy_loss(
    ratio_log: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7), as a loss.

    All tensors have one shape, [N], [N, H] or [N, P]; the mean is over entries where `mask` is
    true. The ratio is clipped to 1 - clip .. 1 + clip_high ("clip-higher" of DAPO,
    arXiv:2503.14476, eq. 10; `clip` where it is None). With `dual_clip` c > 1, the gain of a
    negative advantage is not less than c times the advantage (Ye et al. 2020, arXiv:1912.09729,
    eq. 5).
    """
    high = clip if clip_high is None else clip_high
    count = mask.sum().clamp_min(1)
    bounded = torch.where(mask, ratio_log, torch.zeros_like(ratio_log))
    bounded = bounded.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = bounded.exp()
    weight = torch.where(mask, advantage, torch.zeros_like(advantage))
    gain = torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + high) * weight)
    if dual_clip is not None:
        gain = torch.where(weight < 0, torch.maximum(gain, dual_clip * weight), gain)
    with torch.no_grad():
        divergence = torch.where(mask, ratio - 1 - bounded, torch.zeros_like(ratio))
        outside = mask & ((ratio < 1 - clip) | (ratio > 1 + high))
    return PolicyLoss(-gain.sum() / count, divergence.sum() / count, outside.sum() / count)


def kl_to_reference(
    new: Tensor, reference: Tensor, mask: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Estimate of KL(policy || reference) from log-probabilities of the policy's own decisions.

    After Schulman, "Approximating KL divergence" (2020), with r = reference / policy: k1 is
    -log r, k2 is (log r)^2 / 2, k3 is r - 1 - log r. All tensors have one shape; the mean is over
    `mask`. k1 as a plain loss has a gradient of zero on average, so here it carries the gradient of
    its expectation: that of k2. The gradient of k3 is that of the reversed divergence.
    """
    change = torch.where(mask, new - reference, torch.zeros_like(new))
    change = change.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if estimator == "k3":
        return masked_mean(torch.exp(-change) - 1 + change, mask)
    squares = 0.5 * change.square()
    if estimator == "k2":
        return masked_mean(squares, mask)
    return masked_mean(change.detach() + squares - squares.detach(), mask)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the entries where `mask` is true; 0 if there are none."""
    return torch.where(mask, values, torch.zeros_like(values)).sum() / mask.sum().clamp_min(1)


def value_loss(value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Mean squared error of the value [N] against the return [N], over entries of `mask`."""
    error = torch.where(mask, value - target, torch.zeros_like(value))
    return masked_mean(error.square(), mask)
