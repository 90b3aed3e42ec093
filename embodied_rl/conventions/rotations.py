"""Rotations in other numbers. All of it is in float64 and by way of quaternions (w, x, y, z)."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.contracts.convention import Rotation

_STRAIGHT = 1e-7
"""Below this, half an angle's sine is the half angle to the last bit of float64."""


def converted(numbers: Tensor, given: Rotation, wanted: Rotation) -> Tensor:
    """float64 [..., 3 or 4]: the same rotation as `numbers` [..., 3 or 4] in radians.

    Where there is a choice, axis-angle is the shorter way round and quaternions have w >= 0.
    """
    if given == wanted:
        return numbers.double()
    return _from_quaternion(_to_quaternion(numbers.double(), given), wanted)


def _to_quaternion(numbers: Tensor, given: Rotation) -> Tensor:
    match given:
        case "quaternion_wxyz":
            return numbers
        case "quaternion_xyzw":
            return numbers.roll(1, dims=-1)
        case "axis_angle":
            half = numbers.norm(dim=-1, keepdim=True) / 2
            # sin(half) / (2 half), whose limit at 0 is 1 / 2.
            share = torch.sinc(half / torch.pi) / 2
            return torch.cat([half.cos(), numbers * share], dim=-1)
        case "euler_xyz":
            x, y, z = (_about(axis, numbers[..., axis]) for axis in range(3))
            return _product(_product(x, y), z)
        case "roll_pitch_yaw":
            x, y, z = (_about(axis, numbers[..., axis]) for axis in range(3))
            return _product(_product(z, y), x)


def _from_quaternion(quaternion: Tensor, wanted: Rotation) -> Tensor:
    q = quaternion / quaternion.norm(dim=-1, keepdim=True)
    q = torch.where(q[..., :1] < 0, -q, q)
    match wanted:
        case "quaternion_wxyz":
            return q
        case "quaternion_xyzw":
            return q.roll(-1, dims=-1)
        case "axis_angle":
            sine = q[..., 1:].norm(dim=-1, keepdim=True)
            angle = 2 * torch.atan2(sine, q[..., :1])
            straight = sine < _STRAIGHT
            share = torch.where(straight, 2.0, angle / torch.where(straight, 1.0, sine))
            return q[..., 1:] * share
        case "euler_xyz":
            # With the turns in the other order, the angles of the opposite rotation are opposite.
            return -_roll_pitch_yaw(q * q.new_tensor([1.0, -1.0, -1.0, -1.0]))
        case "roll_pitch_yaw":
            return _roll_pitch_yaw(q)


def _roll_pitch_yaw(q: Tensor) -> Tensor:
    w, x, y, z = q.unbind(-1)
    roll = torch.atan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y))
    pitch = torch.asin((2 * (w * y - x * z)).clamp(-1.0, 1.0))
    yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    return torch.stack([roll, pitch, yaw], dim=-1)


def _about(axis: int, angle: Tensor) -> Tensor:
    """The quaternion of a turn about x (0), y (1) or z (2)."""
    parts = [torch.zeros_like(angle) for _ in range(4)]
    parts[0], parts[1 + axis] = (angle / 2).cos(), (angle / 2).sin()
    return torch.stack(parts, dim=-1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The quaternion of the rotation `b` followed by `a`."""
    w, v = a[..., :1], a[..., 1:]
    scalar = w * b[..., :1] - (v * b[..., 1:]).sum(-1, keepdim=True)
    vector = w * b[..., 1:] + b[..., :1] * v + torch.linalg.cross(v, b[..., 1:])
    return torch.cat([scalar, vector], dim=-1)
