"""Starts that earlier episodes passed through: the very actions, newest successes, resumable."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path as Folder
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from embodied_rl.contracts import Episode, Policy, Simulator
from embodied_rl.rollout.batch import EpisodeResult, Path
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.collector import Collector
from embodied_rl.rollout.episodes import run_episodes
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.practice import Demonstration
from embodied_rl.rollout.running import Running
from embodied_rl.run_config import PracticeConfig, RolloutConfig, RunConfig
from embodied_rl.training.loop import train
from embodied_rl.training.metrics import read
from line_world import Line, LineConfig
from outside import install
from policies.config import GaussianMLPConfig
from recording_line import Recorded
from simulators.config import ManiSkillConfig

LINE = LineConfig(limit=7)


def planner(group_size: int = 1, **options: Any) -> TrainingPlanner:
    practice = PracticeConfig(**{"visited_share": 0.5, **options})
    return TrainingPlanner("line", 0, 1000, group_size, practice)


def went(
    number: int, length: int = 6, first: int = 0, chunk: int = 2, success: bool = True
) -> EpisodeResult:
    """An episode whose actions tell its number and their own."""
    actions = np.array([[100 * number + i] for i in range(length)], dtype=np.float32)
    episode = Episode(f"train/{number:08d}", "line", number, number)
    path = Path(actions, first, chunk)
    return EpisodeResult(episode, success, success, float(success), length - first, None, path=path)


def policy_for(simulator: Simulator, chunk: int = 2) -> Policy:
    torch.manual_seed(0)
    config = GaussianMLPConfig(hidden_size=8, chunk=chunk, initial_std=0.3, normalise_state=False)
    return config.build(simulator.spec.contract)


def drawn(plan: TrainingPlanner, count: int) -> list[Episode]:
    return [episode for episode in plan.take(count) if episode.prelude]


def test_where_a_path_decided_is_counted_by_hand() -> None:
    for first, chunk, length, decided, starts in [
        (0, 2, 5, [2, 4], [2, 4]),
        (0, 2, 4, [2], [2]),  # what follows the last action is the end
        (3, 2, 8, [5, 7], [1, 3, 5, 7]),
        (4, 2, 9, [6, 8], [2, 4, 6, 8]),
        (2, 4, 6, [], [2]),
        (0, 8, 5, [], []),
    ]:
        path = Path(np.zeros((length, 1), dtype=np.float32), first, chunk)
        assert (list(path.decided), list(path.starts)) == (decided, starts)


def test_paths_are_what_the_environment_executed_from_its_reset() -> None:
    """Whatever their own preludes were, and also where those were cut."""
    mixed = np.array([[0.3], [-0.2], [0.1], [0.4], [-0.1]], dtype=np.float32)
    too_long = np.full((12, 1), 0.9, dtype=np.float32)
    demonstrations = [Demonstration("line", 11, mixed), Demonstration("line", 12, too_long)]
    practice = PracticeConfig(demonstrated_share=0.5, visited_share=0.5)
    world = Recorded(LINE, num_slots=4, chunk=2)
    plan = TrainingPlanner("line", 0, 1000, 1, practice, demonstrations)
    policy = policy_for(world.simulator)
    collector = Collector(world.simulator, policy, plan, torch.Generator().manual_seed(0), 2, 10)
    seen = Counter[str]()
    for _ in range(5):
        results = collector.collect().results
        plan.note(results, 0.0)
        for result in results:
            path, episode = result.path, result.episode
            assert path and np.array_equal(path.actions, world.actions(episode.key))
            assert len(path.actions) == result.simulated == path.first + result.num_steps
            assert path.prelude(path.first) == episode.prelude[: path.first]
            seen[episode.start] += 1
            seen["cut"] += path.first < len(episode.prelude)
    assert min(seen[kind] for kind in ("uniform", "demonstration", "visited", "cut")) >= 3
    # Whole episodes, as evaluated, as well.
    for result in run_episodes(world.simulator, policy, plan.take(12), 2, 0):
        assert result.path
        assert np.array_equal(result.path.actions, world.actions(result.episode.key))


def test_a_path_ends_with_the_decision_that_first_succeeded() -> None:
    class Lingering(Line):
        def step(self, action: Any) -> Any:
            outcome = super().step(action)
            return type(outcome)(outcome.reward, False, outcome.truncated, outcome.success)

    from embodied_rl.rollout.inline import InlineSimulator

    simulator = InlineSimulator([Lingering(LINE), Lingering(LINE)], 2)
    plan = TrainingPlanner("line", 0, 1000)
    results = run_episodes(simulator, policy_for(simulator), plan.take(30), 1, 0, mode="explore")
    won = [r for r in results if r.success_once]
    assert 3 < len(won) < 30
    for result in results:
        assert result.path and result.num_steps == 7
        line = Line(LINE)
        line.reset(result.episode)
        successes = [line.step(action).success for action in result.path.actions]
        if result.success_once:
            assert successes.index(True) >= len(successes) - 2
            assert not len(successes) % 2 or len(successes) == 7
        else:
            assert len(successes) == 7 and not any(successes)


def test_the_pool_holds_the_newest_successes_that_decided_twice() -> None:
    plan = planner(visited_share=1.0, visited_pool=3)
    assert not drawn(plan, 50)  # Nothing was visited yet.
    results = [went(i) for i in (1, 2, 3)] + [went(4, success=False), went(5, length=2)]
    assert plan.note(results, 0.0)["visited_pool"] == 3
    assert {e.initial_state for e in drawn(plan, 200)} == {1, 2, 3}
    plan.note([went(7, length=5, first=1), went(6)][::-1], 0.0)
    found = Counter((e.initial_state, len(e.prelude)) for e in drawn(plan, 3000))
    assert set(found) == {(3, 2), (3, 4), (6, 2), (6, 4), (7, 1), (7, 3)}
    for count in found.values():  # Of each path alike, and alike on it.
        assert abs(count / 3000 - 1 / 6) < 4 * math.sqrt(5 / 36 / 3000)
    for episode in plan.take(100):
        assert episode.start == "visited"
        expected = tuple((100.0 * episode.initial_state + i,) for i in range(len(episode.prelude)))
        assert episode.prelude == expected


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 0.6), (0.2, 0.3), (0.4, 0.0), (1, 0.0)])
def test_the_share_falls_linearly_to_zero(progress: float, expected: float) -> None:
    plan = planner(visited_share=0.6, visited_until=0.4)
    values = plan.note([went(1)], progress)
    assert values["visited_share"] == 0.0 and values["success_rate_from_initial_state"] == 1.0
    error = math.sqrt(expected * (1 - expected) / 4000)
    assert abs(len(drawn(plan, 4000)) / 4000 - expected) <= 4 * error


def test_the_rest_of_the_plan_is_what_it_was() -> None:
    plan, plain = planner(), TrainingPlanner("line", 0, 1000)
    plan.note([went(1)], 0.1)
    pairs = list(zip(plan.take(200), plain.take(200), strict=True))
    assert all(a == b for a, b in pairs if not a.prelude) and any(a.prelude for a, _ in pairs)


def test_the_order_of_results_does_not_matter() -> None:
    plans = [planner(visited_pool=2), planner(visited_pool=2)]
    results = [went(i) for i in range(5)]
    plans[0].note(results, 0.1)
    plans[1].note(results[::-1], 0.1)
    assert plans[0].take(60) == plans[1].take(60)


def test_a_plan_continues_from_its_saved_pool() -> None:
    plan = planner(group_size=3, visited_pool=4)
    plan.note([went(i, length=5 + i) for i in range(6)], 0.1)
    plan.put_back(plan.take(20)[5:])
    other = planner(group_size=3, visited_pool=4)
    other.load_state_dict(json.loads(json.dumps(plan.state_dict())))
    for number in (10, 20):
        episodes = plan.take(40)
        assert other.take(40) == episodes and any(e.prelude for e in episodes)
        assert len({(e.group, e.prelude) for e in episodes}) == len({e.group for e in episodes})
        for both in (plan, other):
            both.note([went(number)], 0.2)
    assert plan.state_dict() == other.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_visited_state_is_reached_again(workers: int) -> None:
    rollout = RolloutConfig(num_slots=4, num_workers=workers)
    simulator = build_simulator(LINE, rollout, chunk=2)
    policy, plan = policy_for(simulator), planner(visited_share=0.8)
    collector = Collector(simulator, policy, plan, torch.Generator().manual_seed(0), 2, 8)
    states: set[tuple[int, tuple[float, ...]]] = set()
    visited = 0
    for _ in range(4):
        batch = collector.collect()
        plan.note(batch.results, 0.0)
        for i, (result, rows) in enumerate(_rows(batch)):
            if result.episode.start == "visited":
                # The first view is one that an earlier decision from there was made at.
                visited += 1
                assert (result.episode.initial_state, rows[0]) in states, i
            states |= {(result.episode.initial_state, row) for row in rows}
    assert visited > 5
    simulator.close()


def _rows(batch: Any) -> list[tuple[EpisodeResult, list[tuple[float, ...]]]]:
    """Episodes that began and ended in this batch, in the order in which they ended, and what they
    saw when they decided."""
    slots = len(batch.done) // batch.num_decisions
    found = []
    for i, result in enumerate(batch.results):
        rows = (batch.episode == i).nonzero()[:, 0]
        begun = len(rows) * 2 >= result.num_steps  # and not in an earlier batch
        if begun and (rows.diff() == slots).all():
            states = batch.observation.state[rows].tolist()
            found.append((result, [tuple(state) for state in states]))
    return found


def test_all_simulated_steps_are_counted() -> None:
    """A prelude's with the end of its episode."""
    world = Recorded(LINE, num_slots=4, chunk=2)
    policy, plan = policy_for(world.simulator), planner(visited_share=0.8)
    collector = Collector(world.simulator, policy, plan, torch.Generator().manual_seed(0), 2, 9)
    counted = executed = 0
    for _ in range(4):
        batch = collector.collect()
        plan.note(batch.results, 0.0)
        counted += batch.num_steps
        executed += int(batch.executed.sum())
    in_flight = sum(len(running.episode.prelude) for running in collector._running)
    assert counted + in_flight == world.num_steps and counted > executed


