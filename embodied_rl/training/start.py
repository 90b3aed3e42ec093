"""The policy that reinforcement learning starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from embodied_rl.contracts import Policy, SimulatorSpec
from embodied_rl.run_config import DemonstrationsConfig, ImitationConfig
from embodied_rl.training.checkpoint import CheckpointStore
from embodied_rl.training.demonstrations import Demonstrations, load
from embodied_rl.training.imitation import Imitation
from embodied_rl.training.interrupt import StopSignal
from embodied_rl.training.lerobot_folder import demonstrations_folder
from embodied_rl.training.policy_folder import extra_in, load_policy, save_policy
from embodied_rl.training.progress import ProgressLine
from embodied_rl.training.recording import record
from embodied_rl.training.run import Run

type Make = Callable[[], Policy]
type Watch = Callable[[Make], Policy]
"""Calls what makes a policy and returns it; it may look at the policy, and raise."""


def starting_policy(
    run: Run, spec: SimulatorSpec, device: str, stop: StopSignal, watch: Watch
) -> Policy:
    """The run's `start` policy: found in the run, given, imitated, or new with random weights.

    It is made under the eyes of `watch`, before anything that takes long.
    """
    folder = run.policy_folder("start")

    def load_start() -> Policy:
        loaded = load_policy(folder, device)
        loaded.contract.require_equal(spec.contract, "the policy", "the simulator")
        return loaded.policy

    if folder.exists():
        return watch(load_start)
    policy, value_discount = _make(run, spec, device, stop, watch)
    save_policy(policy, run.config.policy, folder, extra_of(run, value_discount))
    return load_start()


def extra_of(run: Run, value_discount: float | None = None) -> dict[str, Any]:
    """What is saved beside a policy: the simulator that it was trained with, and the discount per
    control step of the return that its value estimates; None where nobody trained it."""
    return {
        "simulator": run.config.simulator.model_dump(mode="json"),
        "seed": run.config.seed,
        "run": run.config.name,
        "value_discount": value_discount,
    }


def _make(
    run: Run, spec: SimulatorSpec, device: str, stop: StopSignal, watch: Watch
) -> tuple[Policy, float | None]:
    """With the discount of its value (`extra_of`)."""
    config = run.config
    if config.initial_policy:
        path = config.initial_policy

        def given() -> Policy:
            loaded = load_policy(path, device, config.policy)
            loaded.contract.require_equal(spec.contract, f"the policy {path}", "the simulator")
            return loaded.policy

        return watch(given), extra_in(path).get("value_discount")
    torch.manual_seed(config.seed)
    build: Any = config.policy
    policy = watch(lambda: build.build(spec.contract).to(device))
    if config.demonstrations and config.imitation:
        _imitate(run, policy, spec, config.demonstrations, config.imitation, device, stop)
    return policy, None


def _imitate(
    run: Run,
    policy: Policy,
    spec: SimulatorSpec,
    demonstrations: DemonstrationsConfig,
    options: ImitationConfig,
    device: str,
    stop: StopSignal,
) -> None:
    data = _demonstrations(run, spec, demonstrations)
    phase = Imitation(policy, data, options, run.config.seed, device)
    store = CheckpointStore(run.directory / "checkpoints_imitation", keep=1)
    done = phase.restore(store)
    run.metrics.truncate_after("imitation", done)
    with ProgressLine("imitation", options.steps, done) as progress:
        result = phase.run(
            log=lambda step, values: run.metrics.log("imitation", step, values),
            store=store,
            on_step=lambda step, loss: progress.update(step, f"loss {loss:.3f}"),
            stop=lambda: stop.requested,
        )
        if result is None:
            stop.leave("imitation is saved")
        error = result.open_loop_error
        shown = f", open-loop action error {error:.3f}" if error is not None else ""
        progress.say(f"imitation: loss {result.loss:.3f}{shown}")
    store.clear()


def _demonstrations(run: Run, spec: SimulatorSpec, options: DemonstrationsConfig) -> Demonstrations:
    path = demonstrations_folder(run.directory, spec.contract, options)
    if not path.exists() and not options.is_given:
        _record(run, path, options)
    return load(path, spec.contract, options)


def _record(run: Run, path: Path, options: DemonstrationsConfig) -> None:
    with ProgressLine("demonstrations", options.total) as progress:
        summary = record(
            run.config.simulator,
            path,
            options.by_task or options.total,
            options.action_noise,
            run.config.seed,
            lambda successes, attempts: progress.update(successes, f"{attempts} attempts"),
            options.video,
        )
        progress.say(
            f"demonstrations: {summary.episodes} successes of {summary.attempts} attempts, "
            f"{summary.frames} frames in {summary.seconds:.0f} s"
        )
