"""The look at the memory that a run will need, on the simulator and policy that it makes anyway.

It costs fractions of a second, unlike measuring in a process of its own (`measure`): what is there
already counts as it is, and only what will come is computed. (The second that it seems to take in a
fresh process is for what torch imports, which the first optimiser would import otherwise.)
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import torch

from embodied_rl.config import ConfigError
from embodied_rl.contracts import Observation, Policy, Simulator, SimulatorSpec
from embodied_rl.memory.arithmetic import MemoryPlan, predict
from embodied_rl.memory.machine import Machine, free
from embodied_rl.memory.measure import simulates_here
from embodied_rl.memory.parts import Measured, WorkerBytes
from embodied_rl.memory.policy_bytes import (
    is_out_of_memory,
    measure_policy,
    too_large,
    weights_on_paper,
)
from embodied_rl.memory.tracking import data_bytes, parent_of, process_bytes
from embodied_rl.run_config import RunConfig

LARGEST_ENVIRONMENT = 64 * 2**20
"""More than a scene takes that is stepped on its own: ManiSkill's take about 3 MiB, and 20 with
cameras. Only whether they are measured before they are all made depends on it."""


def has_many_environments(config: RunConfig) -> bool:
    """Whether the simulator alone could come near to what is free."""
    return config.rollout.num_slots * LARGEST_ENVIRONMENT > free("cpu").host // 2


def watched(
    config: RunConfig,
    reinforces: bool,
    simulator: Simulator,
    device: str,
    make: Callable[[], Policy],
) -> tuple[Policy, MemoryPlan, Machine]:
    """The policy that a run makes, what the run (or its imitation alone) will need, and what there
    was for it.

    Raises `ConfigError` if the policy does not fit even alone. Draws no random numbers but those
    that `make` draws.
    """
    before, taken, shared = free(device), _resident(), _workers(simulator)
    left = before.host if device == "cpu" else before.gpu or 0
    spec = simulator.spec
    with torch.random.fork_rng():
        weights = weights_on_paper(config, spec.contract)
    if weights and weights > left:
        raise ConfigError(too_large(weights, left))
    try:
        with _limit(before.host if device == "cpu" else None):
            policy = make()
            made = _resident()
            with torch.random.fork_rng():
                parts = measure_policy(policy, _blank(spec), device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(too_large(weights, left)) from None
    measured = Measured(
        process=max(taken, made - parts.weights if device == "cpu" else made),
        simulator=_expert(simulator) if simulates_here(config) else 0,
        workers=WorkerBytes(server=shared),
        num_workers=len(_process_ids(simulator)),
        policy=parts,
        arrays=0,  # They are there, and counted as part of the process.
        num_tasks=len(spec.all_tasks),
        max_episode_steps=spec.max_episode_steps,
        on_gpu=device != "cpu",
    )
    # What the run has taken already is there for it.
    machine = replace(before, host=before.host + taken + shared)
    return policy, predict(config, measured, reinforces), machine


def _resident() -> int:
    return process_bytes().get("Rss", 0)


def _process_ids(simulator: Simulator) -> list[int]:
    ids: list[int] = getattr(simulator, "process_ids", [])
    return ids


def _workers(simulator: Simulator) -> int:
    """The proportional share of the workers and of the process that they are forked from."""
    ids = _process_ids(simulator)
    parents = {parent_of(pid) for pid in ids}
    return sum(process_bytes(pid).get("Pss", 0) for pid in {*ids, *parents})


def _expert(simulator: Simulator) -> int:
    """What a simulator would add to this process, where demonstrations are recorded: no more than
    what a worker has that this process has not."""
    found = [process_bytes(pid).get("Anonymous", 0) for pid in _process_ids(simulator)]
    return max(0, max(found, default=0) - process_bytes().get("Anonymous", 0))


def _blank(spec: SimulatorSpec) -> Observation:
    """An observation of one environment that shows nothing."""
    contract = spec.contract
    images = {
        camera.name: torch.zeros(1, camera.height, camera.width, 3, dtype=torch.uint8)
        for camera in contract.cameras
    }
    # Without words: a policy refuses an instruction that is longer than it reads.
    return Observation(images, torch.zeros(1, contract.state_dim), ("",))


@contextmanager
def _limit(room: int | None) -> Generator[None]:
    """Let this process take no more than so many further bytes; an allocation beyond fails, where
    the system would otherwise end some process."""
    if room is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = data_bytes() + room
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([most, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
