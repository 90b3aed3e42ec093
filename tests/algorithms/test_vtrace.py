"""PPO that looks at its decisions again before every epoch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.algorithms.ppo import PPO
from embodied_rl.algorithms.stale import fresh, seen_again
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig
from line_world import LineConfig
from policies.config import GaussianMLPConfig

DECISIONS, SLOTS = 8, 16


class Bench:
    """The line world, in chunks of two steps that the limit of five cuts, and a PPO."""

    def __init__(self, **options: Any) -> None:
        rollout = RolloutConfig(num_slots=SLOTS, num_workers=0)
        self.simulator = build_simulator(LineConfig(limit=5), rollout, chunk=2)
        torch.manual_seed(0)
        made = GaussianMLPConfig(chunk=2, hidden_size=16).build(self.simulator.spec.contract)
        self.policy: Any = made
        given = {"decisions_per_iteration": DECISIONS, "critic_warmup_iterations": 0}
        self.algorithm = PPO(PPOConfig.model_validate(given | options), made, 0)
        generator = torch.Generator().manual_seed(0)
        planner = TrainingPlanner("line", 0)
        self.collector = self.algorithm.collector(self.simulator, planner, generator, 2)

    def collect(self) -> Batch:
        return self.collector.collect()

    def change(self) -> None:
        """Another policy with another value."""
        with torch.no_grad():
            self.policy.mean_network[-1].bias += 0.1
            self.policy.value_network[-1].bias += 5.0


def test_a_policy_that_has_not_changed_sees_what_was_collected() -> None:
    bench = Bench(advantages="vtrace")
    batch = bench.collect()
    view = seen_again(bench.policy, batch, 50)
    for name in ("value", "next_value", "ratio"):
        torch.testing.assert_close(getattr(view, name), getattr(fresh(batch), name))
    estimated = Bench(advantages="gae").algorithm.advantages(batch)
    for mine, wanted in zip(bench.algorithm.advantages(batch, view), estimated, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_values_within_the_batch_are_new_and_those_beyond_it_old() -> None:
    bench = Bench()
    batch = bench.collect()
    bench.change()
    view = seen_again(bench.policy, batch, 50)
    torch.testing.assert_close(view.value, batch.value + 5.0)
    last = torch.arange(DECISIONS * SLOTS) >= (DECISIONS - 1) * SLOTS
    beyond = batch.done | last
    assert beyond.any() and batch.bootstraps[batch.done].any()
    assert torch.equal(view.next_value[beyond], batch.next_value[beyond])
    torch.testing.assert_close(view.next_value[~beyond], batch.next_value[~beyond] + 5.0)


def test_ratios_are_those_of_the_executed_steps() -> None:
    bench = Bench()
    batch = bench.collect()
    bench.change()
    view = seen_again(bench.policy, batch, 50)
    # Unit deviation: a mean of 0.1 more changes the log-density of z by 0.1 z - 0.005 per step.
    with torch.no_grad():
        old_mean = bench.policy._mean(bench.policy._see(batch.observation)) - 0.1
    steps = (0.1 * (batch.trace["drawn"] - old_mean) - 0.005)[..., 0]
    one = batch.executed == 1
    assert one.any() and not one.all()
    torch.testing.assert_close(view.ratio[one].log(), steps[one, 0], atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(view.ratio[~one].log(), steps[~one].sum(1), atol=1e-5, rtol=1e-3)


def test_lost_rows_are_not_looked_at() -> None:
    bench = Bench(advantages="vtrace")
    batch = bench.collect()
    batch.valid[::7] = False
    batch.log_prob[::7] = batch.reward[::7] = float("nan")
    view = seen_again(bench.policy, batch, 50)
    assert view.ratio.isfinite().all()
    advantage, target = bench.algorithm.advantages(batch, view)
    assert advantage.isfinite().all() and target[batch.valid].isfinite().all()


def test_every_further_epoch_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def look(*arguments: Any) -> Any:
        looked.append(seen_again(*arguments))
        return looked[-1]

    monkeypatch.setattr("embodied_rl.algorithms.ppo.seen_again", look)
    bench = Bench(advantages="vtrace", epochs=3, max_kl=None, learning_rate=1e-3)
    bench.algorithm.update(bench.collect(), 0)
    assert len(looked) == 2
    # The policy and the value had moved on from the first to the second look.
    assert 1e-3 < (looked[0].ratio - 1).abs().max() < (looked[1].ratio - 1).abs().max()
    assert not torch.equal(looked[0].value, looked[1].value)
    bench = Bench(advantages="gae", epochs=3)
    bench.algorithm.update(bench.collect(), 0)
    assert len(looked) == 2


def test_the_bounds_reach_the_estimate() -> None:
    found = []
    for bounds in ((1.0, 1.0), (1.2, 1.0), (1.2, 1.2), (1.2, 0.8)):
        bench = Bench(
            advantages="vtrace",
            vtrace_rho_bar=bounds[0],
            vtrace_c_bar=bounds[1],
            gae_lambda=1.0,
        )
        batch = bench.collect()
        bench.change()
        view = seen_again(bench.policy, batch, 50)
        found.append(bench.algorithm.advantages(batch, view)[1])
    assert all(not torch.allclose(a, b) for a, b in itertools.pairwise(found))


def test_bounds_and_epochs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"vtrace_c_bar=2\.0 must not be more than vtrace_rho_bar"):
        PPOConfig(vtrace_c_bar=2.0)
    with pytest.raises(ValueError, match=r"epochs=1 has none"):
        PPOConfig(advantages="vtrace", epochs=1)
