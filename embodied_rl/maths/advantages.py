"""Advantages on decisions: a decision executes several control steps, so discounts vary by row.

T decisions, B slots, N = T * B rows, H control steps per chunk.
"""

from __future__ import annotations

from typing import Literal

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


def vtrace(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    discount: Tensor,
    done: Tensor,
    valid: Tensor,
    trace_decay: float,
    ratio: Tensor,
    rho_bar: float,
    c_bar: float,
) -> tuple[Tensor, Tensor]:
    """Advantages, and corrections v_s - V(x_s) of the values, for a policy that has moved on since
    it decided (V-trace, Espeholt et al. 2018, arXiv:1802.01561, equation 1; with its remark on
    lambda). The corrected values are those of a policy between the two, which `rho_bar` chooses.

    Beside `gae`'s tensors, `ratio` [T, B] is the present probability of each decision over the one
    that it was made with. The correction holds a decision's own ratio; the advantage does not, for
    the surrogate loss multiplies by it. With ratios of 1, and bounds that are not below, both are
    what `gae` gives.
    """
    zero = torch.zeros_like(value)
    ratio = torch.where(valid, ratio, zero)
    delta = torch.where(valid, reward + discount * next_value - value, zero)
    carry = torch.where(valid & ~done, discount * trace_decay, zero)
    rho, c = ratio.clamp_max(rho_bar), ratio.clamp_max(c_bar)
    advantage, correction = torch.empty_like(delta), torch.empty_like(delta)
    following = torch.zeros_like(delta[0])
    for t in range(delta.shape[0] - 1, -1, -1):
        advantage[t] = delta[t] + carry[t] * following
        following = rho[t] * delta[t] + carry[t] * c[t] * following
        correction[t] = following
    return advantage, correction


def group_advantage(score: Tensor, group: Tensor, scale: Literal["std", "off"]) -> Tensor:
    """Score [E] of each episode against the mean of its group [E] (GRPO, arXiv:2402.03300, section
    4.1.2); with `std` also divided by the group's unbiased deviation, which Dr. GRPO
    (arXiv:2503.20783) leaves out because it favours groups that are nearly solved or hopeless.

    A group with equal scores, or of one episode, gets zeros.
    """
    member, count = _members(group)
    total = score.new_zeros(len(count)).index_add_(0, member, score)
    centred = score - (total / count)[member]
    if scale == "off":
        return centred
    squares = score.new_zeros(len(count)).index_add_(0, member, centred.square())
    std = (squares / (count - 1).clamp_min(1)).sqrt()[member]
    # Rounding leaves equal scores a little apart; that must not be blown up.
    equal = std < 1e-6 * score.abs().clamp_min(1.0)
    return torch.where(equal, torch.zeros_like(score), centred / torch.where(equal, 1.0, std))


def leave_one_out_advantage(score: Tensor, group: Tensor) -> Tensor:
    """Score [E] of each episode less the mean of the others in its group [E] (Kool et al. 2019;
    RLOO, arXiv:2402.14740, eq. 7): an unbiased baseline. A group of one episode gets zero."""
    member, count = _members(group)
    size = count[member]
    return group_advantage(score, group, "off") * size / (size - 1).clamp_min(1)


def _members(group: Tensor) -> tuple[Tensor, Tensor]:
    """Position of each entry's group [E] among the distinct ones, and how often each occurs."""
    _, member, count = torch.unique(group, return_inverse=True, return_counts=True)
    return member, count.float()


def episode_weights(
    episode: Tensor,
    size: Tensor,
    rule: Literal["decision", "episode", "constant"],
    longest: int,
) -> Tensor:
    """Weight [N] of each row's policy loss, so that the mean over what is counted is the loss
    wanted.

    `size` [N] is how many terms of that mean a row has: 1 with one ratio per decision, the executed
    steps with one per step, 0 for a row that does not count.
    `decision`: every term counts the same (DAPO's token mean, arXiv:2503.14476, eq. 12).
    `episode`: every episode counts the same, however many decisions it took (GRPO's form).
    `constant`: the sum over an episode divided by `longest`, the most terms that an episode can
    have, whatever its length (Dr. GRPO, arXiv:2503.20783).
    """
    counts = (size > 0).float()
    if rule == "decision":
        return counts
    member, count = _members(episode)
    length = torch.zeros_like(count).index_add_(0, member, size.float())
    total, num_episodes = size.sum(), (length > 0).sum().clamp_min(1)
    if rule == "episode":
        return counts * total / (num_episodes * length[member].clamp_min(1))
    return counts * total / (num_episodes * longest)


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


def normalise_each(advantage: Tensor, valid: Tensor, part: Tensor) -> Tensor:
    """`normalise` within each part of the rows, given by its number [N]."""
    scaled = torch.zeros_like(advantage)
    for number in torch.unique(part):
        scaled = scaled + normalise(advantage, valid & (part == number))
    return scaled


def explained_variance(prediction: Tensor, target: Tensor) -> float:
    """Share of the targets' variance that the prediction explains: 1 is perfect, 0 no better than
    the mean. NaN if the targets do not vary."""
    variance = target.var(unbiased=False)
    if variance == 0:
        return float("nan")
    return float(1 - (target - prediction).var(unbiased=False) / variance)
