"""Playing the rest of an episode in one scene, to compare it with another time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodied_rl.contracts import Environment, EnvironmentObservation


@dataclass(frozen=True)
class Ending:
    """How an episode ended."""

    terminated: bool
    truncated: bool
    success: bool


@dataclass(frozen=True)
class PlayedOut:
    """The rest of an episode."""

    views: tuple[EnvironmentObservation, EnvironmentObservation]
    """At first, and one step later."""
    steps: int
    ending: Ending


def play_out(environment: Environment, action: Any) -> PlayedOut:
    """Go on with one action to the episode's end."""
    views, steps = [environment.observe()], 0
    while True:
        outcome = environment.step(action)
        steps += 1
        if steps == 1:
            views.append(environment.observe())
        if outcome.terminated or outcome.truncated or steps > environment.spec.max_episode_steps:
            ending = Ending(outcome.terminated, outcome.truncated, outcome.success)
            return PlayedOut((views[0], views[1]), steps, ending)


def apart(first: EnvironmentObservation, second: EnvironmentObservation) -> float:
    """Largest difference of two views: of states as they are, of pictures as shares of white."""
    if not first.state.size:
        pairs = [(first.images[name], second.images[name]) for name in first.images]
        return max((float(abs(a.astype(float) - b).max()) / 255 for a, b in pairs), default=0.0)
    return float(abs(first.state - second.state).max())
