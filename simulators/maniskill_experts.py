"""Scripted experts for ManiSkill's cube tasks, to record demonstrations with.

An expert has no memory: it looks at the true poses and decides where the hand should be heading
now. It therefore recovers by itself when noise pushes the hand away or the cube slips. Positions
are in metres in the world's frame, orientations quaternions (w, x, y, z).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from simulators.maniskill_tasks import only_task

if TYPE_CHECKING:
    from embodied_rl.contracts import Environment, Expert, FloatArray
    from simulators.config import ManiSkillConfig

type Array = npt.NDArray[np.float64]
type Pose = tuple[npt.NDArray[Any], npt.NDArray[Any]]

OPEN, CLOSED = 1.0, -1.0
CONTROL_MODE = "pd_ee_delta_pose"
_FULL_STEP_M = 0.1
# ManiSkill scales a rotation by its controller's lower bound, -0.1 rad, so its sign is flipped.
_FULL_TURN_RAD = -0.1
_GAIN = 1.6
_ROBOT_BASE = np.array([-0.615, 0.0])
_EASY_REACH_M = 0.65
_SLOWING_M = 0.15
_SHORTEST_STEP = 0.2
_CUBE_SIZE_M = 0.04
_AT_CUBE_M = 0.012
_TURNED_RAD = 0.15
_FINGER_OPEN_M = 0.03
_POINTING_DOWN = np.array([0.0, 1.0, 0.0, 0.0])


class Scene(Protocol):
    """What an expert reads of a ManiSkill environment. A pose is a position and a quaternion."""

    def tcp_pose(self) -> Pose:
        """The point between the fingertips."""
        ...

    def pose_of(self, name: str) -> Pose:
        """An actor of the scene, by its name there."""
        ...

    def gripper_opening(self) -> float:
        """How far one finger is from the closed position, in metres."""
        ...

    def is_grasped(self, name: str) -> bool:
        """Whether both fingers hold the actor."""
        ...


@dataclass(frozen=True)
class Aim:
    """Where the hand should be heading."""

    position: Array
    orientation: Array
    gripper: float
    """`OPEN` or `CLOSED`."""
    forceful: bool = False
    """Whether to keep up large steps with a stretched arm: small ones do not move a cube."""


def make(config: ManiSkillConfig, environment: Environment) -> Expert:
    """The expert for the configured task, acting on the true state of `environment`.

    Raises ValueError that lists the tasks, the control mode and the robots that have one.
    """
    plan = PLANS.get(only_task(config))
    if plan is None or config.control_mode != CONTROL_MODE or config.robot not in (None, "panda"):
        raise ValueError(
            f"no scripted expert for {config.task} with control_mode={config.control_mode} and "
            f"robot={config.robot or 'the default'}; there is one for {', '.join(sorted(PLANS))} "
            f"with control_mode={CONTROL_MODE} and robot=panda. Otherwise give "
            f"demonstrations.path, or learn from scratch by leaving out demonstrations and "
            f"imitation"
        )
    return ScriptedExpert(cast(Scene, environment), plan)


class ScriptedExpert:
    """Turns a plan's aim into actions of `pd_ee_delta_pose`."""

    def __init__(self, scene: Scene, plan: Callable[[Scene], Aim]) -> None:
        self._scene = scene
        self._plan = plan

    def __call__(self) -> FloatArray:
        """The action [7] for the present state: translation, rotation, gripper; in [-1, 1]."""
        return action_towards(self._scene.tcp_pose(), self._plan(self._scene))


def action_towards(hand: Pose, aim: Aim) -> FloatArray:
    """The action [7] that moves the hand towards an aim, as far as one control step reaches.

    Overshooting the remaining distance (gain above 1) makes up for the lag of the joint drives.
    Both parts shrink as a whole rather than per component, which keeps the direction.
    """
    position, orientation = np.asarray(hand[0], float), np.asarray(hand[1], float)
    move = _GAIN * (aim.position - position) / _FULL_STEP_M
    longest = 1.0 if aim.forceful else longest_step(position, move)
    move /= max(1.0, float(np.abs(move).max()) / longest)
    turn = rotation_vector(multiply(aim.orientation, conjugate(orientation))) / _FULL_TURN_RAD
    turn /= max(1.0, float(np.linalg.norm(turn)))
    action: FloatArray = np.concatenate([move, turn, [aim.gripper]]).astype(np.float32)
    return action


def longest_step(position: Array, direction: Array) -> float:
    """The share of a full step that the arm can follow from here in this direction, in (0, 1].

    ManiSkill's inverse kinematics gives up on large steps of a stretched arm, and the hand then
    does not move at all. The numbers are from trials on the failing states.
    """
    outward = position[:2] - _ROBOT_BASE
    reach = float(np.linalg.norm(outward))
    if outward @ direction[:2] <= 0.0:
        return 1.0
    return float(np.clip(1.0 - (reach - _EASY_REACH_M) / _SLOWING_M, _SHORTEST_STEP, 1.0))


def pick_cube(scene: Scene) -> Aim:
    """Grasp the cube, then carry it to the goal."""
    tcp, _ = scene.tcp_pose()
    if not scene.is_grasped("cube"):
        return _grasp(scene, "cube", clearance_m=0.07)
    cube, goal = scene.pose_of("cube")[0], scene.pose_of("goal_site")[0]
    return Aim(tcp + (goal - cube), _keep_heading(scene), CLOSED)


