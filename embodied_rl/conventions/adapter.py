"""Between a checkpoint that speaks one convention and a simulator that speaks another.

Only what goes into a policy and comes out of it is changed: log-probabilities are those of what the
checkpoint itself says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied_rl.contracts import Contract, ContractMismatch, Observation
from embodied_rl.contracts.convention import Orientation, Rotation
from embodied_rl.conventions.config import NO_CONVENTION, ConventionConfig, GripperConfig
from embodied_rl.conventions.rotations import converted

_HAND_CONTROL = "simulator.control_mode=pd_ee_delta_pose"
_FLIPPED_DIMS: dict[Orientation, frozenset[int]] = {
    "upright": frozenset(),
    "mirrored": frozenset({2}),
    "upside_down": frozenset({1}),
    "turned": frozenset({1, 2}),
}
"""Dimensions of images [B, height, width, 3] that are reversed in comparison with the scene."""

_GRIPPER = re.compile(r"([+-]?[\d.]+) opens, ([+-]?[\d.]+) closes")


@dataclass(frozen=True)
class Adapter:
    """Turns a simulator's observations into a checkpoint's, and actions into each other's."""

    convention: ConventionConfig | None
    """The checkpoint's; None speaks as the simulator does."""
    simulator: Contract
    reads_state: bool = True
    """Whether the checkpoint sees a state at all."""

    def __post_init__(self) -> None:
        """Raises ContractMismatch naming the field that cannot be adapted, and the cure."""
        # The contract of a saved policy tells in whose convention it learned.
        self.contract.require_equal(
            self.simulator, "the policy with these options", "the saved policy"
        )
        if self.convention is not None:
            _require_adaptable(self.convention, self.simulator, self.reads_state)

    @property
    def name(self) -> str:
        """The convention's, or `none`."""
        return self.convention.name if self.convention else NO_CONVENTION

    @property
    def contract(self) -> Contract:
        """The simulator's, and whose convention the policy speaks."""
        said = self.convention.fingerprint if self.convention else NO_CONVENTION
        return replace(self.simulator, convention=self.name, convention_hash=said)

    @property
    def checkpoint(self) -> Contract:
        """The simulator's contract, with as many entries of the state as the checkpoint sees."""
        if not self._wanted_parts:
            return self.simulator
        sizes = {part.name: part.size for part in self.simulator.state_parts}
        size = sum(
            rotation_size(wanted) if wanted else sizes[name]
            for name, wanted in self._wanted_parts.items()
        )
        return replace(self.simulator, state_dim=size)

    def observation(self, seen: Observation) -> Observation:
        """As the checkpoint was trained to see it."""
        if self.convention is None:
            return seen
        images = {name: self._image(name, image) for name, image in seen.images.items()}
        return replace(seen, images=images, state=self.state(seen.state))

    def state(self, state: Tensor) -> Tensor:
        """The checkpoint's state [..., its size] of the simulator's [..., S]."""
        if not self._wanted_parts:
            return state
        parts = self.simulator.state_parts
        pieces = torch.split(state, [part.size for part in parts], dim=-1)
        given = {part.name: (part, piece) for part, piece in zip(parts, pieces, strict=True)}
        found = []
        for name, wanted in self._wanted_parts.items():
            part, piece = given[name]
            if wanted and part.rotation:
                piece = converted(piece, part.rotation, wanted)
            found.append(piece.to(state.dtype))
        return torch.cat(found, dim=-1)

    def to_simulator(self, actions: Tensor) -> Tensor:
        """Actions [..., A] that the checkpoint decided, as the simulator executes them, within its
        bounds."""
        low, high = (
            torch.tensor(bound, dtype=actions.dtype, device=actions.device)
            for bound in (self.simulator.action_low, self.simulator.action_high)
        )
        return torch.clamp(self._exchanged(actions, to_simulator=True), low, high)

    def to_checkpoint(self, actions: Tensor) -> Tensor:
        """Actions [..., A] of the simulator, such as demonstrated ones, as the checkpoint would say
        them."""
        return self._exchanged(actions, to_simulator=False)

    def _image(self, name: str, image: Tensor) -> Tensor:
        assert self.convention is not None
        options = self.convention
        wanted = options.orientations.get(name, options.orientation)
        known = {camera.name: camera.orientation for camera in self.simulator.cameras}
        given = known.get(name, "upright")
        return reoriented(image, given, wanted)

    @property
    def _wanted_parts(self) -> Mapping[str, Rotation | None]:
        return self.convention.state if self.convention and self.reads_state else {}

    def _exchanged(self, actions: Tensor, to_simulator: bool) -> Tensor:
        if (options := self.convention) is None:
            return actions
        arm, last = actions[..., :-1], actions[..., -1:]
        if options.hand and (hand := self.simulator.hand):
            given, wanted = (options.hand, hand) if to_simulator else (hand, options.hand)
            move = arm[..., :3].double() * (given.metres_per_unit / wanted.metres_per_unit)
            turn = arm[..., 3:6].double() * given.radians_per_unit
            turn = converted(turn, given.rotation, wanted.rotation) / wanted.radians_per_unit
            arm = torch.cat([move, turn], dim=-1)
        if options.gripper and (theirs := gripper_of(self.simulator)):
            mine = options.gripper
            given_grip, wanted_grip = (mine, theirs) if to_simulator else (theirs, mine)
            rounded = mine.threshold is not None
            last = regripped(last, given_grip, wanted_grip, rounded)
        return torch.cat([arm.to(actions.dtype), last.to(actions.dtype)], dim=-1)


