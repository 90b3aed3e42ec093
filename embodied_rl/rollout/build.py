"""From options to a running simulator."""

from __future__ import annotations

import os
from typing import Any

from embodied_rl.contracts import Simulator
from embodied_rl.rollout.batched import BatchedSimulator
from embodied_rl.rollout.inline import InlineSimulator
from embodied_rl.rollout.pool import SimulatorPool
from embodied_rl.run_config import RolloutConfig

_MOST_WORKERS = 16


def build_simulator(
    simulator: Any, rollout: RolloutConfig, chunk: int, device: str = "cpu"
) -> Simulator:
    """A simulator with `rollout.num_slots` slots for chunks of `chunk` steps.

    Raises the simulator's own complaint if it cannot be built.
    """
    if simulator.batched:
        return BatchedSimulator(simulator.build_batch(rollout.num_slots, device))
    num_workers = num_workers_of(simulator, rollout)
    if num_workers == 0:
        environments = [simulator.build_environment() for _ in range(rollout.num_slots)]
        return InlineSimulator(environments, chunk)
    return SimulatorPool(simulator, num_workers, chunk, rollout)


def num_workers_of(simulator: Any, rollout: RolloutConfig) -> int:
    """Worker processes that the simulator will run in; 0 if it runs in this one."""
    if simulator.batched:
        return 0
    if rollout.num_workers is None:
        return min(len(os.sched_getaffinity(0)), _MOST_WORKERS, rollout.num_slots)
    return rollout.num_workers
