"""Who starts where: planned here, never drawn inside a simulator; `practice` says what is favoured.

Initial states are numbers. Training, quick checks and final results take theirs from ranges that do
not touch, so that a policy is never measured on what it was trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np

from embodied_rl.contracts import Episode, InitialStates, Reason
from embodied_rl.rollout.batch import EpisodeResult
from embodied_rl.rollout.practice import (
    AGAIN,
    DemonstratedStarts,
    Demonstration,
    Start,
    WeightedStates,
    start_values,
)
from embodied_rl.rollout.visited import VisitedStarts
from embodied_rl.run_config import PracticeConfig

type Split = Literal["train", "quick", "final"]

END_OF_NUMBERS = 2**31
"""Numbers of initial states are below this where a simulator accepts any."""

_SHARES: dict[Split, tuple[float, float]] = {
    "train": (0.0, 0.5),
    "quick": (0.5, 0.75),
    "final": (0.75, 1.0),
}


def initial_states(split: Split, states: InitialStates | int | None) -> range:
    """The initial states of a split, out of all that there are (None: any number will do)."""
    known = states if isinstance(states, InitialStates) else InitialStates(states)
    if known.benchmark and (split == "final" or (split == "train" and known.trained_on)):
        return range(known.benchmark)
    count = END_OF_NUMBERS if known.count is None else known.count
    first, last = _SHARES[split]
    return range(max(int(first * count), known.benchmark), int(last * count))


def evaluation_plan(
    tasks: str | Sequence[str],
    num_episodes: int,
    seed: int = 0,
    split: Literal["quick", "final"] = "final",
    states: InitialStates | int | None = None,
) -> list[Episode]:
    """Episodes of each task on the first held-out initial states of a split, each state once.

    Raises ValueError if the simulator has fewer held-out states than episodes were asked for.
    """
    numbers = initial_states(split, states)
    if num_episodes > len(numbers):
        raise ValueError(
            f"{num_episodes} evaluation episodes asked for, but of {_in_words(states)} only "
            f"{len(numbers)} are held out for the {split} evaluation; ask for at most that many"
        )
    tasks = _as_tuple(tasks)
    prefixes = [(task, f"{task}/" if len(tasks) > 1 else "") for task in tasks]
    return [
        Episode(
            key=f"{split}/{seed}/{prefix}{i:06d}",
            task=task,
            initial_state=numbers[i],
            seed=seed,
            group=i * len(tasks) + number,
        )
        # One after the other, so that every part of the plan holds all tasks.
        for i in range(num_episodes)
        for number, (task, prefix) in enumerate(prefixes)
    ]


class TrainingPlanner:
    """An endless plan of training episodes; groups of `group_size` share task and start.

    Without `practice`, and with `starts=uniform`, tasks take turns and all training states are
    equally likely.
    """

    def __init__(
        self,
        tasks: str | Sequence[str],
        seed: int,
        states: InitialStates | int | None = None,
        group_size: int = 1,
        practice: PracticeConfig | None = None,
        demonstrations: Sequence[Demonstration] = (),
    ) -> None:
        self.seed, self.group_size = seed, group_size
        self.tasks = _as_tuple(tasks)
        self._states = initial_states("train", states)
        if not self._states:
            raise ValueError(f"{_in_words(states)} are too few to hold some out; give at least 4")
        self._cursor = 0
        self._waiting: deque[Episode] = deque()
        self._progress = 0.0
        self._start: Start | None = None
        self._weighted: WeightedStates | None = None
        self._demonstrated: DemonstratedStarts | None = None
        self._visited: VisitedStarts | None = None
        if practice and practice.starts != "uniform":
            self._weighted = WeightedStates(practice, self.tasks, self._states, seed)
        if practice and practice.demonstrated_share:
            self._demonstrated = DemonstratedStarts(practice, demonstrations, seed)
        if practice and practice.visited_share:
            self._visited = VisitedStarts(practice, seed)

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

    def again(self, member: Episode, time: int) -> list[Episode]:
        """Another `group_size` episodes of a member's group, for the first, second ... time.

        A function of the seed and the group alone, so that it does not matter which of several
        groups asks first, and the plan of the groups to come is the same whoever asks. Their keys
        follow those that the group began with.
        """
        drawn = np.random.SeedSequence([self.seed, member.group, time, AGAIN])
        # Simulators take seeds below 2^32; those of planned episodes count up from 0.
        seeds = drawn.generate_state(self.group_size, np.uint32) >> 1
        last = (member.group + 1) * self.group_size - 1
        return [
            replace(member, key=f"train/{last:08d}/{time:04d}/{i:04d}", seed=int(seed))
            for i, seed in enumerate(seeds)
        ]

    def note(self, results: Sequence[EpisodeResult], progress: float) -> dict[str, float]:
        """How episodes of this plan went, and the share of the run that is done: what is planned
        from now on depends on it. Returns values for the training curves."""
        self._progress = progress
        values = self._weighted.note(results) if self._weighted else {}
        values |= self._visited.note(results) if self._visited else {}
        kinds: list[Reason] = ["demonstration"] if self._demonstrated else []
        kinds += ["visited"] if self._visited else []
        return values | start_values(results, kinds)

    def state_dict(self) -> dict[str, Any]:
        """Plain data from which the plan continues."""
        state: dict[str, Any] = {
            "cursor": self._cursor,
            "waiting": [asdict(e) for e in self._waiting],
            "progress": self._progress,
            "start": self._start,
        }
        state |= {"weighted": self._weighted.state_dict()} if self._weighted else {}
        return state | ({"visited": self._visited.state_dict()} if self._visited else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a plan."""
        self._cursor = int(state["cursor"])
        self._waiting = deque(Episode.from_json(episode) for episode in state["waiting"])
        # Plans saved before there was a choice of starts say nothing about it.
        self._progress = float(state.get("progress", 0.0))
        start = state.get("start")
        self._start = Start.from_json(start) if start else None
        if self._weighted:
            self._weighted.load_state_dict(state["weighted"])
        if self._visited:
            self._visited.load_state_dict(state["visited"])

    def _plan(self, number: int) -> Episode:
        group, place = divmod(number, self.group_size)
        # The evidence may change between the episodes of a group, which must start alike.
        if place == 0 or self._start is None:
            self._start = self._draw(group)
        return Episode(
            key=f"train/{number:08d}",
            task=self._start.task,
            initial_state=self._start.initial_state,
            seed=number,
            group=group,
            start=self._start.why,
            prelude=self._start.prelude,
        )

    def _draw(self, group: int) -> Start:
        """A function of the seed, the group and what was noted: nothing random has to be saved."""
        for within in (self._demonstrated, self._visited):
            start = within and within.draw(group, self._progress)
            if start:
                return start
        if self._weighted:
            return self._weighted.draw(group)
        drawn = np.random.SeedSequence([self.seed, group]).generate_state(1, np.uint64)[0]
        task = self.tasks[group % len(self.tasks)]
        return Start(task, self._states[int(drawn % len(self._states))])


def _in_words(states: InitialStates | int | None) -> str:
    count = states.count if isinstance(states, InitialStates) else states
    return "all initial states" if count is None else f"{count} initial states"


def _as_tuple(tasks: str | Sequence[str]) -> tuple[str, ...]:
    return (tasks,) if isinstance(tasks, str) else tuple(tasks)
