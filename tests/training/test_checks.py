"""Which policy of a run is its result."""

from __future__ import annotations

import pytest

from embodied_rl.training.checks import is_as_good


@pytest.mark.parametrize(
    ("success", "best", "episodes", "expected"),
    [
        (0.0, -1.0, 64, True),  # the first check
        (0.90, 0.90, 64, True),  # of equals the later one
        (0.87, 0.90, 64, True),  # one standard error is 0.038
        (0.85, 0.90, 64, False),
        (0.87, 0.90, 400, False),  # one standard error is 0.015
        (63 / 64, 1.0, 64, True),  # no failure in 64 is not certainty
        (0.9, 1.0, 64, False),
    ],
)
def test_a_later_policy_is_passed_over_only_if_clearly_worse(
    success: float, best: float, episodes: int, expected: bool
) -> None:
    assert is_as_good(success, best, episodes) is expected
