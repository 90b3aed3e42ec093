"""Advantages on decisions: a decision executes several control steps, so discounts vary by row.

T decisions, B slots, N = T * B rows, H control steps per chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_reward(reward: Tensor, executed: Tensor, discount: float) -> Tensor:
    """Discounted reward [N] of each decision: the sum over executed steps i of discount^i r_i.

    `reward` is [N, H], `executed` [N] counts steps. What lies past the executed steps is never
    read, so it may hold anything, NaN included.
    """
    steps = torch.arange(reward.shape[1], device=reward.device)
    counted = torch.where(steps < executed[:, None], reward, torch.zeros_like(reward))
    return (counted * discount**steps).sum(dim=1)


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    discount: Tensor,
    done: Tensor,
    valid: Tensor,
    trace_decay: float,
) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    All tensors are [T, B]. `next_value` already follows the bootstrap rules: 0 after a termination,
    the value of the cut observation at a time limit. `discount` is the discount per control step to
    the power of the executed steps. `trace_decay` is the paper's lambda, applied per decision.
    Rows that are not valid get advantage 0 and pass nothing on.
    """
    zero = torch.zeros_like(value)
    delta = torch.where(valid, reward + discount * next_value - value, zero)
    carry = torch.where(valid & ~done, discount * trace_decay, zero)
    advantage = torch.empty_like(delta)
    following = torch.zeros_like(delta[0])
    for t in range(delta.shape[0] - 1, -1, -1):
        following = delta[t] + carry[t] * following
        advantage[t] = following
    return advantage


def normalise(advantage: Tensor, valid: Tensor, smallest_std: float = 1e-3) -> Tensor:
    """Zero mean and unit deviation over the valid entries; the others become 0.

    When all valid advantages are nearly equal, dividing by their deviation would turn noise into a
    signal, so the deviation is never taken as less than `smallest_std`.
    """
    chosen = advantage[valid]
    if chosen.numel() < 2:
        return torch.zeros_like(advantage)
    scaled = (advantage - chosen.mean()) / chosen.std().clamp_min(smallest_std)
    return torch.where(valid, scaled, torch.zeros_like(scaled))


def explained_variance(prediction: Tensor, target: Tensor) -> float:
    """Share of the targets' variance that the prediction explains: 1 is perfect, 0 no better than
    the mean. NaN if the targets do not vary."""
    variance = target.var(unbiased=False)
    if variance == 0:
        return float("nan")
    return float(1 - (target - prediction).var(unbiased=False) / variance)
