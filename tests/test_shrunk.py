"""Configurations made small for a dry run."""

from __future__ import annotations

from typing import Any

import pytest

from embodied_rl.config import GROUPS, load
from embodied_rl.run_config import RunConfig
from embodied_rl.shrunk import AT_MOST, SET, in_words, shrunk


def config(*options: str, file: str | None = None) -> RunConfig:
    path = GROUPS / file if file else None
    parts = [] if file else ["simulator=maniskill", "policy=flow_mlp"]
    return load(RunConfig, path, [*parts, *options])


def value_of(config: RunConfig, option: str) -> Any:
    node: Any = config
    for name in option.split("."):
        node = getattr(node, name)
    return node


def test_the_quickstart_becomes_small() -> None:
    before = config(file="quickstart.yaml")
    small, changes = shrunk(before)
    assert changes["iterations"] == (150, 2)
    assert changes["rollout.num_slots"] == (64, 4)
    assert changes["imitation.steps"] == (2000, 3)
    assert changes["evaluation.every"] == (20, 1)
    for option, (old, new) in changes.items():
        assert value_of(before, option) == old and value_of(small, option) == new
    # What the run learns with stays: only how much of it there is changes.
    untouched = ("seed", "simulator", "policy")
    assert all(value_of(small, option) == value_of(before, option) for option in untouched)
    assert small.algorithm.learning_rate == before.algorithm.learning_rate  # type: ignore[attr-defined]
    assert shrunk(small)[1] == {}, "what is small stays as it is"


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce"])
@pytest.mark.parametrize("imitates", [True, False])
def test_every_algorithm_with_and_without_imitation(algorithm: str, imitates: bool) -> None:
    given = ["demonstrations.episodes=9", "imitation.steps=7"] if imitates else []
    small, changes = shrunk(config(f"algorithm={algorithm}", *given))
    assert {"iterations", "rollout.num_slots", "evaluation.episodes"} <= set(changes)
    assert ("algorithm.decisions_per_iteration" in changes) == (algorithm == "ppo")
    assert ("algorithm.group_size" in changes) == (algorithm != "ppo")
    assert ("algorithm.epochs" in changes) == (algorithm != "reinforce")
    assert ("imitation.steps" in changes) == imitates == (small.imitation is not None)


def test_smaller_values_and_none_stay() -> None:
    options = ("iterations=1", "rollout.num_slots=2", "rollout.num_workers=null")
    small, changes = shrunk(config("algorithm=ppo", *options))
    assert (small.iterations, small.rollout.num_slots, small.rollout.num_workers) == (1, 2, None)
    assert not {"iterations", "rollout.num_slots", "rollout.num_workers"} & set(changes)
    # Checks during training that were off stay off.
    assert small.evaluation.every == 0


def test_what_is_written_elsewhere_and_budgets_are_off() -> None:
    options = ("max_env_steps=5", "logging.wandb=offline", "logging.tensorboard=true")
    small, changes = shrunk(config("algorithm=ppo", *options))
    assert small.max_env_steps is None and changes["max_env_steps"] == (5, None)
    assert (small.logging.wandb, small.logging.tensorboard) == ("off", False)


def test_each_task_is_demonstrated_once() -> None:
    small, changes = shrunk(config(file="multitask.yaml"))
    assert small.demonstrations and small.demonstrations.by_task
    assert set(small.demonstrations.by_task.values()) == {1}
    assert changes["demonstrations.by_task"][1] == small.demonstrations.by_task


def test_every_option_is_named_in_words() -> None:
    words = in_words()
    assert all(f"{name}=" in words for name in (*AT_MOST, *SET))
    assert "logging.tensorboard=false" in words and "max_env_steps=null" in words
