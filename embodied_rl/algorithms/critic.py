"""What PPO's value stands for, and how it is learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embodied_rl.contracts import Estimate, Evaluation, Observation, Policy
from embodied_rl.maths.hl_gauss import hl_gauss_loss, share_outside
from embodied_rl.maths.losses import value_loss
from embodied_rl.maths.popart import Moments, moved, preserving


def estimate(policy: Policy, observation: Observation) -> Estimate:
    """The policy's estimate of the returns; one without histograms need not have the method."""
    known = getattr(policy, "estimate", None)
    found: Estimate = known(observation) if known else Estimate(policy.value(observation))
    return found


class Critic:
    """The policy's value is the expected return itself."""

    def returns(self, value: Tensor, task: Tensor) -> Tensor:
        """Expected returns [N] of the policy's values [N] in tasks [N]."""
        return value

    def observe(self, target: Tensor, task: Tensor) -> None:
        """Take note of the returns [N] that are about to be learned."""

    def loss(self, found: Estimate | Evaluation, target: Tensor, task: Tensor) -> Tensor:
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

    def state_dict(self) -> dict[str, Any]:
        """Tensors that it keeps beside the policy: none."""
        return {}


class PopArt(nn.Module, Critic):
    """The policy's value n is shared by K tasks, each with a scale of its own for the returns.

    The expected return in task k is mean_k + std_k * (gain_k * n + shift_k). Mean and deviation
    follow the returns; gain and shift are learned, and changed when those move so that the expected
    returns stay what they were (Hessel et al. 2018, arXiv:1809.04474).
    """

    first: Tensor
    second: Tensor
    weight: Tensor

    def __init__(self, num_tasks: int, decay: float) -> None:
        super().__init__()
        self._decay = decay
        for name in ("first", "second", "weight"):
            self.register_buffer(name, torch.zeros(num_tasks, dtype=torch.float64))
        self.gain = nn.Parameter(torch.ones(num_tasks))
        self.shift = nn.Parameter(torch.zeros(num_tasks))

    @property
    def moments(self) -> Moments:
        """What is known of the returns."""
        return Moments(self.first, self.second, self.weight)

    def returns(self, value: Tensor, task: Tensor) -> Tensor:
        """Expected returns [N] of the policy's values [N] in tasks [N]."""
        mean, std = self._scale(task)
        return mean + std * self._normalised(value, task)

    @torch.no_grad()
    def observe(self, target: Tensor, task: Tensor) -> None:
        """Let means and deviations follow the returns [N], and the expected returns not."""
        old = self.moments
        new = moved(old, target.double(), task, self._decay)
        gain, shift = preserving(self.gain.double(), self.shift.double(), old, new)
        # Nothing has been learned on the scale that a task begins with: its first returns set the
        # scale, and n means the same in all tasks. Keeping the output there would let the task with
        # the largest returns, through its gain, take the least part in n.
        known = old.weight > 0
        self.gain.copy_(torch.where(known, gain, self.gain))
        self.shift.copy_(torch.where(known, shift, self.shift))
        self.first.copy_(new.first)
        self.second.copy_(new.second)
        self.weight.copy_(new.weight)

    def loss(self, found: Estimate | Evaluation, target: Tensor, task: Tensor) -> Tensor:
        """Squared error on each task's own scale."""
        mean, std = self._scale(task)
        everything = torch.ones_like(target, dtype=torch.bool)
        return value_loss(self._normalised(found.value, task), (target - mean) / std, everything)

    def _scale(self, task: Tensor) -> tuple[Tensor, Tensor]:
        moments = self.moments
        return moments.mean.float()[task], moments.std.float()[task]

    def _normalised(self, value: Tensor, task: Tensor) -> Tensor:
        return self.gain[task] * value + self.shift[task]
