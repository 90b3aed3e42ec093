"""Who starts where: planned here, never drawn inside a simulator.

Initial states are numbers. Training, quick checks and final results take theirs from ranges that do
not touch, so that a policy is never measured on what it was trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from embodied_rl.contracts import Episode

type Split = Literal["train", "quick", "final"]

END_OF_NUMBERS = 2**31
"""Numbers of initial states are below this where a simulator accepts any."""

_SHARES: dict[Split, tuple[float, float]] = {
    "train": (0.0, 0.5),
    "quick": (0.5, 0.75),
    "final": (0.75, 1.0),
}


def initial_states(split: Split, num_initial_states: int | None) -> range:
    """The initial states of a split, out of all that there are (None: any number will do)."""
    count = END_OF_NUMBERS if num_initial_states is None else num_initial_states
    first, last = _SHARES[split]
    return range(int(first * count), int(last * count))


def evaluation_plan(
    tasks: str | Sequence[str],
    num_episodes: int,
    seed: int = 0,
    split: Literal["quick", "final"] = "final",
    num_initial_states: int | None = None,
) -> list[Episode]:
    """Episodes of each task on the first held-out initial states of a split, each state once.

    Raises ValueError if the simulator has fewer held-out states than episodes were asked for.
    """
    states = initial_states(split, num_initial_states)
    if num_episodes > len(states):
        raise ValueError(
            f"{num_episodes} evaluation episodes asked for, but of {num_initial_states} initial "
            f"states only {len(states)} are held out for the {split} evaluation; ask for at most "
            f"that many"
        )
    tasks = _as_tuple(tasks)
    prefixes = [(task, f"{task}/" if len(tasks) > 1 else "") for task in tasks]
    return [
        Episode(
            key=f"{split}/{seed}/{prefix}{i:06d}",
            task=task,
            initial_state=states[i],
            seed=seed,
            group=i * len(tasks) + number,
        )
        # One after the other, so that every part of the plan holds all tasks.
        for i in range(num_episodes)
        for number, (task, prefix) in enumerate(prefixes)
    ]


class TrainingPlanner:
    """An endless plan of training episodes; groups of `group_size` share task and initial state.

    Tasks take turns, group by group.
    """

    def __init__(
        self,
        tasks: str | Sequence[str],
        seed: int,
        num_initial_states: int | None = None,
        group_size: int = 1,
    ) -> None:
        self.seed, self.group_size = seed, group_size
        self.tasks = _as_tuple(tasks)
        self._states = initial_states("train", num_initial_states)
        if not self._states:
            raise ValueError(
                f"{num_initial_states} initial states are too few to hold some out; give at least 4"
            )
        self._cursor = 0
        self._waiting: deque[Episode] = deque()

    def take(self, count: int) -> list[Episode]:
        """The next episodes of the plan."""
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        while len(taken) < count:
            taken.append(self._plan(self._cursor))
            self._cursor += 1
        return taken

    def put_back(self, episodes: Iterable[Episode]) -> None:
        """Episodes that were not run, or were lost: they come next, in this order."""
        self._waiting.extendleft(reversed(list(episodes)))

    def state_dict(self) -> dict[str, Any]:
        """Plain data from which the plan continues."""
        return {"cursor": self._cursor, "waiting": [asdict(e) for e in self._waiting]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a plan."""
        self._cursor = int(state["cursor"])
        self._waiting = deque(Episode(**episode) for episode in state["waiting"])

    def _plan(self, number: int) -> Episode:
        group = number // self.group_size
        # A function of seed and number alone: nothing random has to be saved.
        drawn = np.random.SeedSequence([self.seed, group]).generate_state(1, np.uint64)[0]
        return Episode(
            key=f"train/{number:08d}",
            task=self.tasks[group % len(self.tasks)],
            initial_state=self._states[int(drawn % len(self._states))],
            seed=number,
            group=group,
        )


def _as_tuple(tasks: str | Sequence[str]) -> tuple[str, ...]:
    return (tasks,) if isinstance(tasks, str) else tuple(tasks)
