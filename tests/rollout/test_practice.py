"""What is practised on: weights from evidence, plans that continue, visits on the line."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.contracts import Episode
from embodied_rl.rollout.batch import EpisodeResult
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.collector import Collector
from embodied_rl.rollout.planner import TrainingPlanner, initial_states
from embodied_rl.run_config import PracticeConfig, RolloutConfig
from line_world import LineConfig
from policies.config import GaussianMLPConfig


def planner(group_size: int = 1, seed: int = 3, **options: Any) -> TrainingPlanner:
    practice = PracticeConfig(**{"starts": "curriculum", "pool": 4, **options})
    return TrainingPlanner("t", seed, 100, group_size, practice)


def result(episode: Episode, success: bool, error: str | None = None) -> EpisodeResult:
    return EpisodeResult(episode, success, success, float(success), 3, error)


def shown(state: int, successes: int, failures: int) -> list[EpisodeResult]:
    outcomes = [True] * successes + [False] * failures
    return [result(Episode(f"e/{i}", "t", state, i), won) for i, won in enumerate(outcomes)]


def pool_of(plan: TrainingPlanner) -> list[int]:
    assert plan._weighted is not None
    return [state for _, state in plan._weighted.pool]


def weights_of(plan: TrainingPlanner) -> list[float]:
    assert plan._weighted is not None
    return [float(weight) for weight in plan._weighted.weights]


def test_the_uniform_plan_is_what_it_always_was() -> None:
    for practice in (None, PracticeConfig()):
        plan = TrainingPlanner("t", 0, practice=practice)
        assert [e.initial_state for e in plan.take(3)] == [821328062, 743699524, 993632895]
        plan = TrainingPlanner("t", 7, 100, 2, practice)
        episodes = plan.take(8)
        assert [e.initial_state for e in episodes] == [22, 22, 38, 38, 37, 37, 11, 11]
        assert {(e.start, e.prelude) for e in episodes} == {("uniform", ())}
        assert plan.note([result(episodes[0], True)], 0.5) == {}
        assert TrainingPlanner("t", 7, 100, 2, practice).take(8) == episodes


@pytest.mark.parametrize("starts", ["curriculum", "worst_case"])
def test_the_pool_is_drawn_from_training_states_by_the_seed(starts: str) -> None:
    pool = pool_of(planner(starts=starts, pool=20))
    assert len(set(pool)) == 20
    assert set(pool) <= set(initial_states("train", 100))
    assert pool == pool_of(planner(starts=starts, pool=20))
    assert pool != pool_of(planner(starts=starts, pool=20, seed=4))
    assert set(pool_of(planner(starts=starts, pool=1000))) == set(range(50))
    episodes = planner(starts=starts, pool=20).take(400)
    assert {e.initial_state for e in episodes} == set(pool)
    assert {e.start for e in episodes} == {starts}
    many = TrainingPlanner("t", 0, None, 1, PracticeConfig(starts="curriculum"))
    assert len(set(pool_of(many))) == 256


def test_evidence_is_weighed_by_hand_and_fades() -> None:
    plan = planner(floor=0.0, decay=0.5)
    a, b, c, _ = pool_of(plan)
    assert weights_of(plan) == pytest.approx([0.25] * 4)
    values = plan.note([*shown(a, 1, 1), *shown(b, 3, 0), *shown(c, 0, 8)], 0.1)
    # 1/5, 2/15, 9/110 and, unseen, 1/6; in 330ths 66, 44, 27 and 55 of 192.
    assert weights_of(plan) == pytest.approx([66 / 192, 44 / 192, 27 / 192, 55 / 192])
    assert values["practice_success"] == 0.5  # nothing was known of them
    assert values["practice_states"] == pytest.approx(192**2 / (66**2 + 44**2 + 27**2 + 55**2))
    # Half of it is left: b's belief is Beta(1 + 1.5, 1), then one more success is seen.
    values = plan.note(shown(b, 1, 0), 0.2)
    assert values["practice_success"] == pytest.approx(4 / 5)
    # 1.5 * 1.5 / (3 * 4), 3.5 * 1 / (4.5 * 5.5), 1 * 5 / (6 * 7), 1/6
    expected = np.array([3 / 16, 14 / 99, 5 / 42, 1 / 6])
    assert weights_of(plan) == pytest.approx(expected / expected.sum())


def test_worst_case_weights_follow_failure() -> None:
    plan = planner(starts="worst_case", floor=0.0, temperature=0.3)
    a, b, _, _ = pool_of(plan)
    plan.note([*shown(a, 8, 0), *shown(b, 0, 8)], 0.0)
    found = weights_of(plan)
    # Failure rates 0.1, 0.9 and, unseen, 0.5.
    assert found[1] / found[2] == pytest.approx(math.exp(0.4 / 0.3))
    assert found[2] / found[0] == pytest.approx(math.exp(0.4 / 0.3))
    assert found[2] == found[3]


def test_states_are_drawn_as_often_as_they_weigh() -> None:
    count = 20_000
    for starts in ("curriculum", "worst_case"):
        plan = planner(starts=starts, floor=0.2)
        a, b, c, _ = pool_of(plan)
        plan.note([*shown(a, 30, 30), *shown(b, 60, 0), *shown(c, 1, 9)], 0.0)
        weights = weights_of(plan)
        drawn = Counter(e.initial_state for e in plan.take(count))
        for state, weight in zip(pool_of(plan), weights, strict=True):
            error = math.sqrt(weight * (1 - weight) / count)
            assert abs(drawn[state] / count - weight) < 4 * error
        assert max(weights) > 2 * min(weights)


def test_the_floor_is_kept_whatever_is_known() -> None:
    for starts in ("curriculum", "worst_case"):
        plan = planner(starts=starts, floor=0.2, temperature=0.01)
        a, b, _, _ = pool_of(plan)
        plan.note([*shown(a, 500, 0), *shown(b, 250, 250)], 0.0)
        assert min(weights_of(plan)) >= 0.2 / 4
        assert sum(weights_of(plan)) == pytest.approx(1)
        error = math.sqrt(0.05 * 0.95 / 4000)
        drawn = Counter(e.initial_state for e in plan.take(4000))
        assert all(drawn[state] / 4000 > 0.05 - 4 * error for state in pool_of(plan))
    plan = planner(floor=1.0)
    plan.note(shown(pool_of(plan)[0], 0, 50), 0.0)
    assert weights_of(plan) == pytest.approx([0.25] * 4)


def test_what_says_nothing_about_a_state_does_not_count() -> None:
    plan = planner()
    state = pool_of(plan)[0]
    outside = next(s for s in range(50) if s not in pool_of(plan))
    silent = [
        result(Episode("a", "t", state, 0), False, error="the worker died"),
        result(Episode("b", "t", state, 0, prelude=((1.0,),)), True),
        result(Episode("c", "t", outside, 0), False),
    ]
    assert "practice_success" not in plan.note(silent, 0.0)
    assert weights_of(plan) == pytest.approx([0.25] * 4)


def test_the_order_of_results_does_not_matter() -> None:
    plans = [planner(), planner()]
    a, b, _, _ = pool_of(plans[0])
    results = [*shown(a, 2, 5), *shown(b, 3, 1)]
    plans[0].note(results, 0.1)
    plans[1].note(results[::-1], 0.1)
    assert plans[0].take(50) == plans[1].take(50)


@pytest.mark.parametrize("starts", ["curriculum", "worst_case"])
def test_a_plan_continues_from_its_saved_evidence(starts: str) -> None:
    plan = planner(group_size=3, starts=starts, pool=10)
    pool = pool_of(plan)
    plan.note([*shown(pool[0], 3, 4), *shown(pool[1], 0, 30)], 0.25)
    plan.put_back(plan.take(7)[:2])  # Two wait, and the third group has been begun.
    other = planner(group_size=3, starts=starts, pool=10)
    other.load_state_dict(json.loads(json.dumps(plan.state_dict())))
    for _ in range(3):
        episodes = plan.take(10)
        assert other.take(10) == episodes
        results = [result(e, i % 3 == 0) for i, e in enumerate(episodes)]
        assert plan.note(results, 0.5) == other.note(results, 0.5)
    assert plan.state_dict() == other.state_dict()


def test_a_group_starts_alike_though_the_evidence_changes_within_it() -> None:
    plan = planner(group_size=8, pool=40, floor=0.0)
    for _ in range(40):
        first = plan.take(3)
        plan.note(shown(first[0].initial_state, 0, 200), 0.0)
        rest = plan.take(5)
        assert len({(e.group, e.initial_state) for e in [*first, *rest]}) == 1


def test_a_plan_saved_before_there_was_a_choice_goes_on() -> None:
    plan = TrainingPlanner("t", 7, 100)
    waiting = [{"key": "k", "task": "t", "initial_state": 5, "seed": 0, "group": 0}]
    plan.load_state_dict({"cursor": 4, "waiting": waiting})
    following = TrainingPlanner("t", 7, 100)
    following.take(4)
    assert plan.take(3) == [Episode("k", "t", 5, 0), *following.take(2)]


def test_half_solved_states_of_the_line_are_visited_more() -> None:
    """A fixed noisy policy comes home always from some states, never from others."""
    simulator = build_simulator(LineConfig(limit=2), RolloutConfig(num_slots=16, num_workers=0), 1)
    torch.manual_seed(0)
    options = GaussianMLPConfig(hidden_size=8, initial_std=0.15, normalise_state=False)
    policy = options.build(simulator.spec.contract)
    practice = PracticeConfig(starts="curriculum", pool=24, decay=1.0, floor=0.1)
    plan = TrainingPlanner("line", 0, practice=practice)
    collector = Collector(simulator, policy, plan, torch.Generator().manual_seed(0), 2, 16)
    visits, wins = Counter[int](), Counter[int]()
    for _ in range(40):
        results = collector.collect().results
        values = plan.note(results, 0.0)
        visits.update(r.episode.initial_state for r in results)
        wins.update(r.episode.initial_state for r in results if r.success_once)
    rates = {state: wins[state] / count for state, count in visits.items()}
    half = [visits[state] for state, rate in rates.items() if 0.25 <= rate <= 0.75]
    extreme = [visits[state] for state, rate in rates.items() if not 0.05 <= rate <= 0.95]
    assert len(rates) == 24 and len(half) >= 2 and len(extreme) >= 8
    assert min(half) > 2 * max(extreme)
    assert values["practice_states"] < 20
    simulator.close()


@pytest.mark.parametrize(
    "options",
    [{"pool": 1}, {"floor": 1.5}, {"decay": 0.0}, {"temperature": 0.0}, {"starts": "easy"},
     {"demonstrated_share": -0.1}, {"demonstrated_until": 0.0}],
)  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PracticeConfig(**options)


def test_tasks_that_fail_are_practised_more() -> None:
    practice = PracticeConfig(starts="worst_case", pool=5, floor=0.0, decay=1.0)
    plan = TrainingPlanner(("easy", "hard"), 0, 100, practice=practice)
    assert plan._weighted is not None
    for task, state in plan._weighted.pool:
        outcomes = [
            result(Episode(f"{task}/{i}", task, state, i), task == "easy") for i in range(8)
        ]
        plan.note(outcomes, 0.1)
    # Nine of ten against one of ten: failure rates apart by 0.8, at a temperature of 0.25.
    share = sum(e.task == "hard" for e in plan.take(4000)) / 4000
    assert share == pytest.approx(1 / (1 + np.exp(-3.2)), abs=4 * 0.0032)
