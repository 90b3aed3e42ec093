"""Groups of whole episodes: together under every sharding, refilled when they teach nothing."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.algorithms.config import REINFORCEConfig
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.groups import GroupCollector, Growth, NothingRan
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.pool import SimulatorPool
from embodied_rl.run_config import RolloutConfig
from grouped_lines import GROUP_SIZE, collect, collector, line, policy_for, same
from line_world import LineConfig


def members(batch: Batch) -> dict[int, list[bool]]:
    """Successes of each group's episodes, in the order of their keys."""
    found: dict[int, list[bool]] = {}
    for result in sorted(batch.results, key=lambda r: r.episode.key):
        found.setdefault(result.episode.group, []).append(result.success_once)
    return found


@pytest.mark.parametrize(("num_slots", "workers"), [(2, 0), (6, 0), (20, 0), (6, 3)])
def test_groups_are_the_same_under_every_sharding(num_slots: int, workers: int) -> None:
    assert same(collect(), collect(num_slots, workers))


def test_a_group_shares_its_start_and_nothing_else() -> None:
    batch = collect()
    for number in sorted(set(batch.group.tolist())):
        rows = batch.group == number
        episodes = [batch.results[i].episode for i in sorted(set(batch.episode[rows].tolist()))]
        assert len(episodes) == GROUP_SIZE
        assert len({e.initial_state for e in episodes}) == 1
        assert len({e.seed for e in episodes}) == GROUP_SIZE
        first = [int((batch.episode == i).nonzero()[0]) for i in set(batch.episode[rows].tolist())]
        assert len(torch.unique(batch.observation.state[first], dim=0)) == 1
        assert len(torch.unique(batch.log_prob[first], dim=0)) == GROUP_SIZE


def test_rows_are_whole_episodes_in_order() -> None:
    batch = collect()
    assert batch.valid.all()
    ends = batch.done.nonzero()[:, 0].tolist()
    assert [batch.episode[i].item() for i in ends] == list(range(len(ends)))
    for i in range(len(ends)):
        rows = (batch.episode == i).nonzero()[:, 0]
        assert torch.equal(rows, torch.arange(int(rows[0]), int(rows[-1]) + 1))
        assert int(batch.executed[rows].sum()) == batch.results[i].num_steps
        assert float(batch.reward[rows].sum()) == batch.results[i].total_reward
        # Within an episode the next value is that of the next decision.
        assert torch.equal(batch.next_value[rows[:-1]], batch.value[rows[1:]])
        won = batch.results[i].success_once
        assert (batch.next_value[rows[-1]] == 0) == won  # only a time limit is bootstrapped
        assert batch.bootstraps[rows[:-1]].all() and batch.bootstraps[rows[-1]] == (not won)


def test_groups_that_teach_nothing_are_replaced() -> None:
    batch = collect()
    outcomes: dict[int, list[float]] = {}
    for result in batch.results:
        outcomes.setdefault(result.episode.group, []).append(result.total_reward)
    taught = set(batch.group.tolist())
    assert len(taught) == 5
    assert all(len(set(outcomes[group])) > 1 for group in taught)
    dull = set(outcomes) - taught
    assert dull and all(len(set(outcomes[group])) == 1 for group in dull)
    # Their episodes still count in the success rate.
    assert len(batch.results) == GROUP_SIZE * len(outcomes)


def test_without_refill_the_batch_shrinks() -> None:
    batch = collect(max_groups=5)
    assert 0 < len(set(batch.group.tolist())) < 5
    assert len(batch.results) == 5 * GROUP_SIZE


def test_a_batch_that_teaches_nothing_has_no_valid_rows() -> None:
    with line() as simulator:
        policy: Any = policy_for(simulator)
        policy.head.low.zero_(), policy.head.high.zero_()  # It cannot move.
        batch = collector(simulator, policy, num_groups=1, max_groups=1).collect()
    assert len(batch.valid) and not batch.valid.any()
    assert len(batch.results) == GROUP_SIZE


def test_evaluate_reproduces_the_log_probabilities() -> None:
    with line() as simulator:
        policy = policy_for(simulator)
        batch = collector(simulator, policy).collect()
    seen = policy.evaluate(batch.observation, batch.trace)
    assert torch.allclose(seen.log_prob, batch.log_prob, atol=1e-5)


def test_the_plan_goes_on_where_it_was() -> None:
    with line() as simulator:
        policy = policy_for(simulator)
        whole = collector(simulator, policy)
        whole.collect()
        tensors, state = whole.state_dict()
        expected = whole.collect()
        again = collector(simulator, policy)
        again.load_state_dict(tensors, state)
        assert same(again.collect(), expected)


def test_a_killed_worker_costs_nothing_but_time() -> None:
    with line(num_slots=4, workers=2) as simulator:
        assert isinstance(simulator, SimulatorPool)
        policy = policy_for(simulator)
        collecting = collector(simulator, policy)
        os.kill(simulator.process_ids[1], signal.SIGKILL)
        time.sleep(0.1)
        batch = collecting.collect()
    counts = Counter(batch.results[i].episode.group for i in set(batch.episode.tolist()))
    assert set(counts.values()) == {GROUP_SIZE}
    assert same(batch, collect())


