"""What we know of ManiSkill's tasks beside their code: sentences, assets, what runs here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulators.config import ManiSkillConfig

INSTRUCTIONS: dict[str, str] = {
    "LiftPegUpright-v1": "lift the peg and stand it upright",
    "PegInsertionSide-v1": "insert the peg into the hole in the side of the box",
    "PickCube-v1": "pick up the red cube and move it to the green goal",
    "PickCubeSO100-v1": "pick up the red cube and move it to the green goal",
    "PlaceSphere-v1": "put the blue sphere into the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCube-v1": "pull the cube onto the target",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "PushCube-v1": "push the cube onto the target",
    "PushT-v1": "push the T onto its outline",
    "RollBall-v1": "roll the ball onto the target",
    "StackCube-v1": "stack the red cube on the green cube",
    "StackPyramid-v1": "build a pyramid of the three cubes",
}
"""What each task asks for. Add an entry to give your own task a sentence."""

PANDA_TASKS = frozenset(INSTRUCTIONS) - {"PickCubeSO100-v1", "PushT-v1"}
"""Tabletop tasks that run with the plain `panda`; several name a robot with a camera by default."""

FAST_TASKS = frozenset({"PickCube-v1", "PullCube-v1", "PushCube-v1", "StackCube-v1"})
"""Tasks that `simulators.maniskill_fast` can step."""

EXPERT_TASKS = frozenset({"PickCube-v1", "PullCube-v1", "PushCube-v1", "StackCube-v1"})
"""Tasks that `simulators.maniskill_experts` can solve."""

# ManiSkill registers these downloads under the scene's or robot's name, not under the task's.
_UNREGISTERED_ASSETS = {
    "AssemblingKits-v1": "assembling_kits",
    "PickClutterYCB-v1": "ycb",
    "PickSingleYCB-v1": "ycb",
    "TurnFaucet-v1": "partnet_mobility_faucet",
}


@dataclass(frozen=True)
class TaskInfo:
    """One registered task."""

    name: str
    max_episode_steps: int | None
    has_fast_path: bool
    has_expert: bool
    missing_assets: tuple[str, ...]
    """Downloads that it needs and that are not here."""


def instruction_for(task: str, override: str | None) -> str:
    """What the task asks for: the override, our sentence, or words made from the task's name."""
    if override is not None:
        return override
    if task in INSTRUCTIONS:
        return INSTRUCTIONS[task]
    name = task.rpartition("-v")[0] or task
    spaced = "".join(f" {c.lower()}" if c.isupper() else c for c in name)
    return spaced.strip().replace("  ", " ")


def only_task(config: ManiSkillConfig) -> str:
    """The task of options that name one; ValueError where they name several."""
    if not isinstance(config.task, str):
        raise ValueError(f"one scene runs one task, got {', '.join(config.task)}")
    return config.task


def require_task(task: str) -> Any:
    """ManiSkill's registration of a task whose assets are here.

    Raises ValueError naming near matches if there is no such task, and FileNotFoundError with the
    download commands if assets are missing, before anything could ask on standard input.
    """
    registered = _registered()
    if task not in registered:
        near = difflib.get_close_matches(task, registered, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"ManiSkill has no task {task!r}{hint} `embodied-rl list tasks` shows all of them."
        )
    missing = missing_assets(task)
    if missing:
        commands = "\n".join(
            f"  python -m mani_skill.utils.download_asset {asset} -y" for asset in missing
        )
        raise FileNotFoundError(
            f"{task} needs assets that are not here: {', '.join(missing)}. Download them with\n"
            f"{commands}"
        )
    return registered[task]


def missing_assets(task: str) -> tuple[str, ...]:
    """Names of the downloads that a task needs and that are not on this machine."""
    from mani_skill.utils import assets

    wanted = list(assets.DATA_GROUPS.get(task, ()))
    if task in _UNREGISTERED_ASSETS:
        wanted.append(_UNREGISTERED_ASSETS[task])
    robots = getattr(_registered()[task].cls, "SUPPORTED_ROBOTS", ())
    default_robot = robots[0] if robots and task not in PANDA_TASKS else None
    wanted += _robot_assets(default_robot)
    missing = []
    for name in dict.fromkeys(wanted):
        parts = _sources_of(name)
        if any(not assets.is_data_source_downloaded(part) for part in parts):
            missing.append(name)
    return tuple(missing)


def list_tasks() -> list[TaskInfo]:
    """All registered tasks, by name, without building any."""
    return [
        TaskInfo(
            name=name,
            max_episode_steps=spec.max_episode_steps,
            has_fast_path=name in FAST_TASKS,
            has_expert=name in EXPERT_TASKS,
            missing_assets=missing_assets(name),
        )
        for name, spec in sorted(_registered().items())
    ]


def _registered() -> dict[str, Any]:
    import mani_skill.envs  # noqa: F401  importing registers the tasks
    from mani_skill.utils.registration import REGISTERED_ENVS

    registered: dict[str, Any] = REGISTERED_ENVS
    return registered


def _sources_of(name: str) -> list[str]:
    """The single downloads behind a name that may stand for a group of groups."""
    from mani_skill.utils import assets

    if name in assets.DATA_SOURCES:
        return [name]
    return [part for child in assets.DATA_GROUPS.get(name, ()) for part in _sources_of(child)]


def _robot_assets(robot: Any) -> list[str]:
    from mani_skill.agents.registration import REGISTERED_AGENTS

    if not isinstance(robot, str) or robot not in REGISTERED_AGENTS:
        return []
    return list(REGISTERED_AGENTS[robot].asset_download_ids or ())
