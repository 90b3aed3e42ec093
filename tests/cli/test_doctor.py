"""`embodied-rl doctor`: what it finds, and what it makes of it."""

from __future__ import annotations

import json

import pytest

from embodied_rl.cli import doctor, main
from embodied_rl.correctness.gates import Finding


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *words])
    return int(caught.value.code or 0)


def test_this_machine_can_run_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    data = json.loads(capsys.readouterr().out)
    by_name = {finding["name"]: finding for finding in data["findings"]}
    assert data["ok"] is True
    assert set(by_name) == {
        *("python", "machine", "torch", "shared memory", "drawing", "maniskill", "lerobot"),
    }
    assert "a state of 42 numbers" in by_name["maniskill"]["text"]
    assert "cores" in by_name["machine"]["text"]
    if by_name["drawing"]["state"] == "warn":
        assert "mesa-vulkan-drivers" in by_name["drawing"]["text"]
        assert "simulator.observation=state" in by_name["drawing"]["text"]


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Finding:
        raise ImportError("libGL.so.1: cannot open shared object file")

    def fine() -> Finding:
        return Finding("maniskill", "ok", "runs")

    monkeypatch.setattr(doctor, "_lerobot", broken)
    monkeypatch.setattr(doctor, "_maniskill", fine)
    assert run() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    python: 3.")
    assert lines[-1] == "fail  lerobot: ImportError: libGL.so.1: cannot open shared object file"


def test_little_shared_memory_is_a_warning_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 32 * 2**20

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    found = doctor._shared_memory()
    assert found.state == "warn"
    assert "32 MiB free in /dev/shm" in found.text
    assert "--shm-size=1g" in found.text
    assert "rollout.num_workers=0" in found.text
