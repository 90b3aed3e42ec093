"""What only the simulator's own description can tell: whether a run's options can be met at all."""

from __future__ import annotations

from typing import Any

from embodied_rl.contracts import SimulatorSpec
from embodied_rl.rollout.planner import evaluation_plan, initial_states
from embodied_rl.run_config import RunConfig
from embodied_rl.run_rules import starts_within_episodes


def require_fit(config: RunConfig, spec: SimulatorSpec, reinforces: bool = True) -> None:
    """Raise ValueError before any work is done, rather than when the work that it cannot do comes.

    The size of a group is not among what can be too large: its episodes share one initial state,
    and where there are fewer slots they run one after the other.
    """
    states, tasks = spec.states, spec.all_tasks
    options = config.evaluation
    evaluation_plan(tasks, options.episodes, config.seed, "final", states)
    if not (reinforces and config.iterations):
        return
    if not initial_states("train", states):
        raise ValueError(
            f"{spec.num_initial_states} initial states are too few to hold some out; give at least "
            f"4, or set iterations=0"
        )
    if options.every:
        evaluation_plan(tasks, options.quick_episodes, config.seed, "quick", states)
    _require_middles(config, spec)


def _require_middles(config: RunConfig, spec: SimulatorSpec) -> None:
    """Only demonstrations can be begun in at any step; the rest needs a decision in the middle."""
    chunk: Any = getattr(config.policy, "chunk", 1)
    given = [o for o in starts_within_episodes(config) if "demonstrated" not in o]
    if not given or chunk < spec.max_episode_steps:
        return
    raise ValueError(
        f"{given[0]} begins episodes at decisions in the middle of others, but with policy.chunk="
        f"{chunk} an episode of {spec.max_episode_steps} steps is one decision; set it to 0 or "
        f"take a shorter chunk"
    )