def stack_cube(scene: Scene) -> Aim:
    """Grasp cube A, carry it over cube B, lower it, let go and rise."""
    tcp, _ = scene.tcp_pose()
    cube, base = scene.pose_of("cubeA")[0], scene.pose_of("cubeB")[0]
    sideways, height = float(np.linalg.norm((cube - base)[:2])), float(cube[2] - base[2])
    heading = _keep_heading(scene)
    if sideways < _CUBE_SIZE_M / 2 and abs(height - _CUBE_SIZE_M) < 0.006:
        rise = 0.08 if scene.gripper_opening() > _FINGER_OPEN_M else 0.0
        return Aim(tcp + np.array([0.0, 0.0, rise]), heading, OPEN)
    if not scene.is_grasped("cubeA"):
        return _grasp(scene, "cubeA", clearance_m=0.09)
    above = base + np.array([0.0, 0.0, _CUBE_SIZE_M + 0.002])
    if sideways > 0.008:
        above[2] += 0.03
        if height < _CUBE_SIZE_M + 0.015:
            above[:2] = cube[:2]  # Lift first, or the cube in hand would topple the other.
    return Aim(tcp + (above - cube), heading, CLOSED)


def push_cube(scene: Scene) -> Aim:
    """Get behind the cube with a closed gripper and push it away from the robot (+x)."""
    return _slide(scene, direction=1.0)


def pull_cube(scene: Scene) -> Aim:
    """Reach over the cube with a closed gripper and drag it towards the robot (-x)."""
    return _slide(scene, direction=-1.0)


PLANS: dict[str, Callable[[Scene], Aim]] = {
    "PickCube-v1": pick_cube,
    "PullCube-v1": pull_cube,
    "PushCube-v1": push_cube,
    "StackCube-v1": stack_cube,
}


def _grasp(scene: Scene, name: str, clearance_m: float) -> Aim:
    """Come from above with open fingers, turned along the cube's faces, and close around it."""
    tcp, orientation = scene.tcp_pose()
    cube, cube_orientation = scene.pose_of(name)
    facing = downward(nearest_face(yaw_of_hand(orientation), yaw(cube_orientation)))
    sideways = float(np.linalg.norm((tcp - cube)[:2]))
    to_turn = rotation_vector(multiply(facing, conjugate(orientation)))
    if sideways < _AT_CUBE_M and abs(tcp[2] - cube[2]) < _AT_CUBE_M:
        return Aim(np.asarray(cube, float), facing, CLOSED)
    if sideways < _AT_CUBE_M and np.linalg.norm(to_turn) < _TURNED_RAD:
        return Aim(np.asarray(cube, float), facing, OPEN)
    above = clearance_m if sideways > 0.03 else 0.05
    return Aim(cube + np.array([0.0, 0.0, above]), facing, OPEN)


def _slide(scene: Scene, direction: float) -> Aim:
    """Move the cube along x: rise, get to its far side, come down, then sweep.

    The fingers spread across x, so that the flat side of the hand pushes.
    """
    tcp, _ = scene.tcp_pose()
    cube, _ = scene.pose_of("obj")
    lead = float(direction * (cube[0] - tcp[0]))
    aside = abs(float(tcp[1] - cube[1]))
    table_height = _CUBE_SIZE_M / 2
    if lead > 0.03 and aside < 0.02 and tcp[2] < 0.04:
        position = np.array([tcp[0] + 0.06 * direction, cube[1], table_height])
        return Aim(position, downward(0.0), CLOSED, forceful=True)
    if lead > 0.045 and aside < 0.03:
        position = np.array([cube[0] - 0.07 * direction, cube[1], table_height])
    else:
        position = np.array([cube[0] - 0.09 * direction, cube[1], 0.08])
    return Aim(position, downward(0.0), CLOSED)


def _keep_heading(scene: Scene) -> Array:
    return downward(yaw_of_hand(scene.tcp_pose()[1]))


def downward(yaw_rad: float) -> Array:
    """The orientation of a hand that points straight down, turned about the vertical."""
    about_z = np.array([np.cos(yaw_rad / 2), 0.0, 0.0, np.sin(yaw_rad / 2)])
    return multiply(about_z, _POINTING_DOWN)


def yaw_of_hand(orientation: npt.NDArray[Any]) -> float:
    """The angle for which `downward` comes closest to the orientation."""
    return yaw(multiply(orientation, conjugate(_POINTING_DOWN)))


def nearest_face(hand_rad: float, cube_rad: float) -> float:
    """The yaw nearest to the hand's among the four along the faces of a cube."""
    quarters = np.round((hand_rad - cube_rad) / (np.pi / 2))
    return float(cube_rad + quarters * np.pi / 2)


def multiply(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Array:
    """The quaternion of the rotation `b` followed by `a`."""
    scalar = a[0] * b[0] - a[1:] @ b[1:]
    vector = a[0] * b[1:] + b[0] * a[1:] + np.cross(a[1:], b[1:])
    product: Array = np.concatenate([[scalar], vector])
    return product


def conjugate(quaternion: npt.NDArray[Any]) -> Array:
    """The quaternion of the opposite rotation."""
    opposite: Array = np.asarray(quaternion, float) * np.array([1.0, -1.0, -1.0, -1.0])
    return opposite


def yaw(quaternion: npt.NDArray[Any]) -> float:
    """The rotation about the vertical in radians, as in the roll-pitch-yaw angles."""
    w, x, y, z = quaternion
    return float(np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)))


def rotation_vector(quaternion: npt.NDArray[Any]) -> Array:
    """Axis times angle in radians [3], of at most pi length."""
    scalar = float(quaternion[0])
    vector: Array = np.asarray(quaternion[1:], float)
    sine = float(np.linalg.norm(vector))
    if sine < 1e-9:
        return np.zeros(3)
    # Quaternions q and -q are the same rotation; this takes the shorter way round.
    angle = 2 * np.arctan2(sine if scalar >= 0 else -sine, abs(scalar))
    turn: Array = vector * (angle / sine)
    return turn
