"""The conventions of public checkpoints.

LIBERO's images come upside down, and those checkpoints were trained on images turned by 180
degrees: of the upright scene, these are mirror images. Its controller (robosuite's OSC_POSE) takes
axis-angle and moves 0.05 m and 0.5 rad per unit; -1 opens the gripper and +1 closes it.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import BeforeValidator

from embodied_rl.contracts.convention import Rotation
from embodied_rl.conventions.config import ConventionConfig, GripperConfig, HandConfig

_OSC_POSE = HandConfig(metres_per_unit=0.05, radians_per_unit=0.5, rotation="axis_angle")
_LIBERO_STATE: dict[str, Rotation | None] = {
    "eef_position": None,
    "eef_rotation": "axis_angle",
    "gripper_joints": None,
}
_THIRD_PERSON, _WRIST = "agentview", "robot0_eye_in_hand"

_ALL = (
    # openpi's examples/libero and lerobot's LIBERO processor: the gripper as the simulator has it.
    ConventionConfig(
        name="libero_openpi",
        orientation="mirrored",
        cameras={
            "base_0_rgb": _THIRD_PERSON,
            "left_wrist_0_rgb": _WRIST,
            "image": _THIRD_PERSON,
            "image2": _WRIST,
        },
        state=_LIBERO_STATE,
        hand=_OSC_POSE,
        gripper=GripperConfig(open=-1.0, closed=1.0),
    ),
    # OpenVLA, OpenVLA-OFT and what was made of them (SimpleVLA-RL, RLinf): their data loader turns
    # the gripper into 1 for open and 0 for closed, their evaluation rounds it and turns it back.
    ConventionConfig(
        name="libero_openvla",
        orientation="mirrored",
        cameras={"full_image": _THIRD_PERSON, "wrist_image": _WRIST},
        state=_LIBERO_STATE,
        hand=_OSC_POSE,
        gripper=GripperConfig(open=1.0, closed=0.0, threshold=0.5),
        datasets=("libero_*",),
    ),
    # BridgeData V2 on a WidowX, also in SIMPLER: metres and roll, pitch, yaw in radians.
    ConventionConfig(
        name="bridge_openvla",
        cameras={"full_image": "3rd_view_camera"},
        hand=HandConfig(metres_per_unit=1.0, radians_per_unit=1.0, rotation="roll_pitch_yaw"),
        gripper=GripperConfig(open=1.0, closed=0.0, threshold=0.5),
        datasets=("bridge_*",),
    ),
    # ManiSkill's pd_ee_delta_pose of the Panda. It scales rotations by its lower bound.
    ConventionConfig(
        name="maniskill_ee_delta",
        hand=HandConfig(metres_per_unit=0.1, radians_per_unit=-0.1, rotation="euler_xyz"),
        gripper=GripperConfig(open=1.0, closed=-1.0),
    ),
    # Any of ManiSkill's controllers of the Panda that ends with the gripper, such as
    # pd_joint_delta_pos: the arm as it is.
    ConventionConfig(name="maniskill_arm", gripper=GripperConfig(open=1.0, closed=-1.0)),
)

KNOWN = {convention.name: convention for convention in _ALL}


def _named(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in KNOWN:
        near = difflib.get_close_matches(value, KNOWN, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"no convention is called {value!r}{hint}; known: {', '.join(KNOWN)}. Your own is "
            f"written inline, such as {{gripper: {{open: 1, closed: 0, threshold: 0.5}}}}"
        )
    return KNOWN[value]


Convention = Annotated[ConventionConfig, BeforeValidator(_named)]
"""A known convention by its name, or a new one inline."""
