"""Values as histograms: regression by classification with Gaussian targets (HL-Gauss, Farebrother
et al. 2024, arXiv:2403.03950, section 3, after Imani and White 2018)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

SIGMA_IN_BINS = 0.75
"""Deviation of the Gaussian in widths of a bin, which the paper recommends: most of the probability
lies in about six neighbouring bins."""


def bin_edges(low: float, high: float, num_bins: int) -> Tensor:
    """Edges [n + 1] of n equal bins."""
    return torch.linspace(low, high, num_bins + 1)


def gauss_histogram(target: Tensor, edges: Tensor) -> Tensor:
    """Probabilities [N, n] of the bins between `edges` [n + 1] under a Gaussian around each target
    [N], cut off at the outermost edges: differences of its distribution function.

    A target outside of the range counts as the nearest edge. Being cut off there moves the mean
    inwards by up to 0.6 bins, so the range should reach a little past the returns.
    """
    target = target.clamp(edges[0], edges[-1])
    scale = math.sqrt(2.0) * SIGMA_IN_BINS * (edges[1] - edges[0])
    below = torch.erf((edges - target[:, None]) / scale)
    return below.diff(dim=1) / (below[:, -1:] - below[:, :1])


def histogram_mean(logits: Tensor, edges: Tensor) -> Tensor:
    """Expected value [N] of the bins' centres under logits [N, n]."""
    centres = (edges[1:] + edges[:-1]) / 2
    return (logits.softmax(dim=1) * centres).sum(dim=1)


def hl_gauss_loss(logits: Tensor, target: Tensor, edges: Tensor) -> Tensor:
    """Mean cross-entropy of the logits [N, n] against the targets' [N] Gaussian histograms."""
    wanted = gauss_histogram(target, edges)
    return -(wanted * log_softmax(logits, dim=1)).sum(dim=1).mean()


def share_outside(target: Tensor, edges: Tensor) -> Tensor:
    """Share of targets [N] that lie outside of the range, so that the value cannot reach them."""
    return ((target < edges[0]) | (target > edges[-1])).float().mean()
