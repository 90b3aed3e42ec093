"""Metrics survive kills, resumes and numbers that JSON has no word for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.run_config import LoggingConfig
from embodied_rl.training.metrics import MetricsLog, read


def open_log(folder: Path) -> MetricsLog:
    return MetricsLog(folder, LoggingConfig(), "run", {})


def steps(folder: Path, phase: str = "rl") -> list[int]:
    return [entry["step"] for entry in read(folder) if entry["phase"] == phase]


def test_what_is_logged_is_read(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    narrow: Any = np.float32(3.0)
    log.log("rl", 1, {"loss": 0.25, "count": narrow})
    log.log("evaluation", 0, {"success_once": 0.5}, label="start")
    # Readable at once, while the run goes on.
    first, second = read(tmp_path)
    assert first["values"] == {"loss": 0.25, "count": 3.0} and "label" not in first
    assert (second["phase"], second["step"], second["label"]) == ("evaluation", 0, "start")
    assert first["time"] <= second["time"]
    log.close()


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.log("rl", 1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.0})
    log.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    values = json.loads(line, parse_constant=refuse)["values"]
    assert values == {"a": None, "b": None, "c": None, "d": 1.0}


@pytest.mark.parametrize("torn", [b'{"phase": "rl", "st', b'{"phase": "\xc3', b"\0\0\0\0", b"{"])
def test_a_torn_last_line_is_dropped_and_the_log_goes_on(tmp_path: Path, torn: bytes) -> None:
    log = open_log(tmp_path)
    log.log("rl", 1, {})
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert steps(tmp_path) == [1]
    log = open_log(tmp_path)
    log.log("rl", 2, {})
    log.close()
    assert steps(tmp_path) == [1, 2]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for step in (1, 2, 3):
        log.log("rl", step, {"of": 1.0})
    log.log("imitation", 50, {})
    log.truncate_after("rl", 1)
    log.log("rl", 2, {"of": 2.0})
    log.close()
    assert steps(tmp_path) == [1, 2] and steps(tmp_path, "imitation") == [50]
    assert read(tmp_path)[-1]["values"] == {"of": 2.0}


def test_no_file_is_no_metrics(tmp_path: Path) -> None:
    assert read(tmp_path) == []


def test_tensorboard_holds_the_same_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, LoggingConfig(tensorboard=True), "run", {})
    for step in (1, 2):
        log.log("rl", step, {"loss": step / 4})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rl/loss")] == [(1, 0.25), (2, 0.5)]


def test_offline_wandb_needs_no_account_and_has_an_id_per_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for name in ("a", "a", "b"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        log = MetricsLog(folder, LoggingConfig(wandb="offline"), "same name", {"seed": 1})
        log.log("rl", 1, {"loss": 0.5})
        log.close()
        ids.append((folder / ".wandb_id").read_text())
        assert list(folder.glob(f"wandb/offline-run-*-{ids[-1]}/*.wandb"))
    # The same folder goes on with its run; another folder of the same name has another.
    assert ids[0] == ids[1] != ids[2]


def test_loggers_are_imported_only_when_used(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from embodied_rl.run_config import LoggingConfig\n"
        "from embodied_rl.training.metrics import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]), LoggingConfig(), 'r', {}); log.log('rl', 1, {})\n"
        "log.close()\n"
        "print([m for m in ('wandb', 'tensorboard', 'torch') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
