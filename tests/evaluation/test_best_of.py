"""Success against N: what must not change with it, what should, how it is resumed and refused."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest
import torch
from torch import Tensor

from broken_lines import OddLineConfig
from embodied_rl.contracts import (
    CannotLookAhead,
    Contract,
    ContractMismatch,
    Decision,
    Episode,
    Observation,
    Policy,
    Simulator,
)
from embodied_rl.evaluation.best_of import Curve, evaluate_best_of
from embodied_rl.evaluation.evaluate import EvaluationSummary, evaluate, protocol, summarise
from embodied_rl.maths.randomness import uniform_numbers
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.lookahead import reward_and_value
from embodied_rl.rollout.planner import evaluation_plan
from embodied_rl.run_config import RolloutConfig
from line_world import Line, LineConfig
from policies.config import FlowMLPConfig, GaussianMLPConfig

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness

CHUNK = 2
PLAN = evaluation_plan("line", 100)
HEADER = protocol("weights", {"type": "line"}, PLAN, 0)


class Drunk:
    """Goes anywhere, also when it does not explore; but its value knows the way home."""

    chunk = CHUNK
    contract = Line(LineConfig()).spec.contract

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        shape = (len(observation), CHUNK, 1)
        zeros = torch.zeros(shape[:2])
        return Decision(uniform_numbers(shape, generator) - 0.5, zeros, zeros[:, 0], {})

    def value(self, observation: Observation) -> Tensor:
        return -observation.state[:, 0].abs()


def drunk() -> Policy:
    return cast(Policy, Drunk())


def line(num_slots: int = 4, workers: int = 0, **options: Any) -> Simulator:
    halves = 2 if num_slots % 2 == 0 else 1
    rollout = RolloutConfig.model_validate(
        {"num_slots": num_slots, "num_workers": workers, "halves": halves}
    )
    return build_simulator(LineConfig(**options), rollout, CHUNK)


def measure(
    numbers: list[int],
    policy: Policy | None = None,
    plan: list[Episode] = PLAN,
    num_slots: int = 4,
    workers: int = 0,
    halves: int = 2,
    **options: Any,
) -> Curve:
    policy = policy or drunk()
    score = options.pop("score", None) or reward_and_value(policy, 0.99)
    simulator = line(num_slots, workers)
    try:
        return evaluate_best_of(
            policy, simulator, plan, numbers, halves, 0, score, header=HEADER, **options
        )
    finally:
        simulator.close()


def timeless(curve: Curve) -> list[dict[str, Any]]:
    return [{**point, "wall_s": 0.0} for point in curve.to_json()["best_of"]]


def rows_in(folder: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    found = {row["key"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def flow() -> Policy:
    torch.manual_seed(0)
    contract = Line(LineConfig()).spec.contract
    sizes = {"hidden_size": 16, "num_layers": 1, "value_hidden_size": 8}
    return FlowMLPConfig(chunk=CHUNK, **sizes).build(contract)


def gaussian() -> Policy:
    torch.manual_seed(0)
    return GaussianMLPConfig(chunk=CHUNK, hidden_size=8).build(Line(LineConfig()).spec.contract)


def test_more_candidates_help_a_noisy_policy_whose_value_is_right() -> None:
    curve = measure([8, 1, 2, 4, 2])
    assert list(curve.points) == [1, 2, 4, 8]
    rates = [point.success_once for point in curve.points.values()]
    assert rates[0] < 0.6 and rates[3] > 0.9
    assert all(more > fewer for fewer, more in itertools.pairwise(rates))
    for number, point in curve.points.items():
        assert point.low < point.success_once < point.high or point.success_once == 1.0
        # A candidate may end earlier or later than the chunk that is executed, never beyond H.
        assert (point.mean_looked > 0) == (number > 1)
        assert point.mean_looked <= number * (point.mean_steps + 1)


@pytest.mark.parametrize("policy", [drunk(), flow(), gaussian()], ids=["drunk", "flow", "gaussian"])
def test_one_candidate_is_the_plain_evaluation(policy: Policy, tmp_path: Path) -> None:
    plan = PLAN[:20]
    curve = measure([1], policy, plan, output=tmp_path / "curve")
    simulator = line()
    plain = evaluate(policy, simulator, plan, 2, 0, output=tmp_path / "plain", header=HEADER)
    assert replace(curve.points[1], wall_s=0.0) == replace(plain, wall_s=0.0)
    rows, wanted = (rows_in(tmp_path / name) for name in ("curve/best_of_1", "plain"))
    assert rows == {
        f"{key}/best-of-1": {**row, "key": f"{key}/best-of-1"} for key, row in wanted.items()
    }


@pytest.mark.parametrize("policy", [drunk(), flow(), gaussian()], ids=["drunk", "flow", "gaussian"])
def test_where_nothing_is_better_the_plain_decisions_are_executed(policy: Policy) -> None:
    """Snapshots, looks and further candidates leave the episode as it was."""
    plan = PLAN[:20]
    curve = measure([1, 3], policy, plan, score=lambda result: torch.zeros(len(result.executed)))
    plain, chosen = (curve.points[number] for number in (1, 3))
    assert chosen.mean_looked > 0
    assert replace(chosen, mean_looked=0.0, wall_s=0.0) == replace(plain, wall_s=0.0)


@pytest.mark.parametrize("policy", [drunk(), flow()], ids=["drunk", "flow"])
def test_slots_halves_and_workers_change_nothing(policy: Policy) -> None:
    plan = PLAN[:24]
    one = timeless(measure([2, 4], policy, plan, num_slots=1, halves=1))
    assert one == timeless(measure([2, 4], policy, plan, num_slots=8))
    assert one == timeless(measure([2, 4], policy, plan, num_slots=3, halves=1))
    assert one == timeless(measure([2, 4], policy, plan, num_slots=6, workers=2))


def test_the_same_states_and_candidates_for_every_number(tmp_path: Path) -> None:
    measure([1, 2, 4], plan=PLAN[:10], output=tmp_path)
    starts = []
    for number in (1, 2, 4):
        rows = rows_in(tmp_path / f"best_of_{number}")
        assert all(key.endswith(f"/best-of-{number}") for key in rows)
        starts.append([(row["initial_state"], row["seed"]) for row in sorted_by_key(rows)])
    assert starts[0] == starts[1] == starts[2]


def sorted_by_key(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[key] for key in sorted(rows)]


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize(("number", "after"), [(1, 5), (4, 1), (4, 11)])
def test_a_partial_run_is_resumed_to_the_same_result(
    number: int, after: int, tmp_path: Path
) -> None:
    plan = PLAN[:20]
    whole = measure([1, 4], plan=plan, output=tmp_path / "whole")

    def stop(at: int, done: int, good: int) -> None:
        if (at, done) == (number, after):
            raise Killed

    with pytest.raises(Killed):
        measure([1, 4], plan=plan, output=tmp_path / "cut", on_progress=stop)
    assert not (tmp_path / "cut" / "best_of.json").exists()
    assert len(rows_in(tmp_path / "cut" / f"best_of_{number}")) == after
    told: list[tuple[int, int]] = []
    resumed = measure(
        [1, 4],
        plan=plan,
        output=tmp_path / "cut",
        on_progress=lambda at, done, good: told.append((at, done)),
    )
    before = [(1, done) for done in range(1, 21)] + [(4, done) for done in range(1, 21)]
    assert told == before[before.index((number, after)) + 1 :]
    assert timeless(resumed) == timeless(whole)
    for name in ("best_of_1", "best_of_4"):
        assert rows_in(tmp_path / "cut" / name) == rows_in(tmp_path / "whole" / name)


def test_further_numbers_add_to_what_is_there(tmp_path: Path) -> None:
    measure([1, 2], plan=PLAN[:8], output=tmp_path)
    told: set[int] = set()
    curve = measure(
        [1, 2, 4], plan=PLAN[:8], output=tmp_path, on_progress=lambda at, *_: told.add(at)
    )
    assert told == {4}
    assert timeless(curve) == timeless(measure([1, 2, 4], plan=PLAN[:8]))


def test_what_is_written(tmp_path: Path) -> None:
    curve = measure([1, 2], plan=PLAN[:8], output=tmp_path)
    data = json.loads((tmp_path / "best_of.json").read_text())
    assert [point["n"] for point in data["best_of"]] == [1, 2]
    assert data["best_of"][1]["success_once"] == curve.points[2].success_once
    page = (tmp_path / "best_of.html").read_text()
    assert page.count("<svg") == 1 and "candidates N" in page
    assert curve.points[2].in_words in page
    assert not re.search(r'(src|href)="(?!#)', page)


def point(successes: int, task: str = "a", looked: int = 0) -> EvaluationSummary:
    rows = [
        {
            "key": str(i),
            "task": "a" if i % 2 else "b",
            "success_once": i < successes,
            "success_at_end": False,
            "steps": 4,
            "looked": looked,
            "return": 0.0,
            "error": None,
        }
        for i in range(100)
    ]
    return summarise(task, rows, 1.0)


def test_the_table_in_words() -> None:
    lines = Curve("a+b", {1: point(47), 16: point(100, looked=64)}).in_words.splitlines()
    assert lines == [
        "a+b: success when the best of N candidates is executed, over the same 100 held-out states",
        "   N  success [95 % interval]   control steps per episode",
        "   1  47.0 % [37.5, 56.7]       4.0 (4.0 executed, 0.0 tried out)",
        "      b: 48.0 % [34.8, 61.5]",
        "      a: 46.0 % [33.0, 59.6]",
        "  16  100.0 % [96.3, 100.0]     68.0 (4.0 executed, 64.0 tried out)",
        "      b: 100.0 % [92.9, 100.0]",
        "      a: 100.0 % [92.9, 100.0]",
    ]


def refusal(simulator: Simulator, numbers: list[int], policy: Policy | None = None) -> None:
    policy = policy or drunk()
    score = reward_and_value(policy, 0.99)
    evaluate_best_of(policy, simulator, PLAN, numbers, 1, 0, score)


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"candidates must be at least 1, got \[4, 0\]"):
        refusal(line(), [4, 0])


def test_a_simulator_without_snapshots_is_refused_before_anything_is_run() -> None:
    environment = OddLineConfig(kind="Fixed").build_environment()
    simulator = cast(Any, line(1))
    simulator._environments = [environment]
    with pytest.raises(CannotLookAhead) as caught:
        refusal(simulator, [1, 2])
    assert "line gives no snapshots" in str(caught.value)
    assert "simulator.backend=cpu" in str(caught.value)
    assert cast(Line, environment).elapsed == 0
    refusal(simulator, [1])  # One candidate needs none.


def test_a_policy_for_another_simulator_is_refused() -> None:
    policy = Drunk()
    other: Contract = replace(Drunk.contract, gripper="+1 opens")
    policy.contract = other
    with pytest.raises(ContractMismatch, match="gripper"):
        refusal(line(), [2], cast(Policy, policy))


def test_an_episode_that_fails_while_looking_is_a_failure_and_is_listed() -> None:
    rollout = RolloutConfig(num_slots=2, num_workers=1)
    simulator = build_simulator(OddLineConfig(kind="Brittle"), rollout, CHUNK)
    policy = drunk()
    try:
        curve = evaluate_best_of(
            policy, simulator, PLAN[:3], [2], 2, 0, reward_and_value(policy, 0.99)
        )
    finally:
        simulator.close()
    assert curve.points[2].success_once == 0.0
    assert set(curve.points[2].errors) == {f"{episode.key}/best-of-2" for episode in PLAN[:3]}
    assert all("it broke" in text for text in curve.points[2].errors.values())
    assert asdict(curve.points[2])["mean_looked"] == 0.0
