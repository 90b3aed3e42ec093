"""The rules inside a chunk, line by line, with scripted outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from embodied_rl.contracts import Episode, StepOutcome
from embodied_rl.rollout.inline import InlineSimulator
from line_world import Line, LineConfig, episode

GO, WIN = StepOutcome(0.0, False, False, False), StepOutcome(1.0, True, False, True)
CUT, BOTH = StepOutcome(0.0, False, True, False), StepOutcome(1.0, True, True, True)
TOUCH = StepOutcome(0.5, False, False, True)


class Scripted(Line):
    """Gives prescribed outcomes; x counts the steps."""

    def __init__(self, script: Sequence[StepOutcome]) -> None:
        super().__init__(LineConfig())
        self.script, self.num_steps, self.num_resets = list(script), 0, 0

    def reset(self, episode: Episode) -> None:
        super().reset(episode)
        self.x, self.num_resets = 100.0 * episode.initial_state, self.num_resets + 1

    def step(self, action: np.ndarray) -> StepOutcome:  # type: ignore[type-arg]
        self.x, self.num_steps = self.x + 1, self.num_steps + 1
        return self.script.pop(0)


@pytest.mark.parametrize(
    ("script", "executed", "terminated", "truncated", "once", "now", "rewards"),
    [
        ([GO, GO, GO], 3, False, False, False, False, [0, 0, 0]),
        ([GO, WIN], 2, True, False, True, True, [0, 1, 0]),
        ([GO, CUT], 2, False, True, False, False, [0, 0, 0]),
        ([BOTH], 1, True, False, True, True, [1, 0, 0]),
        ([TOUCH, GO, GO], 3, False, False, True, False, [0.5, 0, 0]),
        ([TOUCH, CUT], 2, False, True, True, False, [0.5, 0, 0]),
    ],
)
def test_chunk_rules(
    script: list[StepOutcome],
    executed: int,
    terminated: bool,
    truncated: bool,
    once: bool,
    now: bool,
    rewards: list[float],
) -> None:
    environment = Scripted(script)
    simulator = InlineSimulator([environment], chunk=3)
    simulator.start([0], [episode(1)])
    simulator.send([0], torch.zeros(1, 3, 1), [episode(2)])
    result = simulator.receive([0])
    assert environment.num_steps == executed == int(result.executed[0])
    assert bool(result.terminated[0]) is terminated
    assert bool(result.truncated[0]) is truncated
    assert bool(result.success_once[0]) is once
    assert bool(result.success_now[0]) is now
    assert result.reward[0].tolist() == rewards
    done = terminated or truncated
    assert bool(result.refilled[0]) is done
    # The next view is the next episode's first, or the chunk's end.
    assert result.observation.state[0, 0] == (200 if done else 103)
    assert result.observation.instruction[0] == f"go home from {2 if done else 1}"
    if truncated:
        # The cut observation is the one at step i, under its own instruction.
        assert result.final_observation.state[0, 0] == 100 + executed
        assert result.final_observation.instruction[0] == "go home from 1"


def test_only_consumed_observations_are_made() -> None:
    environment = Scripted([GO] * 6 + [GO, WIN])
    simulator = InlineSimulator([environment], chunk=3)
    simulator.start([0], [episode(1)])
    for _ in range(2):
        simulator.send([0], torch.zeros(1, 3, 1), [None])
    assert environment.num_observed == 3  # first view and two chunk ends, not six steps
    simulator.send([0], torch.zeros(1, 3, 1), [None])
    assert environment.num_observed == 3  # a termination needs no last view


def test_an_ended_slot_without_an_offer_stays_frozen() -> None:
    environment = Scripted([WIN])
    simulator = InlineSimulator([environment], chunk=3)
    simulator.start([0], [episode(1)])
    simulator.send([0], torch.zeros(1, 3, 1), [None])
    result = simulator.receive([0])
    assert not result.refilled[0] and environment.num_resets == 1
