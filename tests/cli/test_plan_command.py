"""`embodied-rl plan`, `train --dry-run`, and what `train` refuses for its memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cheap_run import cheap_run, write_config
from embodied_rl.cli import main
from embodied_rl.memory import check, measure
from embodied_rl.memory.machine import Machine, free
from round_numbers import MEASURED

LITTLE = Machine(2**20, 2**30, None)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


def planned(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Measuring gives round numbers instead of taking seconds."""
    monkeypatch.setattr(measure, "measure", lambda config: (MEASURED, machine))


def test_plan_in_words_and_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For once with the real process that measures."""
    file = str(write_config(tmp_path))
    assert run("plan", file, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] is True
    place = data["places"]["training process"]
    assert place["peak"] == max(sum(m.values()) for m in place["moments"].values())
    assert place["peak"] + data["places"]["simulator workers"]["peak"] == data["host_peak"]
    # Python, torch and the project are most of it.
    assert 100 * 2**20 < place["moments"]["update"]["libraries"] < 2**30
    policy = data["measured"]["policy"]
    # Two hidden layers of 16, state 3, action 1 per step, beside the value head: float32.
    assert 0 < policy["imitated"] < policy["learned"] <= policy["weights"] < 10**5
    assert policy["observation"] == 3 * 4
    assert data["machine"]["host"] > 0
    assert not (tmp_path / "runs").exists()


def test_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, Machine(2**30, 2**30, None))
    file = str(write_config(tmp_path))
    assert run("plan", file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["training", "process", "collect", "update", "evaluate"]
    assert [line.split()[0] for line in lines if line.startswith("  ")][:2] == [
        "libraries",
        "simulator",
    ]
    assert "simulator workers (2 processes): 0 MiB" in lines
    assert lines[-1] == "it fits"
    planned(monkeypatch, Machine(1, 2**30, None))
    assert run("plan", file) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "it does not fit: too little memory"


def test_a_run_looks_at_its_memory_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(write_config(tmp_path))
    small = ("iterations=1", "logging.video_episodes=0")
    assert run("train", file, *small, "algorithm.decisions_per_iteration=10000000000") == 2
    said = capsys.readouterr().err
    assert "this run does not fit:\n  it needs about" in said
    assert "change rollout.num_slots, algorithm.decisions_per_iteration" in said
    assert not (tmp_path / "runs" / "run").exists()
    assert run("train", file, *small) == 0
    said = capsys.readouterr().err
    assert "memory: about " in said and " are free" in said
    monkeypatch.setattr(check, "watched", None)
    assert run("train", file, *small, "name=forced", "--force") == 0


def test_the_look_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, bit for bit, with and without it."""
    file = str(write_config(tmp_path))
    small = ("iterations=1", "logging.video_episodes=0")
    assert run("train", file, *small, "name=watched") == 0
    assert run("train", file, *small, "name=forced", "--force") == 0
    folder = tmp_path / "runs"
    weights = [
        (folder / name / "policies" / "final" / "policy.safetensors").read_bytes()
        for name in ("watched", "forced")
    ]
    assert weights[0] == weights[1]


def test_many_environments_are_measured_before_they_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = cheap_run(tmp_path), cheap_run(tmp_path, "rollout.num_slots=60000")
    monkeypatch.setattr(check, "free", lambda device: Machine(10 * 2**30, None))
    assert not check.has_many_environments(few) and check.has_many_environments(many)
    planned(monkeypatch, LITTLE)
    monkeypatch.setattr(
        "embodied_rl.training.loop.simulator_of", lambda config: pytest.fail("it was made")
    )
    assert run("train", str(write_config(tmp_path)), "rollout.num_slots=60000") == 2
    assert "this run does not fit" in capsys.readouterr().err


def test_a_dry_run_in_words_and_as_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, free("cpu"))
    file = str(write_config(tmp_path))
    assert run("train", file, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "options of the dry run:\n  iterations=2 instead of 100" in out
    assert "checked:\n  memory: about " in out
    assert "the dry run passed in " in out and "nothing is left of it on disk" in out
    assert run("train", file, "--dry-run", "--force", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True and data["shrunk"]["iterations"] == {"from": 100, "to": 2}
    assert not any("memory" in text for text in data["checked"])
    assert run("train", file, "--dry-run", "--resume") == 2
    assert "--dry-run begins anew" in capsys.readouterr().err
    assert run("train", file, "--dry-run", "--force", "algorithm.learning_rate=1e-60") == 1
    assert "the dry run failed: 2 iterations left all parameters" in capsys.readouterr().err


def test_a_measuring_process_that_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_measure", _killed)
    assert run("plan", str(write_config(tmp_path))) == 1
    assert "the process that builds simulator and policy to measure them was killed" in (
        capsys.readouterr().err
    )


def _killed(config: Any) -> None:
    os._exit(9)
