"""What ManiSkill's contract says is what the scene does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied_rl.contracts import Episode, HandMotion
from simulators.config import ManiSkillConfig
from simulators.maniskill_experts import conjugate, multiply, rotation_vector


@pytest.mark.parametrize("task", ["PickCube-v1", "StackCube-v1"])
def test_the_contract_names_the_parts_of_the_state(task: str) -> None:
    environment: Any = ManiSkillConfig(task=task).build_environment()
    try:
        environment.reset(Episode("x", task, 0, 0))
        contract = environment.spec.contract
        sizes = [part.size for part in contract.state_parts]
        assert sum(sizes) == contract.state_dim
        pieces = np.split(environment.observe().state, np.cumsum(sizes)[:-1])
        parts = dict(zip((part.name for part in contract.state_parts), pieces, strict=True))
        position, orientation = environment.tcp_pose()
        np.testing.assert_allclose(parts["eef_position"], position, atol=1e-6)
        np.testing.assert_allclose(parts["eef_rotation"], orientation, atol=1e-6)
        assert parts["gripper_joints"][-1] == pytest.approx(environment.gripper_opening())
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("mode", "hand"),
    [
        ("pd_ee_delta_pose", HandMotion(0.1, -0.1, "euler_xyz")),
        ("pd_joint_delta_pos", None),
        ("pd_ee_pose", None),
    ],
)
def test_the_contract_says_how_far_an_action_moves_the_hand(
    mode: str, hand: HandMotion | None
) -> None:
    environment = ManiSkillConfig(control_mode=mode).build_environment()
    found = environment.spec.contract.hand
    environment.close()
    if hand is None or found is None:
        assert found is hand
        return
    assert found.metres_per_unit == pytest.approx(hand.metres_per_unit)
    assert found.radians_per_unit == pytest.approx(hand.radians_per_unit)
    assert found.rotation == hand.rotation


def test_the_hand_moves_and_turns_as_the_contract_says() -> None:
    """A quarter of a unit up and about the vertical, eight times."""
    environment: Any = ManiSkillConfig().build_environment()
    try:
        hand = environment.spec.contract.hand
        environment.reset(Episode("x", "PickCube-v1", 0, 0))
        before = environment.tcp_pose()
        action = np.array([0.0, 0.0, 0.25, 0.0, 0.0, 0.25, 1.0], dtype=np.float32)
        for _ in range(8):
            environment.step(action)
        after = environment.tcp_pose()
        # The drives lag behind: it is the sign and the size that count.
        rise = float(after[0][2] - before[0][2]) / (8 * 0.25)
        turn = rotation_vector(multiply(after[1], conjugate(before[1])))[2] / (8 * 0.25)
        assert 0.2 < rise / hand.metres_per_unit < 1.1
        assert 0.2 < turn / hand.radians_per_unit < 1.1
    finally:
        environment.close()
