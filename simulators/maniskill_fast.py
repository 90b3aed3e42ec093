"""Stepping a ManiSkill scene directly, without ManiSkill's step.

On a CPU the physics is about 2 % of a ManiSkill step; the rest is Python over tensors of one row.
Here ManiSkill builds and resets the scene, and we call the same physics with the same drive
targets, then read what the task needs. The result equals the stock step up to float rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from embodied_rl.contracts import FloatArray

type Vector = npt.NDArray[Any]

CONTROL_MODES = ("pd_ee_delta_pose", "pd_ee_delta_pos", "pd_joint_delta_pos")
"""Controllers that `FastStepper` drives by itself."""

_GRASP_FORCE_N = 0.5
_GRASP_COSINE = math.cos(math.radians(85))


class FastStepper:
    """Drives one Panda scene, which ManiSkill must not rebuild afterwards."""

    def __init__(self, base: Any, task: str, control_mode: str) -> None:
        self._base, self._task, self._control_mode = base, TASKS[task], control_mode
        self._bind()

    def _bind(self) -> None:
        """Look up the simulation objects of the scene."""
        base = self._base
        self._physics = base.scene.px
        self._robot = base.agent.robot._objs[0]
        self._tcp, self._finger1, self._finger2 = (
            link._objs[0].entity
            for link in (base.agent.tcp, base.agent.finger1_link, base.agent.finger2_link)
        )
        self._joints = self._robot.active_joints
        self._root = np.array(self._robot.root_pose.p, dtype=np.float64)
        self._num_substeps = base._sim_steps_per_control
        arm = base.agent.controller.controllers["arm"]
        if self._control_mode != "pd_joint_delta_pos":
            kinematics = arm.kinematics
            self._model = kinematics.pmodel
            self._end_link = kinematics.end_link_idx
            self._joint_mask = np.asarray(kinematics.qmask.numpy(), dtype=np.int32)
        self._lower = np.broadcast_to(np.asarray(arm.config.__dict__.get("lower", 0.0)), (7,))
        self._upper = np.broadcast_to(np.asarray(arm.config.__dict__.get("upper", 0.0)), (7,))
        gripper = base.agent.controller.controllers["gripper"].config
        self._gripper_low, self._gripper_high = float(gripper.lower), float(gripper.upper)
        self._entity = {name: getattr(base, name)._objs[0] for name in self._task.actors}
        self._grasp: dict[str, bool] = {}

    def step(self, action: FloatArray) -> bool:
        """One control step with an action [A]; whether the task's success condition holds."""
        arm = self._arm_targets(np.asarray(action, dtype=np.float64))
        opening = (min(1.0, max(-1.0, float(action[-1]))) + 1) / 2
        finger = self._gripper_low + opening * (self._gripper_high - self._gripper_low)
        for joint, target in zip(self._joints[:7], arm, strict=True):
            joint.set_drive_target(float(target))
        for joint in self._joints[7:9]:
            joint.set_drive_target(finger)
        physics_step = self._physics.step
        for _ in range(self._num_substeps):
            physics_step()
        self._grasp.clear()
        return self._task.success(self)

    def forget(self) -> None:
        """Drop what was read from the scene: it was changed from outside."""
        self._grasp.clear()

    def state(self, privileged: bool) -> FloatArray:
        """The state vector in ManiSkill's own order: its full state, or what a robot measures."""
        parts = [self._robot.qpos, self._robot.qvel, *self._task.state(self, privileged)]
        state: FloatArray = np.concatenate(parts).astype(np.float32, copy=False)
        return state

    def tcp_pose(self) -> tuple[Vector, Vector]:
        """Position [3] and quaternion [4] (w, x, y, z) of the point between the fingertips."""
        pose = self._tcp.pose
        return pose.p, pose.q

    def pose_of(self, name: str) -> tuple[Vector, Vector]:
        """Position and quaternion of an actor of the task."""
        pose = self._entity[name].pose
        return pose.p, pose.q

    def gripper_opening(self) -> float:
        """How far one finger is from the closed position, in metres."""
        return float(self._robot.qpos[-1])

    def is_grasped(self, name: str) -> bool:
        """Whether both fingers press on an actor from the inside, as ManiSkill defines it."""
        if name not in self._grasp:
            self._grasp[name] = self._compute_grasp(self._entity[name])
        return self._grasp[name]

    def is_robot_static(self) -> bool:
        """Whether no arm joint moves faster than 0.2 rad/s."""
        return bool(np.abs(self._robot.qvel[:-2]).max() <= 0.2)

    def is_static(self, name: str) -> bool:
        """Whether an actor moves at most 1 cm/s and turns at most 0.5 rad/s."""
        import sapien

        body = self._entity[name].find_component_by_type(sapien.physx.PhysxRigidDynamicComponent)
        return bool(
            np.linalg.norm(body.linear_velocity) <= 1e-2
            and np.linalg.norm(body.angular_velocity) <= 0.5
        )

    def _arm_targets(self, action: Vector) -> Vector:
        qpos = self._robot.qpos
        if self._control_mode == "pd_joint_delta_pos":
            share = (np.clip(action[:7], -1, 1) + 1) / 2
            targets: Vector = qpos[:7] + self._lower + share * (self._upper - self._lower)
            return targets
        import sapien

        tcp = self._tcp.pose
        # Both controllers move at most 0.1 m per step, given in the robot's root frame.
        position = tcp.p - self._root + np.clip(action[:3], -1, 1) * 0.1
        orientation = tcp.q
        if self._control_mode == "pd_ee_delta_pose":
            turn = action[3:6] / max(1.0, float(np.linalg.norm(action[3:6])))
            # ManiSkill scales a rotation by its lower bound, -0.1 rad: the sign is flipped.
            orientation = _multiply(_euler_xyz(turn * -0.1), orientation)
        result, found, _ = self._model.compute_inverse_kinematics(
            self._end_link,
            sapien.Pose(position, orientation),
            initial_qpos=qpos,
            active_qmask=self._joint_mask,
            max_iterations=100,
        )
        return np.asarray(result)[:7] if found else qpos[:7]

    def _compute_grasp(self, target: Any) -> bool:
        force1, force2 = np.zeros(3), np.zeros(3)
        for contact in self._physics.get_contacts():
            first, second = contact.bodies[0].entity, contact.bodies[1].entity
            if second == target:
                finger, sign = first, 1.0
            elif first == target:
                finger, sign = second, -1.0
            else:
                continue
            if finger == self._finger1:
                force1 += sign * sum(point.impulse for point in contact.points)
            elif finger == self._finger2:
                force2 += sign * sum(point.impulse for point in contact.points)
        inverse_s = 1.0 / self._physics.timestep
        return _presses(force1 * inverse_s, _second_axis(self._finger1.pose.q)) and _presses(
            force2 * inverse_s, -_second_axis(self._finger2.pose.q)
        )


