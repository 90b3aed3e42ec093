"""Starts that earlier episodes of the run passed through.

As SnapshotRL does (Zhao et al. 2024, arXiv:2403.00673) with a teacher's states, here with the
learner's own. Only of episodes that succeeded: every one of their states is known to be one from
which success is possible, whereas a failed episode's late states are often beyond repair, and early
in a run failures would crowd out the rest. The pool holds the newest, so that its states are those
that the present policy comes through.

A state is reached by executing the episode's actions again, from its initial state on. That takes
nothing of a simulator but that it repeats itself; it costs the simulation, not the decisions, of
these steps, which are counted in `env_steps`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from embodied_rl.rollout.batch import Path
from embodied_rl.rollout.practice import VISITED, Start, falling, seeded

if TYPE_CHECKING:
    from embodied_rl.rollout.batch import EpisodeResult
    from embodied_rl.run_config import PracticeConfig


class _Visit(NamedTuple):
    """A success of this run."""

    task: str
    initial_state: int
    path: Path


class VisitedStarts:
    """Begins a share of the groups within earlier successes, less and less often."""

    def __init__(self, options: PracticeConfig, seed: int) -> None:
        self._options, self._seed = options, seed
        self._pool: deque[_Visit] = deque(maxlen=options.visited_pool)

    def note(self, results: Iterable[EpisodeResult]) -> dict[str, float]:
        """Take the successes in; the order of the results does not matter."""
        for result in sorted(results, key=lambda result: result.episode.key):
            path, episode = result.path, result.episode
            # One that succeeds with its first decision passes through no state of interest.
            if result.success_once and path and path.starts:
                self._pool.append(_Visit(episode.task, episode.initial_state, path))
        return {"visited_pool": float(len(self._pool))}

    def draw(self, group: int, progress: float) -> Start | None:
        """Where a group begins; None: elsewhere, for one thing as long as nothing succeeded."""
        random = seeded(self._seed, group, VISITED)
        share = falling(self._options.visited_share, self._options.visited_until, progress)
        if random.random() >= share or not self._pool:
            return None
        visit = self._pool[random.integers(len(self._pool))]
        length = visit.path.starts[random.integers(len(visit.path.starts))]
        return Start(visit.task, visit.initial_state, "visited", visit.path.prelude(length))

    def state_dict(self) -> list[dict[str, Any]]:
        """The pool, as plain data."""
        return [
            {
                "task": visit.task,
                "initial_state": visit.initial_state,
                "actions": visit.path.actions.tolist(),
                "first": visit.path.first,
                "chunk": visit.path.chunk,
            }
            for visit in self._pool
        ]

    def load_state_dict(self, state: Iterable[dict[str, Any]]) -> None:
        """Go on with a saved pool."""
        self._pool.clear()
        for entry in state:
            actions = np.array(entry["actions"], dtype=np.float32)
            path = Path(actions, int(entry["first"]), int(entry["chunk"]))
            self._pool.append(_Visit(entry["task"], int(entry["initial_state"]), path))
