"""The policy's loss in PPO and GRPO: clipped surrogate, entropy bonus, tie to the first one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.algorithms.config import ClipConfig
from embodied_rl.algorithms.micro import Whole
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
    whole: Whole
    """What the loss divides by: of these decisions, or of the minibatch that they are a part of."""


@dataclass(frozen=True)
class ActorLoss:
    """The policy's loss and its parts, for the training curves; all as what the judged decisions
    add to their minibatch's means."""

    loss: Tensor
    curves: dict[str, Tensor]


def judge(
    config: ClipConfig,
    policy: Policy,
    reference: Reference | None,
    batch: Batch,
    rows: Tensor,
    advantage: Tensor,
    whole: Whole | None = None,
) -> Judged:
    """The batch's rows [n], with their advantages [n], seen by the present policy; with `whole` as
    a part of that minibatch."""
    trace = {name: tensor[rows] for name, tensor in batch.trace.items()}
    observation = batch.observation.select(rows)
    seen = policy.evaluate(observation, trace)
    scored = scored_steps(batch, config.scored_steps)[rows]
    steps = executed_mask(scored, seen.log_prob.shape[1])
    change, mask = ratios(seen, batch, rows, scored, config.ratio_level)
    known = reference.log_prob(observation, trace) if reference else None
    whole = whole or Whole(mask.sum(), steps.sum())
    return Judged(seen, change, mask, steps, per_ratio(advantage, change), known, whole)


def actor_loss(config: ClipConfig, judged: Judged, part: Tensor | None = None) -> ActorLoss:
    """What the judged decisions add to the mean over their minibatch; with `part` [n] only those
    rows, so that the losses of parts add up to that of the whole."""
    mask, steps = judged.mask, judged.steps
    if part is not None:
        steps = steps & part[:, None]
        mask = mask & per_ratio(part, mask)
    of_mask = mask.sum() / judged.whole.ratios.clamp_min(1)
    of_steps = steps.sum() / judged.whole.steps.clamp_min(1)
    policy = clipped_policy_loss(
        judged.change, judged.advantage, mask, config.clip, config.clip_high, config.dual_clip
    )
    entropy = masked_mean(judged.seen.entropy, steps)
    loss = of_mask * policy.loss - of_steps * config.entropy_coefficient * entropy
    curves = {
        "policy_loss": of_mask * policy.loss,
        "approx_kl": of_mask * policy.approx_kl,
        "clip_fraction": of_mask * policy.clip_fraction,
        "entropy": of_steps * entropy,
    }
    if judged.reference is not None:
        away = kl_to_reference(judged.seen.log_prob, judged.reference, steps, config.kl_estimator)
        loss = loss + of_steps * config.kl_coefficient * away
        curves["kl_to_reference"] = of_steps * away
    return ActorLoss(loss, curves)


def losses_by_task(config: ClipConfig, judged: Judged, task: Tensor) -> list[Tensor]:
    """What each task [n] among the judged decisions adds to their loss."""
    return [
        actor_loss(config, judged, task == number).loss for number in torch.unique(task).tolist()
    ]
