"""The reinforcement-learning phase: collect, update, log, now and then check and save."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from embodied_rl.algorithms.protocol import Algorithm
from embodied_rl.algorithms.steps import set_progress
from embodied_rl.contracts import Policy, Simulator
from embodied_rl.evaluation.evaluate import EvaluationSummary
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.training.checkpoint import (
    generator_state,
    optimizer_from_state,
    optimizer_to_state,
    under,
    with_prefix,
)
from embodied_rl.training.checks import is_as_good, quick_check
from embodied_rl.training.demonstrated import demonstrations_to_begin_in
from embodied_rl.training.interrupt import StopSignal
from embodied_rl.training.policy_folder import extra_in, load_policy, save_policy
from embodied_rl.training.progress import ProgressLine
from embodied_rl.training.run import Run
from embodied_rl.training.start import extra_of


@dataclass
class Position:
    """Where the phase stands, beside weights, optimiser and episodes in flight."""

    iteration: int = 0
    env_steps: int = 0
    best_success: float = -1.0
    last_is_best: bool = False


class Reinforcement:
    """Holds together what a checkpoint has to hold together."""

    def __init__(self, run: Run, simulator: Simulator, policy: Policy, device: str) -> None:
        config = run.config
        build: Any = config.algorithm
        self.run, self.simulator, self.policy, self.device = run, simulator, policy, device
        self.algorithm: Algorithm = build.build(policy, config.seed)
        self.generator = torch.Generator(device).manual_seed(config.seed + 1)
        self.planner = TrainingPlanner(
            simulator.spec.all_tasks,
            config.seed,
            simulator.spec.states,
            self.algorithm.group_size,
            config.practice,
            demonstrations_to_begin_in(run, simulator.spec.contract),
        )
        self.collector = self.algorithm.collector(
            simulator, self.planner, self.generator, config.rollout.halves
        )
        self.position = Position()
        self.num_threads = torch.get_num_threads()

    def train(self, stop: StopSignal) -> int:
        """Run the remaining iterations; returns the control steps simulated in all."""
        total = self.run.config.iterations
        with ProgressLine("RL", total, self.position.iteration) as progress:
            while not self._is_over():
                note = self._iterate()
                progress.update(self.position.iteration, note)
                self._save_if_due(stop)
        return self.position.env_steps

    def _is_over(self) -> bool:
        config, position = self.run.config, self.position
        budget = config.max_env_steps
        spent = budget is not None and position.env_steps >= budget
        return spent or position.iteration >= config.iterations

    def _done(self) -> float:
        """Share of the run that is done, of iterations or of control steps, whichever ends it."""
        config, position = self.run.config, self.position
        spent = position.env_steps / config.max_env_steps if config.max_env_steps else 0.0
        return min(1.0, max(position.iteration / config.iterations, spent))

    def _iterate(self) -> str:
        began = time.monotonic()
        set_progress(self.policy, self._done())
        self.algorithm.set_progress(self._done())
        # The simulator's workers need the cores while decisions are collected.
        torch.set_num_threads(1)
        batch = self.collector.collect()
        collected = time.monotonic()
        torch.set_num_threads(self.num_threads)
        values = self.algorithm.update(batch, self.position.iteration)
        ended = time.monotonic()
        steps = batch.num_steps
        self.position.iteration += 1
        self.position.env_steps += steps
        values |= self.planner.note(batch.results, self._done())
        values |= _episode_values(batch) | {"env_steps": float(self.position.env_steps)}
        values |= _utilisation(batch, collected - began, ended - collected, steps)
        self.run.metrics.log("rl", self.position.iteration, values)
        every = self.run.config.evaluation.every
        if every and self.position.iteration % every == 0:
            self._check()
        return _note(values)

    def collapsed(self) -> bool:
        """Whether the policy that training ended with is worse than the one that was kept."""
        options = self.run.config.evaluation
        if not options.every or self.position.iteration % options.every == 0:
            return not self.position.last_is_best
        return not self._is_as_good(self._quick_check())

    def _quick_check(self) -> EvaluationSummary:
        return quick_check(
            self.run, self.simulator, self.policy, self.position.iteration, self.device
        )

    def _is_as_good(self, found: EvaluationSummary) -> bool:
        return is_as_good(found.success_once, self.position.best_success, found.episodes)

    def _check(self) -> None:
        """Measure on quick-check states; keep the policy unless an earlier one was better."""
        # The simulator's slots are in mid-episode: they are put back where they were afterwards.
        tensors, state = self.collector.state_dict()
        found = self._quick_check()
        self.collector.load_state_dict(tensors, state)
        self.position.last_is_best = self._is_as_good(found)
        self.position.best_success = max(self.position.best_success, found.success_once)
        if self.position.last_is_best:
            self.keep(self.policy, self.run.policy_folder("best"))

    def _save_if_due(self, stop: StopSignal) -> None:
        iteration, config = self.position.iteration, self.run.config
        if stop.requested or iteration % config.checkpoint.every == 0 or self._is_over():
            self.save()
        if stop.requested:
            stop.leave(f"iteration {iteration} of {config.iterations} is saved")

    def save(self) -> None:
        """Write a checkpoint from which `restore` continues exactly."""
        optimizer, optimizer_state = optimizer_to_state(self.algorithm.state_dict())
        flight, flight_state = self.collector.state_dict()
        tensors = with_prefix("policy", self.policy.state_dict())
        tensors |= with_prefix("optimizer", optimizer) | with_prefix("collector", flight)
        tensors["generator"] = generator_state(self.generator)
        state = {
            "position": asdict(self.position),
            "optimizer": optimizer_state,
            "collector": flight_state,
        }
        self.run.checkpoints.save(self.position.iteration, tensors, state)

    def keep(self, policy: Policy, folder: Path) -> None:
        """Write a policy that came out of this phase."""
        config = self.run.config
        # Only an algorithm with a critic has a discount; the others leave the value as it was.
        discount = getattr(config.algorithm, "discount", None) if config.iterations else None
        if discount and getattr(config.algorithm, "value_normalisation", "off") != "off":
            # The scale of what it learned stays with the algorithm: the value alone says nothing.
            discount = None
        elif discount is None:
            discount = extra_in(self.run.policy_folder("start")).get("value_discount")
        save_policy(policy, config.policy, folder, extra_of(self.run, discount))

    def restore(self) -> bool:
        """Continue from the newest good checkpoint; false if there is none."""
        found = self.run.checkpoints.latest()
        if found is None:
            self._forget_later_metrics()
            return False
        tensors, state = found
        self.policy.load_state_dict(under(tensors, "policy"))
        self.algorithm.load_state_dict(
            optimizer_from_state(under(tensors, "optimizer"), state["optimizer"])
        )
        self.generator.set_state(tensors["generator"])
        self.collector.load_state_dict(under(tensors, "collector"), state["collector"])
        self.position = Position(**state["position"])
        self._forget_later_metrics()
        return True

    def _forget_later_metrics(self) -> None:
        """What was logged after the checkpoint will be done, and logged, again."""
        for phase in ("rl", "evaluation"):
            self.run.metrics.truncate_after(phase, self.position.iteration)


def reinforce(run: Run, simulator: Simulator, policy: Policy, device: str, stop: StopSignal) -> int:
    """Improve the policy and leave the result in `policies/final`; returns the control steps."""
    final, best = run.policy_folder("final"), run.policy_folder("best")
    phase = Reinforcement(run, simulator, policy, device)
    phase.restore()
    env_steps = phase.train(stop)
    if run.config.evaluation.keep_best and best.exists() and phase.collapsed():
        policy = load_policy(best, device).policy
    # Also when there is one: the run may have been resumed with more iterations.
    phase.keep(policy, final)
    return env_steps


def _episode_values(batch: Batch) -> dict[str, float]:
    results = batch.results
    values = {"num_episodes": float(len(results)), "num_lost": float(batch.num_lost)}
    if results:
        count = len(results)
        values |= {
            "success_rate": sum(r.success_once for r in results) / count,
            "episode_steps": sum(r.num_steps for r in results) / count,
            "return": sum(r.total_reward for r in results) / count,
        }
    tasks = sorted({result.episode.task for result in results})
    for task in tasks if len(tasks) > 1 else ():
        of_task = [r.success_once for r in results if r.episode.task == task]
        values[f"success_rate/{task}"] = sum(of_task) / len(of_task)
    return values


def _utilisation(
    batch: Batch, collect_s: float, learn_s: float, num_steps: int
) -> dict[str, float]:
    whole = max(collect_s + learn_s, 1e-9)
    infer_s, wait_s = batch.seconds["infer"], batch.seconds["wait"]
    return {
        "percent_infer": 100 * infer_s / whole,
        "percent_wait": 100 * wait_s / whole,
        "percent_learn": 100 * learn_s / whole,
        "percent_other": 100 * max(0.0, collect_s - infer_s - wait_s) / whole,
        "steps_per_s": num_steps / whole,
    }


def _note(values: dict[str, float]) -> str:
    def percent(name: str) -> str:
        return f"{values[name]:.0f} %"

    success = f"success {100 * values['success_rate']:.0f} %, " if "success_rate" in values else ""
    by_task = [f"{n.partition('/')[2]} {100 * v:.0f}" for n, v in values.items() if "rate/" in n]
    success += f"({', '.join(by_task)}), " if by_task else ""
    lost = f", {values['num_lost']:.0f} episodes lost" if values["num_lost"] else ""
    return (
        f"{success}{values['steps_per_s']:.0f} steps/s (wait for simulation "
        f"{percent('percent_wait')}, infer {percent('percent_infer')}, learn "
        f"{percent('percent_learn')}){lost}"
    )
