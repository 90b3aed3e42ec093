"""Whole runs on real, small environments: learning, resuming, refusing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodied_rl.config import ConfigError, load
from embodied_rl.contracts import Episode
from embodied_rl.files import new_folder, recover
from embodied_rl.rollout.planner import initial_states
from embodied_rl.run_config import RunConfig
from embodied_rl.training.loop import train
from embodied_rl.training.metrics import read
from embodied_rl.training.policy_folder import DamagedPolicy, load_policy
from embodied_rl.training.report import write_report

PENDULUM = """
simulator: {type: gymnasium, task: Pendulum-v1, max_episode_steps: 30, success_return: -100}
policy: {type: gaussian_mlp, hidden_size: 16}
algorithm: {type: ppo, decisions_per_iteration: 12, epochs: 2, minibatch_size: 16,
            critic_warmup_iterations: 2, max_kl: null}
rollout: {num_slots: 4, num_workers: 0}
evaluation: {episodes: 4, every: 2, quick_episodes: 4, keep_best: false}
checkpoint: {every: 1}
logging: {video_episodes: 0}
"""


def pendulum(folder: Path, **options: Any) -> RunConfig:
    file = folder / "pendulum.yaml"
    file.write_text(PENDULUM)
    given = {"runs_dir": folder / "runs", **options}
    return load(RunConfig, file, [f"{key}={value}" for key, value in given.items()])


def weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(config.directory / "policies" / "final" / "policy.safetensors")


def _evaluations(config: RunConfig) -> list[tuple[str, int]]:
    found = [e for e in read(config.directory) if e["phase"] == "evaluation"]
    return sorted((e["label"], e["step"]) for e in found)


@pytest.mark.parametrize(
    "options",
    [{}, {"algorithm.value_normalisation": "popart", "algorithm.advantages": "vtrace"}],
    ids=["plain", "popart_vtrace"],
)
def test_three_and_three_iterations_equal_six(tmp_path: Path, options: dict[str, Any]) -> None:
    """Critic warm-up, optimiser, noise, scales, plan and episodes in flight all continue."""
    whole = pendulum(tmp_path, name="whole", iterations=6, **options)
    result = train(whole)
    first = pendulum(tmp_path, name="parts", iterations=3, **options)
    train(first)
    rest = pendulum(tmp_path, name="parts", iterations=6, **options)
    extended = train(rest, resume=True)
    a, b = weights(whole), weights(rest)
    assert all(torch.equal(a[name], b[name]) for name in a)
    # The result is the new policy's, and nothing is logged twice.
    assert extended.summary["after"]["mean_return"] == result.summary["after"]["mean_return"]
    assert _evaluations(rest) == _evaluations(whole)
    rows = [r["values"] for r in read(rest.directory) if r["phase"] == "rl"]
    assert [row["env_steps"] for row in rows] == [
        r["values"]["env_steps"] for r in read(whole.directory) if r["phase"] == "rl"
    ]


def test_a_budget_of_control_steps_ends_a_run(tmp_path: Path) -> None:
    # An iteration is 4 slots times 12 steps: the third one reaches 100.
    config = pendulum(tmp_path, iterations=9, max_env_steps=100)
    assert train(config).summary["env_steps"] == 144
    more = pendulum(tmp_path, iterations=9, max_env_steps=145)
    assert train(more, resume=True).summary["env_steps"] == 192


@pytest.mark.parametrize("starts", ["curriculum", "worst_case"])
def test_what_is_practised_on_continues_too(tmp_path: Path, starts: str) -> None:
    """Evidence, weights and plan after a resume are those of a run that was never stopped."""
    options: dict[str, Any] = {"practice.starts": starts, "practice.pool": 8}
    # Rewards are negative: whether the return is ever above -2 is a matter of the start.
    options |= {"simulator.success_return": -2, "algorithm.decisions_per_iteration": 40}
    whole = pendulum(tmp_path, name="whole", iterations=4, **options)
    train(whole)
    train(pendulum(tmp_path, name="parts", iterations=2, **options))
    rest = pendulum(tmp_path, name="parts", iterations=4, **options)
    train(rest, resume=True)
    a, b = weights(whole), weights(rest)
    assert all(torch.equal(a[name], b[name]) for name in a)
    names = ("practice_states", "practice_success", "success_rate", "env_steps")
    curves = [
        [[r["values"].get(name) for name in names] for r in read(c.directory) if r["phase"] == "rl"]
        for c in (whole, rest)
    ]
    assert curves[0] == curves[1]
    effective = [row[0] for row in curves[0]]
    assert all(1 <= number <= 8 for number in effective) and min(effective) < 7.99
    planned = _planner_state(rest)["weighted"]
    assert planned == _planner_state(whole)["weighted"]
    assert len(planned["successes"]) == 8 and sum(planned["failures"]) > 0


def _planner_state(config: RunConfig) -> dict[str, Any]:
    newest = sorted((config.directory / "checkpoints").iterdir())[-1]
    found: dict[str, Any] = json.loads((newest / "state.json").read_text())
    state: dict[str, Any] = found["state"]["collector"]["planner"]
    return state


def test_a_run_leaves_what_it_promises(tmp_path: Path) -> None:
    config = pendulum(tmp_path, iterations=2)
    result = train(config)
    folder = config.directory
    assert load(RunConfig, folder / "config.yaml", []) == config
    assert json.loads((folder / "result.json").read_text())["line"] == result.line
    assert "Pendulum-v1: start" in result.line and "4 held-out initial states" in result.line
    page = (folder / "report.html").read_text()
    assert result.line.split(",")[0].split("→")[0].strip() in page
    # Nothing is loaded from elsewhere; names of XML formats are no links.
    assert not any(f"{place}http" in page for place in ('src="', 'href="', "url(", "@import "))
    rows = (folder / "evaluation" / "final" / "episodes.jsonl").read_text().splitlines()
    assert len(rows) == 4
    first = next(e["values"] for e in read(folder) if e["phase"] == "rl")
    shares = [first[f"percent_{name}"] for name in ("infer", "wait", "learn", "other")]
    assert sum(shares) == pytest.approx(100, abs=1)
    checkpoints = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert checkpoints == ["step_000001", "step_000002"]


def test_a_run_is_not_overwritten_or_resumed_with_other_options(tmp_path: Path) -> None:
    train(pendulum(tmp_path, iterations=0))
    with pytest.raises(ConfigError, match=r"already holds a run\. Add --resume"):
        train(pendulum(tmp_path, iterations=0))
    other = pendulum(tmp_path, iterations=0, **{"algorithm.clip": 0.3})
    with pytest.raises(ConfigError, match=r"algorithm.clip: the run has 0.2, you gave 0.3"):
        train(other, resume=True)


def test_starting_from_weights_takes_the_options_of_the_run(tmp_path: Path) -> None:
    """How actions are drawn may differ from the earlier run; the network may not."""
    flow = {"policy": "{type: flow_mlp, hidden_size: 16, chunk: 2}", "iterations": 0}
    first = pendulum(tmp_path, name="first", **flow)
    train(first)
    start = {**flow, "initial_policy": first.directory / "policies" / "final"}
    second = pendulum(tmp_path, name="second", **start, **{"policy.noise_level": 0.25})
    train(second)
    assert load_policy(second.directory / "policies" / "final").config == second.policy
    a, b = weights(first), weights(second)
    assert all(torch.equal(a[name], b[name]) for name in a)
    wide = pendulum(tmp_path, name="third", **start, **{"policy.hidden_size": 32})
    with pytest.raises(DamagedPolicy, match=r"does not fit these options .*hidden_size=32"):
        train(wide)


def test_metrics_before_the_first_checkpoint_are_not_repeated(tmp_path: Path) -> None:
    config = pendulum(tmp_path, iterations=2, **{"checkpoint.every": 100})
    train(config)
    for step in (config.directory / "checkpoints").iterdir():
        shutil.rmtree(step)
    train(config, resume=True)
    assert [e["step"] for e in read(config.directory) if e["phase"] == "rl"] == [1, 2]
    assert _evaluations(config) == [("final", 2), ("quick", 2), ("start", 0)]


def test_a_film_that_fails_does_not_cost_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the camera is off")

    monkeypatch.setattr("embodied_rl.training.checks.film_episodes", broken)
    config = pendulum(tmp_path, iterations=0, **{"logging.video_episodes": 1})
    train(config)
    assert "no videos: the camera is off" in capsys.readouterr().err
    assert (config.directory / "result.json").exists()
    assert (config.directory / "report.html").exists()


def test_films_are_of_held_out_states_of_a_bank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filmed: list[Episode] = []

    def note(_: object, __: object, plan: Any, *___: object) -> None:
        bank = SimpleNamespace(all_tasks=("a", "b"), states=40)
        filmed.extend(plan(bank))

    monkeypatch.setattr("embodied_rl.training.checks.film_episodes", note)
    train(pendulum(tmp_path, iterations=0, **{"logging.video_episodes": 2}))
    # Two of each task before and after.
    assert [e.task for e in filmed] == ["a", "b"] * 4
    assert {e.initial_state for e in filmed} < set(initial_states("final", 40))


def test_a_folder_whose_replacement_was_killed_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".best.replaced").mkdir()
    (tmp_path / ".best.replaced" / "old").touch()
    recover(tmp_path)
    assert [p.name for p in (tmp_path / "best").iterdir()] == ["old"]
    with new_folder(tmp_path / "best") as unfinished:
        (unfinished / "new").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["best"]
    assert [p.name for p in (tmp_path / "best").iterdir()] == ["new"]


def test_a_report_of_an_unfinished_run(tmp_path: Path) -> None:
    config = pendulum(tmp_path, iterations=1)
    train(config)
    (config.directory / "result.json").unlink()
    assert "not finished" in write_report(config.directory).read_text()
    with pytest.raises(FileNotFoundError, match="not a run's folder"):
        write_report(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    config = pendulum(tmp_path, iterations=400)
    command = [sys.executable, "-m", "embodied_rl", "train", str(tmp_path / "pendulum.yaml")]
    command += [f"runs_dir={tmp_path / 'runs'}"]
    process = subprocess.Popen(
        [*command, "iterations=400"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 90
    while len(read(config.directory)) < 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    if number == signal.SIGTERM:
        assert "stopped as asked" in errors and "--resume" in errors
    done = max(e["step"] for e in read(config.directory) if e["phase"] == "rl")
    finished = subprocess.run(
        [*command, f"iterations={done + 3}", "--resume", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["task"] == "Pendulum-v1"
    steps = [e["step"] for e in read(config.directory) if e["phase"] == "rl"]
    assert steps == list(range(1, done + 4))  # nothing twice, nothing missing


def _value_discount(folder: Path) -> float | None:
    found: float | None = json.loads((folder / "policy.json").read_text())["extra"][
        "value_discount"
    ]
    return found


def test_policies_say_whether_their_value_was_trained(tmp_path: Path) -> None:
    config = pendulum(tmp_path, name="trained", iterations=1)
    train(config)
    policies = config.directory / "policies"
    assert _value_discount(policies / "start") is None
    assert _value_discount(policies / "final") == 0.99
    # What began with a trained value keeps it; without an iteration nothing is trained.
    after = pendulum(tmp_path, name="after", iterations=0, initial_policy=policies / "final")
    train(after)
    for name in ("start", "final"):
        assert _value_discount(after.directory / "policies" / name) == 0.99
    # A value on a scale that the policy does not know is worth no more than an untrained one.
    popart = {"algorithm.value_normalisation": "popart", "initial_policy": policies / "final"}
    train(scaled := pendulum(tmp_path, name="scaled", iterations=1, **popart))
    assert _value_discount(scaled.directory / "policies" / "final") is None
    untouched = pendulum(tmp_path, name="untouched", iterations=0)
    train(untouched)
    assert _value_discount(untouched.directory / "policies" / "final") is None
