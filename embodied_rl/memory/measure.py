"""Measuring the parts of a run: its simulator with a few scenes, its policy on a few rows.

All of it happens in a process of its own, so that nothing of it is left in the one that trains.
"""

from __future__ import annotations

import importlib
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch

from embodied_rl.config import ConfigError
from embodied_rl.contracts import Contract, Observation, Policy, Simulator, SimulatorSpec
from embodied_rl.memory.machine import Machine, free
from embodied_rl.memory.parts import Measured, WorkerBytes
from embodied_rl.memory.policy_bytes import (
    is_out_of_memory,
    measure_policy,
    too_large,
    weights_on_paper,
)
from embodied_rl.memory.tracking import parent_of, process_bytes
from embodied_rl.rollout.arrays import layout
from embodied_rl.rollout.build import build_simulator, num_workers_of
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.pool import SimulatorPool
from embodied_rl.run_config import RolloutConfig, RunConfig
from embodied_rl.training.loop import device_of
from embodied_rl.training.policy_folder import load_policy


class CannotMeasure(RuntimeError):
    """The measuring process died."""


def measure(config: RunConfig) -> tuple[Measured, Machine]:
    """What the parts of a run take, and what was free for them.

    Raises what building them raises, and `CannotMeasure` if that ends the process.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        try:
            return executor.submit(_measure, config).result()
        except BrokenProcessPool:
            raise CannotMeasure(
                "the process that builds simulator and policy to measure them was killed, most "
                "likely because there is not enough memory for them alone"
            ) from None


def _measure(config: RunConfig) -> tuple[Measured, Machine]:
    device = device_of(config)
    if device == "cpu":
        # So that too large a policy is refused here instead of the system ending any process.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (free(device).host, hard))
    before = process_bytes()
    if device != "cpu":
        torch.zeros(1, device=device)
    at_start, available = process_bytes(), free(device)
    simulators = _simulators(config, device)
    spec = simulators.spec
    loaded = process_bytes()
    try:
        policy = _policy(config, spec.contract, device)
        libraries = process_bytes().get("Rss", 0) - loaded.get("Rss", 0)
        parts = measure_policy(policy, simulators.seen, device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        left = available.host if device == "cpu" else available.gpu or 0
        raise ConfigError(too_large(weights_on_paper(config, spec.contract), left)) from None
    if device == "cpu":
        libraries -= parts.weights
    measured = Measured(
        process=before.get("Rss", 0) + max(0, libraries),
        simulator=simulators.here if simulates_here(config) else 0,
        workers=simulators.workers,
        num_workers=simulators.num_workers,
        policy=parts,
        arrays=layout(spec, config.rollout.num_slots, policy.chunk).size,
        num_tasks=len(spec.all_tasks),
        max_episode_steps=spec.max_episode_steps,
        on_gpu=device != "cpu",
        context=at_start.get("Rss", 0) - before.get("Rss", 0),
        gpu_simulator=simulators.on_gpu,
    )
    return measured, available


@dataclass(frozen=True)
class _Simulators:
    spec: SimulatorSpec
    seen: Observation
    here: int
    """What simulators in the training process would add to it."""
    workers: WorkerBytes = field(default_factory=WorkerBytes)
    num_workers: int = 0
    on_gpu: int = 0


def simulates_here(config: RunConfig) -> bool:
    """Whether some simulator, an expert's included, runs in the training process."""
    batched: Any = getattr(config.simulator, "batched", False)
    demonstrations = None if config.initial_policy else config.demonstrations
    records = demonstrations is not None and demonstrations.path is None
    return batched or config.rollout.num_workers == 0 or records


def _simulators(config: RunConfig, device: str) -> _Simulators:
    num_workers = num_workers_of(config.simulator, config.rollout)
    if num_workers:
        return _in_workers(config, num_workers)
    simulator: Any = config.simulator
    # A batch takes what it takes at once; single scenes are alike.
    count = config.rollout.num_slots if simulator.batched else 1
    free_before, before = _gpu_bytes(device), process_bytes()
    first = _started(config, count, device)
    once = process_bytes()
    try:
        here = once.get("Rss", 0) - before.get("Rss", 0)
        on_gpu = _gpu_bytes(device) - free_before
        if not simulator.batched and config.rollout.num_slots > 1:
            second = _started(config, 1, device)
            more = process_bytes().get("Rss", 0) - once.get("Rss", 0)
            second[0].close()
            here += max(0, more) * (config.rollout.num_slots - 1)
        return _Simulators(first[0].spec, first[1], max(0, here), on_gpu=max(0, on_gpu))
    finally:
        first[0].close()


def _gpu_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    left, total = torch.cuda.mem_get_info()
    return total - left


def _started(config: RunConfig, slots: int, device: str) -> tuple[Simulator, Observation]:
    rollout = RolloutConfig(num_slots=slots, halves=1, num_workers=None)
    if not getattr(config.simulator, "batched", False):
        rollout = rollout.model_copy(update={"num_workers": 0})
    simulator = build_simulator(config.simulator, rollout, 1, device)
    return simulator, _played(simulator)


def _played(simulator: Simulator) -> Observation:
    """What is seen after a step: some memory is taken only then."""
    spec = simulator.spec
    planner = TrainingPlanner(spec.all_tasks, 0, spec.states)
    slots = list(range(simulator.num_slots))
    simulator.start(slots, planner.take(len(slots)))
    actions = torch.zeros(len(slots), 1, spec.contract.action_dim)
    simulator.send(slots, actions, planner.take(len(slots)))
    return simulator.receive(slots).observation


def _in_workers(config: RunConfig, num_workers: int) -> _Simulators:
    """One worker with two environments and one with a single one."""
    before = process_bytes()
    pool = SimulatorPool(config.simulator, 2, 1, RolloutConfig(num_slots=3, halves=1))
    try:
        seen = _played(pool)
        two, one = (process_bytes(pid) for pid in pool.process_ids)
        server = process_bytes(parent_of(pool.process_ids[0]))
        environment = max(0, two.get("Private_Dirty", 0) - one.get("Private_Dirty", 0))
        worker = max(0, one.get("Private_Dirty", 0) - environment)
        shared = sum(process.get("Pss", 0) for process in (server, one, two))
        workers = WorkerBytes(max(0, shared - 2 * worker - 3 * environment), worker, environment)
        here = one.get("Anonymous", 0) - before.get("Anonymous", 0)
        return _Simulators(pool.spec, seen, max(0, here), workers, num_workers)
    finally:
        pool.close()


def _policy(config: RunConfig, contract: Contract, device: str) -> Policy:
    if config.initial_policy:
        return load_policy(config.initial_policy, device, config.policy).policy
    build: Any = config.policy
    policy: Policy = build.build(contract).to(device)
    # What training imports late: an optimiser with torch's compiler, the report with its plots.
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    importlib.import_module("matplotlib.pyplot")
    return policy
