"""What PPO's value stands for, and how it is learned."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.contracts import Estimate, Evaluation, Observation, Policy
from embodied_rl.maths.hl_gauss import hl_gauss_loss, share_outside
from embodied_rl.maths.losses import value_loss


def estimate(policy: Policy, observation: Observation) -> Estimate:
    """The policy's estimate of the returns; one without histograms need not have the method."""
    known = getattr(policy, "estimate", None)
    found: Estimate = known(observation) if known else Estimate(policy.value(observation))
    return found


class Critic:
    """The policy's value is the expected return itself."""

    def loss(self, found: Estimate | Evaluation, target: Tensor) -> Tensor:
        """Of estimates against the returns [N]: cross-entropy where a histogram is estimated, else
        the squared error."""
        if found.histogram is not None:
            return hl_gauss_loss(found.histogram.logits, target, found.histogram.edges)
        return value_loss(found.value, target, torch.ones_like(target, dtype=torch.bool))

    def curves(self, found: Estimate | Evaluation, target: Tensor) -> dict[str, float]:
        """For the training curves: the share of returns that the histogram cannot reach."""
        if found.histogram is None:
            return {}
        outside = share_outside(target, found.histogram.edges)
        return {"outside_value_range": float(outside)}
