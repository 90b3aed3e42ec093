"""A line that remembers what was done in it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from embodied_rl.contracts import Episode, StepOutcome
from embodied_rl.rollout.inline import InlineSimulator
from line_world import Line, LineConfig

if TYPE_CHECKING:
    from embodied_rl.contracts import FloatArray


class RecordingLine(Line):
    """Keeps the actions since the last reset of every episode, and counts all steps."""

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        self.key, self.num_steps = "", 0
        self.actions: dict[str, list[FloatArray]] = defaultdict(list)

    def reset(self, episode: Episode) -> None:
        super().reset(episode)
        self.key = episode.key
        self.actions[self.key].clear()

    def step(self, action: FloatArray) -> StepOutcome:
        self.num_steps += 1
        self.actions[self.key].append(action.copy())
        return super().step(action)


class Recorded:
    """Recording lines as a simulator, and what was executed in them."""

    def __init__(self, config: LineConfig, num_slots: int, chunk: int) -> None:
        self.lines = [RecordingLine(config) for _ in range(num_slots)]
        self.simulator = InlineSimulator(self.lines, chunk)

    @property
    def num_steps(self) -> int:
        return sum(line.num_steps for line in self.lines)

    def actions(self, key: str) -> FloatArray:
        """[L, A]: of the one line that an episode was last run in."""
        found = [line.actions[key] for line in self.lines if line.actions.get(key)]
        assert len(found) == 1
        return np.stack(found[0])
