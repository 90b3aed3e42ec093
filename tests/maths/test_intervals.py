"""How sure a success rate is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.maths.intervals import Z_95, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # From scipy.stats.binomtest(...).proportion_ci(0.95, method="wilson").
        (47, 100, 0.37510817959, 0.56711143029),
        (45, 50, 0.78639768562, 0.95652423506),
        (450, 500, 0.87057809036, 0.92332243726),
        (50, 50, 0.92865240086, 1.0),
        (0, 10, 0.0, 0.27753279986),
        (1, 1, 0.20654931437, 1.0),
    ],
)
def test_against_numbers_from_elsewhere(
    successes: int, trials: int, low: float, high: float
) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-10)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_ends_are_where_the_score_test_just_rejects(counts: tuple[int, int]) -> None:
    successes, trials = counts
    low, high = wilson_interval(successes, trials)
    assert 0.0 <= low <= successes / trials <= high <= 1.0
    for end in (low, high):
        if 0.0 < end < 1.0:
            distance = abs(successes / trials - end) / math.sqrt(end * (1 - end) / trials)
            assert distance == pytest.approx(Z_95, rel=1e-6)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_failures_mirror_successes(counts: tuple[int, int]) -> None:
    successes, trials = counts
    low, high = wilson_interval(successes, trials)
    assert wilson_interval(trials - successes, trials) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 5), (1, -1)])
def test_impossible_counts_are_refused(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match=f"{successes} successes of {trials} trials"):
        wilson_interval(successes, trials)
