"""What a ManiSkill scene says of its observations and actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.contracts import Camera, Contract, HandMotion, StatePart
from simulators.maniskill_tasks import FAST_TASKS, only_task

if TYPE_CHECKING:
    from simulators.config import ManiSkillConfig

_GRIPPER_MODES = ("pd_ee_delta_pose", "pd_ee_delta_pos", "pd_joint_delta_pos")


def make_contract(config: ManiSkillConfig, base: Any, state_dim: int) -> Contract:
    """The conventions of a built scene."""
    space = base.single_action_space
    size = config.image_size
    cameras = tuple(sorted(base.scene.sensors)) if config.gives_images else ()
    return Contract(
        state_dim=state_dim,
        action_dim=int(space.shape[0]),
        action_low=tuple(float(x) for x in space.low),
        action_high=tuple(float(x) for x in space.high),
        control_mode=config.control_mode,
        control_hz=float(base.control_freq),
        gripper="+1 opens, -1 closes" if config.control_mode in _GRIPPER_MODES else "task's own",
        rotation=(
            "Euler XYZ change of the present pose, -0.1 rad per unit"
            if config.control_mode == "pd_ee_delta_pose"
            else "none"
        ),
        cameras=tuple(Camera(name, size, size) for name in cameras),
        state_parts=_state_parts(only_task(config), base.agent.uid, state_dim),
        hand=_hand_motion(base),
    )


def _hand_motion(base: Any) -> HandMotion | None:
    """What an action of a controller that moves and turns the hand a little means; None for others.
    ManiSkill scales rotations by their lower bound."""
    controllers = getattr(base.agent.controller, "controllers", {})
    arm: Any = getattr(controllers.get("arm"), "config", None)
    along_base = getattr(arm, "frame", "") == "root_translation:root_aligned_body_rotation"
    if not (along_base and arm.use_delta and hasattr(arm, "rot_lower")):
        return None
    if not arm.normalize_action:
        return HandMotion(1.0, 1.0, "euler_xyz")
    metres, radians = np.unique(arm.pos_upper), np.unique(arm.rot_lower)
    if len(metres) != 1 or len(radians) != 1:
        return None
    return HandMotion(float(metres[0]), float(radians[0]), "euler_xyz")


def _state_parts(task: str, robot: str, state_dim: int) -> tuple[StatePart, ...]:
    """What the entries of a Panda's state are in the tasks of which we know it, privileged or not;
    nothing for others."""
    if task not in FAST_TASKS or robot != "panda":
        return ()
    parts = [StatePart("joints", 7), StatePart("gripper_joints", 2), StatePart("speeds", 9)]
    if task == "PickCube-v1":
        parts.append(StatePart("is_grasped", 1))
    parts += [StatePart("eef_position", 3), StatePart("eef_rotation", 4, "quaternion_wxyz")]
    rest = state_dim - sum(part.size for part in parts)
    return (*parts, StatePart("task", rest)) if rest else tuple(parts)
