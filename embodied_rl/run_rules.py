"""Rules between the parts of a run: what does not go together, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from embodied_rl.ratio_levels import refusal

if TYPE_CHECKING:
    from embodied_rl.run_config import RunConfig


def _batched_simulators_need_no_workers(run: RunConfig) -> None:
    batched: Any = getattr(run.simulator, "batched", False)
    if batched and run.rollout.num_workers:
        raise ValueError(
            f"rollout.num_workers={run.rollout.num_workers} but this simulator runs as one batch; "
            f"leave num_workers out"
        )


def _policy_needs_cameras(run: RunConfig) -> None:
    needs: Any = getattr(run.policy, "needs_cameras", False)
    gives: Any = getattr(run.simulator, "gives_images", False)
    if needs and not gives:
        raise ValueError(
            "this policy looks through cameras but the simulator gives only a state; choose "
            "simulator.observation=rgb or a policy without cameras"
        )


def _demonstrated_tasks_are_the_tasks(run: RunConfig) -> None:
    counts = run.demonstrations and run.demonstrations.by_task
    given: Any = getattr(run.simulator, "task", ())
    tasks = {given} if isinstance(given, str) else set(given)
    if counts and set(counts) != tasks:
        raise ValueError(
            f"demonstrations.by_task counts {', '.join(sorted(counts))}, but simulator.task is "
            f"{', '.join(sorted(tasks))}; count each task once"
        )


def _several_tasks_are_told_apart(run: RunConfig) -> None:
    tasks: Any = getattr(run.simulator, "task", "")
    if isinstance(tasks, str) or len(tasks) < 2:
        return
    for option, such_as in (("instruction_size", 32), ("max_instruction_bytes", 64)):
        if getattr(run.policy, option, such_as) == 0:
            raise ValueError(
                f"policy.{option}=0 reads no instruction, so the policy could not tell "
                f"{', '.join(tasks)} apart; set it, to {such_as} for example"
            )


def _exploration_has_what_is_weighed(run: RunConfig) -> None:
    exploration: Any = getattr(run.policy, "exploration", None)
    entropy: Any = getattr(run.algorithm, "entropy_coefficient", 0.0)
    kl: Any = getattr(run.algorithm, "kl_coefficient", 0.0)
    if exploration in ("flow_sde", "fpo") and entropy:
        raise ValueError(
            f"algorithm.entropy_coefficient={entropy} but policy.exploration={exploration} learns "
            f"no noise, so there is no entropy to raise; set it to 0 or choose flow_noise"
        )
    if exploration == "fpo" and kl:
        raise ValueError(
            f"algorithm.kl_coefficient={kl} but policy.exploration=fpo has no likelihood that a "
            f"divergence could be measured with; set it to 0"
        )


def _preludes_need_single_scenes(run: RunConfig) -> None:
    batched: Any = getattr(run.simulator, "batched", False)
    if batched and (given := starts_within_episodes(run)):
        raise ValueError(
            f"{given[0]} plays recorded actions again in single scenes, but this simulator runs as "
            f"one batch; set it to 0 or choose simulator.backend=cpu"
        )


def starts_within_episodes(run: RunConfig) -> list[str]:
    """The options, with their values, that have episodes begin within others."""
    branches: Any = getattr(run.algorithm, "branches", 0)
    options = {
        "practice.demonstrated_share": run.practice.demonstrated_share,
        "practice.visited_share": run.practice.visited_share,
        "algorithm.branches": branches,
    }
    return [f"{name}={value}" for name, value in options.items() if value]


def _policy_has_the_ratio_level(run: RunConfig) -> None:
    level = getattr(run.algorithm, "ratio_level", "chunk")
    rule = getattr(run.algorithm, "length_normalisation", "decision")
    problem = refusal(run.policy, level, rule)
    if problem:
        raise ValueError(problem)


def _policy_can_explore(run: RunConfig) -> None:
    if run.iterations and not getattr(run.policy, "explores", True):
        raise ValueError(
            "this policy has no likelihood to learn from by trial, as with policy.head=l1; set "
            "iterations=0 to imitate and evaluate it, or choose a policy that explores"
        )


def _demonstrated_starts_need_demonstrations(run: RunConfig) -> None:
    share = run.practice.demonstrated_share
    if not share:
        return
    recorded = run.demonstrations and not run.initial_policy
    if not (recorded or (run.demonstrations and run.demonstrations.is_given)):
        raise ValueError(
            f"practice.demonstrated_share={share} needs demonstrations to begin in; set "
            f"demonstrations and imitation (with initial_policy also demonstrations.path or "
            f"repo_id), or set it to 0"
        )


def _normalised_values_are_numbers(run: RunConfig) -> None:
    normalisation: Any = getattr(run.algorithm, "value_normalisation", "off")
    head: Any = getattr(run.policy, "value_head", "scalar")
    if normalisation != "off" and head != "scalar":
        raise ValueError(
            f"algorithm.value_normalisation={normalisation} moves the scale of the returns, "
            f"but the bins of policy.value_head={head} cover one fixed range; "
            f"choose policy.value_head=scalar or algorithm.value_normalisation=off"
        )


RULES = (
    _demonstrated_tasks_are_the_tasks,
    _several_tasks_are_told_apart,
    _exploration_has_what_is_weighed,
    _batched_simulators_need_no_workers,
    _policy_needs_cameras,
    _preludes_need_single_scenes,
    _policy_has_the_ratio_level,
    _policy_can_explore,
    _demonstrated_starts_need_demonstrations,
    _normalised_values_are_numbers,
)
