"""Returns of several tasks on scales of their own (PopArt: van Hasselt et al. 2016,
arXiv:1602.07714; with tasks: Hessel et al. 2018, arXiv:1809.04474)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_STD = 1e-2
"""A deviation is never taken as less: a task that has always failed returns nothing but noise."""


@dataclass(frozen=True)
class Moments:
    """Decayed sums over the returns of K tasks, each [K]."""

    first: Tensor
    second: Tensor
    """Of the squares."""
    weight: Tensor
    """Of ones: dividing by it takes away the zeros that the sums began with. 0 before a task's
    first return."""

    @property
    def mean(self) -> Tensor:
        """Of each task's returns [K]; 0 while there are none."""
        return self.first / torch.where(self.weight > 0, self.weight, 1.0)

    @property
    def std(self) -> Tensor:
        """Their deviation [K], not less than a floor; 1 while there are none."""
        second = self.second / torch.where(self.weight > 0, self.weight, 1.0)
        std = (second - self.mean.square()).clamp_min(SMALLEST_STD**2).sqrt()
        return torch.where(self.weight > 0, std, 1.0)


def moved(known: Moments, value: Tensor, task: Tensor, decay: float) -> Moments:
    """The moments after values [N] of tasks [N]: a share `decay` of what was known, and the rest
    from the values' means. Tasks without a value keep theirs."""
    zero = torch.zeros_like(known.weight)
    count = zero.index_add(0, task, torch.ones_like(value))
    seen, divisor = count > 0, count.clamp_min(1)

    def mix(old: Tensor, summands: Tensor) -> Tensor:
        new = zero.index_add(0, task, summands) / divisor
        return torch.where(seen, decay * old + (1 - decay) * new, old)

    return Moments(
        mix(known.first, value),
        mix(known.second, value.square()),
        mix(known.weight, torch.ones_like(value)),
    )


def preserving(gain: Tensor, shift: Tensor, old: Moments, new: Moments) -> tuple[Tensor, Tensor]:
    """Gain and shift [K] with which the new moments give what the old ones gave: for every n,
    mean + std * (gain * n + shift) stays the same ("preserving outputs" of Hessel et al.)."""
    return (
        gain * old.std / new.std,
        (old.std * shift + old.mean - new.mean) / new.std,
    )