@pytest.mark.parametrize("hard_success", [0.0, 0.25])
def test_hard_groups_grow_until_they_are_not_or_may_not(hard_success: float) -> None:
    before = members(collect(max_groups=5))
    batch = collect(max_groups=5, growth=Growth(3, hard_success))
    after = members(batch)
    assert before.keys() == after.keys()
    grown = 0
    for number, successes in after.items():
        # What the group began with is what it would have been.
        assert successes[:GROUP_SIZE] == before[number]
        parts = range(GROUP_SIZE, len(successes) + 1, GROUP_SIZE)
        hard = [sum(successes[:n]) <= hard_success * n for n in parts]
        assert len(successes) == parts[-1] and len(hard) <= 1 + 3
        assert all(hard[:-1]) and (not hard[-1] or len(hard) == 1 + 3)
        grown += len(hard) - 1
    assert grown
    learned = [n for n in after if len(after[n]) > GROUP_SIZE and n in batch.group.tolist()]
    assert learned  # A group that had failed altogether now teaches.


def test_a_grown_group_shares_its_start_and_nothing_else() -> None:
    batch = collect(max_groups=5, growth=Growth(2))
    assert len({r.episode.key for r in batch.results}) == len(batch.results)
    for number, successes in members(batch).items():
        episodes = [r.episode for r in batch.results if r.episode.group == number]
        assert len({e.initial_state for e in episodes}) == 1
        assert len({e.seed for e in episodes}) == len(episodes) == len(successes)
        assert all(0 <= e.seed < 2**31 for e in episodes)


@pytest.mark.parametrize(("num_slots", "workers"), [(2, 0), (20, 0), (6, 3)])
def test_grown_groups_are_the_same_under_every_sharding(num_slots: int, workers: int) -> None:
    growth = Growth(2, 0.25)
    assert same(collect(growth=growth), collect(num_slots, workers, growth=growth))


def test_growing_leaves_the_plan_alone() -> None:
    plans = []
    for growth in (Growth(), Growth(3)):
        with line() as simulator:
            policy = policy_for(simulator)
            collecting = collector(simulator, policy, max_groups=5, growth=growth)
            collecting.collect()
            plans.append(collecting.state_dict()[1])
    assert plans[0] == plans[1]


def test_algorithms_pass_the_options_of_growth_on() -> None:
    from embodied_rl.algorithms.config import GRPOConfig, REINFORCEConfig

    sizes = []
    for extra in (0, 2):
        for kind in (GRPOConfig, REINFORCEConfig):
            options: Any = kind(
                groups_per_iteration=5, group_size=4, max_refill=1.0, extra_groups=extra,
                hard_success=0.25,
            )  # fmt: skip
            with line() as simulator:
                policy = policy_for(simulator)
                algorithm = options.build(policy, 0)
                planner = TrainingPlanner("line", 0, group_size=4)
                collecting = algorithm.collector(simulator, planner, torch.Generator(), 2)
                batch = collecting.collect()
                sizes.append(len(batch.results))
                algorithm.update(batch, 0)
    assert sizes[0] == sizes[1] == 20 and sizes[2] == sizes[3] > 20
    with pytest.raises(ValueError, match=r"extra_groups=1 would shift the mean"):
        REINFORCEConfig(baseline="batch", extra_groups=1)
    with pytest.raises(ValueError, match="hard_success"):
        GRPOConfig(hard_success=1.0)


@given(pairs=st.integers(1, 7), halves=st.integers(1, 2), size=st.integers(2, 7))
@settings(max_examples=10, deadline=None)
def test_any_group_size_runs_on_any_number_of_slots(pairs: int, halves: int, size: int) -> None:
    def batch(num_slots: int) -> Batch:
        with line(num_slots) as simulator:
            planner = TrainingPlanner("line", 0, group_size=size)
            policy = policy_for(simulator)
            return GroupCollector(simulator, policy, planner, "cpu", halves, 2, 4).collect()

    found = batch(2 * pairs)
    assert same(found, batch(2 * size))
    counts = Counter(result.episode.group for result in found.results)
    assert set(counts.values()) == {size}


def test_all_that_was_simulated_is_counted() -> None:
    batch = collect()
    assert batch.num_steps == sum(result.num_steps for result in batch.results)
    assert batch.num_steps > int(batch.executed.sum())


def test_against_the_mean_of_the_batch_every_group_teaches() -> None:
    with line() as simulator:
        policy = policy_for(simulator)
        options = REINFORCEConfig(baseline="batch", groups_per_iteration=5, group_size=GROUP_SIZE)
        algorithm = options.build(policy, 0)
        planner = TrainingPlanner("line", 0, group_size=GROUP_SIZE)
        batch = algorithm.collector(simulator, planner, torch.Generator(), 2).collect()
    assert any(len(set(wins)) == 1 for wins in members(batch).values())
    assert set(batch.group.tolist()) == {result.episode.group for result in batch.results}
    # Zero mean over episodes: nothing that moves the mean was left out.
    firsts = [batch.episode.tolist().index(i) for i in range(len(batch.results))]
    assert abs(float(algorithm.advantages(batch)[firsts].mean())) < 1e-6


def test_a_collection_in_which_nothing_runs_says_why() -> None:
    planner = TrainingPlanner("line", 0, group_size=GROUP_SIZE)
    bad = planner.take(1)[0].initial_state
    planner = TrainingPlanner("line", 0, group_size=GROUP_SIZE)
    rollout = RolloutConfig(num_slots=4, num_workers=2)
    simulator = build_simulator(LineConfig(break_on_state=bad), rollout, chunk=2)
    try:
        policy = policy_for(simulator)
        collecting = GroupCollector(simulator, policy, planner, "cpu", 2, 1, 1)
        with pytest.raises(NothingRan, match=f"cannot start from {bad}"):
            collecting.collect()
        assert collecting.collect().results[0].error is None
    finally:
        simulator.close()
