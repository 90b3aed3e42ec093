"""PPO and GRPO with conflicts between tasks projected away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied_rl.algorithms.actor import actor_loss, judge, losses_by_task
from embodied_rl.algorithms.config import GRPOConfig, PPOConfig
from embodied_rl.algorithms.steps import Reference
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig
from line_world import LineConfig
from policies.config import GaussianMLPConfig

OPTIONS: dict[str, Any] = {
    "ppo": PPOConfig(
        decisions_per_iteration=8, minibatch_size=64, critic_warmup_iterations=0, epochs=2
    ),
    "grpo": GRPOConfig(groups_per_iteration=8, group_size=4, minibatch_size=64, epochs=2),
}


def opposed(batch: Batch) -> Batch:
    """The batch, had the second task been to stay away from where the first one goes."""
    sign = torch.tensor([1.0, -1.0])[batch.task]
    results = [
        replace(r, total_reward=r.total_reward * (-1.0 if r.episode.task == "b" else 1.0))
        for r in batch.results
    ]
    return replace(batch, reward=batch.reward * sign[:, None], results=results)


class Bench:
    """The line world under the names of some tasks."""

    def __init__(self, name: str, tasks: tuple[str, ...], **options: Any) -> None:
        rollout = RolloutConfig(num_slots=16, num_workers=0)
        simulator = build_simulator(LineConfig(), rollout, chunk=2)
        torch.manual_seed(0)
        made = GaussianMLPConfig(chunk=2, hidden_size=16).build(simulator.spec.contract)
        self.policy: Any = made
        config = OPTIONS[name].model_copy(update={"learning_rate": 1e-3, **options})
        self.algorithm: Any = config.build(made, 0)
        planner = TrainingPlanner(tasks, 0, group_size=self.algorithm.group_size)
        generator = torch.Generator().manual_seed(0)
        self.collector: Any = self.algorithm.collector(simulator, planner, generator, 2)

    def updated(self) -> list[torch.Tensor]:
        """Parameters of the policy and of the value after one iteration."""
        self.algorithm.update(opposed(self.collector.collect()), 0)
        parts = [self.policy.policy_parameters(), self.policy.value_parameters()]
        return [torch.cat([p.detach().flatten() for p in part]) for part in parts]


@pytest.mark.parametrize("level", ["chunk", "step"])
def test_losses_of_tasks_add_up_to_the_whole(level: str) -> None:
    bench = Bench("ppo", ("a", "b", "c"))
    batch: Batch = bench.collector.collect()
    config = OPTIONS["ppo"].model_copy(
        update={"ratio_level": level, "entropy_coefficient": 0.3, "kl_coefficient": 0.7}
    )
    reference = Reference(bench.policy)
    with torch.no_grad():
        for parameter in bench.policy.policy_parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    rows = torch.arange(5, 90)
    advantage = torch.randn(85)
    judged = judge(config, bench.policy, reference, batch, rows, advantage)
    assert len(set(batch.executed[rows].tolist())) == 2
    whole = actor_loss(config, judged).loss
    parts = losses_by_task(config, judged, batch.task[rows])
    assert len(parts) == 3
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    assert all(abs(float(part.detach())) > 1e-4 for part in parts)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_single_task_learns_as_before(name: str) -> None:
    plain = Bench(name, ("a",)).updated()
    projected = Bench(name, ("a",), task_gradients="pcgrad").updated()
    for one, other in zip(plain, projected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_several_tasks_change_the_policy_otherwise_and_the_value_not(name: str) -> None:
    tasks = ("a", "b")
    options = {"epochs": 1, "minibatch_size": 4096}
    plain = Bench(name, tasks, **options).updated()
    projected = Bench(name, tasks, task_gradients="pcgrad", **options).updated()
    again = Bench(name, tasks, task_gradients="pcgrad", **options).updated()
    assert not torch.allclose(plain[0], projected[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(plain[1], projected[1])
    assert torch.equal(projected[0], again[0])
