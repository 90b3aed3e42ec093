"""Collected decisions as a policy sees them that has learned since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied_rl.algorithms.steps import scored_steps
from embodied_rl.contracts import Policy
from embodied_rl.maths.losses import LARGEST_LOG_RATIO, executed_mask, log_ratio
from embodied_rl.rollout.batch import Batch


@dataclass(frozen=True)
class View:
    """What changes of a batch when the policy does, each [N]."""

    value: Tensor
    next_value: Tensor
    """Of the observation that follows within the batch. What is not in it, at a time limit and
    after the last decision, keeps the value that it had while collecting."""
    ratio: Tensor
    """Probability of each decision now, over the one that it was made with."""


def fresh(batch: Batch) -> View:
    """As it was collected."""
    return View(batch.value, batch.next_value, torch.ones_like(batch.value))


@torch.no_grad()
def seen_again(
    policy: Policy, batch: Batch, size: int, which: Literal["executed", "all"] = "executed"
) -> View:
    """As the policy sees it now, looking at `size` decisions at once, with the ratio of the control
    steps that count (`scored_steps`)."""
    scored = scored_steps(batch, which)
    value, change = batch.value.clone(), torch.zeros_like(batch.value)
    for rows in torch.split(batch.valid.nonzero()[:, 0], size):
        trace = {name: tensor[rows] for name, tensor in batch.trace.items()}
        seen = policy.evaluate(batch.observation.select(rows), trace)
        steps = executed_mask(scored[rows], seen.log_prob.shape[1])
        change[rows], _ = log_ratio(seen.log_prob, batch.log_prob[rows], steps, "chunk")
        value[rows] = seen.value
    ratio = change.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    return View(value, following_value(batch, value), ratio)


def following_value(batch: Batch, value: Tensor) -> Tensor:
    """`next_value` [N] of the batch with those replaced that are the value [N] of its next row."""
    shape = (batch.num_decisions, -1)
    valid, done = batch.valid.view(shape), batch.done.view(shape)
    known = batch.next_value.view(shape).clone()
    inside = (valid & ~done)[:-1] & valid[1:]
    known[:-1] = torch.where(inside, value.view(shape)[1:], known[:-1])
    return known.flatten()
