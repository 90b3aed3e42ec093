"""`embodied-rl evaluate`: from a policy folder to a success rate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

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
    extra = {"simulator": LineConfig().model_dump(mode="json")}
    save_policy(policy, options, tmp_path / "run" / "policies" / "final", extra)
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


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
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
