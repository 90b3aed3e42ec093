"""What to practise on: which initial states training episodes start from, and how far in.

Everything random is a function of the seed, the number of the group and the evidence so far, so
that a plan that is continued from its saved evidence is the plan that it would have been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from embodied_rl.maths.practice import (
    Numbers,
    effective_number,
    expected_success,
    learnability,
    with_floor,
    worst_case,
)
from embodied_rl.run_config import PracticeConfig

if TYPE_CHECKING:
    from embodied_rl.contracts import FloatArray, Prelude, Reason
    from embodied_rl.rollout.batch import EpisodeResult

_POOL, _STATE, _DEMONSTRATION, AGAIN, VISITED, BRANCH = 1, 2, 3, 4, 5, 6
"""Salts: what is drawn for one group must not depend on what else is drawn for it."""

_WITHIN: dict[Reason, tuple[str, str]] = {
    "demonstration": ("demonstrated", "within_demonstration"),
    "visited": ("visited", "from_visited"),
    "branch": ("branched", "from_branch"),
}
"""Starts after a prelude, as the training curves name them."""


class Start(NamedTuple):
    """Where the episodes of one group begin."""

    task: str
    initial_state: int
    why: Reason = "uniform"
    prelude: Prelude = ()

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Start:
        """The start that was written as JSON, which knows no tuples."""
        task, initial_state, why, prelude = data
        return cls(task, initial_state, why, tuple(tuple(action) for action in prelude))


class WeightedStates:
    """A pool of training states, drawn the more often the more there is to learn from them.

    With several tasks it holds each state of every task, so that tasks are weighted as well.
    """

    def __init__(
        self, options: PracticeConfig, tasks: Sequence[str], states: range, seed: int
    ) -> None:
        assert options.starts != "uniform"
        self._options, self._seed = options, seed
        self._why: Reason = options.starts
        size = min(options.pool, len(states))
        chosen = seeded(seed, _POOL).choice(len(states), size, replace=False)
        self.pool = [(task, states[int(i)]) for i in chosen for task in tasks]
        self._row = {entry: row for row, entry in enumerate(self.pool)}
        self._successes: Numbers = np.zeros(len(self.pool))
        self._failures: Numbers = np.zeros(len(self.pool))
        self._weigh()

    def draw(self, group: int) -> Start:
        """Where a group begins."""
        at = seeded(self._seed, group, _STATE).random()
        # Rounding may leave the last sum below 1.
        row = min(int(np.searchsorted(self._sums, at, side="right")), len(self.pool) - 1)
        return Start(*self.pool[row], self._why)

    def note(self, results: Iterable[EpisodeResult]) -> dict[str, float]:
        """Let the old evidence fade, add what these episodes showed, and say what was expected of
        them and how spread out the weights now are.

        The order of the results does not matter. Episodes that failed to run, or began after a
        prelude, say nothing about their initial state.
        """
        counted = [
            (self._row[entry], result.success_once)
            for result in results
            if result.error is None
            and not result.episode.prelude
            and (entry := (result.episode.task, result.episode.initial_state)) in self._row
        ]
        expected = expected_success(self._successes, self._failures)
        self._successes *= self._options.decay
        self._failures *= self._options.decay
        for row, success in counted:
            (self._successes if success else self._failures)[row] += 1
        self._weigh()
        values = {"practice_states": effective_number(self.weights)}
        if counted:
            values["practice_success"] = float(np.mean([expected[row] for row, _ in counted]))
        return values

    def state_dict(self) -> dict[str, Any]:
        """The evidence, as plain data."""
        return {"successes": self._successes.tolist(), "failures": self._failures.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved evidence."""
        self._successes = np.array(state["successes"], dtype=np.float64)
        self._failures = np.array(state["failures"], dtype=np.float64)
        self._weigh()

    def _weigh(self) -> None:
        options = self._options
        if options.starts == "curriculum":
            weights = learnability(self._successes, self._failures)
        else:
            success = expected_success(self._successes, self._failures)
            weights = worst_case(success, options.temperature)
        self.weights = with_floor(weights, options.floor)
        self._sums = np.cumsum(self.weights)


@dataclass(frozen=True)
class Demonstration:
    """A recorded success that can be played again."""

    task: str
    initial_state: int
    actions: FloatArray
    """[L, A]: the last one succeeds."""


class DemonstratedStarts:
    """Begins a share of the groups within demonstrations, less and less often.

    As SnapshotRL does (Zhao et al. 2024, arXiv:2403.00673), early training starts from states on
    the way to success. A state is reached by playing the demonstrated actions up to it, which
    needs nothing of a simulator but that it nearly repeats itself, and nothing of the data set but
    its actions.
    """

    def __init__(
        self, options: PracticeConfig, demonstrations: Sequence[Demonstration], seed: int
    ) -> None:
        self._options, self._seed = options, seed
        # One that succeeds at its first step has no state before its end but the initial one.
        self._demonstrations = [d for d in demonstrations if len(d.actions) > 1]
        if not self._demonstrations:
            raise ValueError(
                f"practice.demonstrated_share={options.demonstrated_share} needs demonstrations of "
                f"at least 2 steps, but none of the {len(demonstrations)} given is that long; "
                f"record others or set practice.demonstrated_share=0"
            )

    def draw(self, group: int, progress: float) -> Start | None:
        """Where a group begins; None: at an initial state, as usual."""
        random = seeded(self._seed, group, _DEMONSTRATION)
        options = self._options
        share = falling(options.demonstrated_share, options.demonstrated_until, progress)
        if random.random() >= share:
            return None
        demonstration = self._demonstrations[random.integers(len(self._demonstrations))]
        length = int(random.integers(1, len(demonstration.actions)))
        actions = tuple(tuple(action) for action in demonstration.actions[:length].tolist())
        return Start(demonstration.task, demonstration.initial_state, "demonstration", actions)


def start_values(results: Sequence[EpisodeResult], kinds: Collection[Reason]) -> dict[str, float]:
    """How many episodes began in these ways within others, or did so unasked, and how those and
    the ones from initial states went. Nothing to tell where none does."""
    counted = Counter(result.episode.start for result in results)
    shown = [reason for reason in _WITHIN if reason in kinds or counted[reason]]
    if not results or not shown:
        return {}
    values: dict[str, float] = {}
    for reason in shown:
        name, words = _WITHIN[reason]
        values[f"{name}_share"] = counted[reason] / len(results)
        values |= _success(words, [r for r in results if r.episode.start == reason])
    outside = [result for result in results if result.episode.start not in _WITHIN]
    return values | _success("from_initial_state", outside)


def _success(name: str, results: Sequence[EpisodeResult]) -> dict[str, float]:
    if not results:
        return {}
    return {f"success_rate_{name}": sum(r.success_once for r in results) / len(results)}


def falling(share: float, until: float, progress: float) -> float:
    """A share that falls linearly to zero, which it reaches at the progress `until`."""
    return share * max(0.0, 1 - progress / until)


def seeded(*numbers: int) -> np.random.Generator:
    """A generator for these numbers, the last of which is a salt."""
    return np.random.default_rng(np.random.SeedSequence(list(numbers)))
