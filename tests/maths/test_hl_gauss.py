"""Histograms of returns against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from embodied_rl.maths.hl_gauss import (
    bin_edges,
    gauss_histogram,
    histogram_mean,
    hl_gauss_loss,
    share_outside,
)

EDGES = torch.tensor([0.0, 3.0, 6.0])
"""Two bins of width 3: the Gaussian's deviation is 2.25."""


def test_edges_are_even() -> None:
    assert bin_edges(-1.0, 1.0, 4).tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]


def test_probabilities_by_hand() -> None:
    # From tables of the normal distribution: P(|z| < 4/3) = 0.817578 is what the range keeps of a
    # Gaussian around 3. Around 0.75 the edges are at z = -1/3, 1 and 7/3, where the distribution
    # function is 0.369441, 0.841345 and 0.990185: 0.471904 and 0.148840, in all 0.620743.
    found = gauss_histogram(torch.tensor([3.0, 0.75]), EDGES)
    expected = torch.tensor([[0.5, 0.5], [0.760224, 0.239776]])
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_a_histogram_has_the_mean_of_its_gaussian() -> None:
    edges = bin_edges(-2.0, 3.0, 50)
    target = torch.linspace(-1.5, 2.5, 200)
    found = gauss_histogram(target, edges)
    torch.testing.assert_close(found.sum(1), torch.ones(200))
    assert (found >= 0).all()
    torch.testing.assert_close(histogram_mean(found.log(), edges), target, atol=1e-3, rtol=0)


def test_a_target_outside_of_the_range_counts_as_its_edge() -> None:
    found = gauss_histogram(torch.tensor([-1e6, 0.0, 6.0, 1e6]), EDGES)
    assert found.isfinite().all()
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    # By symmetry, and the mean is cut inwards.
    torch.testing.assert_close(found[0], found[3].flip(0))
    assert found[0, 0] > 0.75
    assert share_outside(torch.tensor([-1.0, 0.0, 3.0, 7.0]), EDGES) == 0.5


def test_the_mean_of_logits_by_hand() -> None:
    # Centres 1.5 and 4.5 with probabilities 1/4 and 3/4.
    logits = torch.tensor([[0.0, 0.0], [1.0, 3.0]]) + torch.tensor([[7.0], [0.0]])
    logits[1] = logits[1].log()
    assert histogram_mean(logits, EDGES).tolist() == pytest.approx([3.0, 3.75])


def test_the_loss_by_hand_and_where_it_is_least() -> None:
    # Even logits have the cross-entropy log 2 = 0.693147 against anything.
    target = torch.tensor([3.0, 0.75])
    assert float(hl_gauss_loss(torch.zeros(2, 2), target, EDGES)) == pytest.approx(0.693147)
    # Probabilities 1/4 and 3/4 against 1/2 and 1/2: (1.386294 + 0.287682) / 2.
    quarter = torch.tensor([[1.0, 3.0]]).log()
    assert float(hl_gauss_loss(quarter, target[:1], EDGES)) == pytest.approx(0.836988)
    best = gauss_histogram(target, EDGES).log().requires_grad_()
    (gradient,) = torch.autograd.grad(hl_gauss_loss(best, target, EDGES), best)
    assert gradient.abs().max() < 1e-6
