"""Flow-SDE against an exact recursion and its own identities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embodied_rl.maths import flow
from embodied_rl.maths.intervals import wilson_interval
from embodied_rl.maths.statistics import merge_moments

MEAN, STD = 0.8, 0.5  # of the target distribution of actions


def exact_velocity(x: Tensor, t: Tensor) -> Tensor:
    """E[noise - action | x_t] when actions are normal: affine in x_t."""
    variance = t**2 + (1 - t) ** 2 * STD**2
    gain = (t - (1 - t) * STD**2) / variance
    return gain * (x - (1 - t) * MEAN) - MEAN


def moments(num_steps: int, noise_level: float | None) -> tuple[float, float]:
    """Mean and deviation of what sampling ends with, by pushing two points and the variance
    through the real step functions: every step is affine in x."""
    points = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    mean, variance = 0.0, 1.0
    for k in range(num_steps):
        step = torch.full((2,), k)
        t = flow.time_of(step, num_steps)[:, None, None]
        velocity = exact_velocity(points, t)
        if noise_level is None:
            moved, std = flow.ode_step(points, velocity, num_steps), torch.zeros(1)
        else:
            moved, std = flow.sde_step(points, velocity, step, num_steps, noise_level)
        offset, slope = moved[0].item(), (moved[1] - moved[0]).item()
        mean = offset + slope * mean
        variance = slope**2 * variance + float(std.flatten()[0]) ** 2
    return mean, math.sqrt(variance)


@pytest.mark.parametrize(
    ("num_steps", "noise_level", "std"),
    [
        (4, None, 0.341), (10, None, 0.431), (50, None, 0.485), (200, None, 0.496),
        (4, 0.5, 0.413), (10, 0.5, 0.463), (50, 0.5, 0.495), (200, 0.5, 0.500),
        (4, 0.8, 0.471), (10, 0.8, 0.486), (200, 0.8, 0.501),
    ],
)  # fmt: skip
def test_final_distribution_is_the_known_one(
    num_steps: int, noise_level: float | None, std: float
) -> None:
    """A missing drift correction gives .674 at K = 10, a wrong sign 1.041, a missing half .347."""
    found_mean, found_std = moments(num_steps, noise_level)
    assert found_mean == pytest.approx(MEAN, abs=1e-3)
    assert found_std == pytest.approx(std, abs=1e-3)


def test_noise_per_step_by_hand() -> None:
    step = torch.arange(4)
    x = torch.zeros(4, 1, 1)
    _, std = flow.sde_step(x, x, step, 4, 0.5)
    # 0.5 * sqrt(t / (1 - t)) * sqrt(1/4), with 1/4 for 1 - t at the first step.
    assert std.flatten().tolist() == pytest.approx([0.5, 0.4330, 0.25, 0.1443], abs=1e-4)


def test_without_noise_the_sde_is_the_ode() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 2, generator=generator)
    v = torch.randn(5, 3, 2, generator=generator)
    mean, std = flow.sde_step(x, v, torch.arange(5), 5, 1e-6)
    assert torch.allclose(mean, flow.ode_step(x, v, 5), atol=1e-6)
    assert std.max() < 1e-5


def test_log_probability_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0]]])
    mean = torch.tensor([[[0.0, 2.0]]])
    std = torch.full((1, 1, 1), 0.5)
    # Per dimension log(1 / (0.5 sqrt(2 pi))) = -0.2258, and -2 for two deviations in the first.
    assert flow.normal_log_prob(x, mean, std).item() == pytest.approx(2 * -0.225791 - 2.0, abs=1e-5)


def test_the_loss_ignores_steps_past_the_end() -> None:
    velocity = torch.tensor([[[1.0], [float("nan")]]], requires_grad=True)
    valid = torch.tensor([[True, False]])
    loss = flow.flow_matching_loss(velocity, torch.tensor([[[3.0], [0.0]]]), valid)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 4.0
    assert velocity.grad is not None and velocity.grad[0, 0, 0] == -4.0


def test_time_and_interpolation_ends() -> None:
    action, noise = torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), 5.0)
    assert flow.noisy_action(action, noise, torch.ones(1)).item() == 5.0
    assert flow.noisy_action(action, noise, torch.zeros(1)).item() == 2.0
    assert flow.velocity_target(action, noise).item() == 3.0
    assert flow.time_of(torch.tensor([0, 3]), 4).tolist() == [1.0, 0.25]


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (94, 200, 0.4020, 0.5391),
        (185, 200, 0.8800, 0.9540),
        (0, 10, 0.0, 0.2775),
        (5, 5, 0.5655, 1),
    ],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=2e-4)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 5)])
def test_wilson_interval_refuses_what_is_no_rate(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="not a success rate"):
        wilson_interval(successes, trials)


def test_merged_moments_equal_those_of_all_rows() -> None:
    rows = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known = (torch.zeros(3).double(), torch.ones(3).double(), torch.zeros(()).double())
    for part in torch.tensor_split(rows, [7, 30]):
        known = merge_moments(known, part)
    assert torch.allclose(known[0], rows.mean(0)) and int(known[2]) == 50
    assert torch.allclose(known[1], rows.var(0, unbiased=False))


def test_times_are_rounded_once() -> None:
    found = flow.time_of(torch.arange(10), 10)
    assert (
        found.tolist() == torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]).tolist()
    )
