"""Any gymnasium environment with box actions, stepped one by one or as gymnasium's own vector."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from embodied_rl.contracts import (
    BatchOutcome,
    Camera,
    Contract,
    EnvironmentObservation,
    Episode,
    Observation,
    SimulatorSpec,
    StepOutcome,
)

if TYPE_CHECKING:
    from embodied_rl.contracts import ByteArray, FloatArray
    from simulators.config import GymnasiumConfig

_DEFAULT_HZ = 20.0
_NO_LIMIT = 1_000_000


class GymnasiumEnvironment:
    """One environment (contracts.Environment). Initial state i is the reset with seed i."""

    def __init__(self, config: GymnasiumConfig) -> None:
        self._config = config
        options = {"render_mode": "rgb_array", **config.options}
        self._env = _make(config, options)
        self._limit = _time_limit(config, self._env.spec)
        self._observation, _ = self._env.reset(seed=0)
        seen = split(self._observation)
        self._elapsed, self._return = 0, 0.0
        self.spec = _spec(config, self._env.action_space, seen, self._limit, self._env)

    @property
    def instruction(self) -> str:
        """What the task asks for."""
        return self._config.instruction

    def reset(self, episode: Episode) -> None:
        """Start from the planned initial state."""
        self._observation, _ = self._env.reset(seed=episode.initial_state)
        self._elapsed, self._return = 0, 0.0

    def step(self, action: FloatArray) -> StepOutcome:
        """Run one control step."""
        space: Any = self._env.action_space
        given = np.asarray(action, dtype=space.dtype).reshape(space.shape)
        self._observation, reward, terminated, truncated, info = self._env.step(given)
        self._elapsed += 1
        self._return += float(reward)
        return StepOutcome(
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated) or self._elapsed >= self._limit,
            success=self._success(info),
        )

    def observe(self) -> EnvironmentObservation:
        """The last observation, split into images and a flat state."""
        return split(self._observation)

    def snapshot(self) -> dict[str, FloatArray]:
        """Not every environment can: NotImplementedError says so."""
        raise NotImplementedError(
            f"gymnasium has no way to save the state of {self._config.task}; replay its actions "
            f"from the same initial state instead"
        )

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None:
        """See `snapshot`."""
        self.snapshot()

    def render(self) -> ByteArray:
        """The environment's own picture."""
        picture = self._env.render()
        if picture is None:
            raise RuntimeError(f"{self._config.task} draws nothing with render_mode=rgb_array")
        return np.asarray(picture, dtype=np.uint8)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _success(self, info: Mapping[str, Any]) -> bool:
        if self._config.success_key in info:
            return bool(np.any(info[self._config.success_key]))
        wanted = self._config.success_return
        return wanted is not None and self._return >= wanted


