"""Rotations in other numbers, by hand and there and back."""

from __future__ import annotations

import math

import pytest
import torch

from embodied_rl.contracts.convention import Rotation
from embodied_rl.conventions.rotations import converted

FORMS: tuple[Rotation, ...] = (
    *("axis_angle", "euler_xyz", "roll_pitch_yaw", "quaternion_xyzw", "quaternion_wxyz"),
)
HALF = math.sqrt(0.5)
RIGHT = math.pi / 2


@pytest.mark.parametrize("axis", range(3))
def test_a_right_angle_about_one_axis_is_written_down(axis: int) -> None:
    quaternion = [HALF, 0.0, 0.0, 0.0]
    quaternion[1 + axis] = HALF
    angles = [0.0, 0.0, 0.0]
    angles[axis] = RIGHT
    given = torch.tensor(quaternion, dtype=torch.float64)
    # A pitch of a right angle is the one at which the other two are not told apart.
    forms = FORMS[:3] if axis != 1 else FORMS[:1]
    for form in forms:
        assert converted(given, "quaternion_wxyz", form).tolist() == pytest.approx(angles, abs=1e-7)
        back = converted(torch.tensor(angles), form, "quaternion_xyzw").tolist()
        assert back == pytest.approx([*quaternion[1:], quaternion[0]], abs=1e-7)


def test_the_two_orders_of_turning_differ_as_they_should() -> None:
    """About x, then about z by a right angle each: the z that turned along, or the one that
    stayed."""
    both = torch.tensor([RIGHT, 0.0, RIGHT])
    moving = converted(both, "euler_xyz", "quaternion_wxyz")
    fixed = converted(both, "roll_pitch_yaw", "quaternion_wxyz")
    # Products of (c, s, 0, 0) and (c, 0, 0, s) with c = s = sqrt(1/2), multiplied by hand.
    assert moving.tolist() == pytest.approx([0.5, 0.5, -0.5, 0.5])
    assert fixed.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5])
    third = 2 * math.pi / 3 / math.sqrt(3)
    assert converted(fixed, "quaternion_wxyz", "axis_angle").tolist() == pytest.approx([third] * 3)


@pytest.mark.parametrize("there", FORMS)
@pytest.mark.parametrize("form", FORMS)
def test_there_and_back(form: Rotation, there: Rotation) -> None:
    generator = torch.Generator().manual_seed(0)
    turns = 0.6 * torch.randn((64, 3), generator=generator, dtype=torch.float64)
    given = converted(turns, "axis_angle", form)
    back = converted(converted(given, form, there), there, form)
    torch.testing.assert_close(back, given, atol=1e-12, rtol=0)


def test_no_turn_and_half_a_turn() -> None:
    for form in FORMS[:3]:
        none = converted(torch.tensor([1.0, 0.0, 0.0, 0.0]), "quaternion_wxyz", form)
        assert none.tolist() == [0.0, 0.0, 0.0]
        assert converted(torch.zeros(3), form, "quaternion_wxyz").tolist() == [1.0, 0.0, 0.0, 0.0]
    half = converted(torch.tensor([0.0, 0.0, 0.0, -1.0]), "quaternion_wxyz", "axis_angle")
    assert half.abs().tolist() == pytest.approx([0.0, 0.0, math.pi])


def test_opposite_quaternions_are_one_rotation() -> None:
    quaternion = torch.tensor([0.8, 0.0, -0.6, 0.0])
    first, second = (
        converted(q, "quaternion_wxyz", "axis_angle") for q in (quaternion, -quaternion)
    )
    assert first.tolist() == second.tolist()
    assert first.tolist() == pytest.approx([0.0, -2 * math.atan2(0.6, 0.8), 0.0])


def test_tiny_turns_lose_nothing() -> None:
    turn = torch.tensor([1e-9, -2e-9, 3e-12], dtype=torch.float64)
    back = converted(
        converted(turn, "axis_angle", "quaternion_wxyz"), "quaternion_wxyz", "axis_angle"
    )
    torch.testing.assert_close(back, turn, atol=0, rtol=1e-12)
