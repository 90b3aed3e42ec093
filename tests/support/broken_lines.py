"""The line world with one fault in each class, for the gates of `doctor simulator` to catch.

In a module of its own, so that worker processes can import it by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from embodied_rl.contracts import (
    BatchEnvironment,
    BatchOutcome,
    Environment,
    EnvironmentObservation,
    Episode,
    Observation,
    StepOutcome,
)
from line_world import Line, LineConfig

if TYPE_CHECKING:
    from torch import Tensor

    from embodied_rl.contracts import ByteArray, FloatArray


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


class Timeless(Line):
    """Its snapshots forget how many steps have gone by."""

    def observe(self) -> EnvironmentObservation:
        return EnvironmentObservation({}, np.array([self.x, 0.0], dtype=np.float32))

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None:
        self.x = float(snapshot["x"][0])


class Crosstalk:
    """Lines as one batch. `fault="reset"`: a reset begins all slots anew; `fault="step"`: a slot
    that waits is stepped as well."""

    def __init__(self, config: LineConfig, num_slots: int, fault: str) -> None:
        self.num_slots, self._fault = num_slots, fault
        self._lines = [Line(config) for _ in range(num_slots)]
        self._episodes: dict[int, Episode] = {}
        self.spec = self._lines[0].spec

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        begun = dict(zip(slots, episodes, strict=True))
        self._episodes |= begun
        for slot in self._episodes if self._fault == "reset" else begun:
            self._lines[slot].reset(self._episodes[slot])

    def step(self, actions: Tensor, active: Tensor) -> BatchOutcome:
        idle = StepOutcome(0.0, False, False, False)
        outcomes = [
            line.step(action.numpy()) if runs or self._fault == "step" else idle
            for line, action, runs in zip(self._lines, actions + 0.1, active, strict=True)
        ]
        flags = ("terminated", "truncated", "success")
        return BatchOutcome(
            torch.tensor([outcome.reward for outcome in outcomes]),
            *(torch.tensor([getattr(o, flag) for o in outcomes]) for flag in flags),
        )

    def observe(self, slots: Sequence[int]) -> Observation:
        states = [torch.from_numpy(self._lines[slot].observe().state) for slot in slots]
        words = tuple(self._lines[slot].instruction for slot in slots)
        return Observation({}, torch.stack(states), words)

    def render(self, slot: int) -> ByteArray:
        return self._lines[slot].render()

    def close(self) -> None:
        pass


class CrosstalkConfig(LineConfig):
    """Lines as one batch, with a fault or without."""

    batched: bool = True
    fault: str = "none"

    def build_batch(self, num_slots: int, device: str) -> BatchEnvironment:
        return Crosstalk(self, num_slots, self.fault)


KINDS: dict[str, type[Line]] = {
    kind.__name__: kind
    for kind in (
        Endless,
        Moody,
        Slippery,
        Foggy,
        Silent,
        Jumpy,
        Fixed,
        Brittle,
        Wild,
        Same,
        Timeless,
    )
}


class OddLineConfig(LineConfig):
    """A line with a fault."""

    kind: str

    def build_environment(self) -> Environment:
        return KINDS[self.kind](self)
