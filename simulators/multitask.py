"""Several tasks behind one environment: the planned episode says which of them runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.contracts import (
    Contract,
    ContractMismatch,
    Environment,
    EnvironmentObservation,
    Episode,
    Expert,
    SimulatorSpec,
    StepOutcome,
)

if TYPE_CHECKING:
    from embodied_rl.contracts import ByteArray, FloatArray

_TASK = "multitask/task"


class MultiTask:
    """One scene per task, of which one is in use (contracts.Environment).

    States are filled up with zeros to the longest one; the instruction tells the tasks apart.
    Scenes are built when an episode first needs them. `configs` are single-task options of one
    simulator, by task.
    """

    def __init__(self, configs: Mapping[str, Any]) -> None:
        self._configs = dict(configs)
        self._scenes: dict[str, Environment] = {}
        self.spec = _spec_of(tuple(configs), tuple(configs.values()))
        self._task = next(iter(configs))

    @property
    def scene(self) -> Environment:
        """The scene of the present episode's task."""
        return self._scene(self._task)

    @property
    def instruction(self) -> str:
        """What the present task asks for."""
        return self.scene.instruction

    def reset(self, episode: Episode) -> None:
        """Start the episode in its task's scene; ValueError if there is no such task."""
        if episode.task not in self._configs:
            raise ValueError(f"no task {episode.task!r} here; tasks: {', '.join(self._configs)}")
        self._task = episode.task
        self.scene.reset(episode)

    def step(self, action: FloatArray) -> StepOutcome:
        """One control step of the present task."""
        return self.scene.step(action)

    def observe(self) -> EnvironmentObservation:
        """What the present task shows, its state filled up."""
        seen = self.scene.observe()
        state = np.zeros(self.spec.contract.state_dim, dtype=np.float32)
        state[: len(seen.state)] = seen.state
        return EnvironmentObservation(seen.images, state)

    def snapshot(self) -> dict[str, FloatArray]:
        """The present scene's, with the task's number."""
        number = np.array([list(self._configs).index(self._task)], dtype=np.float32)
        return {**self.scene.snapshot(), _TASK: number}

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None:
        """Go to the task and the state that `snapshot` gave."""
        self._task = list(self._configs)[int(snapshot[_TASK][0])]
        self.scene.restore({key: value for key, value in snapshot.items() if key != _TASK})

    def render(self) -> ByteArray:
        """A picture of the present scene."""
        return self.scene.render()

    def close(self) -> None:
        """Free all scenes."""
        for scene in self._scenes.values():
            scene.close()
        self._scenes.clear()

    def expert(self) -> Expert:
        """The present task's scripted expert; ValueError if a task has none."""
        experts: dict[str, Expert] = {
            task: config.build_expert(self._scene(task)) for task, config in self._configs.items()
        }
        return lambda: experts[self._task]()

    def _scene(self, task: str) -> Environment:
        if task not in self._scenes:
            self._scenes[task] = self._configs[task].build_environment()
        return self._scenes[task]


@functools.cache
def _spec_of(tasks: Sequence[str], configs: Sequence[Any]) -> SimulatorSpec:
    """What all tasks offer together; each is built once per process to find out.

    Raises ContractMismatch naming the fields in which tasks differ beside the size of the state.
    """
    specs = []
    for config in configs:
        scene: Environment = config.build_environment()
        specs.append(scene.spec)
        scene.close()
    longest = max(spec.contract.state_dim for spec in specs)
    # Entries of filled-up states mean something else in every task.
    contracts = [
        dataclasses.replace(spec.contract, state_dim=longest, state_parts=()) for spec in specs
    ]
    for task, contract in zip(tasks[1:], contracts[1:], strict=True):
        _require_alike(contracts[0], contract, tasks[0], task)
    counts = {spec.num_initial_states for spec in specs}
    return SimulatorSpec(
        task="+".join(tasks),
        contract=contracts[0],
        max_episode_steps=max(spec.max_episode_steps for spec in specs),
        can_render=all(spec.can_render for spec in specs),
        num_initial_states=None if None in counts else min(count for count in counts if count),
        tasks=tuple(tasks),
        benchmark_states=min(spec.benchmark_states for spec in specs),
        trains_on_benchmark=any(spec.trains_on_benchmark for spec in specs),
        variations=tuple(
            axis for axis in specs[0].variations if all(axis in spec.variations for spec in specs)
        ),
        # Numbers of stages mean the same in all tasks or nothing.
        stages=specs[0].stages if len({spec.stages for spec in specs}) == 1 else (),
        protocol={task: dict(s.protocol) for task, s in zip(tasks, specs, strict=True)},
    )


def _require_alike(first: Contract, other: Contract, task: str, other_task: str) -> None:
    try:
        first.require_equal(other, task, other_task)
    except ContractMismatch as error:
        raise ContractMismatch(
            f"{task} and {other_task} cannot share one policy: {error}"
        ) from None
