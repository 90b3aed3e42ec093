"""The conventions in which a policy and its environment speak to each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


class ContractMismatch(ValueError):
    """A policy meets a simulator, data set or robot that it was not made for."""


@dataclass(frozen=True)
class Camera:
    """One camera as the policy sees it: upright uint8 RGB images of [height, width, 3]."""

    name: str
    height: int
    width: int


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

    @property
    def fingerprint(self) -> str:
        """A short hash of all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def require_equal(self, other: Contract, mine: str, theirs: str) -> None:
        """Raise `ContractMismatch` naming each field in which `other` differs."""
        ours, others = asdict(self), asdict(other)
        lines = [
            f"  {name}: {mine} has {ours[name]!r}, {theirs} has {others[name]!r}"
            for name in ours
            if ours[name] != others[name]
        ]
        if lines:
            raise ContractMismatch(
                f"{mine} does not fit {theirs}:\n" + "\n".join(lines) + "\nUse the checkpoint with "
                "the simulator options that it was trained with, or train a policy for these."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into an equal contract."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Contract:
        """The contract that `to_json` wrote."""
        values = dict(data)
        values["cameras"] = tuple(Camera(**camera) for camera in values["cameras"])
        for name in ("action_low", "action_high"):
            values[name] = tuple(values[name])
        return cls(**values)
