"""Stepping a ManiSkill scene through ManiSkill's own step, and what both ways of stepping offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from embodied_rl.contracts import FloatArray


class Stepper(Protocol):
    """How one control step is run and read; the direct way or ManiSkill's."""

    def step(self, action: FloatArray) -> bool: ...

    def state(self, privileged: bool) -> FloatArray: ...

    def forget(self) -> None: ...

    def tcp_pose(self) -> tuple[Any, Any]: ...

    def pose_of(self, name: str) -> tuple[Any, Any]: ...

    def gripper_opening(self) -> float: ...

    def is_grasped(self, name: str) -> bool: ...


class StockStepper:
    """Runs a scene through ManiSkill's own step; any task."""

    def __init__(self, base: Any, get_obs: Any) -> None:
        import torch

        self._torch, self._base, self._get_obs = torch, base, get_obs

    def forget(self) -> None:
        """Nothing is kept of the scene."""

    def step(self, action: FloatArray) -> bool:
        """One control step; whether the task's success condition holds."""
        tensor = self._torch.from_numpy(np.asarray(action, dtype=np.float32))[None]
        info = self._base.step(tensor)[4]
        return bool(info["success"][0]) if "success" in info else False

    def state(self, privileged: bool) -> FloatArray:
        """ManiSkill's flat state, or in rgb mode what a robot can measure."""
        from mani_skill.utils import common

        base = self._base
        info = base.get_info()
        if privileged:
            flat = self._get_obs(info)
        else:
            measured = {"agent": base._get_obs_agent(), "extra": base._get_obs_extra(info)}
            flat = common.flatten_state_dict(measured, use_torch=True)
        state: FloatArray = flat[0].cpu().numpy().astype(np.float32)
        return state

    def tcp_pose(self) -> tuple[Any, Any]:
        """Position and quaternion of the point between the fingertips."""
        pose = self._base.agent.tcp.pose
        return pose.p[0].numpy(), pose.q[0].numpy()

    def pose_of(self, name: str) -> tuple[Any, Any]:
        """Position and quaternion of an actor, by the task's attribute."""
        pose = getattr(self._base, name).pose
        return pose.p[0].numpy(), pose.q[0].numpy()

    def gripper_opening(self) -> float:
        """How far one finger is from the closed position, in metres."""
        return float(self._base.agent.robot.get_qpos()[0, -1])

    def is_grasped(self, name: str) -> bool:
        """Whether both fingers hold the actor."""
        return bool(self._base.agent.is_grasping(getattr(self._base, name))[0])
