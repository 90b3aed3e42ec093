"""What the simulator cannot give is refused before any work is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.run_config import RunConfig
from embodied_rl.training.fit import require_fit
from embodied_rl.training.loop import train
from line_world import Line, LineConfig
from policies.config import FlowMLPConfig

SPEC = Line(LineConfig()).spec  # 6 steps long


def config(chunk: int = 2, **options: Any) -> RunConfig:
    given: dict[str, Any] = {
        "simulator": LineConfig(),
        "policy": FlowMLPConfig(chunk=chunk),
        "algorithm": {"type": "grpo", "group_size": 100},
        "evaluation": {"episodes": 10},
    }
    return RunConfig.model_validate(given | options)


def test_states_that_are_asked_for_must_be_there() -> None:
    few = replace(SPEC, num_initial_states=40)
    require_fit(config(), few)  # 10 are held out; a group of 100 shares one of the 20 others
    with pytest.raises(ValueError, match=r"11 evaluation episodes asked for, but of 40 .* only 10"):
        require_fit(config(evaluation={"episodes": 11}), few)
    often = {"episodes": 10, "every": 2, "quick_episodes": 11}
    with pytest.raises(ValueError, match=r"only 10 are held out for the quick evaluation"):
        require_fit(config(evaluation=often), few)
    require_fit(config(evaluation=often), few, reinforces=False)
    require_fit(config(evaluation=often, iterations=0), few)
    one = replace(SPEC, num_initial_states=1)
    with pytest.raises(ValueError, match="1 initial states are too few to hold some out"):
        require_fit(config(evaluation={"episodes": 1}), one)


def test_an_episode_of_one_decision_has_no_middle() -> None:
    branches = {"type": "grpo", "branches": 1}
    visited = {"visited_share": 0.5}
    require_fit(config(5, algorithm=branches, practice=visited), SPEC)
    require_fit(config(6), SPEC)
    for options, name in (
        ({"algorithm": branches}, r"algorithm\.branches=1"),
        ({"practice": visited}, r"practice\.visited_share=0\.5"),
        (
            {"practice": visited | {"demonstrated_share": 0.5}, "imitation": {},
             "demonstrations": {}},
            r"practice\.visited_share=0\.5",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name} begins episodes .* policy\.chunk=6"):
            require_fit(config(6, **options), SPEC)


def test_a_run_is_refused_before_it_begins(tmp_path: Path) -> None:
    given = config(
        6, runs_dir=tmp_path, practice={"visited_share": 0.5}, imitation={}, demonstrations={},
        rollout={"num_slots": 2, "num_workers": 0},
    )  # fmt: skip
    with pytest.raises(ValueError, match="an episode of 6 steps is one decision"):
        train(given)
    assert not (given.directory / "demonstrations").exists()
