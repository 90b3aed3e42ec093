"""Losses against numbers worked out by hand, and masks that hide what they should."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.maths.losses import (
    clipped_policy_loss,
    executed_mask,
    kl_to_reference,
    log_ratio,
    masked_mean,
    per_ratio,
    token_mask,
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


def test_token_ratios_keep_the_tokens_of_executed_steps() -> None:
    # Two tokens per step, and a padded one; of the first chunk only one step was executed.
    token_step = torch.tensor([[0, 0, 1, 1, -1], [0, 0, 1, 1, 1]])
    mask = token_mask(token_step, torch.tensor([1, 2]))
    assert mask.tolist() == [[True, True, False, False, False], [True] * 5]
    new = torch.tensor([[0.5, -0.25, INFINITY, 9.0, 9.0], [0.0, 0.1, 0.2, 0.3, 0.4]])
    change, same = log_ratio(new, torch.zeros(2, 5), mask, "token")
    assert change[0].tolist() == [0.5, -0.25, 0.0, 0.0, 0.0]
    assert torch.equal(change[1], new[1]) and torch.equal(same, mask)


def test_the_token_loss_is_a_mean_over_tokens_with_the_chunks_advantage() -> None:
    change = logs(1.1, 1.0, 0.9, 1.5, 1.0, 1.0).view(2, 3)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    weight = per_ratio(torch.tensor([2.0, -1.0]), change)
    assert weight.tolist() == [[2.0, 2.0, 2.0], [-1.0, -1.0, -1.0]]
    found = clipped_policy_loss(change, weight, mask, 0.2)
    # Gains 2.2 and 2; then -1.5 (not cut, since it is bad), -1 and -1: .7 over five tokens.
    assert found.loss.item() == pytest.approx(-0.7 / 5)
    chunks = per_ratio(torch.tensor([2.0, -1.0]), torch.zeros(2))
    assert chunks.tolist() == [2.0, -1.0]


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
        for level in ("chunk", "step", "token"):
            change, kept = log_ratio(new, torch.zeros_like(new), mask, level)
            loss = clipped_policy_loss(change, torch.ones_like(change), kept, 0.2).loss
            (gradient,) = torch.autograd.grad(loss, new)
            losses.append(loss.item())
            gradients.append(gradient)
    assert losses == [-1.0] * 6
    for gradient in gradients[3:]:
        assert torch.equal(gradient, torch.tensor([[-1.0, 0.0]]))


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


def test_clip_higher_bounds_only_the_rise() -> None:
    advantage = torch.tensor([1.0, 1.0, -1.0])
    found = clipped_policy_loss(logs(1.25, 1.5, 0.7), advantage, all_of(advantage), 0.2, 0.3)
    # 1.25 is inside 0.8 .. 1.3, 1.5 is cut to 1.3, and 0.7 is held at 0.8: -(1.25 + 1.3 - 0.8) / 3.
    assert float(found.loss) == pytest.approx(-1.75 / 3)
    assert float(found.clip_fraction) == pytest.approx(2 / 3)


def test_dual_clip_bounds_the_loss_of_a_bad_decision() -> None:
    advantage = torch.tensor([-2.0, -2.0, 2.0])
    ratio = logs(5.0, 2.0, 5.0).requires_grad_()
    found = clipped_policy_loss(ratio, advantage, all_of(advantage), 0.2, dual_clip=3.0)
    # Gains: -10 held at -6, -4, and 5 cut to 1.2 times 2.
    assert float(found.loss.detach()) == pytest.approx((6 + 4 - 2.4) / 3)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert ratio.grad is not None
    assert ratio.grad.tolist() == pytest.approx([0.0, 4 / 3, 0.0])


@pytest.mark.parametrize(
    ("estimator", "value"),
    # log(new / reference) is log 2 and -log 2: r is 1/2 and 2.
    [("k1", 0.0), ("k2", math.log(2) ** 2 / 2), ("k3", ((0.5 - 1) + (2 - 1)) / 2)],
)
def test_kl_estimates_by_hand(estimator: Any, value: float) -> None:
    reference = torch.zeros(3)
    new = torch.tensor([math.log(2), -math.log(2), math.nan])
    mask = torch.tensor([True, True, False])
    assert float(kl_to_reference(new, reference, mask, estimator)) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradients_point_back_to_the_reference(estimator: Any) -> None:
    """On exact expectations over three outcomes: k1 and k2 give the gradient of KL(policy ||
    reference), k3 that of KL(reference || policy)."""
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    new = logits.log_softmax(0)
    weights = new.detach().exp()
    total = sum(
        weights[i]
        * kl_to_reference(new[i : i + 1], reference[i : i + 1], torch.tensor([True]), estimator)
        for i in range(3)
    )
    assert isinstance(total, Tensor)
    (found,) = torch.autograd.grad(total, logits)
    again = logits.log_softmax(0)
    policy_first = torch.nn.functional.kl_div(reference, again, reduction="sum", log_target=True)
    reference_first = torch.nn.functional.kl_div(again, reference, reduction="sum", log_target=True)
    exact = reference_first if estimator == "k3" else policy_first
    (expected,) = torch.autograd.grad(exact, logits)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_neither_overflows_nor_sees_masked_entries(estimator: Any) -> None:
    new = torch.tensor([-500.0, math.nan, 300.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    found = kl_to_reference(new, torch.zeros(3), mask, estimator)
    found.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(found)
    assert new.grad is not None and torch.isfinite(new.grad).all()