@pytest.mark.parametrize("workers", [0, 2])
def test_collecting_continues_exactly(workers: int) -> None:
    def collector(noise: torch.Generator) -> tuple[Collector, TrainingPlanner]:
        plan = planner(visited_share=0.7, visited_pool=5)
        return Collector(simulator, policy, plan, noise, 2, 5), plan

    simulator = build_simulator(LINE, RolloutConfig(num_slots=4, num_workers=workers), chunk=2)
    policy, noise = policy_for(simulator), torch.Generator().manual_seed(0)
    whole, plan = collector(noise)
    for i in range(4):
        plan.note(whole.collect().results, i / 20)
    tensors, state = whole.state_dict()
    saved = json.loads(json.dumps(state))
    assert any(e["start"] == "visited" for e in saved["episodes"])
    again, other = collector(torch.Generator())
    again._generator.set_state(noise.get_state())

    def go_on(collecting: Collector, planning: TrainingPlanner) -> list[Any]:
        found = []
        for _ in range(3):
            batch = collecting.collect()
            found.append((batch, planning.note(batch.results, 0.2)))
        return found

    expected = go_on(whole, plan)
    again.load_state_dict(tensors, saved)
    for (a, values), (b, others) in zip(go_on(again, other), expected, strict=True):
        assert a.results == b.results and values == others
        assert torch.equal(a.observation.state, b.observation.state)
        assert torch.equal(a.log_prob, b.log_prob) and a.num_steps == b.num_steps
    simulator.close()