def reoriented(image: Tensor, given: Orientation, wanted: Orientation) -> Tensor:
    """Images [B, height, width, 3] that show the scene in one way, in another."""
    dims = sorted(_FLIPPED_DIMS[given] ^ _FLIPPED_DIMS[wanted])
    return image.flip(dims) if dims else image


def regripped(
    command: Tensor, given: GripperConfig, wanted: GripperConfig, rounded: bool
) -> Tensor:
    """Gripper commands [...] in other numbers; all the way open or closed if `rounded`."""
    openness = (command.double() - given.closed) / (given.open - given.closed)
    if rounded:
        middle = 0.5
        if given.threshold is not None:
            middle = (given.threshold - given.closed) / (given.open - given.closed)
        openness = (openness > middle).double()
    return wanted.closed + openness * (wanted.open - wanted.closed)


def gripper_of(contract: Contract) -> GripperConfig | None:
    """The gripper commands of a simulator, if it has a gripper and says what they mean."""
    found = _GRIPPER.fullmatch(contract.gripper)
    return GripperConfig(open=float(found[1]), closed=float(found[2])) if found else None


def rotation_size(rotation: Rotation) -> int:
    """How many numbers stand for a rotation."""
    return 4 if rotation.startswith("quaternion") else 3


def _require_adaptable(convention: ConventionConfig, simulator: Contract, state: bool) -> None:
    who = f"the convention {convention.name}"
    if convention.hand and (simulator.hand is None or simulator.action_dim != 7):
        raise ContractMismatch(
            f"control_mode: {who} moves the hand (7 entries: translation, rotation, gripper), the "
            f"simulator has {simulator.control_mode!r} with {simulator.action_dim} entries; set "
            f"{_HAND_CONTROL}, or take a convention without `hand`"
        )
    if convention.gripper and gripper_of(simulator) is None:
        raise ContractMismatch(
            f"gripper: {who} has {convention.gripper.open:g} for open and "
            f"{convention.gripper.closed:g} for closed, the simulator has {simulator.gripper!r}; "
            f"take a control mode with a gripper, or a convention without `gripper`"
        )
    names = {camera.name for camera in simulator.cameras}
    if unknown := sorted(set(convention.orientations) - names):
        raise ContractMismatch(
            f"cameras: {who} names {', '.join(unknown)} in `orientations`, the simulator has "
            f"{', '.join(sorted(names)) or 'none'}"
        )
    if state:
        _require_state(convention, simulator, who)


def _require_state(convention: ConventionConfig, simulator: Contract, who: str) -> None:
    given = {part.name: part for part in simulator.state_parts}
    offers = f"the simulator's state has {', '.join(given) or 'no named parts'}"
    for name, wanted in convention.state.items():
        if name not in given:
            raise ContractMismatch(
                f"state_parts: {who} sees {', '.join(convention.state)}, but {offers}; take a "
                f"simulator that names {name}, or write the convention inline with another `state`"
            )
        if (wanted is None) != (given[name].rotation is None):
            raise ContractMismatch(
                f"state_parts: {who} takes {name} as {wanted or 'it is'}, the simulator gives "
                f"{given[name].rotation or 'no rotation'}; correct `state` of the convention"
            )
