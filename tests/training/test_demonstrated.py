"""Episodes that begin within demonstrations: exact, in all simulators alike, fewer and fewer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.config import Config
from embodied_rl.contracts import Episode
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.collector import Collector
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.practice import Demonstration
from embodied_rl.run_config import DemonstrationsConfig, PracticeConfig, RolloutConfig, RunConfig
from embodied_rl.training.demonstrated import replayable
from embodied_rl.training.demonstrations import load
from embodied_rl.training.lerobot_folder import OUR_FILE, BadDemonstrations
from embodied_rl.training.loop import train
from embodied_rl.training.metrics import read
from embodied_rl.training.recording import record
from line_world import Line, LineConfig, episode
from policies.config import GaussianMLPConfig
from simulators.config import ManiSkillConfig

LINE = LineConfig(limit=8)
DEMONSTRATIONS = [
    Demonstration("line", 11, np.array([[0.1], [0.2], [-0.3]], dtype=np.float32)),
    Demonstration("line", 12, np.array([[0.01], [0.02]], dtype=np.float32)),
    Demonstration("line", 13, np.array([[0.5]], dtype=np.float32)),
]


def planner(share: float = 0.5, until: float = 0.5, group_size: int = 1) -> TrainingPlanner:
    practice = PracticeConfig(demonstrated_share=share, demonstrated_until=until)
    return TrainingPlanner("line", 0, 1000, group_size, practice, DEMONSTRATIONS)


def contract_of(config: LineConfig) -> Any:
    return Line(config).spec.contract


def first(episodes: int) -> DemonstrationsConfig:
    return DemonstrationsConfig(episodes=episodes)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "line"
    record(LINE, path, episodes=6, action_noise=0.0, seed=3)
    return path


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 0.6), (0.2, 0.3), (0.4, 0.0), (1, 0.0)])
def test_the_share_falls_linearly_to_zero(progress: float, expected: float) -> None:
    plan = planner(share=0.6, until=0.4)
    plan.note([], progress)
    within = [e for e in plan.take(4000) if e.prelude]
    error = math.sqrt(expected * (1 - expected) / 4000)
    assert abs(len(within) / 4000 - expected) <= 4 * error
    assert all(e.start == "demonstration" for e in within)


def test_preludes_are_the_beginnings_of_demonstrations() -> None:
    episodes = planner().take(400)
    seen = {(e.initial_state, e.prelude) for e in episodes if e.prelude}
    a, b, c = (float(np.float32(x)) for x in (0.1, 0.2, 0.01))
    # Never the whole: its last action would end the episode.
    assert seen == {(11, ((a,),)), (11, ((a,), (b,))), (12, ((c,),))}
    assert len({e.seed for e in episodes}) == 400
    others = [e for e in episodes if not e.prelude]
    plain = TrainingPlanner("line", 0, 1000).take(400)
    assert all(e == plain[e.seed] for e in others)


def test_a_group_shares_its_prelude() -> None:
    episodes = planner(group_size=4).take(80)
    for i in range(0, 80, 4):
        assert len({(e.initial_state, e.prelude) for e in episodes[i : i + 4]}) == 1
    assert 0 < sum(bool(e.prelude) for e in episodes) < 80


def test_the_plan_continues_with_its_preludes() -> None:
    plan = planner(group_size=3)
    plan.note([], 0.1)
    plan.put_back(plan.take(20)[6:])
    other = planner(group_size=3)
    other.load_state_dict(json.loads(json.dumps(plan.state_dict())))
    episodes = plan.take(40)
    assert other.take(40) == episodes and any(e.prelude for e in episodes[:14])


def test_what_is_reported_tells_the_two_kinds_apart() -> None:
    from embodied_rl.rollout.batch import EpisodeResult

    def went(prelude: Any, success: bool) -> EpisodeResult:
        begun = episode(1, start="demonstration" if prelude else "uniform", prelude=prelude)
        return EpisodeResult(begun, success, success, 0.0, 1)

    inside, outside = ((0.1,),), ()
    results = [went(inside, True), went(outside, True), went(outside, False), went(outside, False)]
    values = planner().note(results, 0.1)
    assert values == {
        "demonstrated_share": 0.25,
        "success_rate_within_demonstration": 1.0,
        "success_rate_from_initial_state": pytest.approx(1 / 3),
    }
    assert planner().note([], 0.1) == {}


def test_demonstrations_of_one_step_cannot_be_begun_in() -> None:
    practice = PracticeConfig(demonstrated_share=0.5)
    with pytest.raises(ValueError, match=r"at least 2 steps, but none of the 1 given"):
        TrainingPlanner("line", 0, practice=practice, demonstrations=DEMONSTRATIONS[2:])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_episode_begins_where_its_prelude_leads(workers: int) -> None:
    rollout = RolloutConfig(num_slots=2, num_workers=workers)
    simulator = build_simulator(LINE, rollout, chunk=1)
    by_hand = Line(LINE)
    by_hand.reset(episode(11))
    for action in DEMONSTRATIONS[0].actions[:2]:
        by_hand.step(action)
    expected = by_hand.observe().state
    prelude = tuple(tuple(a) for a in DEMONSTRATIONS[0].actions[:2].tolist())
    begun = simulator.start([0, 1], [episode(11, prelude=prelude), episode(11)])
    assert np.array_equal(begun.state[0].numpy(), expected)
    assert not np.array_equal(begun.state[1].numpy(), expected)
    # The next offered episode as well.
    for _ in range(8):
        simulator.send([0, 1], torch.full((2, 1, 1), 1.0), [episode(11, prelude=prelude), None])
        result = simulator.receive([0, 1])
        if result.refilled[0]:
            break
    assert result.refilled[0] and np.array_equal(result.observation.state[0].numpy(), expected)
    simulator.close()


def test_a_prelude_that_would_end_its_episode_is_cut_before_its_end() -> None:
    simulator = build_simulator(LINE, RolloutConfig(num_slots=2, num_workers=0), chunk=1)
    begun = Line(LINE)
    begun.reset(episode(11))
    too_long = tuple((1.0,) for _ in range(9))
    home = ((0.25,), (-begun.x - 0.25,), (0.25,))
    seen = simulator.start([0, 1], [episode(11, prelude=p) for p in (too_long, home)]).state
    # The limit is 8 steps, and home is reached with the second one.
    assert seen[0].tolist() == pytest.approx([begun.x + 7, 0.7])
    assert seen[1].tolist() == pytest.approx([begun.x + 0.25, 0.1])


@pytest.mark.parametrize("workers", [0, 2])
def test_collecting_continues_exactly_within_demonstrations(workers: int) -> None:
    practice = PracticeConfig(starts="curriculum", pool=5, demonstrated_share=0.5)

    def collector(noise: torch.Generator) -> tuple[Collector, TrainingPlanner]:
        plan = TrainingPlanner("line", 0, 1000, 1, practice, DEMONSTRATIONS)
        return Collector(simulator, policy, plan, noise, 2, 5), plan

    rollout = RolloutConfig(num_slots=4, num_workers=workers)
    simulator = build_simulator(LINE, rollout, chunk=2)
    torch.manual_seed(0)
    policy: Any = GaussianMLPConfig(hidden_size=8, chunk=2, normalise_state=False).build(
        simulator.spec.contract
    )
    noise = torch.Generator().manual_seed(0)
    whole, plan = collector(noise)
    for i in range(3):
        plan.note(whole.collect().results, i / 20)
    tensors, state = whole.state_dict()
    saved = json.loads(json.dumps(state))
    assert any(e["prelude"] for e in saved["episodes"])
    again, other = collector(torch.Generator())
    again._generator.set_state(noise.get_state())
    expected = [whole.collect()]
    values = [plan.note(expected[0].results, 0.2)]
    expected.append(whole.collect())
    again.load_state_dict(tensors, saved)
    found = [again.collect()]
    assert [other.note(found[0].results, 0.2)] == values
    found.append(again.collect())
    for a, b in zip(found, expected, strict=True):
        assert a.results == b.results
        assert torch.equal(a.observation.state, b.observation.state)
        assert torch.equal(a.log_prob, b.log_prob)
    assert any(r.episode.prelude for b in expected for r in b.results)
    simulator.close()


def test_recorded_demonstrations_lead_through_their_own_states(recorded: Path) -> None:
    assert _furthest_from_recorded(LINE, recorded) == 0.0


def test_maniskill_nearly_repeats_a_demonstration(tmp_path: Path) -> None:
    """Not bit for bit: an environment that was used before keeps what its solver learned."""
    config = ManiSkillConfig(task="PickCube-v1")
    record(config, tmp_path / "data", episodes=2, action_noise=0.0, seed=1)
    assert _furthest_from_recorded(config, tmp_path / "data") < 0.05


def _furthest_from_recorded(config: Any, path: Path) -> float:
    """Largest difference between the first views after preludes and the recorded states."""
    furthest = 0.0
    simulator = build_simulator(config, RolloutConfig(num_slots=2, num_workers=0), chunk=1)
    contract = simulator.spec.contract
    data = load(path, contract)
    demonstrations = replayable(
        path, config.model_dump(mode="json"), contract, first(data.num_episodes)
    )
    for number, demonstration in enumerate(demonstrations):
        frames = data.observation.state[data.episode == number]
        assert len(frames) == len(demonstration.actions)
        for length in range(1, len(frames), 10 if len(frames) > 20 else 1):
            prelude = tuple(tuple(a) for a in demonstration.actions[:length].tolist())
            start = Episode("e", "t", demonstration.initial_state, 99, prelude=prelude)
            seen = simulator.start([1], [start]).state[0]
            furthest = max(furthest, float((seen - frames[length]).abs().max()))
            assert length < 10 or float((seen - frames[0]).abs().max()) > 0.1
    simulator.close()
    return furthest


def test_noise_other_options_and_unknown_starts_are_refused(recorded: Path, tmp_path: Path) -> None:
    options, contract = LINE.model_dump(mode="json"), contract_of(LINE)
    with pytest.raises(BadDemonstrations, match=r"simulator.radius: recorded with 0.1, the run"):
        replayable(recorded, {**options, "radius": 0.2}, contract, first(6))
    with pytest.raises(BadDemonstrations, match="holds 6 episodes"):
        replayable(recorded, options, contract, first(7))
    record(LINE, tmp_path / "noisy", episodes=2, action_noise=0.1, seed=3)
    with pytest.raises(BadDemonstrations, match=r"action_noise=0\.1, and the noise is not in"):
        replayable(tmp_path / "noisy", options, contract, first(2))
    (tmp_path / "noisy" / OUR_FILE).unlink()
    with pytest.raises(BadDemonstrations, match="the initial states of its episodes are not known"):
        replayable(tmp_path / "noisy", options, contract, first(2))


def run(folder: Path, **options: Any) -> RunConfig:
    given: dict[str, Any] = {
        "runs_dir": folder,
        "simulator": LINE,
        "policy": GaussianMLPConfig(hidden_size=8),
        "algorithm": {"type": "ppo", "decisions_per_iteration": 16, "critic_warmup_iterations": 0},
        "demonstrations": {"episodes": 4},
        "imitation": {"steps": 5, "batch_size": 8},
        "rollout": {"num_slots": 8, "num_workers": 0},
        "evaluation": {"episodes": 20},
        "logging": {"video_episodes": 0},
        "iterations": 4,
    }
    return RunConfig.model_validate(given | options)


def test_a_run_begins_within_its_own_demonstrations(tmp_path: Path) -> None:
    practice = {"starts": "worst_case", "demonstrated_share": 0.9, "demonstrated_until": 0.6}
    config = run(tmp_path, practice=practice)
    train(config)
    rows = [r["values"] for r in read(config.directory) if r["phase"] == "rl"]
    shares = [row["demonstrated_share"] for row in rows]
    assert shares[0] > 0.5 and shares[-1] < 0.3
    assert all(1 <= row["practice_states"] <= 256 for row in rows)
    assert any("success_rate_within_demonstration" in row for row in rows)
    # What is measured starts where it always does.
    before = [json.loads(line) for line in _rows(config)]
    plain = run(tmp_path, name="plain", iterations=0)
    train(plain)
    assert [row["success_once"] for row in before] == [
        json.loads(line)["success_once"] for line in _rows(plain)
    ]


def _rows(config: RunConfig) -> list[str]:
    return (config.directory / "evaluation" / "start" / "episodes.jsonl").read_text().splitlines()


def test_options_that_cannot_go_together_are_refused(tmp_path: Path) -> None:
    practice = {"demonstrated_share": 0.5}
    with pytest.raises(ValueError, match=r"demonstrated_share=0\.5 needs demonstrations"):
        run(tmp_path, practice=practice, demonstrations=None, imitation=None)
    with pytest.raises(ValueError, match=r"with initial_policy also demonstrations\.path"):
        run(tmp_path, practice=practice, initial_policy=tmp_path)
    run(tmp_path, practice=practice, initial_policy=tmp_path, demonstrations={"path": tmp_path})
    batched: Config = LINE.model_copy(update={"batched": True})
    with pytest.raises(ValueError, match="runs as one batch"):
        run(tmp_path, practice=practice, simulator=batched)
