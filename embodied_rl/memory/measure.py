"""Measuring the parts of a run: its simulator with a few scenes, its policy on a few rows.

All of it happens in a process of its own, so that nothing of it is left in the one that trains.
"""

from __future__ import annotations

import importlib
import multiprocessing
import resource
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import Contract, Observation, Policy, Simulator, SimulatorSpec
from embodied_rl.memory.arithmetic import Growing, Measured, PolicyBytes, WorkerBytes, gib
from embodied_rl.memory.machine import Machine, free
from embodied_rl.memory.tracking import bytes_of, parent_of, peak_of, process_bytes
from embodied_rl.rollout.arrays import layout
from embodied_rl.rollout.build import build_simulator, num_workers_of
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.pool import SimulatorPool
from embodied_rl.run_config import RolloutConfig, RunConfig
from embodied_rl.training.loop import device_of
from embodied_rl.training.policy_folder import load_policy

_ROWS = (2, 4)
"""Sizes of the batches that are measured; the rest lies on the line through them."""


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
        if not _is_out_of_memory(error):
            raise
        raise CannotMeasure(
            f"this run does not fit: the policy ({_weights_on_paper(config, spec.contract)}) and "
            f"{_ROWS[1]} rows of what it computes take more than the "
            f"{gib(available.host)} of memory that are free; choose a smaller policy"
        ) from None
    if device == "cpu":
        libraries -= parts.weights
    measured = Measured(
        process=before.get("Rss", 0) + max(0, libraries),
        simulator=simulators.here if _simulates_here(config) else 0,
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


def _simulates_here(config: RunConfig) -> bool:
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
    planner = TrainingPlanner(spec.all_tasks, 0, spec.num_initial_states)
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


def _is_out_of_memory(error: BaseException) -> bool:
    known = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, known) or "can't allocate memory" in str(error)


def _weights_on_paper(config: RunConfig, contract: Contract) -> str:
    """The size of the weights without making them, where the policy can be built that way."""
    build: Any = config.policy
    try:
        with torch.device("meta"):
            policy = build.build(contract)
        weights = sum(tensor.nbytes for tensor in policy.state_dict().values())
    except Exception:
        return "its weights"
    return f"its weights of {weights / 2**30:.1f} GiB"


def measure_policy(policy: Policy, seen: Observation, device: str) -> PolicyBytes:
    """A policy on the first of the observations, repeated."""
    weights, contract = policy.state_dict(), policy.contract
    imitated = [p for p in policy.policy_parameters() if p.requires_grad]
    learned = [*imitated, *(p for p in policy.value_parameters() if p.requires_grad)]
    batches = [
        seen.to(device).select(torch.zeros(rows, dtype=torch.int64, device=device))
        for rows in _ROWS
    ]
    generator = torch.Generator(device).manual_seed(0)
    decisions = [policy.act(batch, generator, "explore") for batch in batches]

    def update(row: int) -> None:
        found = policy.evaluate(batches[row], decisions[row].trace)
        _backward([found.log_prob, found.entropy, found.value])

    def imitate(row: int) -> None:
        rows = _ROWS[row]
        middle = torch.zeros(rows, policy.chunk, contract.action_dim, device=device)
        valid = torch.ones(rows, policy.chunk, dtype=torch.bool, device=device)
        _backward([policy.imitation_loss(batches[row], middle, valid, generator)])

    def act(row: int) -> None:
        policy.act(batches[row], generator, "explore")

    update(0)  # Gradients are then there, and what is only made once.
    lines = []
    for compute in (update, imitate, act):
        few, many = (peak_of(partial(compute, row), device) for row in (0, 1))
        lines.append(Growing.through((_ROWS[0], few), (_ROWS[1], many)))
    for parameter in learned:
        parameter.grad = None
    one = decisions[0]
    kept = [one.actions, one.log_prob, one.value, *one.trace.values()]
    kept += [one.token_log_prob] if one.token_log_prob is not None else []
    reward = 4 * policy.chunk
    return PolicyBytes(
        weights=bytes_of(weights.values()),
        learned=bytes_of(learned),
        imitated=bytes_of(imitated),
        update=lines[0],
        imitation=lines[1],
        act=lines[2],
        observation=bytes_of([batches[0].state, *batches[0].images.values()]) // _ROWS[0],
        decision=bytes_of(kept) // _ROWS[0] + reward,
        action=4 * contract.action_dim + 8,
    )


def _backward(values: Sequence[Tensor]) -> None:
    total = torch.stack([value.float().sum() for value in values]).sum()
    total.backward()  # type: ignore[no-untyped-call]
