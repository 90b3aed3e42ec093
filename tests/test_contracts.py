"""The conventions that travel with a checkpoint."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from embodied_rl.contracts import (
    Camera,
    Contract,
    ContractMismatch,
    HandMotion,
    Observation,
    StatePart,
)

CONTRACT = Contract(
    state_dim=9,
    action_dim=2,
    action_low=(-1.0, -0.1),
    action_high=(1.0, 0.3),
    control_mode="pd_ee_delta_pose",
    control_hz=20.0,
    gripper="+1 opens, -1 closes",
    rotation="axis-angle delta",
    cameras=(Camera("base", 64, 96), Camera("wrist", 32, 32, "upside_down")),
    state_parts=(StatePart("joints", 5), StatePart("eef_rotation", 4, "quaternion_wxyz")),
    hand=HandMotion(0.1, -0.1, "euler_xyz"),
    convention="libero_openpi",
    convention_hash="9b1dab78666a",
    statistics="action by QUANTILES",
    statistics_hash="0123456789ab",
)

CHANGES: dict[str, Any] = {
    "state_dim": 8,
    "action_dim": 3,
    "action_low": (-1.0, -0.2),
    "action_high": (1.0, 0.4),
    "control_mode": "pd_joint_delta_pos",
    "control_hz": 10.0,
    "gripper": "+1 closes, -1 opens",
    "rotation": "none",
    "cameras": (Camera("wrist", 32, 32), Camera("base", 64, 96)),
    "state_parts": (StatePart("joints", 9),),
    "hand": HandMotion(0.05, 0.5, "axis_angle"),
    "convention": "libero_openvla",
    "convention_hash": "ccfb77000dfc",
    "statistics": "action by MEAN_STD",
    "statistics_hash": "ba9876543210",
}

UNSAID: dict[str, Any] = {
    "state_parts": (),
    "hand": None,
    **dict.fromkeys(("convention", "convention_hash", "statistics", "statistics_hash"), ""),
}


def test_json_and_back() -> None:
    text = json.dumps(CONTRACT.to_json())
    again = Contract.from_json(json.loads(text))
    assert again == CONTRACT
    assert hash(again) == hash(CONTRACT)
    assert again.fingerprint == CONTRACT.fingerprint


def test_equal_contracts_fit() -> None:
    CONTRACT.require_equal(replace(CONTRACT), "the policy", "the simulator")


def test_every_field_is_tried_below() -> None:
    assert set(CHANGES) == {field.name for field in fields(Contract)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_in_any_field_is_named_with_both_values(name: str) -> None:
    other = replace(CONTRACT, **{name: CHANGES[name]})
    assert other.fingerprint != CONTRACT.fingerprint
    with pytest.raises(ContractMismatch) as caught:
        CONTRACT.require_equal(other, "the policy", "the simulator")
    lines = str(caught.value).splitlines()
    assert lines[0] == "the policy does not fit the simulator:"
    assert lines[1].startswith(f"  {name}: the policy has ")
    if name not in ("cameras", "state_parts", "hand"):
        mine, theirs = getattr(CONTRACT, name), CHANGES[name]
        assert lines[1] == f"  {name}: the policy has {mine!r}, the simulator has {theirs!r}"
    assert len(lines) == 3
    assert "train a policy for these" in lines[2]


@pytest.mark.parametrize("name", UNSAID)
def test_what_only_one_side_knows_is_not_compared(name: str) -> None:
    silent = replace(CONTRACT, **{name: UNSAID[name]})
    silent.require_equal(CONTRACT, "the simulator", "the policy")
    CONTRACT.require_equal(silent, "the policy", "the simulator")
    assert name not in silent.to_json()
    assert Contract.from_json(silent.to_json()) == silent


def test_all_differences_are_named_at_once() -> None:
    other = replace(CONTRACT, gripper="none", control_hz=5.0)
    with pytest.raises(ContractMismatch, match=r"(?s)control_hz.*gripper"):
        CONTRACT.require_equal(other, "the data set", "the robot")


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    # Written down from another process: it must not depend on hash seeds or field order.
    bare = Contract(1, 1, (-1.0,), (1.0,), "delta", 10.0, "none", "none")
    assert bare.fingerprint == "8b6bc8b27bc5"


def test_selecting_rows_keeps_each_row_together() -> None:
    state = torch.arange(6.0).view(3, 2)
    images = {"base": torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 2, 2, 3)}
    seen = Observation(images, state, ("a", "b", "c"))
    chosen = seen.select(torch.tensor([2, 0, 2]))
    assert len(chosen) == 3
    assert chosen.instruction == ("c", "a", "c")
    assert chosen.state.tolist() == [[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]
    assert chosen.images["base"][:, 0, 0, 0].tolist() == [2, 0, 2]
