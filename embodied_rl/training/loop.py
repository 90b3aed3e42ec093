"""A whole run: demonstrations, imitation, reinforcement learning, and what it was worth.

Every phase leaves its result in the run folder, so a run that was killed goes on where it was.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from embodied_rl.contracts import Policy, Simulator
from embodied_rl.evaluation.evaluate import EvaluationSummary
from embodied_rl.rollout.build import build_simulator
from embodied_rl.run_config import RunConfig
from embodied_rl.training.checks import film, measure
from embodied_rl.training.fit import require_fit
from embodied_rl.training.interrupt import StopSignal
from embodied_rl.training.reinforcement import reinforce
from embodied_rl.training.report import write_report
from embodied_rl.training.run import Run
from embodied_rl.training.start import Make, starting_policy


@dataclass(frozen=True)
class TrainResult:
    """The end of a run, in words and as data."""

    line: str
    summary: dict[str, Any]


type Watch = Callable[[Simulator, str, Make], Policy]
"""Makes a run's policy for a simulator and a device, and may refuse it."""


def _unwatched(simulator: Simulator, device: str, make: Make) -> Policy:
    return make()


def train(config: RunConfig, resume: bool = False, watch: Watch = _unwatched) -> TrainResult:
    """Imitate, improve by reinforcement learning, evaluate before and after."""
    began = time.monotonic()
    with Run(config, resume) as run, StopSignal() as stop:
        device = device_of(config)
        simulator = simulator_of(config)
        try:
            require_fit(config, simulator.spec)
            made = partial(watch, simulator, device)
            policy = starting_policy(run, simulator.spec, device, stop, made)
            before = measure(run, simulator, "start", device)
            env_steps = reinforce(run, simulator, policy, device, stop)
            after = measure(run, simulator, "final", device)
        finally:
            simulator.close()
        return _finish(run, before, after, env_steps, time.monotonic() - began)


def imitate_only(config: RunConfig, resume: bool = False, watch: Watch = _unwatched) -> TrainResult:
    """Demonstrations, imitation and the closed-loop check."""
    began = time.monotonic()
    with Run(config, resume) as run, StopSignal() as stop:
        device = device_of(config)
        simulator = simulator_of(config)
        try:
            require_fit(config, simulator.spec, reinforces=False)
            made = partial(watch, simulator, device)
            starting_policy(run, simulator.spec, device, stop, made)
            before = measure(run, simulator, "start", device)
        finally:
            simulator.close()
        return _finish(run, before, None, 0, time.monotonic() - began)


def device_of(config: RunConfig) -> str:
    """Where the networks of a run are; ValueError if it asks for a GPU that is not there."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda, but torch finds no GPU that it can use; take device=auto or device=cpu, "
            "or see `embodied-rl doctor`"
        )
    return config.device


def simulator_of(config: RunConfig) -> Simulator:
    """The running simulator of a run, to be closed."""
    chunk: Any = getattr(config.policy, "chunk", 1)
    return build_simulator(config.simulator, config.rollout, chunk, device_of(config))


def _finish(
    run: Run,
    before: EvaluationSummary,
    after: EvaluationSummary | None,
    env_steps: int,
    wall_s: float,
) -> TrainResult:
    start = "imitation" if run.config.imitation else "start"
    task = before.task
    line = f"{task}: {start} {before.in_words}"
    if after:
        line += f" → RL {after.in_words}"
    line += f", {before.episodes} held-out initial states"
    for name, first in before.by_task.items():
        line += f"\n  {name}: {start} {first.in_words}"
        line += f" → RL {after.by_task[name].in_words}" if after else ""
    summary = {
        "task": task,
        "line": line,
        "seed": run.config.seed,
        "before": before.to_json(),
        "after": after.to_json() if after else None,
        "env_steps": env_steps,
        "wall_s": round(wall_s, 1),
        "resumed": run.resumed,
    }
    run.result(summary)
    # The result is safe by now: a film that fails must not cost it.
    try:
        film(run, "start")
        if after:
            film(run, "final")
    except Exception as error:
        print(f"no videos: {error}", file=sys.stderr)
    write_report(run.directory)
    return TrainResult(line, summary)
