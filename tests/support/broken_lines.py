"""The line world with one fault in each class, for the gates of `doctor simulator` to catch.

In a module of its own, so that worker processes can import it by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from embodied_rl.contracts import Environment, EnvironmentObservation, Episode, StepOutcome
from line_world import Line, LineConfig

if TYPE_CHECKING:
    from embodied_rl.contracts import FloatArray


class Endless(Line):
    """Never says that its time is over."""

    def step(self, action: FloatArray) -> StepOutcome:
        super().step(action)
        return StepOutcome(0.0, False, False, False)


class Moody(Line):
    """Starts anywhere."""

    def reset(self, episode: Episode) -> None:
        super().reset(episode)
        self.x = float(np.random.default_rng().uniform(-1, 1))


class Slippery(Line):
    """Moves at random."""

    def step(self, action: FloatArray) -> StepOutcome:
        self.x += float(np.random.default_rng().uniform(-0.3, 0.3))
        return super().step(action)


class Foggy(Line):
    def observe(self) -> EnvironmentObservation:
        return EnvironmentObservation({}, np.array([np.nan, 0.0], dtype=np.float32))


class Silent(Line):
    def reset(self, episode: Episode) -> None:
        super().reset(episode)
        self.instruction = ""


class Jumpy(Line):
    """Restores beside where it was."""

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None:
        super().restore(snapshot)
        self.x += 0.5


class Fixed(Line):
    def snapshot(self) -> dict[str, FloatArray]:
        raise NotImplementedError


class Brittle(Line):
    """Breaks when it is put back."""

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None:
        raise RuntimeError("it broke")


class Wild(Line):
    def step(self, action: FloatArray) -> StepOutcome:
        outcome = super().step(action)
        if abs(float(action[0])) > 10.0:
            self.x = float("nan")
        return outcome


class Same(Line):
    def reset(self, episode: Episode) -> None:
        super().reset(episode)
        self.x = 0.9


KINDS: dict[str, type[Line]] = {
    kind.__name__: kind
    for kind in (Endless, Moody, Slippery, Foggy, Silent, Jumpy, Fixed, Brittle, Wild, Same)
}


class OddLineConfig(LineConfig):
    """A line with a fault."""

    kind: str

    def build_environment(self) -> Environment:
        return KINDS[self.kind](self)
