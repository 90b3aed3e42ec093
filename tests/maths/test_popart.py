"""Scales of returns against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embodied_rl.maths.popart import SMALLEST_STD, Moments, moved, preserving


def moments(mean: list[float], std: list[float]) -> Moments:
    first = torch.tensor(mean)
    return Moments(first, torch.tensor(std).square() + first.square(), torch.ones(len(mean)))


def none(count: int) -> Moments:
    return Moments(*(torch.zeros(count, dtype=torch.float64) for _ in range(3)))


def test_before_any_return_the_scale_is_that_of_the_returns() -> None:
    assert none(2).mean.tolist() == [0.0, 0.0]
    assert none(2).std.tolist() == [1.0, 1.0]


def test_the_first_returns_set_the_scale_whatever_the_decay() -> None:
    task = torch.tensor([1, 1, 2])
    found = moved(none(3), torch.tensor([2.0, 6.0, 5.0]).double(), task, decay=0.9)
    assert found.mean.tolist() == pytest.approx([0.0, 4.0, 5.0], rel=1e-6)
    # The deviation of a single return is the floor; without a return nothing is known.
    assert found.std.tolist() == pytest.approx([1.0, 2.0, SMALLEST_STD], rel=1e-4)


def test_what_was_seen_decays_by_hand() -> None:
    known = moments([4.0, 7.0], [2.0, 1.0])
    # Means: of the returns 3/4 * 4 + 1/4 * 8 = 5; of the squares 3/4 * 20 + 1/4 * 68 = 32.
    found = moved(known, torch.tensor([6.0, 10.0]), torch.tensor([0, 0]), decay=0.75)
    assert found.mean.tolist() == [5.0, 7.0]
    assert found.std.tolist() == pytest.approx([7**0.5, 1.0])


def test_gain_and_shift_by_hand() -> None:
    old, new = moments([10.0], [4.0]), moments([6.0], [8.0])
    gain, shift = preserving(torch.tensor([2.0]), torch.tensor([1.0]), old, new)
    # With n = 3 the output was 10 + 4 * 7 = 38, and 6 + 8 * (1 * 3 + 1) is too.
    assert (gain.tolist(), shift.tolist()) == ([1.0], [1.0])


def test_outputs_are_preserved_wherever_the_moments_go() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    known = moved(none(3), draw(30) * 100, torch.arange(30) % 3, 0.5)
    gain, shift, n = draw(3), draw(3), draw(50, 3)
    before = known.mean + known.std * (gain * n + shift)
    for _ in range(20):
        new = moved(known, draw(8) * 1e4 + 1e3, torch.arange(8) % 2, 0.8)
        gain, shift = preserving(gain, shift, known, new)
        known = new
    torch.testing.assert_close(known.mean + known.std * (gain * n + shift), before)
