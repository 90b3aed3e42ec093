"""Gradients of several tasks against numbers worked out by hand."""

from __future__ import annotations

import torch

from embodied_rl.maths.gradients import project_conflicts


def projected(*gradients: list[float], seed: int = 0) -> list[float]:
    found = project_conflicts(torch.tensor(gradients), torch.Generator().manual_seed(seed))
    return [round(value, 6) for value in found.tolist()]


def test_two_tasks_at_odds_by_hand() -> None:
    # (2, 0) . (-1, 1) = -2. The first loses -2/2 of the second: (2, 0) + (-1, 1) = (1, 1).
    # The second loses -2/4 of the first: (-1, 1) + (1, 0) = (0, 1). The sum is (1, 2).
    assert projected([2.0, 0.0], [-1.0, 1.0]) == [1.0, 2.0]
    assert projected([-1.0, 1.0], [2.0, 0.0]) == [1.0, 2.0]


def test_tasks_that_agree_are_added_up() -> None:
    assert projected([2.0, 0.0], [1.0, 1.0], [0.0, 3.0]) == [3.0, 4.0]
    assert projected([2.0, -5.0]) == [2.0, -5.0]


def test_opposite_tasks_cancel_and_one_without_a_gradient_does_nothing() -> None:
    assert projected([2.0, 0.0], [-1.0, 0.0]) == [0.0, 0.0]
    assert projected([2.0, 0.0], [0.0, 0.0], [-1.0, 1.0]) == [1.0, 2.0]


def test_the_order_is_drawn_and_projections_are_from_the_others_own_gradients() -> None:
    # Of (1, 0), the gradients (-1, 1) and (-1, -2) are both at odds with it, and with each other
    # ((-1, 1) . (-1, -2) = -1). By hand, for the first: (-1, 1) first gives (1/2, 1/2), then
    # (-1, -2) gives (1/2, 1/2) + 1.5/5 (-1, -2) = (0.2, -0.1); the other way round it gives
    # (0.8, -0.4), then + 1.2/2 (-1, 1) = (0.2, 0.2). For the second: (0, 1), then + 2/5 (-1, -2)
    # = (-0.4, 0.2); or (-1.2, 0.6), then (0, 0.6). For the third: (0, -2), then + 2/2 (-1, 1) =
    # (-1, -1); or (-1.5, -1.5), then (0, -1.5).
    first, second, third = [(2, -1), (2, 2)], [(-4, 2), (0, 6)], [(-10, -10), (0, -15)]
    possible = {
        (a[0] + b[0] + c[0], a[1] + b[1] + c[1]) for a in first for b in second for c in third
    }
    tasks = [[1.0, 0.0], [-1.0, 1.0], [-1.0, -2.0]]
    found = [projected(*tasks, seed=seed) for seed in range(60)]
    assert {(round(10 * x), round(10 * y)) for x, y in found} == possible
    assert projected(*tasks, seed=3) == found[3]


def test_no_task_is_hurt_where_there_are_two() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        gradients = torch.randn(2, 6, generator=generator)
        found = project_conflicts(gradients, generator)
        assert (gradients @ found > -1e-5).all()
        if gradients[0] @ gradients[1] >= 0:
            assert torch.equal(found, gradients.sum(0))
