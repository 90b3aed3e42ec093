"""A configuration made small: the same parts and phases, with next to no work in each."""

from __future__ import annotations

from typing import Any

from embodied_rl.run_config import RunConfig

AT_MOST: dict[str, int] = {
    "iterations": 2,
    "rollout.num_slots": 4,
    "rollout.num_workers": 2,
    "algorithm.decisions_per_iteration": 4,
    "algorithm.groups_per_iteration": 2,
    "algorithm.group_size": 2,
    "algorithm.epochs": 2,
    "algorithm.critic_warmup_iterations": 0,
    "practice.pool": 8,
    "demonstrations.episodes": 2,
    "demonstrations.by_task": 1,
    "imitation.steps": 3,
    "imitation.batch_size": 16,
    "imitation.checkpoint_every": 2,
    "evaluation.episodes": 4,
    "evaluation.every": 1,
    "evaluation.quick_episodes": 4,
    "checkpoint.every": 1,
    "logging.video_episodes": 0,
}
"""Options that are lowered to this where they are higher. Without a warm-up of the critic the first
iteration already changes the policy."""

SET: dict[str, Any] = {
    "max_env_steps": None,
    "logging.tensorboard": False,
    "logging.wandb": "off",
}
"""Options that are set to this, whatever they were."""


def in_words() -> str:
    """What is changed, for a person."""
    lowered = [f"{name}={most}" for name, most in AT_MOST.items()]
    fixed = [f"{name}={_word(value)}" for name, value in SET.items()]
    return f"at most {', '.join(lowered)}; and {', '.join(fixed)}"


def shrunk(config: RunConfig) -> tuple[RunConfig, dict[str, tuple[Any, Any]]]:
    """The small configuration, and what it changed: per option what it was and what it is."""
    tree = config.model_dump(mode="json")
    changes: dict[str, tuple[Any, Any]] = {}
    for option in (*AT_MOST, *SET):
        *parents, leaf = option.split(".")
        node: Any = tree
        for parent in parents:
            node = (node or {}).get(parent)
        # Not every algorithm has every option, and nobody has to imitate.
        if not node or leaf not in node:
            continue
        old = node[leaf]
        new = SET[option] if option in SET else _lowered(old, AT_MOST[option])
        if new != old:
            node[leaf] = new
            changes[option] = old, new
    return RunConfig.model_validate(tree), changes


def _lowered(value: Any, most: int) -> Any:
    if isinstance(value, dict):
        return {name: min(entry, most) for name, entry in value.items()}
    return value if value is None else min(value, most)


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower()
