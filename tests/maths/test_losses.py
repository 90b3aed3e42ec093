"""Losses against numbers worked out by hand, and masks that hide what they should."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embodied_rl.maths.losses import (
    clipped_policy_loss,
    executed_mask,
    log_ratio,
    masked_mean,
    value_loss,
)

INFINITY = float("inf")


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios).log()


def all_of(tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor, dtype=torch.bool)


def test_executed_mask() -> None:
    assert executed_mask(torch.tensor([0, 1, 3]), 3).tolist() == [
        [False, False, False],
        [True, False, False],
        [True, True, True],
    ]


def test_chunk_ratio_is_the_exact_joint_over_executed_steps() -> None:
    new = torch.tensor([[0.5, 0.25, 9.0], [1.0, 1.0, 1.0]])
    old = torch.zeros(2, 3)
    mask = executed_mask(torch.tensor([2, 0]), 3)
    joint, rows = log_ratio(new, old, mask, "chunk")
    assert joint.tolist() == [0.75, 0.0]
    assert rows.tolist() == [True, False]
    steps, same = log_ratio(new, old, mask, "step")
    assert steps.tolist() == [[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]]
    assert torch.equal(same, mask)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range: -r A, and its derivative in log r
        (1.5, 2.0, -2.4, 0.0),  # too far up with a good outcome: cut at 1.2, no gradient
        (0.5, 2.0, -1.0, -1.0),  # too far down with a good outcome: pulled back
        (0.5, -2.0, 1.6, 0.0),  # too far down with a bad outcome: cut at 0.8
        (1.5, -2.0, 3.0, 3.0),  # too far up with a bad outcome: pushed down
    ],
)
def test_clipped_loss_and_gradient(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    change = logs(ratio).requires_grad_()
    found = clipped_policy_loss(change, torch.tensor([advantage]), all_of(change), 0.2)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert found.loss.item() == pytest.approx(loss)
    assert change.grad is not None
    assert change.grad.item() == pytest.approx(gradient)


def test_loss_diagnostics_by_hand() -> None:
    change = logs(1.0, 1.5, math.e)
    found = clipped_policy_loss(change, torch.zeros(3), all_of(change), 0.2)
    # r - 1 - log r: 0; 0.5 - 0.405465; e - 2.
    assert found.approx_kl.item() == pytest.approx((0.094535 + 0.718282) / 3, abs=1e-5)
    assert found.clip_fraction.item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("poison", [float("nan"), INFINITY, -INFINITY, 1e30])
def test_neither_loss_nor_gradient_sees_masked_entries(poison: float) -> None:
    clean = torch.zeros(1, 1, requires_grad=True)
    dirty = torch.tensor([[0.0, poison]], requires_grad=True)
    gradients, losses = [], []
    for new in (clean, dirty):
        mask = executed_mask(torch.tensor([1]), new.shape[1])
        for level in ("chunk", "step"):
            change, kept = log_ratio(new, torch.zeros_like(new), mask, level)
            loss = clipped_policy_loss(change, torch.ones_like(change), kept, 0.2).loss
            (gradient,) = torch.autograd.grad(loss, new)
            losses.append(loss.item())
            gradients.append(gradient)
    assert losses == [-1.0] * 4
    assert torch.equal(gradients[2], torch.tensor([[-1.0, 0.0]]))
    assert torch.equal(gradients[3], torch.tensor([[-1.0, 0.0]]))


def test_masked_advantage_that_is_nan_does_not_leak() -> None:
    change = torch.zeros(2, requires_grad=True)
    advantage = torch.tensor([1.0, float("nan")])
    found = clipped_policy_loss(change, advantage, torch.tensor([True, False]), 0.2)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert found.loss.item() == -1.0
    assert change.grad is not None and change.grad.tolist() == [-1.0, 0.0]


def test_huge_ratios_stay_finite() -> None:
    change = torch.tensor([500.0, -500.0], requires_grad=True)
    found = clipped_policy_loss(change, torch.tensor([-1.0, 1.0]), all_of(change), 0.2)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(found.loss) and torch.isfinite(found.approx_kl)
    assert change.grad is not None and torch.isfinite(change.grad).all()


def test_padding_does_not_change_the_loss() -> None:
    change, advantage = logs(1.1, 0.9), torch.tensor([1.0, -2.0])
    plain = clipped_policy_loss(change, advantage, all_of(change), 0.2)
    padded = clipped_policy_loss(
        torch.cat([change, torch.full((5,), 3.0)]),
        torch.cat([advantage, torch.full((5,), 7.0)]),
        torch.tensor([True] * 2 + [False] * 5),
        0.2,
    )
    assert padded.loss == plain.loss
    assert padded.approx_kl == plain.approx_kl
    assert padded.clip_fraction == plain.clip_fraction


def test_means_over_nothing_are_zero() -> None:
    empty = torch.zeros(3, dtype=torch.bool)
    assert masked_mean(torch.full((3,), float("nan")), empty).item() == 0.0
    assert value_loss(torch.ones(3), torch.zeros(3), empty).item() == 0.0


def test_value_loss_by_hand() -> None:
    mask = torch.tensor([True, True, False])
    assert value_loss(torch.tensor([1.0, 2.0, 9.0]), torch.zeros(3), mask).item() == 2.5
