"""A hand that closes around something, importable by worker processes: seven action entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from embodied_rl.config import Config
from embodied_rl.contracts import (
    Contract,
    Environment,
    EnvironmentObservation,
    Episode,
    Expert,
    HandMotion,
    SimulatorSpec,
    StatePart,
    StepOutcome,
)

if TYPE_CHECKING:
    from embodied_rl.contracts import ByteArray, FloatArray

CONTRACT = Contract(
    state_dim=9,
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    control_mode="hand",
    control_hz=10.0,
    gripper="+1 opens, -1 closes",
    rotation="euler, half a radian per unit",
    state_parts=(
        StatePart("gripper_joints", 2),
        StatePart("eef_position", 3),
        StatePart("eef_rotation", 4, "quaternion_wxyz"),
    ),
    hand=HandMotion(0.1, 0.5, "euler_xyz"),
)


class HandConfig(Config):
    """A point in space that should be reached, then grasped."""

    type: Literal["hand"] = "hand"
    task: str = "grasp"
    gripper: str = CONTRACT.gripper
    """What the simulator says of its gripper, true or not."""
    batched: bool = False
    gives_images: bool = False
    preload: tuple[str, ...] = ()

    def build_environment(self) -> Environment:
        return Hand(self)

    def build_expert(self, environment: Environment) -> Expert:
        assert isinstance(environment, Hand)
        return environment.expert


class Hand:
    """Success is a gripper closed for two steps within 2 cm of the origin; closed, it stays."""

    def __init__(self, config: HandConfig) -> None:
        contract = replace(CONTRACT, gripper=config.gripper)
        self.spec = SimulatorSpec(task="grasp", contract=contract, max_episode_steps=12)
        self.instruction = "grasp it"
        self._position: Any = np.zeros(3)
        self._opening, self._elapsed, self._closed = 1.0, 0, 0

    def reset(self, episode: Episode) -> None:
        generator = np.random.default_rng(episode.initial_state)
        self._position = generator.uniform(-0.3, 0.3, 3)
        self._opening, self._elapsed, self._closed = 1.0, 0, 0

    def expert(self) -> FloatArray:
        move = np.clip(-self._position / 0.1, -1, 1)
        near = np.linalg.norm(self._position) < 0.02
        action: FloatArray = np.array([*move, 0.1, -0.2, 0.3, -1.0 if near else 1.0], np.float32)
        return action

    def step(self, action: FloatArray) -> StepOutcome:
        self._elapsed += 1
        self._opening = 1.0 if action[6] > 0 else 0.0
        if self._opening:
            self._position = self._position + 0.1 * np.asarray(action[:3], float)
        self._closed = 0 if self._opening else self._closed + 1
        success = self._closed > 1 and bool(np.linalg.norm(self._position) < 0.02)
        return StepOutcome(float(success), success, self._elapsed >= 12, success)

    def observe(self) -> EnvironmentObservation:
        fingers = [self._opening / 2, -self._opening / 2]
        state = np.array([*fingers, *self._position, 1, 0, 0, 0], dtype=np.float32)
        return EnvironmentObservation({}, state)

    def snapshot(self) -> dict[str, FloatArray]:
        raise NotImplementedError

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None:
        raise NotImplementedError

    def render(self) -> ByteArray:
        raise RuntimeError("not drawn")

    def close(self) -> None:
        pass


def reversed_gripper() -> dict[str, Any]:
    """A convention as the hand's own, but for the gripper's sign."""
    hand = {"metres_per_unit": 0.1, "radians_per_unit": 0.5, "rotation": "euler_xyz"}
    return {"name": "reversed", "hand": hand, "gripper": {"open": -1.0, "closed": 1.0}}
