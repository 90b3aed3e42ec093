"""Beliefs about success rates, and the weights that follow from them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embodied_rl.maths.practice import (
    effective_number,
    expected_success,
    learnability,
    with_floor,
    worst_case,
)

SUCCESSES = np.array([0.0, 1.0, 3.0, 0.0, 0.5])
FAILURES = np.array([0.0, 1.0, 0.0, 8.0, 0.5])


def test_expected_success_by_hand() -> None:
    found = expected_success(SUCCESSES, FAILURES)
    assert found == pytest.approx([1 / 2, 1 / 2, 4 / 5, 1 / 10, 1 / 2])


def test_learnability_by_hand() -> None:
    found = learnability(SUCCESSES, FAILURES)
    assert found == pytest.approx([1 / 6, 1 / 5, 2 / 15, 9 / 110, 3 / 16])


def test_learnability_is_the_mean_over_the_belief() -> None:
    drawn = np.random.default_rng(0).beta(1 + 3.0, 1 + 5.0, 200_000)
    values = drawn * (1 - drawn)
    found = float(learnability(np.array([3.0]), np.array([5.0]))[0])
    assert abs(found - values.mean()) < 4 * values.std() / math.sqrt(len(values))


def test_what_is_known_to_be_half_solved_weighs_most() -> None:
    evidence = np.array([float(i) for i in range(21)])
    found = learnability(evidence, evidence[::-1].copy())
    assert found.argmax() == 10
    assert (np.diff(found)[:10] > 0).all() and found == pytest.approx(found[::-1])


def test_worst_case_by_hand() -> None:
    found = worst_case(np.array([1.0, 0.5, 0.5]), temperature=0.5)
    one, e = 1.0, 2.718281828459045
    assert found == pytest.approx([one / (1 + 2 * e), e / (1 + 2 * e), e / (1 + 2 * e)])


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_worst_case_goes_from_the_worst_alone_to_uniform(temperature: float) -> None:
    found = worst_case(np.array([0.9, 0.2, 0.3, 1.0]), temperature)
    expected = [0, 1, 0, 0] if temperature < 1 else [0.25] * 4
    assert found == pytest.approx(expected, abs=1e-6)


def test_worst_case_is_the_best_answer_to_its_objective() -> None:
    success, temperature = np.array([0.1, 0.4, 0.8]), 0.3

    def objective(q: np.ndarray) -> float:  # type: ignore[type-arg]
        return float(q @ (1 - success) - temperature * (q * np.log(3 * q)).sum())

    best = objective(worst_case(success, temperature))
    others = np.random.default_rng(1).dirichlet(np.ones(3), 500)
    assert all(objective(q) < best for q in others)


def test_the_floor_by_hand() -> None:
    assert with_floor(np.array([1.0, 3.0]), 0.2) == pytest.approx([0.3, 0.7])
    assert with_floor(np.array([1.0, 0.0, 0.0, 0.0]), 0.4) == pytest.approx([0.7, 0.1, 0.1, 0.1])
    assert with_floor(np.array([2.0, 6.0]), 1.0) == pytest.approx([0.5, 0.5])
    assert with_floor(np.zeros(4), 0.1) == pytest.approx([0.25] * 4)


def test_effective_number_by_hand() -> None:
    assert effective_number(np.array([0.5, 0.5, 0.0])) == pytest.approx(2)
    assert effective_number(np.array([0.3, 0.7])) == pytest.approx(1 / 0.58)
