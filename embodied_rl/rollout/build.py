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
    num_workers = rollout.num_workers
    if num_workers is None:
        num_workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS, rollout.num_slots)
    if num_workers == 0:
        environments = [simulator.build_environment() for _ in range(rollout.num_slots)]
        return InlineSimulator(environments, chunk)
    return SimulatorPool(simulator, num_workers, chunk, rollout)
