"""PPO on a task with a known optimum, its gate, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.algorithms.ppo import PPO, NonFinite, RatioError
from embodied_rl.algorithms.steps import minibatches
from embodied_rl.contracts import Policy
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.episodes import run_episodes
from embodied_rl.rollout.planner import TrainingPlanner, evaluation_plan
from embodied_rl.run_config import RolloutConfig
from line_world import LineConfig
from policies.config import FlowMLPConfig, GaussianMLPConfig

OPTIONS: dict[str, Any] = {
    "decisions_per_iteration": 16,
    "minibatch_size": 128,
    "discount": 0.9,
    "critic_warmup_iterations": 1,
    "max_kl": None,
    "learning_rate": 1e-3,
}
FLOW = FlowMLPConfig(chunk=1, hidden_size=32, num_layers=1, value_hidden_size=32)
GAUSSIAN = GaussianMLPConfig(chunk=1, hidden_size=32)


class Bench:
    """The toy line with a policy and PPO."""

    def __init__(self, policy: Any, seed: int = 0, **options: Any) -> None:
        self.simulator = build_simulator(
            LineConfig(), RolloutConfig(num_slots=32, num_workers=0), chunk=policy.chunk
        )
        torch.manual_seed(seed)
        self.policy: Policy = policy.build(self.simulator.spec.contract)
        generator = torch.Generator().manual_seed(seed)
        planner = TrainingPlanner("line", seed)
        self.algorithm = PPO(PPOConfig(**(OPTIONS | options)), self.policy, seed)
        self.collector = self.algorithm.collector(self.simulator, planner, generator, 2)

    def collect(self) -> Batch:
        return self.collector.collect()

    def success(self) -> float:
        plan = evaluation_plan("line", 100)
        results = run_episodes(self.simulator, self.policy, plan, 2, seed=0)
        return sum(r.success_once for r in results) / len(results)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (FLOW, {}),
        (FLOW, {"ratio_level": "step"}),
        (FLOW.model_copy(update={"stochastic_steps": "all"}), {}),
        (GAUSSIAN, {}),
    ],
)
def test_learns_the_line(policy: Any, options: dict[str, Any], seed: int) -> None:
    """Success within 0.1 of the origin in six steps: the optimum is 100 %."""
    bench = Bench(policy, seed, **options)
    before = bench.success()
    for iteration in range(40):
        values = bench.algorithm.update(bench.collect(), iteration)
    assert values["first_log_ratio"] < 1e-3
    assert before < 0.75
    assert bench.success() > 0.9


def test_critic_warm_up_leaves_the_policy_alone() -> None:
    bench = Bench(FLOW, critic_warmup_iterations=2)
    before = [p.detach().clone() for p in bench.policy.policy_parameters()]
    value = [p.detach().clone() for p in bench.policy.value_parameters()]
    batch = bench.collect()
    bench.algorithm.update(batch, 0)
    bench.algorithm.update(batch, 1)
    now = bench.policy.policy_parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert not torch.equal(value[0], bench.policy.value_parameters()[0])
    bench.algorithm.update(bench.collect(), 2)
    assert not torch.equal(before[0], bench.policy.policy_parameters()[0])


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_histogram_is_learned_by_cross_entropy(warmup: int) -> None:
    """It begins nearly flat, at log 101 = 4.6, which no squared error of these returns reaches."""
    policy = FLOW.model_copy(update={"value_head": "hl_gauss"})
    bench = Bench(policy, critic_warmup_iterations=warmup, epochs=1, value_learning_rate=1e-6)
    values = bench.algorithm.update(bench.collect(), 0)
    assert ("policy_loss" in values) == (warmup == 0)
    assert values["value_loss"] == pytest.approx(4.615, abs=0.1)
    assert values["outside_value_range"] == 0.0
    narrow = policy.model_copy(update={"value_range": (0.9, 1.1)})
    bench = Bench(narrow, critic_warmup_iterations=warmup)
    values = bench.algorithm.update(bench.collect(), 0)
    assert 0.1 < values["outside_value_range"] < 1.0


def test_the_gate_stops_a_policy_that_forgot_its_probabilities() -> None:
    bench = Bench(FLOW)
    batch = bench.collect()
    batch.log_prob.add_(0.01)
    with pytest.raises(RatioError, match=r"largest log-ratio 0\.0.*Usual causes: dropout"):
        bench.algorithm.update(batch, 5)


def test_a_kl_limit_stops_the_epochs() -> None:
    wild = Bench(FLOW, learning_rate=1e-2, epochs=10)
    batch = wild.collect()
    free = wild.algorithm.update(batch, 5)["num_updates"]
    tame = Bench(FLOW, learning_rate=1e-2, epochs=10, max_kl=1e-3)
    assert tame.algorithm.update(tame.collect(), 5)["num_updates"] < free == 40


def test_a_value_that_is_not_finite_is_named() -> None:
    bench = Bench(FLOW)
    batch = bench.collect()
    batch.reward[3] = float("nan")
    with pytest.raises(NonFinite, match="the loss is nan"):
        bench.algorithm.update(batch, 5)


def test_lost_rows_do_not_train() -> None:
    """Poison in invalid rows changes nothing."""
    updated = []
    for poison in (0.0, float("nan")):
        bench = Bench(FLOW)
        batch = bench.collect()
        batch.valid[::7] = False
        batch.reward[::7] = poison
        batch.log_prob[::7] = poison
        bench.algorithm.update(batch, 5)
        updated.append(bench.policy.policy_parameters()[0].detach().clone())
    assert torch.equal(updated[0], updated[1])


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", 1.0), ("linear", 0.75), ("cosine", 0.853553)]
)
def test_learning_rate_schedules(schedule: str, expected: float) -> None:
    bench = Bench(FLOW, learning_rate_schedule=schedule)
    bench.algorithm.set_progress(0.25)
    values = bench.algorithm.update(bench.collect(), 25)
    assert values["learning_rate"] == pytest.approx(1e-3 * expected)


def test_minibatches_differ_by_epoch_and_iteration_but_repeat_with_the_seed() -> None:
    bench = Bench(FLOW)
    batch = bench.collect()
    orders = [torch.cat(list(minibatches(batch.valid, 128, 4, 0, i))) for i in (0, 0, 1)]
    size = len(batch.value)
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0][:size], orders[0][size : 2 * size])
    assert sorted(orders[0][:size].tolist()) == list(range(size))


def test_the_entropy_bonus_widens_a_gaussian() -> None:
    found = []
    for coefficient in (0.0, 1.0):
        bench = Bench(GAUSSIAN, entropy_coefficient=coefficient)
        bench.algorithm.update(bench.collect(), 5)
        policy: Any = bench.policy
        found.append(float(policy.log_std.detach().mean()))
    assert found[1] > found[0]
