"""Success over planned episodes: what counts, what is written, and how it is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pytest
import torch

from embodied_rl.contracts import (
    Contract,
    ContractMismatch,
    Decision,
    Episode,
    Observation,
    Policy,
)
from embodied_rl.evaluation.evaluate import (
    EvaluationSummary,
    OtherEvaluation,
    evaluate,
    protocol,
    summarise,
)
from embodied_rl.rollout.inline import InlineSimulator
from embodied_rl.rollout.planner import evaluation_plan
from embodied_rl.rollout.pool import SimulatorPool
from embodied_rl.run_config import RolloutConfig
from line_world import Line, LineConfig

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness

CHUNK = 2


class OneWay:
    """Walks left by at most 0.4 a step, so that it comes home only from the right."""

    chunk = CHUNK

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        assert mode == "deterministic"
        x = observation.state[:, 0]
        first = -x.clamp(0.0, 0.4)
        second = -(x + first).clamp(0.0, 0.4)
        actions = torch.stack([first, second], 1)[..., None]
        zeros = torch.zeros(len(x), CHUNK)
        return Decision(actions, zeros, zeros[:, 0], {})


def simulator(num_slots: int = 3, **options: Any) -> InlineSimulator:
    return InlineSimulator([Line(LineConfig(**options)) for _ in range(num_slots)], CHUNK)


def policy(contract: Contract | None = None) -> Policy:
    return cast(Policy, OneWay(contract or Line(LineConfig()).spec.contract))


def start_of(episode: Episode) -> float:
    return float(np.random.default_rng(episode.initial_state).uniform(-1, 1))


PLAN = evaluation_plan("line", 20)
HEADER = protocol("weights", {"type": "line"}, PLAN, 0)


def measure(
    output: Path | None = None,
    header: dict[str, Any] = HEADER,
    on_progress: Any = None,
    **options: Any,
) -> EvaluationSummary:
    return evaluate(
        policy(),
        simulator(**options),
        PLAN,
        1,
        0,
        output=output,
        header=header,
        on_progress=on_progress,
    )


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


def test_the_rate_is_that_of_the_whole_plan() -> None:
    # From the left nothing is ever reached, except where the start is already close enough.
    expected = sum(start_of(episode) > -0.1 for episode in PLAN)
    assert 0 < expected < len(PLAN)
    summary = measure()
    assert summary.episodes == len(PLAN)
    assert summary.success_once == expected / len(PLAN)
    assert summary.low < summary.success_once < summary.high
    assert summary.errors == {}
    failures = len(PLAN) - expected  # These last for the whole time limit of 6 steps.
    assert summary.mean_steps >= 6 * failures / len(PLAN)


def test_slots_and_halves_change_nothing() -> None:
    one = measure(num_slots=1)
    many = evaluate(policy(), simulator(8), PLAN, 2, 0)
    assert replace(one, wall_s=0.0) == replace(many, wall_s=0.0)


def test_an_episode_that_cannot_run_is_a_failure_and_is_listed(tmp_path: Path) -> None:
    good = next(episode for episode in PLAN if start_of(episode) > 0.2)
    whole = measure()
    pool = SimulatorPool(
        LineConfig(break_on_state=good.initial_state), 1, CHUNK, RolloutConfig(num_slots=2)
    )
    try:
        broken = evaluate(policy(), pool, PLAN, 2, 0, output=tmp_path, header=HEADER)
    finally:
        pool.close()
    assert broken.episodes == whole.episodes
    assert broken.success_once == pytest.approx(whole.success_once - 1 / len(PLAN))
    assert list(broken.errors) == [good.key]
    assert f"cannot start from {good.initial_state}" in broken.errors[good.key]
    (row,) = [row for row in rows_in(tmp_path) if row["error"]]
    assert row["key"] == good.key
    assert row["success_once"] is False


def test_success_that_is_lost_again_counts_once_but_not_at_the_end() -> None:
    rows = [
        {"key": str(i), "success_once": once, "success_at_end": at_end, "steps": 4, "return": 1.0}
        | {"error": None}
        for i, (once, at_end) in enumerate([(True, True), (True, False), (False, False)])
    ]
    summary = summarise("line", rows, 1.0)
    assert summary.success_once == pytest.approx(2 / 3)
    assert summary.success_at_end == pytest.approx(1 / 3)
    assert summary.low_at_end < summary.low


def test_the_result_in_words() -> None:
    rows = [
        {"key": str(i), "success_once": i < 47, "success_at_end": False, "steps": 1, "return": 0.0}
        | {"error": None}
        for i in range(100)
    ]
    assert summarise("line", rows, 1.0).in_words == "47.0 % [37.5, 56.7]"


def test_each_episode_is_a_row(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    summary = measure(tmp_path, on_progress=lambda done, good: told.append((done, good)))
    rows = {row["key"]: row for row in rows_in(tmp_path)}
    assert set(rows) == {episode.key for episode in PLAN}
    for episode in PLAN:
        row = rows[episode.key]
        assert (row["initial_state"], row["seed"]) == (episode.initial_state, episode.seed)
        assert row["success_once"] == (start_of(episode) > -0.1)
        assert row["return"] == float(row["success_once"])
    assert [done for done, _ in told] == list(range(1, len(PLAN) + 1))
    assert told[-1][1] == round(summary.success_once * len(PLAN))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["summary"]["success_once"] == summary.success_once
    assert {"torch", "numpy", "embodied-rl"} <= set(result["protocol"]["versions"])


class Killed(Exception):
    """Stands for the end of the process."""


def _cut_off(folder: Path, after: int) -> None:
    def stop(done: int, good: int) -> None:
        if done == after:
            raise Killed

    with pytest.raises(Killed):
        measure(folder, on_progress=stop)
    assert len(rows_in(folder)) == after


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    whole = measure(tmp_path / "whole")
    _cut_off(tmp_path / "cut", 7)
    assert not (tmp_path / "cut" / "result.json").exists()
    told: list[int] = []
    resumed = measure(tmp_path / "cut", on_progress=lambda done, good: told.append(done))
    assert told == list(range(8, len(PLAN) + 1))
    assert replace(resumed, wall_s=0.0) == replace(whole, wall_s=0.0)
    keys = [row["key"] for row in rows_in(tmp_path / "cut")]
    assert len(keys) == len(set(keys)) == len(PLAN)


def test_a_finished_evaluation_is_only_read(tmp_path: Path) -> None:
    whole = measure(tmp_path)
    told: list[int] = []
    again = measure(tmp_path, on_progress=lambda done, good: told.append(done))
    assert told == []
    assert replace(again, wall_s=0.0) == replace(whole, wall_s=0.0)


@pytest.mark.parametrize("complete", [0, 7])
def test_a_torn_row_is_run_again(complete: int, tmp_path: Path) -> None:
    whole = measure(tmp_path / "whole")
    _cut_off(tmp_path / "cut", max(complete, 1))
    file = tmp_path / "cut" / "episodes.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:complete]) + lines[0][:25])
    resumed = measure(tmp_path / "cut")
    assert replace(resumed, wall_s=0.0) == replace(whole, wall_s=0.0)
    assert len(rows_in(tmp_path / "cut")) == len(PLAN)


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (protocol("other weights", {"type": "line"}, PLAN, 0), "policy: there 'weights'"),
        (protocol("weights", {"type": "rope"}, PLAN, 0), "simulator: there {'type': 'line'}"),
        (protocol("weights", {"type": "line"}, PLAN[:-1], 0), "plan: there"),
        (protocol("weights", {"type": "line"}, PLAN, 1), "seed: there 0, now 1"),
        ({**HEADER, "versions": {"torch": "0"}}, "versions: there"),
    ],
)
def test_rows_of_another_evaluation_are_refused(
    header: dict[str, Any], named: str, tmp_path: Path
) -> None:
    measure(tmp_path)
    before = (tmp_path / "episodes.jsonl").read_text()
    with pytest.raises(OtherEvaluation) as caught:
        measure(tmp_path, header)
    assert f"{tmp_path} holds episodes of another evaluation" in str(caught.value)
    assert named in str(caught.value)
    assert (tmp_path / "episodes.jsonl").read_text() == before


def test_a_commit_in_between_does_not_hinder(tmp_path: Path) -> None:
    _cut_off(tmp_path, 7)
    assert measure(tmp_path, {**HEADER, "commit": "a later one"}).episodes == len(PLAN)


def test_a_policy_for_another_simulator_is_refused() -> None:
    other = replace(Line(LineConfig()).spec.contract, gripper="+1 opens")
    with pytest.raises(ContractMismatch, match="gripper: the policy has '\\+1 opens'"):
        evaluate(policy(other), simulator(), PLAN, 1, 0)
