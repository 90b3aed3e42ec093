"""`embodied-rl evaluate`: from a policy folder to a success rate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outside
from embodied_rl.cli import main
from embodied_rl.rollout.planner import evaluation_plan
from embodied_rl.training.policy_folder import save_policy
from line_world import Line, LineConfig
from policies.config import GaussianMLPConfig

STATES = [episode.initial_state for episode in evaluation_plan("line", 6)]


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run's folder with a `final` policy for the line, which is installed as a part."""
    outside.install(tmp_path / "parts", {"simulator": {"line": "line_world:LineConfig"}})
    monkeypatch.syspath_prepend(str(tmp_path / "parts"))
    torch.manual_seed(0)
    options = GaussianMLPConfig(chunk=2, hidden_size=8)
    policy = options.build(Line(LineConfig()).spec.contract)
    simulator = {"simulator": LineConfig().model_dump(mode="json")}
    extras: dict[str, dict[str, Any]] = {
        "run": {"value_discount": 0.9},
        "imitated": {"value_discount": None},
        "old": {},
    }
    for name, extra in extras.items():
        folder = tmp_path / name / "policies" / "final"
        save_policy(policy, options, folder, simulator | extra)
    yield tmp_path / "run"


def evaluate(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["evaluate", *words])
    return int(caught.value.code or 0)


def test_a_run_is_evaluated_in_plain_words(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(str(run_folder), "--episodes", "6", "--slots", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    rate = r"\d+\.\d % \[\d+\.\d, \d+\.\d\]"
    assert re.fullmatch(rf"line: success {rate} over 6 held-out states", lines[0])
    assert re.fullmatch(rf"at the end {rate}, \d\.\d steps on average", lines[1])
    assert len(lines) == 2


def test_options_of_the_simulator_can_be_changed_and_errors_are_listed(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run_folder), f"simulator.break_on_state={STATES[3]}", "simulator.limit=1"]
    assert evaluate(*words, "--episodes", "6", "--slots", "1", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["episodes"] == 6
    assert list(data["errors"]) == ["final/0/000003"]
    assert data["mean_steps"] <= 1.0
    assert data["protocol"]["simulator"]["limit"] == 1


def test_rows_are_resumed_and_those_of_other_options_refused(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run_folder), "--episodes", "6", "--slots", "2", "--output", str(tmp_path / "out")]
    assert evaluate(*words, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    rows = (tmp_path / "out" / "episodes.jsonl").read_text()
    assert len(rows.splitlines()) == 6
    assert evaluate(*words, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again | {"wall_s": 0} == first | {"wall_s": 0}
    assert evaluate(*words, "simulator.limit=2") == 1
    said = capsys.readouterr().err
    assert "holds episodes of another evaluation; choose another output folder" in said
    assert "simulator: there" in said
    assert (tmp_path / "out" / "episodes.jsonl").read_text() == rows


def test_success_against_the_number_of_candidates(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--episodes", "6", "--slots", "2", "--output", str(tmp_path / "out")]
    words = [str(run_folder), *sizes, "--best-of", "2", "1"]
    assert evaluate(*words) == 0
    said = capsys.readouterr()
    assert "warning" not in said.err
    lines = said.out.splitlines()
    assert lines[0].startswith("line: success when the best of N candidates is executed")
    rate = r"\d+\.\d % \[\d+\.\d, \d+\.\d\]"
    for line, number in zip(lines[2:4], (1, 2), strict=True):
        steps = r"\d\.\d executed, \d+\.\d tried out"
        assert re.fullmatch(rf" *{number}  {rate} +\d+\.\d \({steps}\)", line)
    assert lines[4] == f"the curve is in {tmp_path / 'out' / 'best_of.html'}"
    assert (tmp_path / "out" / "best_of.html").is_file()
    # Further numbers only add to what is there, and come out as JSON too.
    assert evaluate(*words, "4", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [point["n"] for point in data["best_of"]] == [1, 2, 4]
    assert data["warnings"] == [] and data["protocol"]["discount"] == 0.9
    assert data["best_of"][0]["mean_looked"] == 0.0 < data["best_of"][1]["mean_looked"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("imitated", "this policy's value estimates no return: imitation"),
        ("old", "does not say whether its value was trained; candidates are judged by it all the"),
    ],
)
def test_a_value_that_may_be_worth_nothing(
    name: str, said: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run_folder.parent / name), "--episodes", "2", "--slots", "1", "--json"]
    assert evaluate(*words, "--best-of", "1", "2") == 0
    captured = capsys.readouterr()
    warning = captured.err.splitlines()[0]
    assert warning.startswith("warning: ") and said in warning
    data = json.loads(captured.out)
    assert said in data["warnings"][0] and data["protocol"]["discount"] == 0.99
    # One candidate is not judged at all.
    assert evaluate(*words, "--best-of", "1") == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--best-of", "2", "0"], 2, "--best-of must be at least 1, got 0"),
        (["--best-of", "two"], 2, "'two' is not a whole number"),
        (["--best-of", "2", "simulator.limit=2"], 2, "put key=value before --best-of"),
        (["simulator.batched=true", "--best-of", "2"], 2, "this simulator runs as one batch; best"),
        (["seed=1"], 2, "only simulator.* can be changed in an evaluation, got 'seed=1'"),
        (["simulator.limits=1"], 2, "limits: unknown option; did you mean 'limit'?"),
        (["--episodes", "0"], 2, "--episodes must be at least 1, got 0"),
        (["--slots", "0"], 2, "--slots must be at least 1, got 0"),
        (["simulator.broken=true", "--episodes", "2"], 1, "the line is broken; mend it"),
    ],
)
def test_what_cannot_be_evaluated(
    words: list[str], code: int, said: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(str(run_folder), *words) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_folder_without_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(str(tmp_path)) == 1
    assert f"{tmp_path} holds no policy" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(str(run_folder), "--device", "cuda") == 2
    assert "torch finds no GPU here" in capsys.readouterr().err
