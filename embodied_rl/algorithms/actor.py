"""The policy's loss in PPO and GRPO: clipped surrogate, entropy bonus, tie to the first one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.algorithms.config import ClipConfig
from embodied_rl.algorithms.steps import Reference, ratios, scored_steps
from embodied_rl.contracts import Evaluation, Policy
from embodied_rl.maths.losses import (
    clipped_policy_loss,
    executed_mask,
    kl_to_reference,
    masked_mean,
    per_ratio,
)
from embodied_rl.rollout.batch import Batch


@dataclass(frozen=True)
class Judged:
    """n decisions of a batch as the present policy sees them, and what they are worth."""

    seen: Evaluation
    change: Tensor
    """Log-ratio to the policy that decided, [n], [n, H] or [n, P] by `ratio_level`."""
    mask: Tensor
    """bool: which of its entries count."""
    steps: Tensor
    """bool [n, H]: control steps that count."""
    advantage: Tensor
    """In the shape of `change`."""
    reference: Tensor | None
    """Log-probability [n, H] under the policy that the run began with, if the loss needs it."""


@dataclass(frozen=True)
class ActorLoss:
    """The policy's loss and its parts, for the training curves."""

    loss: Tensor
    curves: dict[str, Tensor]


def judge(
    config: ClipConfig,
    policy: Policy,
    reference: Reference | None,
    batch: Batch,
    rows: Tensor,
    advantage: Tensor,
) -> Judged:
    """The batch's rows [n], with their advantages [n], seen by the present policy."""
    trace = {name: tensor[rows] for name, tensor in batch.trace.items()}
    observation = batch.observation.select(rows)
    seen = policy.evaluate(observation, trace)
    scored = scored_steps(batch, config.scored_steps)[rows]
    steps = executed_mask(scored, seen.log_prob.shape[1])
    change, mask = ratios(seen, batch, rows, scored, config.ratio_level)
    known = reference.log_prob(observation, trace) if reference else None
    return Judged(seen, change, mask, steps, per_ratio(advantage, change), known)


def actor_loss(config: ClipConfig, judged: Judged, part: Tensor | None = None) -> ActorLoss:
    """Mean over all rows of the judged decisions' losses; with `part` [n] only what those rows add
    to it, so that the losses of parts add up to that of the whole."""
    mask, steps = judged.mask, judged.steps
    of_mask = of_steps = 1.0
    if part is not None:
        steps = steps & part[:, None]
        mask = mask & per_ratio(part, mask)
        of_mask = float(mask.sum() / judged.mask.sum().clamp_min(1))
        of_steps = float(steps.sum() / judged.steps.sum().clamp_min(1))
    policy = clipped_policy_loss(
        judged.change, judged.advantage, mask, config.clip, config.clip_high, config.dual_clip
    )
    entropy = masked_mean(judged.seen.entropy, steps)
    loss = of_mask * policy.loss - of_steps * config.entropy_coefficient * entropy
    curves = {
        "policy_loss": policy.loss,
        "approx_kl": policy.approx_kl,
        "clip_fraction": policy.clip_fraction,
        "entropy": entropy,
    }
    if judged.reference is not None:
        away = kl_to_reference(judged.seen.log_prob, judged.reference, steps, config.kl_estimator)
        loss = loss + of_steps * config.kl_coefficient * away
        curves["kl_to_reference"] = away
    return ActorLoss(loss, curves)


def losses_by_task(config: ClipConfig, judged: Judged, task: Tensor) -> list[Tensor]:
    """What each task [n] among the judged decisions adds to their loss."""
    return [
        actor_loss(config, judged, task == number).loss for number in torch.unique(task).tolist()
    ]
