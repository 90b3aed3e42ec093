"""Gradients of several tasks that share parameters."""

from __future__ import annotations

import torch
from torch import Tensor


def project_conflicts(gradients: Tensor, generator: torch.Generator) -> Tensor:
    """One gradient [P] out of those of K tasks [K, P] (PCGrad, Yu et al. 2020, arXiv:2001.06782,
    algorithm 1).

    From each task's gradient is taken, one other task after the other in a random order, the part
    that points against the other task's own gradient. The rest is added up, so that it is the plain
    sum where no two tasks are at odds.
    """
    projected = gradients.clone()
    for own, kept in enumerate(projected):
        for other in torch.randperm(len(gradients), generator=generator).tolist():
            along = kept @ gradients[other]
            if other != own and along < 0:
                kept -= along / gradients[other].square().sum() * gradients[other]
    return projected.sum(dim=0)
