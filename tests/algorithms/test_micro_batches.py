"""Minibatches whose gradients are computed part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from embodied_rl.algorithms.config import GRPOConfig, PPOConfig, REINFORCEConfig
from embodied_rl.algorithms.micro import micro_batches
from embodied_rl.algorithms.steps import NonFinite
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig
from line_world import LineConfig
from policies.config import GaussianMLPConfig, TokenVLAConfig
from seen_line import SeenLineConfig

COMMON: dict[str, Any] = {
    **{"learning_rate": 1e-2, "kl_coefficient": 0.3, "entropy_coefficient": 0.1},
    "minibatch_size": 24,
}
GROUPS = {"groups_per_iteration": 4, "group_size": 4}
CASES: dict[str, Any] = {
    "ppo": PPOConfig(decisions_per_iteration=6, critic_warmup_iterations=0, **COMMON),
    "critic": PPOConfig(decisions_per_iteration=6, critic_warmup_iterations=1, **COMMON),
    "ppo_step": PPOConfig(
        **COMMON,
        decisions_per_iteration=6,
        critic_warmup_iterations=0,
        ratio_level="step",
        normalise_advantages="minibatch",
    ),
    "grpo": GRPOConfig(**COMMON, **GROUPS),
    "grpo_step": GRPOConfig(**COMMON, **GROUPS, ratio_level="step", scored_steps="all"),
    "reinforce": REINFORCEConfig(**COMMON, **GROUPS),
}


def updated(
    config: Any, policy_config: Any, simulator_config: Any
) -> tuple[torch.Tensor, Mapping[str, float], list[int]]:
    """All parameters after an iteration, its curves, and the sizes of what was looked at."""
    rollout = RolloutConfig(num_slots=8, num_workers=0)
    simulator = build_simulator(simulator_config, rollout, chunk=2)
    torch.manual_seed(0)
    policy = policy_config.build(simulator.spec.contract)
    algorithm = config.build(policy, 0)
    planner = TrainingPlanner(("line",), 0, group_size=algorithm.group_size)
    generator = torch.Generator().manual_seed(0)
    batch = algorithm.collector(simulator, planner, generator, 2).collect()
    assert len(set(batch.executed[batch.valid].tolist())) == 2, "chunks are cut short somewhere"
    sizes, evaluate = [], policy.evaluate

    def watched(observation: Any, trace: Any) -> Any:
        sizes.append(len(observation))
        return evaluate(observation, trace)

    policy.evaluate = watched
    curves = algorithm.update(batch, 0)
    parameters = [*policy.policy_parameters(), *policy.value_parameters()]
    return torch.cat([p.detach().flatten() for p in parameters]), curves, sizes


def require_equal(config: Any, policy: Any, simulator: Any) -> None:
    whole, curves, sizes = updated(config, policy, simulator)
    divided = config.model_copy(update={"micro_batch_size": 5})
    parts, same, small = updated(divided, policy, simulator)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(dict(same), dict(curves), atol=1e-5, rtol=1e-4)
    assert max(small, default=0) <= 5 and (not sizes or max(sizes) > 5)


@pytest.mark.parametrize("name", CASES)
def test_an_update_in_parts_is_the_same(name: str) -> None:
    require_equal(CASES[name], GaussianMLPConfig(chunk=2, hidden_size=16), LineConfig(limit=5))


def test_tokens_are_counted_over_the_whole_minibatch() -> None:
    options = COMMON | {"entropy_coefficient": 0.0, "epochs": 1}
    config = GRPOConfig(**options, **GROUPS, ratio_level="token")
    policy = TokenVLAConfig(chunk=2, hidden_size=16)
    require_equal(config, policy, SeenLineConfig(limit=5))


def test_parts_are_few_and_even() -> None:
    assert [part.tolist() for part in micro_batches(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(part) for part in micro_batches(6, 3)] == [3, 3]
    assert [len(part) for part in micro_batches(6, None)] == [6]
    assert [len(part) for part in micro_batches(2, 100)] == [2]


def test_a_part_that_is_not_finite_is_refused() -> None:
    config = CASES["ppo"].model_copy(update={"micro_batch_size": 5, "value_coefficient": 1e39})
    with pytest.raises(NonFinite, match="the loss is inf"):
        updated(config, GaussianMLPConfig(chunk=2, hidden_size=16), LineConfig(limit=5))


@pytest.mark.parametrize("kind", [PPOConfig, GRPOConfig])
def test_conflicts_need_whole_minibatches(kind: Any) -> None:
    with pytest.raises(ValidationError, match="leave micro_batch_size out and lower minibatch"):
        kind(task_gradients="pcgrad", micro_batch_size=8)
