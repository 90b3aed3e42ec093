"""Evaluations within a run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, Literal

from embodied_rl.contracts import Episode, Policy, Simulator, SimulatorSpec
from embodied_rl.evaluation.evaluate import EvaluationSummary, evaluate, protocol
from embodied_rl.rollout.planner import evaluation_plan
from embodied_rl.training.policy_folder import load_policy
from embodied_rl.training.progress import ProgressLine
from embodied_rl.training.run import Run
from embodied_rl.training.video import film_episodes


def measure(
    run: Run, simulator: Simulator, name: Literal["start", "final"], device: str
) -> EvaluationSummary:
    """Success of a saved policy of the run on the held-out states; resumed if it was cut off."""
    loaded = load_policy(run.policy_folder(name), device)
    options, spec = run.config.evaluation, simulator.spec
    plan = evaluation_plan(spec.all_tasks, options.episodes, run.config.seed, "final", spec.states)
    simulator_options = run.config.simulator.model_dump(mode="json")
    header = protocol(loaded.fingerprint, simulator_options, plan, run.config.seed)
    output = run.directory / "evaluation" / name
    _drop_rows_of_another_policy(output, loaded.fingerprint)
    with ProgressLine(f"evaluate {name}", len(plan)) as progress:

        def show(done: int, successes: int) -> None:
            progress.update(done, f"{successes} successes")

        summary = evaluate(
            loaded.policy,
            simulator,
            plan,
            run.config.rollout.halves,
            run.config.seed,
            device,
            output,
            header,
            show,
        )
        for part in (summary, *summary.by_task.values()):
            progress.say(f"{part.task}, {name} policy: {part.in_words}, {part.episodes} states")
    run.metrics.forget("evaluation", name)
    _log(run, summary, 0 if name == "start" else run.config.iterations, name)
    return summary


def _drop_rows_of_another_policy(output: Path, fingerprint: str) -> None:
    """A run that was resumed with more iterations ends with another policy than it did before."""
    stored = output / "protocol.json"
    if stored.exists() and json.loads(stored.read_text()).get("policy") != fingerprint:
        shutil.rmtree(output)


def quick_check(
    run: Run, simulator: Simulator, policy: Policy, iteration: int, device: str
) -> EvaluationSummary:
    """The present policy on quick-check states of all tasks, which the final result never uses."""
    options, spec = run.config.evaluation, simulator.spec
    plan = evaluation_plan(
        spec.all_tasks, options.quick_episodes, run.config.seed, "quick", spec.states
    )
    summary = evaluate(policy, simulator, plan, run.config.rollout.halves, run.config.seed, device)
    _log(run, summary, iteration, "quick")
    return summary


def is_as_good(success: float, best: float, episodes: int) -> bool:
    """Whether a success rate is no worse than the best so far, as far as the check can tell.

    The later of two policies has learned more, so it is passed over only if it did worse by more
    than the standard error of the best one's check: keeping the best guards against a collapse,
    and must not pick what was lucky.
    """
    # Two more successes and failures than were seen (Agresti and Coull 1998): a check without
    # failures is not beyond doubt.
    known = (max(best, 0.0) * episodes + 2.0) / (episodes + 4.0)
    return success >= best - math.sqrt(known * (1.0 - known) / episodes)


def film(run: Run, name: Literal["start", "final"]) -> None:
    """Film a few of the final evaluation's episodes, if this machine can draw."""
    count = min(run.config.logging.video_episodes, run.config.evaluation.episodes)
    if not count:
        return
    policy = load_policy(run.policy_folder(name)).policy
    simulator: Any = run.config.simulator

    def plan(spec: SimulatorSpec) -> list[Episode]:
        states = spec.states
        return evaluation_plan(spec.all_tasks, count, run.config.seed, "final", states)

    film_episodes(simulator, policy, plan, run.directory / "videos", name)


def _log(run: Run, summary: EvaluationSummary, iteration: int, label: str) -> None:
    values = {
        "success_once": summary.success_once,
        "success_at_end": summary.success_at_end,
        "low": summary.low,
        "high": summary.high,
        "episodes": float(summary.episodes),
        "mean_steps": summary.mean_steps,
        "mean_return": summary.mean_return,
    }
    values |= {f"success_once/{task}": s.success_once for task, s in summary.by_task.items()}
    run.metrics.log("evaluation", iteration, values, label)
