"""Entropy bonus, tie to the first policy and the weight of minibatches and episodes, in updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.algorithms.config import GRPOConfig, PPOConfig, REINFORCEConfig
from embodied_rl.algorithms.steps import RatioError, scored_steps
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig
from line_world import LineConfig
from policies.config import GaussianMLPConfig

SMALL: dict[str, Any] = {
    "ppo": PPOConfig(decisions_per_iteration=8, critic_warmup_iterations=0, max_kl=None),
    "grpo": GRPOConfig(groups_per_iteration=6, group_size=4, max_kl=None),
    "reinforce": REINFORCEConfig(groups_per_iteration=6, group_size=4),
}
every_algorithm = pytest.mark.parametrize("name", list(SMALL))


def collected(name: str, limit: int = 6, chunk: int = 2, **options: Any) -> tuple[Any, Batch]:
    """An algorithm and the first batch that its policy collected on the line."""
    rollout = RolloutConfig(num_slots=8, num_workers=0)
    simulator = build_simulator(LineConfig(limit=limit), rollout, chunk=chunk)
    torch.manual_seed(0)
    policy = GaussianMLPConfig(chunk=chunk, hidden_size=8).build(simulator.spec.contract)
    config = SMALL[name].model_copy(update={"learning_rate": 1e-3, **options})
    algorithm = config.build(policy, 0)
    planner = TrainingPlanner("line", 0, None, algorithm.group_size)
    generator = torch.Generator().manual_seed(0)
    return algorithm, algorithm.collector(simulator, planner, generator, 2).collect()


def seen_by(policy: Any, batch: Batch) -> Any:
    with torch.no_grad():
        return policy.evaluate(batch.observation, batch.trace)


@every_algorithm
def test_an_entropy_bonus_spreads_the_actions(name: str) -> None:
    algorithm, batch = collected(name, entropy_coefficient=100.0)
    before = seen_by(algorithm.policy, batch).entropy.mean()
    algorithm.update(batch, 0)
    assert seen_by(algorithm.policy, batch).entropy.mean() > before + 1e-4


@every_algorithm
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_policy_that_went_astray_is_drawn_back(name: str, estimator: str) -> None:
    algorithm, batch = collected(name, kl_coefficient=1e4, kl_estimator=estimator)
    first = batch.log_prob.clone()

    def distance() -> Tensor:
        change: Tensor = seen_by(algorithm.policy, batch).log_prob - first
        return change[batch.valid].square().mean()

    with torch.no_grad():
        for parameter in algorithm.policy.policy_parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    # What was collected belongs to the policy as it is now: the ratio gate holds.
    batch.log_prob.copy_(seen_by(algorithm.policy, batch).log_prob)
    before = distance()
    for iteration in range(5):
        batch.log_prob.copy_(seen_by(algorithm.policy, batch).log_prob)
        algorithm.update(batch, iteration)
    assert distance() < 0.9 * before


def test_minibatches_of_reinforce_are_one_step_with_the_whole_gradient() -> None:
    # The batch falls into two parts of unequal size, which must weigh by it.
    updated = []
    for size in (40, 10_000):
        terms: dict[str, Any] = {
            "entropy_coefficient": 0.3,
            "kl_coefficient": 0.5,
            "kl_estimator": "k1",
        }
        algorithm, batch = collected(
            "reinforce", limit=7, minibatch_size=size, max_grad_norm=1e9, **terms
        )
        algorithm.optimizer = torch.optim.SGD(algorithm.policy.policy_parameters(), 1e-2)
        assert algorithm.update(batch, 0)["num_updates"] == 1.0
        updated.append(torch.cat([p.flatten() for p in algorithm.policy.policy_parameters()]))
        assert int(batch.valid.sum()) % 2 and (batch.executed < 2).any()
    torch.testing.assert_close(updated[0], updated[1], atol=1e-7, rtol=1e-4)


def test_the_longest_episode_is_counted_in_what_has_a_ratio() -> None:
    # 7 control steps are 4 decisions of 2 steps, the last one cut.
    by_level = {
        level: collected("grpo", limit=7, ratio_level=level)[0] for level in ("chunk", "step")
    }
    assert {level: algorithm.longest for level, algorithm in by_level.items()} == {
        "chunk": 4,
        "step": 7,
    }


@pytest.mark.parametrize("level", ["chunk", "step"])
def test_every_episode_weighs_the_same_in_what_has_a_ratio(level: str) -> None:
    algorithm, batch = collected("grpo", limit=7, ratio_level=level, length_normalisation="episode")
    weighted = algorithm.advantages(batch).abs()
    size = batch.executed if level == "step" else torch.ones_like(batch.executed)
    per_episode = torch.zeros(len(batch.results)).index_add(
        0, batch.episode[batch.valid], (weighted * size)[batch.valid]
    )
    plain, _ = collected("grpo", limit=7, ratio_level=level, length_normalisation="decision")
    relative = plain.advantages(batch).abs()
    first = [int((batch.episode == i).nonzero()[0]) for i in range(len(batch.results))]
    known = relative[first]
    # An episode's weights, times what they weigh, add up to the same for all episodes.
    shares = (per_episode / known)[known > 0]
    assert len(set(batch.executed[batch.valid].tolist())) == 2 and len(shares) > 4
    torch.testing.assert_close(shares, shares[:1].expand_as(shares), rtol=1e-4, atol=1e-5)


@every_algorithm
def test_steps_that_were_not_executed_count_only_if_asked(name: str) -> None:
    taught = {}
    for which in ("executed", "all"):
        algorithm, batch = collected(name, limit=7, scored_steps=which)
        # Log-probabilities of unexecuted steps are spoilt: who looks at them sees a ratio of e.
        unexecuted = torch.arange(2) >= batch.executed[:, None]
        assert (unexecuted & batch.valid[:, None]).any()
        batch.log_prob.sub_(unexecuted.float())
        try:
            taught[which] = algorithm.update(batch, 0)["first_log_ratio"]
        except RatioError as error:
            assert "largest log-ratio 1" in str(error)
    assert list(taught) == ["executed"] and taught["executed"] < 1e-3


def test_ratios_over_all_steps_are_counted_in_all_steps() -> None:
    # 7 control steps are 4 decisions of 2 steps, which all have a ratio.
    algorithm, _ = collected("grpo", limit=7, ratio_level="step", scored_steps="all")
    assert algorithm.longest == 8


def test_a_decision_that_was_not_executed_at_all_never_counts() -> None:
    _, batch = collected("ppo")
    executed = torch.tensor([0, 1, 2]).repeat(len(batch.executed))[: len(batch.executed)]
    batch.executed.copy_(executed)
    assert scored_steps(batch, "executed")[:3].tolist() == [0, 1, 2]
    assert scored_steps(batch, "all")[:3].tolist() == [0, 2, 2]
