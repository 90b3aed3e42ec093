"""Scripted experts: they solve their tasks, and their geometry is right."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.contracts import Episode
from simulators.config import ManiSkillConfig
from simulators.maniskill_experts import (
    CLOSED,
    OPEN,
    PLANS,
    Aim,
    action_towards,
    conjugate,
    downward,
    longest_step,
    multiply,
    nearest_face,
    rotation_vector,
    yaw,
    yaw_of_hand,
)
from simulators.maniskill_tasks import EXPERT_TASKS

DOWN = downward(0.0)
ORIGIN = np.zeros(3)


@pytest.mark.parametrize("task", sorted(PLANS))
def test_the_expert_solves_its_task_within_the_time_limit(task: str) -> None:
    config = ManiSkillConfig(task=task)
    environment = config.build_environment()
    expert = config.build_expert(environment)
    num_solved = 0
    for number in range(50):
        environment.reset(Episode(f"test/{number}", task, 10_000 + number, 0))
        while True:
            action = expert()
            assert action.shape == (7,) and np.abs(action).max() <= 1.0
            outcome = environment.step(action)
            if outcome.terminated or outcome.truncated:
                break
        num_solved += outcome.success
    environment.close()
    assert num_solved >= 48


def test_the_expert_works_on_the_stock_path() -> None:
    config = ManiSkillConfig(task="PushCube-v1", fast_path=False)
    environment = config.build_environment()
    expert = config.build_expert(environment)
    environment.reset(Episode("test", environment.spec.task, 0, 0))
    successes = [environment.step(expert()).success for _ in range(15)]
    environment.close()
    assert any(successes)


def test_the_listed_tasks_are_those_with_an_expert() -> None:
    assert set(PLANS) == EXPERT_TASKS


@pytest.mark.parametrize(
    "options",
    [
        {"task": "PegInsertionSide-v1"},
        {"task": "PickCube-v1", "control_mode": "pd_joint_pos"},
        {"task": "PickCube-v1", "robot": "xarm6_robotiq"},
    ],
)
def test_a_missing_expert_names_what_there_is(options: dict[str, str]) -> None:
    config = ManiSkillConfig.model_validate(options)
    with pytest.raises(ValueError) as caught:
        config.build_expert(None)  # type: ignore[arg-type]
    message = str(caught.value)
    assert options["task"] in message
    for words in (*PLANS, "pd_ee_delta_pose", "robot=panda", "demonstrations.path"):
        assert words in message


def test_an_aim_within_reach_is_approached_with_gain_and_no_turn() -> None:
    action = action_towards((ORIGIN, DOWN), Aim(np.array([0.0, 0.05, -0.025]), DOWN, OPEN))
    np.testing.assert_allclose(action, [0.0, 0.8, -0.4, 0.0, 0.0, 0.0, 1.0], atol=1e-7)


def test_a_far_aim_keeps_its_direction() -> None:
    near = np.array([-0.3, 0.0, 0.0])
    action = action_towards((near, DOWN), Aim(np.array([0.1, -0.2, 0.0]), DOWN, CLOSED))
    np.testing.assert_allclose(action[:3], [1.0, -0.5, 0.0], atol=1e-7)
    assert action[6] == -1.0


def test_a_stretched_arm_takes_short_steps_outward_and_full_ones_back() -> None:
    stretched = np.array([0.11, 0.0, 0.0])  # 0.725 m from the robot's base.
    assert longest_step(stretched, np.array([1.0, 0.0, 0.0])) == pytest.approx(0.5)
    assert longest_step(stretched, np.array([-1.0, 0.0, 0.0])) == 1.0
    assert longest_step(stretched + 1.0, np.array([1.0, 0.0, 0.0])) == pytest.approx(0.2)
    away = action_towards((stretched, DOWN), Aim(np.array([0.51, -0.2, 0.0]), DOWN, CLOSED))
    np.testing.assert_allclose(away[:3], [0.5, -0.25, 0.0], atol=1e-7)
    aim = Aim(np.array([0.51, -0.2, 0.0]), DOWN, CLOSED, forceful=True)
    np.testing.assert_allclose(action_towards((stretched, DOWN), aim)[:3], [1, -0.5, 0], atol=1e-7)


def test_turns_have_maniskills_flipped_sign() -> None:
    small = action_towards((ORIGIN, DOWN), Aim(ORIGIN, downward(0.05), OPEN))
    np.testing.assert_allclose(small[3:6], [0.0, 0.0, -0.5], atol=1e-6)
    large = action_towards((ORIGIN, DOWN), Aim(ORIGIN, downward(-1.0), OPEN))
    np.testing.assert_allclose(large[3:6], [0.0, 0.0, 1.0], atol=1e-6)


@pytest.mark.parametrize(
    ("hand", "cube", "expected"),
    [
        (0.1, 0.2, 0.2),
        (0.0, 1.5, 1.5 - np.pi / 2),
        (3.0, 0.0, np.pi),
        (0.0, -0.9, -0.9 + np.pi / 2),
    ],
)
def test_the_hand_turns_to_the_nearest_face(hand: float, cube: float, expected: float) -> None:
    assert nearest_face(hand, cube) == pytest.approx(expected)


def test_rotations_compose_and_invert() -> None:
    quarter = np.array([np.sqrt(0.5), 0.0, 0.0, np.sqrt(0.5)])
    assert yaw(quarter) == pytest.approx(np.pi / 2)
    np.testing.assert_allclose(rotation_vector(quarter), [0.0, 0.0, np.pi / 2], atol=1e-12)
    np.testing.assert_allclose(rotation_vector(-quarter), [0.0, 0.0, np.pi / 2], atol=1e-12)
    np.testing.assert_allclose(rotation_vector(multiply(quarter, conjugate(quarter))), ORIGIN)
    half = multiply(quarter, quarter)
    np.testing.assert_allclose(half, [0.0, 0.0, 0.0, 1.0], atol=1e-12)
    about_x = np.array([np.sqrt(0.5), np.sqrt(0.5), 0.0, 0.0])
    np.testing.assert_allclose(multiply(quarter, about_x), [0.5, 0.5, 0.5, 0.5])
    assert yaw_of_hand(downward(0.7)) == pytest.approx(0.7)
