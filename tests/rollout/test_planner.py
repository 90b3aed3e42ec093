"""Plans: who starts where."""

from __future__ import annotations

import json

import pytest

from embodied_rl.contracts import InitialStates
from embodied_rl.rollout.planner import TrainingPlanner, evaluation_plan, initial_states


@pytest.mark.parametrize("count", [None, 100, 5])
def test_training_and_held_out_states_never_meet(count: int | None) -> None:
    train, quick, final = (initial_states(s, count) for s in ("train", "quick", "final"))
    assert train.stop <= quick.start and quick.stop <= final.start
    assert min(len(train), len(quick), len(final)) >= 1
    planned = {e.initial_state for e in TrainingPlanner("t", 3, count).take(500)}
    assert all(state in train for state in planned)


def test_an_evaluation_plan_visits_every_state_once() -> None:
    plan = evaluation_plan("t", 25, seed=1, states=100)
    assert {e.initial_state for e in plan} == set(range(75, 100))
    assert len({e.key for e in plan}) == 25


def test_more_episodes_than_held_out_states_is_an_error() -> None:
    with pytest.raises(ValueError, match="of 100 initial states only 25 are held out"):
        evaluation_plan("t", 26, states=100)


def test_a_benchmark_is_for_final_results_alone() -> None:
    states = InitialStates(None, benchmark=50)
    assert initial_states("final", states) == range(50)
    assert initial_states("train", states).start == 50
    assert initial_states("quick", states).start >= initial_states("train", states).stop
    asked = InitialStates(None, benchmark=50, trained_on=True)
    assert initial_states("train", asked) == initial_states("final", asked) == range(50)
    # Where there is nothing but the benchmark's states, training has none of its own.
    assert not initial_states("train", InitialStates(50, benchmark=50))


def test_groups_share_task_and_initial_state() -> None:
    episodes = TrainingPlanner("t", 0, group_size=4).take(12)
    for group in range(3):
        members = episodes[4 * group : 4 * group + 4]
        assert {e.group for e in members} == {group}
        assert len({e.initial_state for e in members}) == 1
        assert len({e.key for e in members}) == 4
    assert len({e.initial_state for e in episodes}) == 3


def test_what_is_put_back_comes_next_in_order() -> None:
    planner = TrainingPlanner("t", 0)
    first = planner.take(4)
    planner.put_back([first[1], first[3]])
    assert planner.take(3)[:2] == [first[1], first[3]]


def test_a_plan_continues_from_its_saved_state() -> None:
    planner = TrainingPlanner("t", 5)
    planner.put_back(planner.take(3)[:2])
    saved = json.loads(json.dumps(planner.state_dict()))
    other = TrainingPlanner("t", 5)
    other.load_state_dict(saved)
    assert other.take(6) == planner.take(6)


def test_seeds_give_other_plans() -> None:
    assert TrainingPlanner("t", 0).take(5) != TrainingPlanner("t", 1).take(5)
    assert TrainingPlanner("t", 0).take(5) == TrainingPlanner("t", 0).take(5)
