"""Every known convention against numbers worked out by hand, and what cannot be adapted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from embodied_rl.config import Config, ConfigError, load
from embodied_rl.contracts import (
    Camera,
    Contract,
    ContractMismatch,
    HandMotion,
    Observation,
    StatePart,
)
from embodied_rl.contracts.convention import Orientation
from embodied_rl.conventions.adapter import Adapter, reoriented
from embodied_rl.conventions.config import ConventionConfig, GripperConfig
from embodied_rl.conventions.evidence import require_data_set, require_gripper_range, spoken_by
from embodied_rl.conventions.known import KNOWN, Convention

LIBERO = Contract(
    state_dim=9,
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    control_mode="OSC_POSE",
    control_hz=20.0,
    gripper="-1 opens, +1 closes",
    rotation="axis-angle, half a radian per unit",
    cameras=(
        Camera("agentview", 2, 3, "upside_down"),
        Camera("robot0_eye_in_hand", 2, 3, "upside_down"),
    ),
    state_parts=(
        StatePart("gripper_joints", 2),
        StatePart("eef_rotation", 4, "quaternion_xyzw"),
        StatePart("eef_position", 3),
    ),
    hand=HandMotion(0.05, 0.5, "axis_angle"),
)
"""As robosuite gives it: images as OpenGL stores them, quaternions with w last."""

MANISKILL = replace(
    LIBERO,
    control_mode="pd_ee_delta_pose",
    gripper="+1 opens, -1 closes",
    cameras=(Camera("base_camera", 2, 3),),
    state_parts=(
        StatePart("gripper_joints", 2),
        StatePart("eef_position", 3),
        StatePart("eef_rotation", 4, "quaternion_wxyz"),
    ),
    hand=HandMotion(0.1, -0.1, "euler_xyz"),
)

IMAGE = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)[None, :, :, None].expand(1, 2, 3, 3)


def adapter(name: str, contract: Contract = LIBERO) -> Adapter:
    return Adapter(KNOWN[name], contract)


def rows(image: Tensor) -> list[list[int]]:
    found: list[list[int]] = image[0, :, :, 0].tolist()
    return found


def seen(contract: Contract, state: list[float]) -> Observation:
    images = {camera.name: IMAGE for camera in contract.cameras}
    return Observation(images, torch.tensor([state]), ("go",))


TURNED, MIRRORED = [[6, 5, 4], [3, 2, 1]], [[3, 2, 1], [6, 5, 4]]


@pytest.mark.parametrize("name", ["libero_openpi", "libero_openvla"])
def test_libero_images_are_turned_by_180_degrees(name: str) -> None:
    state = [0.04, -0.03, 0.0, 0.0, 0.6, 0.8, 1.0, 2.0, 3.0]
    found = adapter(name).observation(seen(LIBERO, state))
    assert {key: rows(image) for key, image in found.images.items()} == {
        "agentview": TURNED,
        "robot0_eye_in_hand": TURNED,
    }
    # A simulator that gives them upright has them mirrored: the same pixels.
    upright = replace(LIBERO, cameras=(Camera("agentview", 2, 3),))
    scene = reoriented(IMAGE, "upside_down", "upright")
    there = Adapter(KNOWN[name], upright).observation(
        Observation({"agentview": scene}, torch.tensor([state]), ("go",))
    )
    assert rows(there.images["agentview"]) == TURNED
    # Position, axis-angle of 2 atan(0.6 / 0.8) about z, both fingers.
    angle = 2 * math.atan2(0.6, 0.8)
    assert found.state[0].tolist() == pytest.approx([1, 2, 3, 0, 0, angle, 0.04, -0.03])
    assert adapter(name).checkpoint.state_dim == 8


@pytest.mark.parametrize("name", ["bridge_openvla", "maniskill_ee_delta", "maniskill_arm"])
def test_other_images_and_states_are_as_they_are(name: str) -> None:
    given = seen(MANISKILL, [float(number) for number in range(9)])
    found = adapter(name, MANISKILL).observation(given)
    assert rows(found.images["base_camera"]) == [[1, 2, 3], [4, 5, 6]]
    assert torch.equal(found.state, given.state)


def test_a_quaternion_with_w_first_becomes_the_same_axis_angle() -> None:
    state = [0.01, 0.02, 1.0, 2.0, 3.0, 0.8, 0.6, 0.0, 0.0]
    found = adapter("libero_openpi", MANISKILL).state(torch.tensor([state]))
    angle = 2 * math.atan2(0.6, 0.8)
    assert found[0].tolist() == pytest.approx([1, 2, 3, angle, 0, 0, 0.01, 0.02])


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        ("upright", "mirrored", MIRRORED),
        ("upright", "upside_down", [[4, 5, 6], [1, 2, 3]]),
        ("upright", "turned", TURNED),
        ("upside_down", "mirrored", TURNED),
        ("turned", "turned", [[1, 2, 3], [4, 5, 6]]),
    ],
)
def test_images_of_two_by_three(
    given: Orientation, wanted: Orientation, expected: list[list[int]]
) -> None:
    found = reoriented(IMAGE, given, wanted)
    assert rows(found) == expected
    assert torch.equal(reoriented(found, wanted, given), IMAGE)


OPEN, CLOSED = 1.0, -1.0
"""In ManiSkill; in LIBERO it is the other way round."""

GOLDEN = [
    # libero_openpi's numbers are LIBERO's.
    ("libero_openpi", LIBERO, [0.5, -1, 0.2, 0.1, 0, -0.4, -1], [0.5, -1, 0.2, 0.1, 0, -0.4, -1]),
    ("libero_openpi", LIBERO, [0, 0, 0, 0, 0, 0, 0.25], [0, 0, 0, 0, 0, 0, 0.25]),
    # OpenVLA says 1 for open and 0 for closed; 0.5 and less is closed.
    ("libero_openvla", LIBERO, [0.5, 0, 0, 0, 0, 0, 1], [0.5, 0, 0, 0, 0, 0, -1]),
    ("libero_openvla", LIBERO, [0, 0, 0, 0.5, 0, 0, 0.996], [0, 0, 0, 0.5, 0, 0, -1]),
    ("libero_openvla", LIBERO, [0, 0, 0, 0, 0, 0, 0.5], [0, 0, 0, 0, 0, 0, 1]),
    # 0.05 m of a possible 0.1, 0.05 rad (half a radian times 0.1) of a possible -0.1.
    ("libero_openvla", MANISKILL, [1, 0, -1, 0.1, 0, 0, 1], [0.5, 0, -0.5, -0.5, 0, 0, OPEN]),
    ("libero_openpi", MANISKILL, [1, 0, 0, 0, 0, 0.1, 1], [0.5, 0, 0, 0, 0, -0.5, CLOSED]),
    # 3 cm and 0.02 rad; more than the simulator can do is cut.
    ("bridge_openvla", MANISKILL, [0.03, 0, 0, 0, 0.02, 0, 0], [0.3, 0, 0, 0, -0.2, 0, CLOSED]),
    ("bridge_openvla", MANISKILL, [0.2, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, OPEN]),
    # Both speak the same.
    ("maniskill_ee_delta", MANISKILL, [0.3, 0, 1, -0.2, 0, 0, 1], [0.3, 0, 1, -0.2, 0, 0, OPEN]),
    ("maniskill_arm", MANISKILL, [0.3, 0, 1, -0.2, 0, 0, -1], [0.3, 0, 1, -0.2, 0, 0, CLOSED]),
    # In LIBERO the same action opens with -1, moves twice as far and turns a fifth the other way.
    ("maniskill_ee_delta", LIBERO, [0.3, 0, 0, 0, 0, 0.5, 1], [0.6, 0, 0, 0, 0, -0.1, -1]),
]


@pytest.mark.parametrize(("name", "contract", "said", "executed"), GOLDEN)
def test_actions_by_hand(
    name: str, contract: Contract, said: list[float], executed: list[float]
) -> None:
    known = adapter(name, contract)
    # [B, H, A], as policies have them.
    chunk = torch.tensor([[said, said]])
    found = known.to_simulator(chunk)
    assert found.dtype == torch.float32
    assert found[0, 1].tolist() == pytest.approx(executed, abs=1e-6)
    if max(abs(value) for value in executed[:6]) < 1.0 and said[6] in (-1, 0, 1):
        back = known.to_checkpoint(found)
        assert back[0, 0].tolist() == pytest.approx(said, abs=1e-6)


def test_every_known_convention_is_worked_out_above() -> None:
    assert {name for name, *_ in GOLDEN} == set(KNOWN)


@pytest.mark.parametrize("contract", [LIBERO, MANISKILL], ids=["libero", "maniskill"])
@pytest.mark.parametrize("name", KNOWN)
def test_demonstrated_actions_come_back(name: str, contract: Contract) -> None:
    generator = torch.Generator().manual_seed(0)
    actions = 2 * torch.rand((50, 4, 7), generator=generator) - 1
    actions[..., 3:6] *= 0.5  # turns beyond a whole unit are cut by ManiSkill itself
    actions[..., 6] = actions[..., 6].sign()
    known = adapter(name, contract)
    back = known.to_simulator(known.to_checkpoint(actions))
    torch.testing.assert_close(back, actions, atol=2e-6, rtol=0)


def test_without_a_convention_nothing_changes() -> None:
    nothing = Adapter(None, MANISKILL)
    given = seen(MANISKILL, [0.0] * 9)
    assert nothing.observation(given) is given
    actions = torch.tensor([[[0.3, 0, 0, 0, 0, 0, 0.2]]])
    assert torch.equal(nothing.to_checkpoint(actions), actions)
    assert torch.equal(nothing.to_simulator(actions), actions)
    assert (nothing.contract.convention, nothing.contract.convention_hash) == ("none", "none")


def test_what_a_policy_prepared_is_kept() -> None:
    given = replace(seen(LIBERO, [0.0] * 5 + [1.0] + [0.0] * 3), prepared={"kept": torch.ones(1)})
    assert set(adapter("libero_openpi").observation(given).prepared) == {"kept"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "libero_openpi",
            {"control_mode": "pd_joint_delta_pos", "hand": None, "action_dim": 8},
            r"control_mode: the convention libero_openpi moves the hand .* has "
            r"'pd_joint_delta_pos' with 8 entries; set simulator.control_mode=pd_ee_delta_pose",
        ),
        (
            "maniskill_arm",
            {"gripper": "none"},
            r"gripper: the convention maniskill_arm has 1 for open and -1 for closed, the "
            r"simulator has 'none'; take a control mode with a gripper",
        ),
        (
            "libero_openvla",
            {"state_parts": ()},
            r"state_parts: the convention libero_openvla sees eef_position, eef_rotation, "
            r"gripper_joints, but the simulator's state has no named parts; take a simulator that",
        ),
        (
            "libero_openvla",
            {"state_parts": (StatePart("eef_position", 3), StatePart("eef_rotation", 3))},
            r"takes eef_rotation as axis_angle, the simulator gives no rotation",
        ),
    ],
)
def test_what_cannot_be_adapted_names_field_values_and_cure(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ContractMismatch, match=words):
        adapter(name, replace(MANISKILL, **changes))


def test_a_state_that_nobody_reads_needs_no_parts() -> None:
    blind = Adapter(KNOWN["libero_openvla"], replace(MANISKILL, state_parts=()), reads_state=False)
    assert blind.checkpoint.state_dim == MANISKILL.state_dim


def test_an_unknown_camera_is_named() -> None:
    odd = ConventionConfig(orientations={"top": "turned"})
    with pytest.raises(ContractMismatch, match=r"names top in `orientations`.* has base_camera"):
        Adapter(odd, MANISKILL)


def test_one_camera_may_be_seen_otherwise() -> None:
    odd = ConventionConfig(orientation="upside_down", orientations={"agentview": "upright"})
    found = Adapter(odd, LIBERO).observation(seen(LIBERO, [0.0] * 9)).images
    assert rows(found["agentview"]) == [[4, 5, 6], [1, 2, 3]]
    assert rows(found["robot0_eye_in_hand"]) == [[1, 2, 3], [4, 5, 6]]


class Chosen(Config):
    convention: Convention | None = None


def test_a_convention_is_a_name_or_inline() -> None:
    named = load(Chosen, None, ["convention=libero_openvla"])
    assert named.convention == KNOWN["libero_openvla"]
    assert Chosen.model_validate(named.model_dump(mode="json")) == named
    inline = load(Chosen, None, ["convention={gripper: {open: 1, closed: 0}}"]).convention
    assert inline == ConventionConfig(gripper=GripperConfig(open=1, closed=0))
    with pytest.raises(ConfigError, match=r"no convention is called 'libero_opnvla'; did you mean"):
        load(Chosen, None, ["convention=libero_opnvla"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gripper": {"open": 1, "closed": 1}}, "open=1.0 and closed=1.0 must differ"),
        ({"gripper": {"open": 1, "closed": 0, "threshold": 1}}, "must lie between closed=0.0"),
        (
            {"hand": {"metres_per_unit": 1, "radians_per_unit": 0, "rotation": "axis_angle"}},
            "would never turn the hand",
        ),
        (
            {"hand": {"metres_per_unit": 1, "radians_per_unit": 1, "rotation": "quaternion_wxyz"}},
            "has four numbers, an action has three",
        ),
    ],
)
def test_conventions_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ConventionConfig.model_validate(options)


def test_the_hash_is_of_what_is_said_not_of_the_name() -> None:
    known = KNOWN["libero_openvla"]
    assert known.model_copy(update={"name": "mine"}).fingerprint == known.fingerprint
    assert len({convention.fingerprint for convention in KNOWN.values()}) == len(KNOWN)


def test_statistics_tell_the_range_of_the_gripper() -> None:
    openvla, openpi = KNOWN["libero_openvla"], KNOWN["libero_openpi"]
    require_gripper_range(openvla, 0.0, 0.996, "these")
    require_gripper_range(openvla, 1.0, 1.0, "never moved")
    require_gripper_range(openpi, -1.0, 1.0, "these")
    require_gripper_range(None, -7.0, 7.0, "whatever")
    with pytest.raises(ContractMismatch, match=r"from 0 to 1, these are of commands from -1 to 1"):
        require_gripper_range(openvla, -1.0, 1.0, "these")
    with pytest.raises(ContractMismatch, match=r"from -1 to 1, these are of commands from 0 to 1"):
        require_gripper_range(openpi, 0.0, 1.0, "these")


def test_names_of_statistics_tell_the_convention() -> None:
    assert spoken_by("libero_spatial_no_noops") == KNOWN["libero_openvla"]
    assert spoken_by("bridge_orig") == KNOWN["bridge_openvla"]
    assert spoken_by("my_robot") is None and spoken_by(None) is None
    require_data_set(KNOWN["libero_openvla"], "my_robot")
    require_data_set(ConventionConfig(), "bridge_orig")
    with pytest.raises(ContractMismatch, match=r"statistics bridge_orig are of data in bridge_op"):
        require_data_set(KNOWN["libero_openvla"], "bridge_orig")
