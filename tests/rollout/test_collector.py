"""Collecting and evaluating on the toy line, inline and in worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from embodied_rl.contracts import Observation, Policy, Simulator
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.collector import Collector
from embodied_rl.rollout.episodes import run_episodes
from embodied_rl.rollout.planner import TrainingPlanner, evaluation_plan
from embodied_rl.rollout.pool import SimulatorPool, SimulatorStartError, WorkersKeepDying
from embodied_rl.run_config import RolloutConfig
from line_world import LineConfig, episode
from policies.config import FlowMLPConfig


@contextmanager
def line(num_slots: int = 4, workers: int = 0, **options: object) -> Iterator[Simulator]:
    rollout = {"num_slots": num_slots, "num_workers": workers, "max_worker_restarts": 4}
    limits = {key: options.pop(key) for key in ("step_timeout_s", "halves") if key in options}
    config = RolloutConfig.model_validate(rollout | limits)
    simulator = build_simulator(LineConfig.model_validate(options), config, chunk=2)
    try:
        yield simulator
    finally:
        simulator.close()


def policy_for(simulator: Simulator) -> Policy:
    torch.manual_seed(0)
    config = FlowMLPConfig(chunk=2, hidden_size=16, num_layers=1, value_hidden_size=8)
    return config.build(simulator.spec.contract)


def collector(simulator: Simulator, policy: Policy, num_decisions: int, seed: int = 0) -> Collector:
    generator = torch.Generator().manual_seed(seed)
    planner = TrainingPlanner("line", seed)
    return Collector(simulator, policy, planner, generator, 2, num_decisions)


def same(a: Batch, b: Batch) -> bool:
    tensors = [
        "log_prob",
        "value",
        "next_value",
        "bootstraps",
        "reward",
        "executed",
        "done",
        "valid",
        "group",
    ]
    return (
        all(torch.equal(getattr(a, name), getattr(b, name)) for name in tensors)
        and torch.equal(a.observation.state, b.observation.state)
        and a.observation.instruction == b.observation.instruction
        and a.results == b.results
    )


def test_a_batch_is_consistent() -> None:
    with line() as simulator:
        policy = policy_for(simulator)
        batch = collector(simulator, policy, 12).collect()
    assert batch.valid.all() and len(batch.value) == 48
    rows = batch.done.view(12, 4)
    value, following = batch.value.view(12, 4), batch.next_value.view(12, 4)
    going_on = ~rows[:-1]
    assert torch.equal(following[:-1][going_on], value[1:][going_on])
    won = (batch.reward.sum(1) > 0).view(12, 4)
    assert won.any() and (following[won] == 0).all()  # a termination is not bootstrapped
    cut = rows & ~won
    assert cut.any() and (following[cut] != 0).all()  # a time limit is
    assert torch.equal(batch.bootstraps.view(12, 4), ~won)
    assert (batch.executed >= 1).all() and (batch.executed <= 2).all()
    assert len(batch.results) == int(batch.done.sum())
    # The instruction is each environment's own.
    assert len(set(batch.observation.instruction)) > 4


def test_the_value_of_a_cut_observation_is_the_one_at_the_cut() -> None:
    # With limit 5 and chunks of 2, the cut comes after one step of the third chunk.
    with line(num_slots=2, limit=5) as simulator:
        policy = policy_for(simulator)
        batch = collector(simulator, policy, 8).collect()
        cut = (batch.done & (batch.reward.sum(1) == 0)).nonzero()[:, 0]
        assert len(cut) and (batch.executed[cut] == 1).all()
        first = int(cut[0])
        # Decided at 4 steps; cut at 5, one action later. Its value is that of exactly this view.
        seen = batch.observation.state[first]
        assert seen[1] == pytest.approx(0.4)
        cut_view = Observation({}, torch.tensor([[0.0, 0.5]]), ("",))
        with torch.no_grad():
            views = [_with_x(cut_view, x) for x in torch.linspace(-3, 3, 601)]
            span = [float(policy.value(view)) for view in views]
        assert min(abs(v - float(batch.next_value[first])) for v in span) < 1e-2


def _with_x(view: Observation, x: torch.Tensor) -> Observation:
    state = view.state.clone()
    state[0, 0] = x
    return Observation({}, state, view.instruction)


def test_evaluate_reproduces_collected_log_probabilities_and_values() -> None:
    with line() as simulator:
        policy = policy_for(simulator)
        batch = collector(simulator, policy, 6).collect()
    seen = policy.evaluate(batch.observation, batch.trace)
    assert torch.allclose(seen.log_prob, batch.log_prob, atol=1e-5)
    assert torch.allclose(seen.value, batch.value, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_halves_of_a_run_equal_the_whole(workers: int) -> None:
    with line(workers=workers) as simulator:
        policy = policy_for(simulator)
        whole = collector(simulator, policy, 5)
        whole.collect()
        tensors, state = whole.state_dict()
        noise = whole._generator.get_state()
        expected = whole.collect()
    with line(workers=workers) as simulator:
        again = collector(simulator, policy, 5)
        again._generator.set_state(noise)
        again.load_state_dict(tensors, state)
        assert same(again.collect(), expected)


def test_workers_and_inline_give_the_same_batch() -> None:
    with line() as inline, line(workers=3) as pool:
        policy = policy_for(inline)
        a, b = collector(inline, policy, 6).collect(), collector(pool, policy, 6).collect()
        assert same(a, b)


def test_evaluation_does_not_depend_on_slots_or_workers() -> None:
    plan = evaluation_plan("line", 23)
    found = []
    for slots, workers in ((2, 0), (8, 0), (6, 2)):
        with line(num_slots=slots, workers=workers) as simulator:
            policy = policy_for(simulator)
            results = run_episodes(simulator, policy, plan, 2, seed=0)
            assert [r.episode for r in results] == plan
            found.append([(r.success_once, r.num_steps) for r in results])
    assert found[0] == found[1] == found[2]
    assert any(success for success, _ in found[0])


def test_a_killed_worker_costs_its_episodes_and_nothing_else() -> None:
    with line(num_slots=4, workers=2) as simulator:
        assert isinstance(simulator, SimulatorPool)
        policy = policy_for(simulator)
        collecting = collector(simulator, policy, 3)
        before = collecting.collect()
        os.kill(simulator.process_ids[1], signal.SIGKILL)
        time.sleep(0.1)
        collecting.num_decisions = 6
        batch = collecting.collect()
        assert before.num_lost == 0 and batch.num_lost == 2  # slots 1 and 3
        lost = ~batch.valid.view(6, 4)
        assert lost[:, [1, 3]].any(0).all() and not lost[:, [0, 2]].any()
        assert (batch.executed.view(6, 4)[0, [1, 3]] == 0).all()
        assert collecting.collect().valid.all()
        # The lost episodes are run again: none is missing from the plan.
        keys = [r.episode.key for b in (before, batch) for r in b.results]
        assert len(keys) == len(set(keys))


def test_an_episode_that_always_fails_is_a_failure_with_an_error() -> None:
    plan = evaluation_plan("line", 6)
    bad = plan[3].initial_state
    with line(num_slots=2, workers=1, break_on_state=bad) as simulator:
        results = run_episodes(simulator, policy_for(simulator), plan, 2, seed=0)
    assert [r.error is not None for r in results] == [i == 3 for i in range(6)]
    assert f"cannot start from {bad}" in str(results[3].error)
    assert not results[3].success_once


def test_a_worker_that_hangs_is_replaced() -> None:
    plan = evaluation_plan("line", 4)
    options = {"hang_on_state": plan[3].initial_state, "step_timeout_s": 0.5}
    with line(num_slots=2, workers=1, halves=1, **options) as simulator:
        assert isinstance(simulator, SimulatorPool)
        simulator.start([0, 1], [episode(1), episode(2)])
        for _ in range(4):
            simulator.send([0, 1], torch.zeros(2, 2, 1), [plan[3], None])
            result = simulator.receive([0, 1])
            if result.lost.any():
                break
        assert result.lost.all() and "no answer within" in result.errors[0]


def test_a_pool_gives_up_when_workers_keep_dying() -> None:
    with line(num_slots=2, workers=1, halves=1, die_on_state=7) as simulator:
        simulator.start([0, 1], [episode(1), episode(7)])
        with pytest.raises(WorkersKeepDying, match="max_worker_restarts=4"):
            for _ in range(5):
                simulator.send([0, 1], torch.zeros(2, 2, 1), [episode(7), episode(7)])
                simulator.receive([0, 1])


def test_a_simulator_that_cannot_be_built_says_why_at_once() -> None:
    with (
        pytest.raises(SimulatorStartError, match="the line is broken; mend it"),
        line(workers=2, broken=True),
    ):
        pass


def test_an_episode_that_cannot_start_fails_twice_and_is_left_behind() -> None:
    """PPO's collection goes on, however often a plan comes back to a broken initial state."""
    planner = TrainingPlanner("line", 0)
    bad = planner.take(6)[5].initial_state
    with line(num_slots=4, workers=2, break_on_state=bad) as simulator:
        collecting = collector(simulator, policy_for(simulator), 6)
        batches = [collecting.collect() for _ in range(3)]
    failed = [r for b in batches for r in b.results if r.error]
    assert [r.episode.initial_state for r in failed] == [bad]
    assert f"cannot start from {bad}" in str(failed[0].error)
    assert sum(batch.num_lost for batch in batches) == 2
    assert sum(len(batch.results) for batch in batches) > 12


def test_all_that_was_simulated_is_counted() -> None:
    with line() as simulator:
        batch = collector(simulator, policy_for(simulator), 6).collect()
    assert batch.num_steps == int(batch.executed.sum()) > 0


def test_a_slot_that_fails_while_it_is_put_back_goes_on_with_another_episode() -> None:
    with line(num_slots=4) as simulator:
        policy = policy_for(simulator)
        whole = collector(simulator, policy, 2)
        whole.collect()
        tensors, state = whole.state_dict()
        assert any(state["num_chunks"])
        busy = max(range(4), key=lambda slot: state["num_chunks"][slot])
        bad = state["episodes"][busy]["initial_state"]
    with line(num_slots=4, workers=2, break_on_state=bad) as simulator:
        again = collector(simulator, policy, 4)
        again.load_state_dict(tensors, state)
        assert state["episodes"][busy]["key"] not in [r.episode.key for r in again._running]
        assert again.collect().valid.any()