class GymnasiumBatch:
    """A gymnasium vector environment (contracts.BatchEnvironment).

    The vector steps all environments, also those whose episode is over; their outcomes are dropped,
    and they begin anew only when told to.
    """

    def __init__(self, config: GymnasiumConfig, num_slots: int, device: str) -> None:
        self._config, self._num_slots, self._device = config, num_slots, device
        task = _import(config.task)
        self._env: Any = gymnasium.make_vec(
            task,
            num_slots,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
            **config.options,
        )
        self._limit = _time_limit(config, self._env.spec)
        self._observation, _ = self._env.reset(seed=list(range(num_slots)))
        self._elapsed = np.zeros(num_slots, dtype=np.int64)
        self._return = np.zeros(num_slots)
        first = split(_index(self._observation, 0))
        space = self._env.single_action_space
        self.spec = _spec(config, space, first, self._limit, None)

    @property
    def num_slots(self) -> int:
        """Environments in the vector."""
        return self._num_slots

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Start these slots only."""
        mask = np.zeros(self._num_slots, dtype=np.bool_)
        mask[list(slots)] = True
        seeds: list[int | None] = [None] * self._num_slots
        for slot, episode in zip(slots, episodes, strict=True):
            seeds[slot] = episode.initial_state
        self._observation, _ = self._env.reset(seed=seeds, options={"reset_mask": mask})
        self._elapsed[mask], self._return[mask] = 0, 0.0

    def step(self, actions: Tensor, active: Tensor) -> BatchOutcome:
        """Run one control step of the active slots."""
        space = self._env.single_action_space
        given = actions.cpu().numpy().reshape(self._num_slots, *space.shape).astype(space.dtype)
        self._observation, reward, terminated, truncated, info = self._env.step(given)
        live = active.cpu().numpy()
        self._elapsed[live] += 1
        self._return[live] += reward[live]
        truncated = truncated | (self._elapsed >= self._limit)
        success = np.asarray(info.get(self._config.success_key, np.zeros_like(live)), dtype=bool)
        if self._config.success_key not in info and self._config.success_return is not None:
            success = self._return >= self._config.success_return
        return BatchOutcome(
            reward=self._tensor(np.where(live, reward, 0.0).astype(np.float32)),
            terminated=self._tensor(terminated & live),
            truncated=self._tensor(truncated & live),
            success=self._tensor(success & live),
        )

    def observe(self, slots: Sequence[int]) -> Observation:
        """What these slots see."""
        seen = [split(_index(self._observation, slot)) for slot in slots]
        return Observation(
            images={
                name: self._tensor(np.stack([one.images[name] for one in seen]))
                for name in seen[0].images
            },
            state=self._tensor(np.stack([one.state for one in seen])),
            instruction=(self._config.instruction,) * len(slots),
        )

    def render(self, slot: int) -> ByteArray:
        """Not offered by a vector: film with a single environment."""
        raise RuntimeError("a vector environment is not drawn; film with vectorized=false")

    def close(self) -> None:
        """Close the vector."""
        self._env.close()

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def split(observation: Any) -> EnvironmentObservation:
    """Images (uint8 [height, width, 3]), and all else flat in the order of its keys."""
    images: dict[str, ByteArray] = {}
    parts: list[FloatArray] = []

    def visit(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value):
                visit(key, value[key])
            return
        array = np.asarray(value)
        if array.dtype == np.uint8 and array.ndim == 3 and array.shape[-1] == 3:
            images[name] = array
        else:
            parts.append(array.astype(np.float32).reshape(-1))

    visit("main", observation)
    state = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
    return EnvironmentObservation(images, state)


def _index(observation: Any, slot: int) -> Any:
    if isinstance(observation, Mapping):
        return {key: _index(value, slot) for key, value in observation.items()}
    return observation[slot]


def _import(task: str) -> str:
    """Import the package of `module:id`, which registers the task; returns the plain id."""
    module, colon, name = task.rpartition(":")
    if colon:
        importlib.import_module(module)
    return name


def _make(config: GymnasiumConfig, options: Mapping[str, Any]) -> Any:
    task = _import(config.task)
    try:
        return gymnasium.make(task, **options)
    except gymnasium.error.NameNotFound as error:
        raise ValueError(f"simulator.task={config.task!r}: {error}") from None
    except gymnasium.error.DependencyNotInstalled as error:
        raise RuntimeError(f"{config.task} needs another package: {error}") from None


def _time_limit(config: GymnasiumConfig, spec: Any) -> int:
    own = getattr(spec, "max_episode_steps", None) or _NO_LIMIT
    return min(int(own), config.max_episode_steps or _NO_LIMIT)


def _spec(
    config: GymnasiumConfig, space: Any, seen: EnvironmentObservation, limit: int, env: Any
) -> SimulatorSpec:
    if not isinstance(space, gymnasium.spaces.Box):
        raise ValueError(
            f"{config.task} takes actions of {space}; only Box actions are supported. Wrap it into "
            f"an environment with continuous actions"
        )
    metadata = getattr(env, "metadata", None) or {}
    return SimulatorSpec(
        task=config.task,
        contract=Contract(
            state_dim=len(seen.state),
            action_dim=int(np.prod(space.shape)),
            action_low=tuple(float(x) for x in space.low.reshape(-1)),
            action_high=tuple(float(x) for x in space.high.reshape(-1)),
            control_mode=config.task,
            control_hz=float(metadata.get("render_fps", _DEFAULT_HZ)),
            gripper="none",
            rotation="none",
            cameras=tuple(
                Camera(name, image.shape[0], image.shape[1])
                for name, image in sorted(seen.images.items())
            ),
        ),
        max_episode_steps=limit,
        can_render="rgb_array" in metadata.get("render_modes", ()),
    )
