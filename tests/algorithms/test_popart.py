"""PPO with a scale of returns for each task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.algorithms.critic import PopArt
from embodied_rl.algorithms.ppo import PPO
from embodied_rl.config import ConfigError, load
from embodied_rl.contracts import Estimate
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.episodes import run_episodes
from embodied_rl.rollout.planner import TrainingPlanner, evaluation_plan
from embodied_rl.run_config import RolloutConfig, RunConfig
from embodied_rl.training.checkpoint import optimizer_from_state, optimizer_to_state
from line_world import LineConfig
from policies.config import GaussianMLPConfig

SCALES = torch.tensor([1.0, 1000.0])
"""What success is worth in two tasks that are otherwise the same."""


class TwoTasks:
    """The line world as two tasks."""

    def __init__(self, **options: Any) -> None:
        rollout = RolloutConfig(num_slots=64, num_workers=0)
        world = LineConfig(limit=1, radius=0.25, limit_terminates=True)
        self.simulator = build_simulator(world, rollout, chunk=1)
        torch.manual_seed(0)
        policy = GaussianMLPConfig(hidden_size=32, initial_std=0.3, normalise_state=False)
        self.policy: Any = policy.build(self.simulator.spec.contract)
        given = {
            "minibatch_size": 64,
            "discount": 0.9,
            "critic_warmup_iterations": 1,
            "max_kl": None,
            "learning_rate": 2e-3,
            "value_normalisation": "popart",
        }
        self.algorithm = PPO(PPOConfig.model_validate(given | options), self.policy, 0)
        planner = TrainingPlanner(("small", "large"), 0)
        generator = torch.Generator().manual_seed(0)
        self.collector = self.algorithm.collector(self.simulator, planner, generator, 2)

    def collect(self) -> Batch:
        batch = self.collector.collect()
        return replace(batch, reward=batch.reward * SCALES[batch.task][:, None])

    @property
    def critic(self) -> PopArt:
        assert isinstance(self.algorithm.critic, PopArt)
        return self.algorithm.critic


@pytest.mark.parametrize("task_gradients", ["sum", "pcgrad"])
def test_learns_two_tasks_whose_returns_differ_a_thousandfold(task_gradients: str) -> None:
    bench = TwoTasks(normalise_advantages="task", task_gradients=task_gradients)
    for iteration in range(22):
        values = bench.algorithm.update(bench.collect(), iteration)
    plan = evaluation_plan("small", 200)
    results = run_episodes(bench.simulator, bench.policy, plan, 2, seed=0)
    assert sum(r.success_once for r in results) >= 190
    mean, std = bench.critic.moments.mean, bench.critic.moments.std
    assert float(mean[1] / mean[0]) == pytest.approx(1000.0, rel=0.15)
    # Errors are counted in deviations, whatever a success is worth.
    assert std[1] > 50 and values["value_loss"] < 2.0


def test_moving_statistics_leave_the_expected_returns_where_they_were() -> None:
    bench = TwoTasks()
    batch = bench.collect()
    bench.algorithm.update(batch, 0)
    before = bench.critic.returns(batch.value, batch.task)
    # New returns of one task alone: its scale moves, and no output does.
    old = bench.critic.moments.std
    bench.critic.observe(torch.tensor([5e3, 9e3]), torch.tensor([1, 1]))
    new = bench.critic.moments.std
    assert new[1] > 2 * old[1] and new[0] == old[0]
    now = bench.critic.returns(batch.value, batch.task)
    torch.testing.assert_close(now, before, rtol=1e-4, atol=1e-3)


def test_the_loss_is_counted_in_deviations() -> None:
    critic = PopArt(2, 0.5)
    # Means 3 and 100, deviations 1 and 50.
    returns = torch.tensor([2.0, 4.0, 50.0, 150.0])
    critic.observe(returns, torch.tensor([0, 0, 1, 1]))
    # Returns 4 and 0 are 1 and -2 deviations from the means: errors 0.5 - 1 and 0.5 + 2.
    found = Estimate(torch.tensor([0.5, 0.5]))
    loss = critic.loss(found, torch.tensor([4.0, 0.0]), torch.tensor([0, 1]))
    assert float(loss.detach()) == pytest.approx((0.25 + 6.25) / 2)
    assert critic.returns(found.value, torch.tensor([0, 1])).tolist() == pytest.approx([3.5, 125.0])


def test_a_termination_is_worth_nothing_on_every_scale() -> None:
    bench = TwoTasks(gae_lambda=0.0)
    batch = bench.collect()
    assert batch.done.all() and not batch.bootstraps.any()
    bench.critic.observe(torch.tensor([2.0, 4.0, 50.0, 150.0]), torch.tensor([0, 0, 1, 1]))
    # Every episode is one decision: its return is its reward, and no mean is added to that.
    _, target = bench.algorithm.advantages(batch)
    torch.testing.assert_close(target, batch.reward[:, 0], rtol=1e-4, atol=1e-3)
    # What goes on is worth its value on the task's scale.
    going = replace(batch, bootstraps=~batch.bootstraps, next_value=torch.full((1024,), 0.5))
    _, target = bench.algorithm.advantages(going)
    expected = batch.reward[:, 0] + 0.9 * torch.tensor([3.5, 125.0])[batch.task]
    torch.testing.assert_close(target, expected, rtol=1e-4, atol=1e-3)


def test_lost_rows_do_not_move_the_scales() -> None:
    found = []
    for poison in (0.0, float("nan")):
        bench = TwoTasks()
        batch = bench.collect()
        batch.valid[::7] = False
        batch.reward[::7] = poison
        bench.algorithm.update(batch, 0)
        found.append(bench.critic.moments.mean)
    assert torch.equal(found[0], found[1]) and found[0].all()


def test_scales_are_saved_and_restored() -> None:
    # The policy stays, so that all can learn from the same decisions.
    whole, first, second = (TwoTasks(critic_warmup_iterations=4) for _ in range(3))
    batches = [whole.collect() for _ in range(4)]
    for iteration in range(4):
        whole.algorithm.update(batches[iteration], iteration)
    for iteration in range(2):
        first.algorithm.update(batches[iteration], iteration)
    second.policy.load_state_dict(first.policy.state_dict())
    state = optimizer_from_state(*optimizer_to_state(first.algorithm.state_dict()))
    second.algorithm.load_state_dict(state)
    for iteration in (2, 3):
        second.algorithm.update(batches[iteration], iteration)
    for name, tensor in whole.critic.state_dict().items():
        assert torch.equal(second.critic.state_dict()[name], tensor), name
    a, b = whole.policy.state_dict(), second.policy.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_scales_do_not_go_with_histograms() -> None:
    options = ["simulator=gymnasium", "policy=gaussian_mlp", "algorithm=ppo"]
    load(RunConfig, None, [*options, "algorithm.value_normalisation=popart"])
    load(RunConfig, None, [*options, "policy.value_head=hl_gauss"])
    both = ["algorithm.value_normalisation=popart", "policy.value_head=hl_gauss"]
    with pytest.raises(ConfigError, match=r"popart moves the scale .* bins of policy\.value_head"):
        load(RunConfig, None, [*options, *both])
