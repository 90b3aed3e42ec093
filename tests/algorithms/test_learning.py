"""Algorithms with flow likelihoods learn a task whose optimum is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied_rl.algorithms.config import GRPOConfig, PPOConfig, REINFORCEConfig
from embodied_rl.algorithms.protocol import Algorithm
from embodied_rl.contracts import Policy
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.episodes import run_episodes
from embodied_rl.rollout.planner import TrainingPlanner, evaluation_plan
from embodied_rl.run_config import RolloutConfig
from line_world import LineConfig
from policies.config import FlowMLPConfig

OPTIMUM = 1.0
"""One step of up to 1 brings every start in [-1, 1] to the origin; success is within 0.25 of it."""

SMALL: dict[str, Any] = {"chunk": 1, "hidden_size": 32, "num_layers": 1, "value_hidden_size": 32}
POLICIES: dict[str, Any] = {
    "flow_sde": FlowMLPConfig(**SMALL),
    "flow_sde_all": FlowMLPConfig(stochastic_steps="all", **SMALL),
    "flow_noise": FlowMLPConfig(exploration="flow_noise", noise_std=(0.1, 0.5), **SMALL),
    "flow_noise_mean": FlowMLPConfig(
        exploration="flow_noise", chain_log_prob="mean", noise_std=(0.1, 0.5), **SMALL
    ),
}
ALGORITHMS: dict[str, Any] = {
    "ppo": PPOConfig(
        minibatch_size=64,
        discount=0.9,
        critic_warmup_iterations=1,
        max_kl=None,
        learning_rate=2e-3,
        learning_rate_schedule="linear",
    ),
    "grpo": GRPOConfig(
        minibatch_size=32,
        max_kl=None,
        learning_rate=3e-3,
        learning_rate_schedule="linear",
    ),
    "reinforce": REINFORCEConfig(learning_rate=2e-2, learning_rate_schedule="linear"),
}
ITERATIONS = {"ppo": 30, "grpo": 30, "reinforce": 80}


PAIRS = [
    (policy, algorithm)
    for policy in POLICIES
    for algorithm in ALGORITHMS
    # Open: PPO with Flow-Noise rises and falls back on this task with every setting tried so far.
    if (algorithm, policy) not in {("ppo", "flow_noise"), ("ppo", "flow_noise_mean")}
]


@pytest.mark.parametrize(("policy_name", "algorithm_name"), PAIRS)
def test_learns_the_line(policy_name: str, algorithm_name: str) -> None:
    rollout = RolloutConfig(num_slots=64, num_workers=0)
    simulator = build_simulator(LineConfig(limit=1, radius=0.25), rollout, chunk=1)
    torch.manual_seed(0)
    policy: Policy = POLICIES[policy_name].build(simulator.spec.contract)
    iterations = ITERATIONS[algorithm_name]
    algorithm: Algorithm = ALGORITHMS[algorithm_name].build(policy, iterations, 0)
    planner = TrainingPlanner("line", 0, group_size=algorithm.group_size)
    generator = torch.Generator().manual_seed(0)
    collector = algorithm.collector(simulator, planner, generator, 2)

    def success() -> float:
        results = run_episodes(simulator, policy, evaluation_plan("line", 200), 2, seed=0)
        return sum(result.success_once for result in results) / len(results)

    before = success()
    for iteration in range(iterations):
        algorithm.update(collector.collect(), iteration)
    assert before < 0.5
    assert success() >= 0.95 * OPTIMUM
