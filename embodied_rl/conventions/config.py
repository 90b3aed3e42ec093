"""A checkpoint's convention, as options. The named ones are in `known`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from embodied_rl.config import Config
from embodied_rl.contracts import short_hash
from embodied_rl.contracts.convention import Orientation, Rotation

NO_CONVENTION = "none"
"""What a policy's contract says that speaks as its simulator does."""


class GripperConfig(Config):
    """What the last entry of an action means."""

    open: float
    """The command that opens the gripper."""
    closed: float
    threshold: float | None = None
    """Between the two; what lies on a command's side of it becomes that command. Without one,
    commands in between stay in between."""

    @model_validator(mode="after")
    def _commands_differ(self) -> Self:
        low, high = sorted((self.open, self.closed))
        if low == high:
            raise ValueError(f"open={self.open} and closed={self.closed} must differ")
        if self.threshold is not None and not low < self.threshold < high:
            raise ValueError(
                f"threshold={self.threshold} must lie between closed={self.closed} and "
                f"open={self.open}"
            )
        return self


class HandConfig(Config):
    """What the first six entries of an action mean: how far the hand moves and turns along the axes
    of the robot's base."""

    metres_per_unit: float = Field(gt=0.0)
    radians_per_unit: float
    """May be negative, as in ManiSkill; 0 would never turn."""
    rotation: Rotation

    @model_validator(mode="after")
    def _three_numbers_that_turn(self) -> Self:
        if self.rotation.startswith("quaternion"):
            raise ValueError(f"rotation={self.rotation} has four numbers, an action has three")
        if self.radians_per_unit == 0.0:
            raise ValueError("radians_per_unit=0 would never turn the hand")
        return self


class ConventionConfig(Config):
    """How a checkpoint speaks, whatever the simulator."""

    name: str = "inline"
    orientation: Orientation = "upright"
    """How the images that it saw in training show the scene."""
    orientations: dict[str, Orientation] = Field(default_factory=dict)
    """The same for single cameras of the simulator, where they differ."""
    cameras: dict[str, str] = Field(default_factory=dict)
    """The simulator's camera for each image of the checkpoint, in its order; used for those that
    exist on both sides, where `policy.cameras` says nothing."""
    state: dict[str, Rotation | None] = Field(default_factory=dict)
    """The parts of the simulator's state that it sees, in order, and what rotations become. Empty
    takes the state as the simulator gives it."""
    hand: HandConfig | None = None
    """Without it, all entries of an action but the gripper's are as the simulator has them."""
    gripper: GripperConfig | None = None
    """Without it, so is the gripper's."""
    datasets: tuple[str, ...] = ()
    """Patterns for the names of statistics (`unnorm_key`) of data that were recorded like this."""

    @property
    def fingerprint(self) -> str:
        """A short hash of what it says; its name does not count."""
        return short_hash(self.model_dump(mode="json", exclude={"name", "datasets"}))
