"""What the gates of a simulator stand on: two running slots, and comparisons of what they show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import ChunkResult, Episode, Observation, Simulator
from embodied_rl.correctness.gates import Broken
from embodied_rl.rollout.build import build_simulator
from embodied_rl.run_config import RolloutConfig

CHUNK = 3
"""Control steps per chunk; a time limit that is no multiple of it ends an episode inside one."""

LARGEST_DIFFERENCE = 1e-4
"""Between two simulations of the same episode before anything touches: physics engines keep caches,
so later differences are reported and not forbidden."""


@dataclass(frozen=True)
class SimulatorBench:
    """A simulator's options, with two slots running in this process."""

    config: Any
    simulator: Simulator

    def episode(self, state: int, task: int = 0) -> Episode:
        """A planned episode from an initial state."""
        tasks = self.simulator.spec.all_tasks
        return Episode(f"doctor/{state}", tasks[task % len(tasks)], state, state)

    def actions(self, seed: int, slots: int = 2) -> Tensor:
        """A chunk [slots, H, A] of random actions within finite bounds, the same for all slots."""
        contract = self.simulator.spec.contract
        low = torch.tensor(contract.action_low).clamp_min(-1e3)
        high = torch.tensor(contract.action_high).clamp_max(1e3)
        generator = torch.Generator().manual_seed(seed)
        share = torch.rand(CHUNK, contract.action_dim, generator=generator)
        return (low + share * (high - low)).expand(slots, -1, -1).contiguous()

    def begin(self, *states: int) -> Observation:
        """Start both slots from these initial states, and give their first view."""
        return self.simulator.start([0, 1], [self.episode(state) for state in states])

    def execute(self, actions: Tensor, offers: list[Episode | None]) -> ChunkResult:
        """What a chunk of actions [2, H, A] does to both slots."""
        self.simulator.send([0, 1], actions, offers)
        return self.simulator.receive([0, 1])


@contextmanager
def running(config: Any, num_workers: int) -> Iterator[Simulator]:
    """The simulator that these options build, with two slots; closed at the end."""
    batched: bool = config.batched
    rollout = RolloutConfig(num_slots=2, halves=1, num_workers=None if batched else num_workers)
    simulator = build_simulator(config, rollout, CHUNK)
    try:
        yield simulator
    finally:
        simulator.close()


def require_row(result: ChunkResult, row: int) -> None:
    """Raise `Broken` if one slot's result contradicts itself."""
    executed = int(result.executed[row])
    if result.lost[row]:
        raise Broken(f"the environment failed: {result.errors.get(row, 'no reason given')}")
    if not 1 <= executed <= CHUNK:
        raise Broken(f"executed={executed} of a chunk of {CHUNK}")
    if result.reward[row, executed:].any():
        raise Broken("there is reward after the last executed step")
    if result.terminated[row] and result.truncated[row]:
        raise Broken("terminated and truncated at once: the task must win")
    if not result.done[row] and executed < CHUNK:
        raise Broken(f"only {executed} of {CHUNK} steps executed, but the episode goes on")
    if result.success_now[row] and not result.success_once[row]:
        raise Broken("success holds at the end of the chunk, but success_once says never")


def require_fits(bench: SimulatorBench, seen: Observation) -> None:
    """Raise `Broken` if a view is not what the contract says."""
    contract = bench.simulator.spec.contract
    if seen.state.shape[1] != contract.state_dim or seen.state.dtype != torch.float32:
        raise Broken(
            f"the state is {seen.state.dtype} with {seen.state.shape[1]} entries; the contract "
            f"says float32 with {contract.state_dim}"
        )
    if not seen.state.isfinite().all():
        raise Broken("the state has entries that are not finite")
    for camera in contract.cameras:
        image = seen.images.get(camera.name)
        if image is None:
            raise Broken(f"camera {camera.name!r} of the contract gives no image")
        if tuple(image.shape[1:]) != (camera.height, camera.width, 3) or image.dtype != torch.uint8:
            raise Broken(
                f"camera {camera.name!r} gives {image.dtype} {list(image.shape[1:])}; the contract "
                f"says uint8 [{camera.height}, {camera.width}, 3]"
            )


def difference(first: Observation, second: Observation) -> float:
    """Largest difference of two views: of states as they are, of pictures as shares of white."""
    if first.state.shape[1]:
        return float((first.state - second.state).abs().max())
    pairs = [(first.images[name], second.images[name]) for name in first.images]
    return max((float((a.float() - b.float()).abs().max()) / 255 for a, b in pairs), default=0.0)