def run(folder: Folder, **options: Any) -> RunConfig:
    given: dict[str, Any] = {
        "runs_dir": folder,
        "simulator": LINE,
        "policy": GaussianMLPConfig(hidden_size=8, initial_std=0.3, chunk=2),
        "algorithm": {"type": "ppo", "decisions_per_iteration": 8, "critic_warmup_iterations": 0},
        "practice": {"visited_share": 0.8, "visited_until": 1.0},
        "rollout": {"num_slots": 8, "num_workers": 0},
        "evaluation": {"episodes": 8},
        "checkpoint": {"every": 1, "keep": 20},
        "logging": {"video_episodes": 0},
        "iterations": 6,
    }
    return RunConfig.model_validate(given | options)


@pytest.mark.parametrize("branches", [None, 1])
def test_a_run_that_was_stopped_equals_one_that_was_not(
    branches: int | None, tmp_path: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run that is resumed reads its options again, by the names of their parts.
    install(tmp_path / "outside", {"simulator": {"line": "line_world:LineConfig"}})
    monkeypatch.syspath_prepend(str(tmp_path / "outside"))
    grpo = {"type": "grpo", "groups_per_iteration": 6, "group_size": 4, "branches": branches}
    config = run(tmp_path, algorithm=grpo) if branches else run(tmp_path)
    first = train(config).summary
    weights, rows = _weights(config), _curves(config)
    assert any(row["visited_share"] > 0 for row in rows) and rows[-1]["visited_pool"] > 0
    for checkpoint in sorted((config.directory / "checkpoints").iterdir())[3:]:
        shutil.rmtree(checkpoint)
    shutil.rmtree(config.directory / "policies" / "final")
    shutil.rmtree(config.directory / "evaluation" / "final")
    (config.directory / "result.json").unlink()
    second = train(config, resume=True).summary
    assert second["resumed"] and second["env_steps"] == first["env_steps"]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in _weights(config).items())
    assert _curves(config) == rows


