"""The conventions in which a policy and its environment speak to each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

type Rotation = Literal[
    "axis_angle", "euler_xyz", "roll_pitch_yaw", "quaternion_xyzw", "quaternion_wxyz"
]
"""Numbers that stand for a rotation. `euler_xyz` turns about x, then the new y, then the new z;
`roll_pitch_yaw` about x, then y, then z of the frame that stays."""

type Orientation = Literal["upright", "mirrored", "upside_down", "turned"]
"""How an image shows the scene: as it is, left and right exchanged, top and bottom exchanged (as
OpenGL stores it), or turned by 180 degrees."""

_MAY_BE_UNSAID = {
    "convention": "",
    "convention_hash": "",
    "statistics": "",
    "statistics_hash": "",
    "state_parts": (),
    "hand": None,
}
"""What one side may not know, and how it says so. Then it is neither compared nor written down."""


class ContractMismatch(ValueError):
    """A policy meets a simulator, data set or robot that it was not made for."""


@dataclass(frozen=True)
class Camera:
    """One camera as the simulator gives it: uint8 RGB images of [height, width, 3]."""

    name: str
    height: int
    width: int
    orientation: Orientation = "upright"


@dataclass(frozen=True)
class StatePart:
    """Entries of the state vector that belong together."""

    name: str
    """Such as `eef_position`, `eef_rotation`, `gripper_joints`; conventions pick parts by it."""
    size: int
    rotation: Rotation | None = None
    """How it stands for a rotation, if it does."""


@dataclass(frozen=True)
class HandMotion:
    """What an action whose first six entries move the hand means: three of translation, three of
    rotation, both along the axes of the robot's base."""

    metres_per_unit: float
    radians_per_unit: float
    """May be negative, as in ManiSkill."""
    rotation: Rotation


@dataclass(frozen=True)
class Contract:
    """The conventions that a policy and its environment share; it travels with the checkpoint.

    Two contracts that differ in any field must not be used together: `require_equal` says which.
    """

    state_dim: int
    """Entries of the state vector; 0 when the policy sees images alone."""
    action_dim: int
    """Entries of one action in the environment's own convention, gripper included."""
    action_low: tuple[float, ...]
    """Smallest allowed action, per dimension, in the environment's units."""
    action_high: tuple[float, ...]
    control_mode: str
    """What an action means, such as `pd_ee_delta_pose`."""
    control_hz: float
    """Control steps per second."""
    gripper: str
    """Gripper convention, such as `+1 opens, -1 closes`, or `none`."""
    rotation: str
    """Rotation representation of the action, such as `axis-angle delta`, or `none`."""
    cameras: tuple[Camera, ...] = ()
    """In the order in which the policy takes them."""
    state_parts: tuple[StatePart, ...] = ()
    """What the entries of the state are, in order, where the simulator tells."""
    hand: HandMotion | None = None
    """For actions that move the hand, where the simulator tells how far."""
    convention: str = ""
    """Said by policies alone: the convention that their checkpoint speaks, or `none`."""
    convention_hash: str = ""
    statistics: str = ""
    """Said by policies alone: which statistics scale actions and states, such as `QUANTILES`."""
    statistics_hash: str = ""

    @property
    def fingerprint(self) -> str:
        """A short hash of all fields that are said."""
        return short_hash(self.to_json())

    def require_equal(self, other: Contract, mine: str, theirs: str) -> None:
        """Raise `ContractMismatch` naming each field in which `other` differs. What only one side
        says is not compared (`_MAY_BE_UNSAID`)."""
        ours, others = asdict(self), asdict(other)
        lines = [
            f"  {name}: {mine} has {ours[name]!r}, {theirs} has {others[name]!r}"
            for name in ours
            if ours[name] != others[name]
            and not (name in _MAY_BE_UNSAID and _MAY_BE_UNSAID[name] in (ours[name], others[name]))
        ]
        if lines:
            raise ContractMismatch(
                f"{mine} does not fit {theirs}:\n" + "\n".join(lines) + "\nUse the checkpoint with "
                "the simulator options that it was trained with, or train a policy for these."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into an equal contract."""
        said = {
            name: value
            for name, value in asdict(self).items()
            if name not in _MAY_BE_UNSAID or value != _MAY_BE_UNSAID[name]
        }
        data: dict[str, Any] = json.loads(json.dumps(said))
        for camera in data["cameras"]:
            if camera["orientation"] == "upright":
                del camera["orientation"]  # Folders written before there was another have none.
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Contract:
        """The contract that `to_json` wrote."""
        values = dict(data)
        values["cameras"] = tuple(Camera(**camera) for camera in values["cameras"])
        for name in ("action_low", "action_high"):
            values[name] = tuple(values[name])
        values["state_parts"] = tuple(StatePart(**part) for part in values.get("state_parts", ()))
        if values.get("hand"):
            values["hand"] = HandMotion(**values["hand"])
        return cls(**values)


def short_hash(data: Any) -> str:
    """The first twelve digits of the hash of plain data."""
    text = json.dumps(data, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
