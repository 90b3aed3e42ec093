"""A run's folder: one process at a time, the same options, nothing overwritten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.config import ConfigError, load
from embodied_rl.run_config import RunConfig
from embodied_rl.training.interrupt import Interrupted, StopSignal
from embodied_rl.training.run import Run

PARTS = ["simulator=gymnasium", "policy=gaussian_mlp", "algorithm=ppo"]


def config(folder: Path, **options: Any) -> RunConfig:
    given = {"runs_dir": folder, **options}
    return load(RunConfig, None, PARTS + [f"{key}={value}" for key, value in given.items()])


def test_the_configuration_reloads_equal(tmp_path: Path) -> None:
    given = config(tmp_path, seed=5)
    with Run(given) as run:
        assert load(RunConfig, run.directory / "config.yaml", []) == given
        run.result({"line": "é"})
        assert '"é"' in (run.directory / "result.json").read_text()
    assert not list(run.directory.glob("*.unfinished")) + list(run.directory.glob(".*.unfinished"))


def test_a_run_is_not_overwritten_and_says_how_far_it_came(tmp_path: Path) -> None:
    given = config(tmp_path)
    with Run(given) as run:
        run.policy_folder("start").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"Add --resume .* name=OTHER\. It has not logged"):
        Run(given)
    with Run(given, resume=True) as run:
        run.metrics.log("rl", 7, {})
    with pytest.raises(ConfigError, match=r"It reached phase rl, step 7\."):
        Run(given)
    with Run(given, resume=True) as run:
        run.result({})
    with pytest.raises(ConfigError, match=r"It is finished\."):
        Run(given)


def test_a_run_that_failed_before_it_did_anything_leaves_its_name_free(tmp_path: Path) -> None:
    given = config(tmp_path)
    with pytest.raises(RuntimeError, match="no such controller"), Run(given):
        raise RuntimeError("no such controller")
    assert not given.directory.exists()
    with pytest.raises(RuntimeError, match="late"), Run(given) as run:
        run.metrics.log("rl", 1, {})
        raise RuntimeError("late")
    assert given.directory.exists()
    with pytest.raises(ConfigError, match="It reached phase rl, step 1"):
        Run(given)
    # One that was killed at once is begun anew, whatever its options were.
    killed = config(tmp_path, name="killed")
    with Run(killed):
        pass
    with Run(config(tmp_path, name="killed", seed=3)) as run:
        assert not run.resumed


def test_resuming_names_every_option_that_differs(tmp_path: Path) -> None:
    with Run(config(tmp_path)) as run:
        run.metrics.log("rl", 1, {})
    other = config(tmp_path, seed=1, **{"algorithm.clip": 0.3, "policy.hidden_size": 8})
    with pytest.raises(ConfigError) as caught:
        Run(other, resume=True)
    text = str(caught.value)
    assert "algorithm.clip: the run has 0.2, you gave 0.3" in text
    assert "policy.hidden_size: the run has 64, you gave 8" in text
    assert "seed: the run has 0, you gave 1" in text


def test_some_options_may_change(tmp_path: Path) -> None:
    with Run(config(tmp_path)):
        pass
    free = {
        "iterations": 7,
        "logging.video_episodes": 0,
        "checkpoint.every": 3,
        "rollout.num_workers": 1,
        "rollout.step_timeout_s": 5.0,
    }
    other = config(tmp_path, **free)
    with Run(other, resume=True) as run:
        # What is resumed next is what was last asked for.
        assert load(RunConfig, run.directory / "config.yaml", []) == other


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    given = config(tmp_path)
    with Run(given), pytest.raises(ConfigError, match="another process is working on"):
        Run(given, resume=True)
    with Run(given, resume=True):
        pass


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from embodied_rl.config import load; from embodied_rl.run_config import RunConfig\n"
        "from embodied_rl.training.run import Run\n"
        "run = Run(load(RunConfig, None, sys.argv[1:]))\n"
        "print('locked', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, *PARTS, f"runs_dir={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="another process is working on"):
            Run(config(tmp_path), resume=True)
        process.kill()
        process.wait(timeout=10)
    with Run(config(tmp_path), resume=True):
        pass


def test_a_run_that_cannot_begin_frees_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no logger")

    with monkeypatch.context() as patch:
        patch.setattr("embodied_rl.training.run.MetricsLog", fail)
        with pytest.raises(RuntimeError, match="no logger") as kept:
            Run(config(tmp_path))
    with Run(config(tmp_path), resume=True):
        assert kept  # The traceback, and with it the first attempt, is still alive.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_once_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)  # Asking twice politely changes nothing.
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match="step 3 is saved; start again with --resume"):
            stop.leave("step 3 is saved")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
