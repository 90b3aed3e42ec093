"""Groups from the middle of an episode: one state, compared alone, however they are run."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.config import GRPOConfig, REINFORCEConfig
from embodied_rl.contracts import Episode
from embodied_rl.maths.advantages import group_advantage, leave_one_out_advantage
from embodied_rl.rollout.batch import Batch, EpisodeResult, Path
from embodied_rl.rollout.branching import branch, level_of
from embodied_rl.rollout.groups import GroupCollector, Growth
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.pool import SimulatorPool
from grouped_lines import GROUP_SIZE, collect, collector, line, policy_for, same
from line_world import Line, LineConfig
from recording_line import Recorded

ONCE = Growth(branches=1)


def group_of(*returns: float, lengths: tuple[int, ...] = (), first: int = 0) -> list[EpisodeResult]:
    """Results of one group whose actions tell their episode and their number."""
    results = []
    for i, value in enumerate(returns):
        length = lengths[i] if lengths else 7
        actions = np.array([[100 * i + t] for t in range(length)], dtype=np.float32)
        prelude = tuple((float(t),) for t in range(first))
        episode = Episode(f"train/{i:08d}", "line", 9, i, group=3, prelude=prelude)
        path = Path(actions, first, 2)
        results.append(EpisodeResult(episode, value > 0, value > 0, value, length, None, path=path))
    return results


def trunks(results: list[EpisodeResult]) -> set[tuple[int, int]]:
    """Which episode was followed how far, over many seeds."""
    found = set()
    for seed in range(100):
        episodes = branch(results, 5, seed)
        assert len({e.prelude for e in episodes}) == 1
        last = int(episodes[0].prelude[-1][0])
        found.add((last // 100, len(episodes[0].prelude)))
    return found


def test_the_trunk_is_of_the_rarer_outcome_and_any_of_its_decisions_may_be_chosen() -> None:
    assert trunks(group_of(0, 1, 0, 0)) == {(1, 2), (1, 4), (1, 6)}
    assert trunks(group_of(1, 1, 0, 1)) == {(2, 2), (2, 4), (2, 6)}
    assert {trunk for trunk, _ in trunks(group_of(1, 0, 0, 1))} == {0, 3}
    # Mean 2.25: above it are the second and the fourth.
    assert {trunk for trunk, _ in trunks(group_of(0.5, 3.0, 0.5, 5.0))} == {1, 3}
    # The group's own prelude is not the middle of anything.
    assert trunks(group_of(0, 1, 0, first=3)) == {(1, 5)}
    # A success at once has no middle; one that took two decisions has one.
    assert branch(group_of(0, 1, 0, 0, lengths=(7, 2, 7, 7)), 4, 0) == []
    assert trunks(group_of(1, 0, 0, 1, 0, lengths=(2, 7, 7, 3, 7))) == {(3, 2)}


def test_members_differ_in_their_noise_alone() -> None:
    results = group_of(0, 1, 0, 0)
    episodes = branch(results, 5, 0)
    assert len({e.key for e in episodes}) == len({e.seed for e in episodes}) == 5
    assert {(e.group, e.start, e.initial_state) for e in episodes} == {(2**40 + 3, "branch", 9)}
    assert all(0 <= e.seed < 2**31 for e in episodes)
    assert branch(results[::-1], 5, 0) == episodes  # whoever ended first
    assert level_of(3) == 0 and level_of(episodes[0].group) == 1


def by_group(batch: Batch) -> dict[int, list[EpisodeResult]]:
    found = defaultdict(list)
    for result in sorted(batch.results, key=lambda r: r.episode.key):
        found[result.episode.group].append(result)
    return found


def teaches(results: list[EpisodeResult]) -> bool:
    return len({result.total_reward for result in results}) > 1


def test_a_branch_starts_where_an_episode_of_its_origin_decided() -> None:
    batch = collect(growth=ONCE)
    groups, rows = by_group(batch), batch.observation.state
    learned = set(batch.group.tolist())
    branches = [number for number in groups if level_of(number)]
    assert len(branches) >= 3 and any(number in learned for number in branches)
    for number in branches:
        members, origin = groups[number], groups[number - 2**40]
        assert len(members) == GROUP_SIZE and teaches(origin)
        assert len({(e.episode.initial_state, e.episode.prelude) for e in members}) == 1
        prelude, state = members[0].episode.prelude, members[0].episode.initial_state
        assert state == origin[0].episode.initial_state
        paths = [result.path for result in origin if result.path]
        assert any(prelude == path.prelude(len(prelude)) for path in paths)
        by_hand = Line(LineConfig(limit=5))
        by_hand.reset(members[0].episode)
        for action in prelude:
            by_hand.step(np.array(action, dtype=np.float32))
        expected = torch.from_numpy(by_hand.observe().state)
        assert any(torch.equal(row, expected) for row in rows[batch.group == number - 2**40])
        if number in learned:
            # The first decision learned from is the one at that state, and they differ from there.
            of_members = [i for i, r in enumerate(batch.results) if r.episode.group == number]
            first = [int((batch.episode == i).nonzero()[0]) for i in of_members]
            assert all(torch.equal(rows[i], expected) for i in first)
            assert len(torch.unique(batch.log_prob[first], dim=0)) == GROUP_SIZE


def test_every_group_that_teaches_branches_and_no_other() -> None:
    batch = collect(growth=ONCE)
    groups = by_group(batch)
    for number, results in groups.items():
        if level_of(number):
            continue
        rarer = [r for r in results if r.success_once] or results
        if 2 * len(rarer) > len(results):
            rarer = [r for r in results if not r.success_once] or results
        expected = teaches(results) and any(r.path and r.path.decided for r in rarer)
        assert (number + 2**40 in groups) == expected
    # Dull branches are not replaced and not learned from.
    dull = {number for number, results in groups.items() if not teaches(results)}
    assert dull.isdisjoint(batch.group.tolist())
    assert len([n for n in groups if not level_of(n) and n not in dull]) == 5


@pytest.mark.parametrize(("num_slots", "workers"), [(2, 0), (20, 0), (6, 3)])
@pytest.mark.parametrize("growth", [ONCE, Growth(1, 0.25, 2)])
def test_branches_are_the_same_under_every_sharding(
    num_slots: int, workers: int, growth: Growth
) -> None:
    assert same(collect(growth=growth), collect(num_slots, workers, growth=growth))


def test_branches_leave_the_plan_and_its_groups_alone() -> None:
    plans, planned = [], []
    for growth in (Growth(1), Growth(1, branches=2)):
        with line() as simulator:
            collecting = collector(simulator, policy_for(simulator), growth=growth)
            batch = collecting.collect()
        plans.append(collecting.state_dict()[1])
        planned.append([r for n, rs in by_group(batch).items() if not level_of(n) for r in rs])
    assert plans[0] == plans[1]
    assert planned[0] == planned[1]


def test_branches_branch_so_often_in_a_row_and_do_not_grow() -> None:
    with line(limit=14) as simulator:
        growth = Growth(1, 0.5, branches=3)
        groups = by_group(collector(simulator, policy_for(simulator), growth=growth).collect())
    levels = Counter(level_of(number) for number in groups)
    assert levels[2] >= 2 and max(levels) <= 3
    for number, results in groups.items():
        if level_of(number):
            assert len(results) == GROUP_SIZE and teaches(groups[number - 2**40])
            origins = {len(r.episode.prelude) for r in groups[number - 2**40]}
            assert all(len(r.episode.prelude) > max(origins) for r in results)
    assert len({r.episode.key for rs in groups.values() for r in rs}) == sum(
        len(results) for results in groups.values()
    )


def test_the_plan_goes_on_where_it_was_with_branches() -> None:
    with line() as simulator:
        policy = policy_for(simulator)
        whole = collector(simulator, policy, growth=ONCE)
        whole.collect()
        tensors, state = whole.state_dict()
        expected = whole.collect()
        again = collector(simulator, policy, growth=ONCE)
        again.load_state_dict(tensors, state)
        assert same(again.collect(), expected)


def test_a_worker_killed_among_branches_costs_nothing_but_time() -> None:
    class Killing:
        """Kills a worker when the first branch has begun to decide."""

        def __init__(self, policy: Any, pool: SimulatorPool) -> None:
            self.policy, self.pool, self.calls = policy, pool, 0

        def act(self, *arguments: Any) -> Any:
            self.calls += 1
            if self.calls == 40:
                os.kill(self.pool.process_ids[1], signal.SIGKILL)
                time.sleep(0.1)
            return self.policy.act(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.policy, name)

    with line(num_slots=4, workers=2) as simulator:
        assert isinstance(simulator, SimulatorPool)
        killing: Any = Killing(policy_for(simulator), simulator)
        before = simulator.process_ids
        batch = collector(simulator, killing, growth=ONCE).collect()
        assert killing.calls > 40 and simulator.process_ids != before
    assert same(batch, collect(growth=ONCE))


def test_all_simulated_steps_are_counted() -> None:
    """Also those of preludes and of groups that are not learned from."""
    world = Recorded(LineConfig(limit=5), num_slots=6, chunk=2)
    planner = TrainingPlanner("line", 0, group_size=4)
    policy = policy_for(world.simulator)
    collecting = GroupCollector(world.simulator, policy, planner, "cpu", 2, 5, 15, ONCE)
    batch = collecting.collect()
    assert batch.num_steps == world.num_steps > int(batch.executed.sum())
    for result in batch.results:
        assert result.path
        assert np.array_equal(result.path.actions, world.actions(result.episode.key))


@pytest.mark.parametrize(("num_slots", "group_size"), [(2, 7), (4, 9), (20, 3)])
def test_a_group_need_not_fit_the_slots(num_slots: int, group_size: int) -> None:
    """It may be larger than all of them, or leave some idle."""
    with line(num_slots=num_slots) as simulator:
        planner = TrainingPlanner("line", 0, group_size=group_size)
        policy = policy_for(simulator)
        groups = by_group(
            GroupCollector(simulator, policy, planner, "cpu", 2, 2, 6, ONCE).collect()
        )
    assert all(len(results) == group_size for results in groups.values())
    assert all(len({r.episode.prelude for r in results}) == 1 for results in groups.values())


def test_members_are_compared_with_each_other_alone() -> None:
    batch = collect(growth=ONCE)
    score = torch.tensor([r.total_reward for r in batch.results])
    group = torch.tensor([r.episode.group for r in batch.results])
    # Groups far apart in number are told apart.
    assert len(torch.unique(group)) == len(by_group(batch))
    for advantage in (group_advantage(score, group, "std"), leave_one_out_advantage(score, group)):
        for number in by_group(batch):
            assert float(advantage[group == number].sum()) == pytest.approx(0, abs=1e-5)


def test_algorithms_pass_the_option_on() -> None:
    for kind in (GRPOConfig, REINFORCEConfig):
        sizes = []
        for branches in (0, 1):
            options: Any = kind(
                groups_per_iteration=5, group_size=4, max_refill=1.0, branches=branches
            )
            with line() as simulator:
                algorithm = options.build(policy_for(simulator), 0)
                planner = TrainingPlanner("line", 0, group_size=4)
                batch = algorithm.collector(simulator, planner, torch.Generator(), 2).collect()
                algorithm.update(batch, 0)
                sizes.append(len(batch.results))
                values = planner.note(batch.results, 0.0)
                assert ("branched_share" in values) == bool(branches)
        assert sizes[0] == 20 < sizes[1]
    with pytest.raises(ValueError, match=r"branches=1 would mix later starts"):
        REINFORCEConfig(baseline="batch", branches=1)
