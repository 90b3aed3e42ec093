"""The arrays through which environments and collector exchange actions and observations.

They live in ordinary memory for an inline simulator and in shared memory for worker processes;
the code that fills and reads them is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embodied_rl.contracts import ChunkResult, EnvironmentObservation, Observation, SimulatorSpec

if TYPE_CHECKING:
    import torch

_FLAGS = ("terminated", "truncated", "success_once", "success_now", "refilled")


@dataclass(frozen=True)
class Layout:
    """Name, shape and type of each array, and where it begins in one block of memory."""

    entries: tuple[tuple[str, tuple[int, ...], str, int], ...]
    size: int


def layout(spec: SimulatorSpec, num_slots: int, chunk: int) -> Layout:
    """The arrays for a simulator with this many slots and chunks of this length."""
    contract = spec.contract
    wanted: list[tuple[str, tuple[int, ...], str]] = [
        ("actions", (num_slots, chunk, contract.action_dim), "float32"),
        ("reward", (num_slots, chunk), "float32"),
        ("executed", (num_slots,), "int64"),
        ("begun_after", (num_slots,), "int64"),
        ("prelude_steps", (num_slots,), "int64"),
        ("stage", (num_slots,), "int64"),
        *((name, (num_slots,), "bool") for name in _FLAGS),
    ]
    for view in ("observation", "final"):
        wanted.append((f"{view}/state", (num_slots, contract.state_dim), "float32"))
        for camera in contract.cameras:
            image = (num_slots, camera.height, camera.width, 3)
            wanted.append((f"{view}/image/{camera.name}", image, "uint8"))
    entries, offset = [], 0
    for name, shape, kind in wanted:
        entries.append((name, shape, kind, offset))
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        offset += -(-size // 64) * 64  # Whole cache lines, so that workers do not share one.
    return Layout(tuple(entries), max(offset, 64))


class Arrays:
    """Named arrays over one block of memory."""

    def __init__(self, plan: Layout, memory: SharedMemory | None = None) -> None:
        buffer: Any = memory.buf if memory else bytearray(plan.size)
        self._memory = memory
        self._views: dict[str, npt.NDArray[Any]] = {
            name: np.ndarray(shape, kind, buffer, offset)
            for name, shape, kind, offset in plan.entries
        }

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._views[name]

    def show(self, slot: int, observation: EnvironmentObservation, view: str) -> None:
        """Write what an environment shows; `view` is `observation` or `final`."""
        self._views[f"{view}/state"][slot] = observation.state
        for name, image in observation.images.items():
            self._views[f"{view}/image/{name}"][slot] = image

    def observation(
        self, slots: Sequence[int], instruction: Sequence[str], view: str = "observation"
    ) -> Observation:
        """A copy of what these slots show."""
        prefix = f"{view}/image/"
        return Observation(
            images={
                name[len(prefix) :]: self._copy(name, slots)
                for name in self._views
                if name.startswith(prefix)
            },
            state=self._copy(f"{view}/state", slots),
            instruction=tuple(instruction),
        )

    def result(
        self,
        slots: Sequence[int],
        instruction: Sequence[str],
        ended_instruction: Sequence[str],
        lost: Sequence[bool],
        errors: dict[int, str],
    ) -> ChunkResult:
        """A copy of what these slots did. Lost rows executed nothing."""
        import torch

        flags = {name: self._copy(name, slots) for name in _FLAGS}
        reward, executed = self._copy("reward", slots), self._copy("executed", slots)
        stage = self._copy("stage", slots)
        is_lost = torch.tensor(list(lost), dtype=torch.bool)
        if is_lost.any():
            reward[is_lost] = 0.0
            executed[is_lost] = stage[is_lost] = 0
            for name in _FLAGS[:-1]:
                flags[name][is_lost] = False
        return ChunkResult(
            reward=reward,
            executed=executed,
            prelude_steps=self._copy("prelude_steps", slots),
            stage=stage,
            observation=self.observation(slots, instruction),
            final_observation=self.observation(slots, ended_instruction, "final"),
            lost=is_lost,
            errors=errors,
            **flags,
        )

    def release(self) -> None:
        """Let go of the memory; the arrays must not be used any more."""
        self._views.clear()
        if self._memory:
            self._memory.close()

    def _copy(self, name: str, slots: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.from_numpy(self._views[name][list(slots)])