def _presses(force: Vector, opening: Vector) -> bool:
    strength = float(np.linalg.norm(force))
    return strength >= _GRASP_FORCE_N and float(force @ opening) >= _GRASP_COSINE * strength


def _multiply(a: Any, b: Any) -> Vector:
    """The quaternion of rotation `b` followed by `a`; both (w, x, y, z)."""
    w1, x1, y1, z1 = a
    w2, x2, y2, z2 = b
    return np.array(
        (
            w1 * w2 - x1 * x2 - y1 * y2 - z1 * z2,
            w1 * x2 + x1 * w2 + y1 * z2 - z1 * y2,
            w1 * y2 - x1 * z2 + y1 * w2 + z1 * x2,
            w1 * z2 + x1 * y2 - y1 * x2 + z1 * w2,
        )
    )


def _euler_xyz(angles: Vector) -> Vector:
    """The quaternion of turns about x, then the new y, then the new z, in radians."""
    cx, cy, cz = (math.cos(0.5 * angle) for angle in angles)
    sx, sy, sz = (math.sin(0.5 * angle) for angle in angles)
    return _multiply(_multiply((cx, sx, 0.0, 0.0), (cy, 0.0, sy, 0.0)), (cz, 0.0, 0.0, sz))


def _second_axis(quaternion: Any) -> Vector:
    """The y axis of a frame, in world coordinates."""
    w, x, y, z = quaternion
    return np.array((2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)))


class _Task:
    """Success and state of one task, in the words of `FastStepper`."""

    def __init__(
        self,
        actors: tuple[str, ...],
        success: Callable[[FastStepper], bool],
        state: Callable[[FastStepper, bool], list[Any]],
    ) -> None:
        self.actors, self.success, self.state = actors, success, state


def _pick_success(scene: FastStepper) -> bool:
    distance = np.linalg.norm(scene.pose_of("goal_site")[0] - scene.pose_of("cube")[0])
    return bool(distance <= 0.025) and scene.is_robot_static()


def _pick_state(scene: FastStepper, privileged: bool) -> list[Any]:
    tcp, orientation = scene.tcp_pose()
    goal = scene.pose_of("goal_site")[0]
    measured = [[float(scene.is_grasped("cube"))], tcp, orientation, goal]
    if not privileged:
        return measured
    cube, turned = scene.pose_of("cube")
    return [*measured, cube, turned, cube - tcp, goal - cube]


def _on_target(scene: FastStepper) -> bool:
    offset = scene.pose_of("obj")[0] - scene.pose_of("goal_region")[0]
    return bool(np.linalg.norm(offset[:2]) < 0.1)


def _push_success(scene: FastStepper) -> bool:
    return _on_target(scene) and bool(scene.pose_of("obj")[0][2] < 0.025)


def _push_state(scene: FastStepper, privileged: bool) -> list[Any]:
    if not privileged:
        return [*scene.tcp_pose()]
    return [*scene.tcp_pose(), scene.pose_of("goal_region")[0], *scene.pose_of("obj")]


def _pull_state(scene: FastStepper, privileged: bool) -> list[Any]:
    measured = [*scene.tcp_pose(), scene.pose_of("goal_region")[0]]
    return [*measured, *scene.pose_of("obj")] if privileged else measured


def _stack_success(scene: FastStepper) -> bool:
    offset = scene.pose_of("cubeA")[0] - scene.pose_of("cubeB")[0]
    on_top = np.linalg.norm(offset[:2]) <= np.linalg.norm([0.02, 0.02]) + 0.005
    on_top = on_top and abs(offset[2] - 0.04) <= 0.005
    return bool(on_top) and scene.is_static("cubeA") and not scene.is_grasped("cubeA")


def _stack_state(scene: FastStepper, privileged: bool) -> list[Any]:
    tcp, orientation = scene.tcp_pose()
    if not privileged:
        return [tcp, orientation]
    a, a_turned = scene.pose_of("cubeA")
    b, b_turned = scene.pose_of("cubeB")
    return [tcp, orientation, a, a_turned, b, b_turned, a - tcp, b - tcp, b - a]


TASKS: dict[str, _Task] = {
    "PickCube-v1": _Task(("cube", "goal_site"), _pick_success, _pick_state),
    "PullCube-v1": _Task(("obj", "goal_region"), _on_target, _pull_state),
    "PushCube-v1": _Task(("obj", "goal_region"), _push_success, _push_state),
    "StackCube-v1": _Task(("cubeA", "cubeB"), _stack_success, _stack_state),
}
"""Tasks that can be stepped directly."""
