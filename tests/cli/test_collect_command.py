"""`embodied-rl collect`: an expert's successes as a data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import outside
from embodied_rl.cli import main


@pytest.fixture
def main_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of the line, which is installed as a part."""
    outside.install(tmp_path / "parts", {"simulator": {"line": "line_world:LineConfig"}})
    monkeypatch.syspath_prepend(str(tmp_path / "parts"))
    file = tmp_path / "line.yaml"
    file.write_text(
        "simulator: line\npolicy: gaussian_mlp\nalgorithm: ppo\n"
        "demonstrations: {episodes: 50}\nimitation: {steps: 10}\n"
    )
    return file


def collect(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["collect", *words])
    return int(caught.value.code or 0)


def test_successes_are_counted_and_written(
    main_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "data"
    words = [str(main_file), "--output", str(output), "--episodes", "3", "simulator.limit=9"]
    assert collect(*words, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["path"] == str(output)
    assert data["episodes"] == 3
    assert data["attempts"] >= 3
    information = json.loads((output / "meta" / "info.json").read_text())
    assert information["codebase_version"].startswith("v3")
    assert information["total_episodes"] == 3
    assert information["total_frames"] == data["frames"]
    assert collect(*words) == 1
    assert f"{output} is there already" in capsys.readouterr().err


def test_what_cannot_be_collected(
    main_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(str(main_file), "--episodes", "0") == 2
    assert "demonstrations.episodes: got 0." in capsys.readouterr().err
    assert collect(str(main_file), "simulator=gymnasium", "--output", str(tmp_path / "x")) == 1
    assert "no scripted expert for Pendulum-v1" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    bare = tmp_path / "bare.yaml"
    bare.write_text("simulator: line\npolicy: gaussian_mlp\nalgorithm: ppo\n")
    assert collect(str(bare)) == 2
    assert "sets no demonstrations; add demonstrations.episodes=50" in capsys.readouterr().err
