"""A small deterministic environment, importable by worker processes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from embodied_rl.config import Config
from embodied_rl.contracts import (
    Contract,
    Environment,
    EnvironmentObservation,
    Episode,
    Expert,
    SimulatorSpec,
    StepOutcome,
)

if TYPE_CHECKING:
    from embodied_rl.contracts import ByteArray, FloatArray


class LineConfig(Config):
    """A point on a line that should come to the origin."""

    type: Literal["line"] = "line"
    task: str = "line"
    limit: int = 6
    limit_terminates: bool = False
    """Whether failing to come home in time is an end like success, worth nothing, not a cut."""
    radius: float = 0.1
    break_on_state: int = -1
    """Initial state at which the environment raises."""
    die_on_state: int = -1
    """Initial state at which the whole process dies."""
    hang_on_state: int = -1
    """Initial state at which the environment never answers."""
    broken: bool = False
    """Whether building it fails."""
    batched: bool = False
    gives_images: bool = False
    preload: tuple[str, ...] = ()

    def build_environment(self) -> Environment:
        if self.broken:
            raise RuntimeError("the line is broken; mend it")
        return Line(self)

    def build_expert(self, environment: Environment) -> Expert:
        assert isinstance(environment, Line)
        return lambda: np.array([np.clip(-environment.x, -0.3, 0.3)], dtype=np.float32)


class Line:
    """x moves by the action; success within `radius` of 0 ends the episode with reward 1."""

    def __init__(self, config: LineConfig) -> None:
        self.config = config
        self.x, self.elapsed, self.num_observed = 0.0, 0, 0
        self.instruction = ""
        self.spec = SimulatorSpec(
            task="line",
            contract=Contract(
                state_dim=2,
                action_dim=1,
                action_low=(-1.0,),
                action_high=(1.0,),
                control_mode="delta",
                control_hz=10.0,
                gripper="none",
                rotation="none",
            ),
            max_episode_steps=config.limit,
        )

    def reset(self, episode: Episode) -> None:
        state = episode.initial_state
        if state == self.config.break_on_state:
            raise ValueError(f"cannot start from {state}")
        if state == self.config.die_on_state:
            os._exit(7)
        if state == self.config.hang_on_state:
            time.sleep(1000)
        self.x = float(np.random.default_rng(state).uniform(-1, 1))
        self.elapsed = 0
        self.instruction = f"go home from {state}"

    def step(self, action: FloatArray) -> StepOutcome:
        self.x = float(np.float32(self.x + float(action[0])))
        self.elapsed += 1
        success = abs(self.x) < self.config.radius
        over = self.elapsed >= self.config.limit
        terminated = success or (over and self.config.limit_terminates)
        return StepOutcome(float(success), terminated, over, success)

    def observe(self) -> EnvironmentObservation:
        self.num_observed += 1
        state = np.array([self.x, self.elapsed / 10], dtype=np.float32)
        return EnvironmentObservation({}, state)

    def snapshot(self) -> dict[str, FloatArray]:
        return {"x": np.array([self.x, self.elapsed], dtype=np.float32)}

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None:
        self.x, self.elapsed = float(snapshot["x"][0]), int(snapshot["x"][1])

    def render(self) -> ByteArray:
        raise RuntimeError("lines are not drawn")

    def close(self) -> None:
        pass


def episode(state: int, **options: Any) -> Episode:
    """A training episode from an initial state."""
    return Episode(key=f"train/{state}", task="line", initial_state=state, seed=state, **options)
