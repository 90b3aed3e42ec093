"""The report is one page that needs nothing else, whatever the run left behind."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.run_config import LoggingConfig
from embodied_rl.training.metrics import MetricsLog
from embodied_rl.training.report import write_report

LINE = "PickCube-v1: imitation 47.0 % [40.2, 53.9] → RL 92.5 % [88.0, 95.4]"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(path.read_text())
        self.text = " ".join(self.words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for n, v in attrs if n in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def run_folder(folder: Path, result: dict[str, Any] | None, config: str = "name: x\n") -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    log = MetricsLog(folder, LoggingConfig(), "run", {})
    for step in (50, 100):
        log.log("imitation", step, {"loss": 1.0 / step})
    log.log("imitation", 100, {"open_loop_error": 0.125})
    for step in (1, 2, 3):
        shares = {"percent_infer": 20.0, "percent_wait": 50.0, "percent_learn": 30.0}
        values = {"success_rate": step / 4, "approx_kl": float("nan"), "value_loss": 0.1 * step}
        log.log("rl", step, values | shares)
    log.close()
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_finished_run_shows_its_result_and_curves(tmp_path: Path) -> None:
    result = {"line": LINE, "env_steps": 123456, "wall_s": 61.0, "seed": 3}
    page = Page(write_report(run_folder(tmp_path / "r", result)))
    assert LINE in page.text and "123,456 control steps" in page.text and "seed 3" in page.text
    assert "success rate of training episodes" in page.text and "imitation loss" in page.text
    # All its values are NaN: there is no curve to draw.
    assert "KL divergence" not in page.text
    assert page.tags.count("svg") == 4
    assert "action error after imitation: 0.125" in page.text
    assert "infer 20 %, wait 50 %, learn 30 %" in page.text


def test_it_asks_the_network_for_nothing(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r", {"line": LINE})
    (folder / "videos").mkdir()
    (folder / "videos" / "final_state_1_success.mp4").write_bytes(b"film")
    path = write_report(folder)
    page = Page(path)
    assert [link for link in page.links if not link.startswith(("#", "data:"))] == []
    assert not re.search(r"@import|url\((?!['\"]?#)", path.read_text())
    assert not {"script", "link", "iframe", "img"} & set(page.tags)


def test_what_a_run_says_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = run_folder(tmp_path / "r", {"line": evil, "seed": evil}, f"name: {evil}\n")
    (folder / "videos").mkdir()
    (folder / "videos" / "a<b>_success.mp4").write_bytes(b"film")
    page = Page(write_report(folder))
    assert "script" not in page.tags and "b" not in page.tags
    assert page.text.count(evil) == 3 and "a<b>_success" in page.text


@pytest.mark.parametrize("result", [None, {}, {"seed": 1}])
def test_an_unfinished_or_odd_result_is_no_obstacle(
    tmp_path: Path, result: dict[str, Any] | None
) -> None:
    page = Page(write_report(run_folder(tmp_path / "r", result)))
    assert "not finished; last phase: rl" in page.text


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    page = Page(write_report(tmp_path))
    assert "last phase: none yet" in page.text and "no policy is saved yet" in page.text


def test_versions_come_from_the_policy(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r", None)
    (folder / "policies" / "start").mkdir(parents=True)
    description = {"versions": {"torch": "2.11.0", "numpy": "2.3"}}
    (folder / "policies" / "start" / "policy.json").write_text(json.dumps(description))
    assert "torch 2.11.0, numpy 2.3" in Page(write_report(folder)).text


def test_large_films_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.training.report._LARGEST_VIDEO_BYTES", 10)
    folder = run_folder(tmp_path / "r", None)
    (folder / "videos").mkdir()
    (folder / "videos" / "small.mp4").write_bytes(b"x" * 10)
    (folder / "videos" / "large.mp4").write_bytes(b"x" * 11)
    page = Page(write_report(folder))
    assert page.tags.count("video") == 1 and "small" in page.text and "large" not in page.text


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"not a run's folder: it has no config\.yaml"):
        write_report(tmp_path)