def test_the_share_falls_with_the_budget_where_that_ends_the_run(tmp_path: Folder) -> None:
    practice = {"visited_share": 1.0, "visited_until": 0.5}
    train(run(tmp_path, iterations=10_000, max_env_steps=1200, practice=practice))
    shares = [row["visited_share"] for row in _curves(run(tmp_path))]
    assert max(shares) > 0.3 and shares[-1] == 0.0


def _weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(config.directory / "policies" / "final" / "policy.safetensors")


def _curves(config: RunConfig) -> list[dict[str, float]]:
    return [
        {n: v for n, v in row["values"].items() if not n.startswith(("percent", "steps_per"))}
        for row in read(config.directory)
        if row["phase"] == "rl"
    ]


def test_maniskill_nearly_comes_to_a_visited_state_again() -> None:
    """In another environment, too, and after other episodes in it."""
    config = ManiSkillConfig(task="PickCube-v1")
    simulator = build_simulator(config, RolloutConfig(num_slots=2, num_workers=0), chunk=4)
    begun = Episode("e", "PickCube-v1", 5, 5)
    seen = [simulator.start([0], [begun]).state[0]]
    actions = torch.rand(7, 1, 4, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    running = Running(begun)
    for chunk in actions:
        simulator.send([0], chunk, [None])
        result = simulator.receive([0])
        running.actions.append(chunk[0])
        running.add(result, 0)
        seen.append(result.observation.state[0])
    path = running.result().path
    assert path and list(path.starts) == [4, 8, 12, 16, 20, 24]
    for length in path.starts:
        again = replace(begun, seed=99, prelude=path.prelude(length))
        state = simulator.start([1], [again]).state[0]
        assert float((state - seen[length // 4]).abs().max()) < 0.01
        assert float((state - seen[0]).abs().max()) > 0.05
    simulator.close()


def test_options_that_cannot_go_together_are_refused(tmp_path: Folder) -> None:
    for options in ({"visited_share": 1.5}, {"visited_until": 0.0}, {"visited_pool": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            PracticeConfig.model_validate(options)
    given: dict[str, Any] = {
        "simulator": LINE.model_copy(update={"batched": True}),
        "policy": GaussianMLPConfig(),
        "algorithm": {"type": "ppo"},
    }
    with pytest.raises(ValueError, match=r"practice\.visited_share=0\.5 plays recorded actions"):
        RunConfig.model_validate({**given, "practice": {"visited_share": 0.5}})
    with pytest.raises(ValueError, match=r"algorithm\.branches=1 plays recorded actions"):
        RunConfig.model_validate({**given, "algorithm": {"type": "grpo", "branches": 1}})
