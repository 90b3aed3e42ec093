"""Demonstrations that can be played again, for episodes that begin within them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodied_rl.contracts import Contract
from embodied_rl.rollout.practice import Demonstration
from embodied_rl.run_config import DemonstrationsConfig
from embodied_rl.training.demonstrations import load_actions
from embodied_rl.training.lerobot_folder import (
    OUR_FILE,
    BadDemonstrations,
    demonstrations_folder,
)
from embodied_rl.training.run import Run

_INSTEAD = "Record others with `embodied-rl collect`, or set practice.demonstrated_share=0"


def demonstrations_to_begin_in(run: Run, contract: Contract) -> list[Demonstration]:
    """Those of the run, if its options ask for episodes that begin within them."""
    options = run.config.demonstrations
    if not (run.config.practice.demonstrated_share and options):
        return []
    path = demonstrations_folder(run.directory, contract, options)
    simulator = run.config.simulator.model_dump(mode="json")
    return replayable(path, simulator, contract, options)


def replayable(
    path: Path, simulator: dict[str, Any], contract: Contract, options: DemonstrationsConfig
) -> list[Demonstration]:
    """The first episodes of a data set with their initial states.

    Raises `BadDemonstrations` where playing the recorded actions would not lead through the
    recorded states: if the initial states are not known, the executed actions had noise, or the
    simulator had other options.
    """
    actions = load_actions(path, contract, options)
    file = path / OUR_FILE
    if not file.is_file():
        raise BadDemonstrations(
            f"episodes cannot begin within {path}: it has no {OUR_FILE}, so the initial states of "
            f"its episodes are not known. {_INSTEAD}"
        )
    description = json.loads(file.read_text())
    if description["action_noise"]:
        raise BadDemonstrations(
            f"episodes cannot begin within {path}: it was recorded with "
            f"action_noise={description['action_noise']}, and the noise is not in its actions. "
            f"{_INSTEAD}"
        )
    _require_same(path, description["simulator"], simulator)
    return [
        Demonstration(str(episode["task"]), int(episode["initial_state"]), demonstrated.numpy())
        for episode, demonstrated in zip(description["episodes"], actions, strict=False)
    ]


def _require_same(path: Path, recorded: dict[str, Any], given: dict[str, Any]) -> None:
    lines = [
        f"  simulator.{name}: recorded with {recorded.get(name)!r}, the run has {given.get(name)!r}"
        for name in sorted(recorded.keys() | given.keys())
        if recorded.get(name) != given.get(name)
    ]
    if lines:
        raise BadDemonstrations(
            f"episodes cannot begin within {path}, which has another simulator:\n"
            + "\n".join(lines)
            + f"\n{_INSTEAD}"
        )
