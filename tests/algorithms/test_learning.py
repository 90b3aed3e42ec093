"""Every algorithm learns with every likelihood a task whose optimum is known."""

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
from policies.config import FastVLAConfig, FlowMLPConfig, GaussianMLPConfig, TokenVLAConfig

OPTIMUM = 1.0
"""One step of up to 1 brings every start in [-1, 1] to the origin; success is within 0.25 of it.
Failing ends the task too: were it cut there, the value of places where no episode begins, which
nothing has ever taught, would be the return of missing."""

SMALL: dict[str, Any] = {"chunk": 1, "hidden_size": 32, "num_layers": 1, "value_hidden_size": 32}
SPOKEN: dict[str, Any] = {
    "num_prefix_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "max_instruction_bytes": 0,
    **{name: size for name, size in SMALL.items() if name != "num_layers"},
}
POLICIES: dict[str, Any] = {
    "flow_sde": FlowMLPConfig(**SMALL),
    "flow_sde_all": FlowMLPConfig(stochastic_steps="all", **SMALL),
    "flow_noise": FlowMLPConfig(exploration="flow_noise", noise_std=(0.1, 0.5), **SMALL),
    "flow_noise_mean": FlowMLPConfig(
        exploration="flow_noise", chain_log_prob="mean", noise_std=(0.1, 0.5), **SMALL
    ),
    "fpo": FlowMLPConfig(exploration="fpo", **SMALL),
    "flow_sde_hl_gauss": FlowMLPConfig(value_head="hl_gauss", **SMALL),
    "gaussian": GaussianMLPConfig(hidden_size=32, initial_std=0.3, normalise_state=False),
    "tokens": TokenVLAConfig(num_bins=5, **SPOKEN),
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
    "ppo_vtrace": PPOConfig(
        advantages="vtrace",
        epochs=6,
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
ITERATIONS = {"ppo": 22, "ppo_vtrace": 22, "grpo": 30, "reinforce": 80}
CHANGES: dict[tuple[str, str], dict[str, Any]] = {
    ("gaussian", "reinforce"): {"learning_rate": 1e-2, "groups_per_iteration": 32},
    ("tokens", "reinforce"): {
        "learning_rate": 5e-3,
        "groups_per_iteration": 32,
        "entropy_coefficient": 0.02,
    },
    ("tokens", "ppo"): {"ratio_level": "token"},
    ("tokens", "grpo"): {"learning_rate": 1.5e-3},
}


CASES = [
    (policy, algorithm)
    for policy in POLICIES
    for algorithm in ALGORITHMS
    # Without a critic it does not matter how the value is learned, and one policy is enough to see
    # that V-trace teaches.
    if (policy != "flow_sde_hl_gauss" or algorithm == "ppo")
    and (policy == "gaussian" or algorithm != "ppo_vtrace")
]


@pytest.mark.parametrize(("policy_name", "algorithm_name"), CASES)
def test_learns_the_line(policy_name: str, algorithm_name: str) -> None:
    changes = CHANGES.get((policy_name, algorithm_name), {})
    options = ALGORITHMS[algorithm_name].model_copy(update=changes)
    # A language model's iterations cost more, and PPO needs few of them.
    iterations = (
        8 if (policy_name, algorithm_name) == ("tokens", "ppo") else ITERATIONS[algorithm_name]
    )
    before, after = learned(POLICIES[policy_name], options, iterations)
    assert before < 0.5
    assert after >= 0.95 * OPTIMUM


def test_fast_tokens_get_better_token_by_token() -> None:
    """Not to the optimum, for the sake of time: of two words at most, the second changes
    nothing here, so that a sequence is a noisier teacher than one bin."""
    options = ALGORITHMS["ppo"].model_copy(update={"ratio_level": "token"})
    before, after = learned(FastVLAConfig(scale=2.0, vocabulary=5, **SPOKEN), options, 4)
    assert before < 0.5
    assert after > 0.65


def learned(policy_options: Any, options: Any, iterations: int) -> tuple[float, float]:
    """Success before and after."""
    rollout = RolloutConfig(num_slots=64, num_workers=0)
    simulator = build_simulator(
        LineConfig(limit=1, radius=0.25, limit_terminates=True), rollout, chunk=1
    )
    torch.manual_seed(0)
    policy: Policy = policy_options.build(simulator.spec.contract)
    algorithm: Algorithm = options.build(policy, 0)
    planner = TrainingPlanner("line", 0, group_size=algorithm.group_size)
    generator = torch.Generator().manual_seed(0)
    collector = algorithm.collector(simulator, planner, generator, 2)

    def success() -> float:
        results = run_episodes(simulator, policy, evaluation_plan("line", 200), 2, seed=0)
        return sum(result.success_once for result in results) / len(results)

    before = success()
    for iteration in range(iterations):
        algorithm.set_progress(iteration / iterations)
        algorithm.update(collector.collect(), iteration)
    return before, success()
