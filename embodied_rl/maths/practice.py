"""Which of a finite pool of initial states to practise on, from what is believed of each.

P states. The belief about a state's success rate p is Beta(1 + successes, 1 + failures): uniform
before anything was seen. Counts may be fractions, where old evidence has faded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

type Numbers = npt.NDArray[np.float64]


def expected_success(successes: Numbers, failures: Numbers) -> Numbers:
    """Mean of the belief about each state's success rate [P]."""
    return (1 + successes) / (2 + successes + failures)


def learnability(successes: Numbers, failures: Numbers) -> Numbers:
    """Expected p (1 - p) of each state [P]: the variance of a success, highest at one half.

    A state that is always or never solved has nothing to teach by comparison. For the weight see
    ProCuRL (Tzannetos et al. 2023, arXiv:2304.12877) with an optimal success rate of 1; here its
    expectation under Beta(a, b), a b / ((a + b) (a + b + 1)), stands for the unknown p. It is
    lower than the p (1 - p) of the mean by the belief's variance.
    """
    a, b = 1 + successes, 1 + failures
    expected: Numbers = a * b / ((a + b) * (a + b + 1))
    return expected


def worst_case(success: Numbers, temperature: float) -> Numbers:
    """Distribution [P] that favours failure: a softmax of the failure rates over `temperature`.

    It maximises the mean failure rate less `temperature` times the divergence from the uniform
    distribution: the opponent of distributionally robust optimisation, held near uniform.
    """
    scores = (success.min() - success) / temperature  # At most 0: exp does not overflow.
    weights = np.exp(scores)
    distribution: Numbers = weights / weights.sum()
    return distribution


def with_floor(weights: Numbers, floor: float) -> Numbers:
    """Weights [P] made a distribution of which the share `floor` is uniform, so that no state is
    left out for good. Weights that are all zero give the uniform distribution."""
    total = weights.sum()
    uniform = np.full(len(weights), 1 / len(weights))
    if total <= 0:
        return uniform
    mixed: Numbers = floor * uniform + (1 - floor) * weights / total
    return mixed


def effective_number(distribution: Numbers) -> float:
    """How many equally likely states would be as spread out: 1 over the sum of squares."""
    return float(1 / np.square(distribution).sum())
