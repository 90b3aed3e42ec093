"""Taking gymnasium's observations apart, and counting its episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from embodied_rl.contracts import EnvironmentObservation, StepOutcome

_SUPPORTED = (
    "supported are Box observations of numbers, Box images of uint8 [height, width, 3], and Dict "
    "spaces of these; wrap the environment so that it gives one of them"
)


class UnsupportedSpace(ValueError):
    """An observation or action space that has no counterpart here."""


@dataclass(frozen=True)
class Layout:
    """How one observation is taken apart. A path is the keys that lead to an entry."""

    images: dict[str, tuple[str, ...]]
    """Camera name to path, in sorted order."""
    sizes: dict[str, tuple[int, int]]
    """Camera name to height and width."""
    numbers: tuple[tuple[str, ...], ...]
    """Paths of what is flattened into the state, in sorted order."""
    state_dim: int

    @classmethod
    def of(cls, space: Any, task: str) -> Layout:
        """Read an observation space. Raises `UnsupportedSpace` naming the entry it cannot use."""
        images, sizes, numbers, state_dim = {}, {}, [], 0
        for path, box in _boxes(space, task, ()):
            if box.dtype == np.uint8 and len(box.shape) == 3:
                name = "/".join(path) or "main"
                images[name], sizes[name] = path, (box.shape[0], box.shape[1])
            else:
                numbers.append(path)
                state_dim += int(np.prod(box.shape))
        return cls(images, sizes, tuple(numbers), state_dim)

    def read(self, observation: Any, lead: tuple[int, ...] = ()) -> EnvironmentObservation:
        """Images and state [*lead, S] of an observation whose entries have the shape [*lead, ...].

        Numbers become float32; images are not copied.
        """
        images = {name: np.asarray(_at(observation, path)) for name, path in self.images.items()}
        parts = [
            np.asarray(_at(observation, path), dtype=np.float32).reshape(*lead, -1)
            for path in self.numbers
        ]
        state = np.concatenate(parts, axis=-1) if parts else np.zeros((*lead, 0), np.float32)
        return EnvironmentObservation(images, state)


class ActionFormat:
    """Rows of float32 actions [A] as what an environment's action space holds."""

    def __init__(self, space: Any, task: str) -> None:
        """Raises `UnsupportedSpace` for anything but a bounded Box of floats."""
        is_box = isinstance(space, gymnasium.spaces.Box)
        if not is_box or not np.issubdtype(space.dtype, np.floating):
            raise UnsupportedSpace(
                f"{task} takes actions in {space}; supported are bounded Box spaces of floats. "
                f"Choose a task with continuous actions, or wrap the environment"
            )
        if not space.is_bounded():
            raise UnsupportedSpace(
                f"{task} takes actions without bounds ({space}); wrap the environment with "
                f"gymnasium.wrappers.RescaleAction so that low and high are finite"
            )
        self._shape, self._dtype = space.shape, space.dtype
        self.low, self.high = (edge.astype(np.float64).ravel() for edge in (space.low, space.high))

    def from_row(self, action: Any) -> Any:
        """One action [A] as the environment wants it, within the bounds."""
        clipped = np.clip(np.asarray(action, dtype=np.float64), self.low, self.high)
        return clipped.astype(self._dtype).reshape(self._shape)

    def from_rows(self, actions: Any, active: Any) -> Any:
        """Actions [B, A] for a vector environment; rows that are not active become NaN."""
        clipped = np.clip(np.asarray(actions, dtype=np.float64), self.low, self.high)
        clipped[~active] = np.nan
        return clipped.astype(self._dtype).reshape(-1, *self._shape)


@dataclass(frozen=True)
class EpisodeRules:
    """When an episode ends and what counts as success."""

    max_steps: int
    success_key: str
    success_return: float | None


class EpisodeProgress:
    """Counts the steps and the return of one episode."""

    def __init__(self, rules: EpisodeRules) -> None:
        self._rules = rules
        self.num_steps = 0
        self.total_reward = 0.0

    def after(
        self, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> StepOutcome:
        """The outcome of a step that the environment answered with these."""
        self.num_steps += 1
        self.total_reward += reward
        wanted = self._rules.success_return
        if self._rules.success_key in info:
            success = bool(info[self._rules.success_key])
        else:
            success = wanted is not None and self.total_reward >= wanted
        return StepOutcome(
            reward=reward,
            terminated=terminated,
            truncated=truncated or self.num_steps >= self._rules.max_steps,
            success=success,
        )


def _boxes(space: Any, task: str, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(space, gymnasium.spaces.Dict):
        keys = sorted(space.spaces)
        return [box for key in keys for box in _boxes(space[key], task, (*path, str(key)))]
    where = f"{task}'s observation" + (f" {'/'.join(path)!r}" if path else "")
    if not isinstance(space, gymnasium.spaces.Box):
        raise UnsupportedSpace(f"{where} is in {space}; {_SUPPORTED}")
    if space.dtype == np.uint8 and len(space.shape) >= 2 and space.shape[2:] != (3,):
        raise UnsupportedSpace(f"{where} looks like an image of shape {space.shape}; {_SUPPORTED}")
    return [(path, space)]


def _at(observation: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        observation = observation[key]
    return observation
