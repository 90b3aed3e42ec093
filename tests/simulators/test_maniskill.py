"""The fast path equals ManiSkill's own step; planned states; errors before any long work."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.contracts import Episode
from embodied_rl.rollout.inline import InlineSimulator
from simulators.config import ManiSkillConfig
from simulators.maniskill import ManiSkillEnvironment, make, save_initial_states
from simulators.maniskill_fast import CONTROL_MODES, TASKS
from simulators.maniskill_tasks import list_tasks
from simulators.maniskill_visuals import NO_RENDER_DEVICE, has_render_device

needs_device = pytest.mark.skipif(
    not has_render_device(), reason="no Vulkan device that SAPIEN can draw with"
)


def start(environment: ManiSkillEnvironment, state: int) -> None:
    environment.reset(Episode(f"t/{state}", environment.spec.task, state, 0))


def random_actions(environment: ManiSkillEnvironment, count: int) -> np.ndarray:  # type: ignore[type-arg]
    shape = (count, environment.spec.contract.action_dim)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("control_mode", CONTROL_MODES)
def test_fast_step_equals_the_stock_step(task: str, control_mode: str) -> None:
    config = ManiSkillConfig(task=task, control_mode=control_mode)
    fast, stock = make(config), make(config.model_copy(update={"fast_path": False}))
    assert fast.is_fast and not stock.is_fast
    assert fast.spec == stock.spec
    start(fast, 7)
    start(stock, 7)
    assert np.array_equal(fast.observe().state, stock.observe().state)
    for action in random_actions(fast, 15):
        assert fast.step(action) == stock.step(action)
        difference = np.abs(fast.observe().state - stock.observe().state)
        assert difference.max() < 1e-4
    fast.close()
    stock.close()


@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1"])
def test_dense_rewards_are_equal_too(task: str) -> None:
    config = ManiSkillConfig(task=task, reward="dense")
    fast, stock = make(config), make(config.model_copy(update={"fast_path": False}))
    start(fast, 3)
    start(stock, 3)
    for action in random_actions(fast, 12):
        rewards = fast.step(action).reward, stock.step(action).reward
        assert rewards[0] == pytest.approx(rewards[1], abs=1e-4)
        assert 0 < rewards[0] <= 1
    fast.close()
    stock.close()


def test_the_fast_step_is_much_faster() -> None:
    config = ManiSkillConfig()
    seconds = []
    for fast_path in (True, False):
        environment = make(config.model_copy(update={"fast_path": fast_path}))
        start(environment, 0)
        actions = random_actions(environment, 40)
        environment.step(actions[0])
        began = time.process_time()
        for action in actions:
            environment.step(action)
            environment.observe()
        seconds.append(time.process_time() - began)
        environment.close()
    assert seconds[1] / seconds[0] > 2.5  # measured: 4 to 8


@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1", "PullCube-v1", "StackCube-v1"])
def test_experts_solve_their_tasks(task: str) -> None:
    config = ManiSkillConfig(task=task)
    environment = make(config)
    expert = config.build_expert(environment)
    solved = 0
    for state in range(20):
        start(environment, state)
        ended, total = False, 0.0
        while not ended:
            outcome = environment.step(expert())
            total += outcome.reward
            ended = outcome.terminated or outcome.truncated
        solved += outcome.success
        assert total == float(outcome.success)  # sparse: 1 once, at success
    assert solved >= 18
    environment.close()


def test_equal_numbers_start_equal_and_runs_repeat() -> None:
    found = []
    for _ in range(2):
        environment = make(ManiSkillConfig(task="StackCube-v1"))
        start(environment, 11)
        states = [environment.observe().state]
        for action in random_actions(environment, 10):
            environment.step(action)
            states.append(environment.observe().state)
        found.append(np.stack(states))
        start(environment, 12)
        assert not np.array_equal(environment.observe().state, found[-1][0])
        environment.close()
    assert np.array_equal(found[0], found[1])


def test_success_without_termination_runs_to_the_limit_and_pays_once() -> None:
    config = ManiSkillConfig(terminate_on_success=False, max_episode_steps=40)
    environment = make(config)
    expert = config.build_expert(environment)
    start(environment, 0)
    outcomes = [environment.step(expert()) for _ in range(40)]
    assert sum(o.reward for o in outcomes) == 1.0
    assert sum(o.success for o in outcomes) > 1
    assert not any(o.terminated for o in outcomes)
    assert [o.truncated for o in outcomes] == [False] * 39 + [True]
    environment.close()


def test_snapshots_and_banks_of_initial_states(tmp_path: Path) -> None:
    environment = make(ManiSkillConfig())
    snapshots, states = [], []
    for number in range(4):
        start(environment, number)
        for action in random_actions(environment, 3):
            environment.step(action)
        snapshots.append(environment.snapshot())
        states.append(environment.observe().state)
    environment.restore(snapshots[1])
    assert np.allclose(environment.observe().state[:9], states[1][:9], atol=1e-6)
    assert snapshots[1]["elapsed_steps"] == [3]
    environment.close()
    path = tmp_path / "states.npz"
    save_initial_states(path, snapshots)
    banked = make(ManiSkillConfig(initial_states=path))
    assert banked.spec.num_initial_states == 4
    start(banked, 2)
    # Poses, not contacts, are restored; index 18 is whether the cube is grasped.
    assert np.allclose(banked.observe().state[19:], states[2][19:], atol=1e-5)
    with pytest.raises(IndexError, match="4 initial states, 0 to 3; got 4"):
        start(banked, 4)
    with pytest.raises(ValueError, match="does not belong to PickCube-v1"):
        banked.restore({"actors/foreign": snapshots[0]["actors/cube"]})
    banked.close()


def test_what_was_tried_out_happens() -> None:
    environment = make(ManiSkillConfig())
    simulator = InlineSimulator([environment], chunk=4)
    simulator.start([0], [Episode("t/0", "PickCube-v1", 0, 0)])
    candidates = torch.from_numpy(random_actions(environment, 12)).view(3, 1, 4, -1)
    for actions in candidates:
        looks = [simulator.look([0], other).observation.state for other in candidates]
        seen = simulator.look([0], actions).observation.state
        simulator.send([0], actions, [None])
        result = simulator.receive([0])
        assert torch.equal(result.observation.state, seen)
        assert sum(torch.equal(look, seen) for look in looks) == 1
    simulator.close()


def test_snapshots_hold_the_target_of_target_controllers() -> None:
    environment = make(ManiSkillConfig(control_mode="pd_ee_target_delta_pose"))
    start(environment, 0)
    actions = random_actions(environment, 6)
    for action in actions[:3]:
        environment.step(action)
    saved = environment.snapshot()
    targets = [name for name in saved if name.startswith("controller/")]
    assert targets
    for action in actions[3:]:
        environment.step(action)
    assert any(not np.array_equal(environment.snapshot()[t], saved[t]) for t in targets)
    environment.restore(saved)
    for name, value in environment.snapshot().items():
        assert np.allclose(value, saved[name], atol=1e-6), name
    environment.close()


def test_a_success_that_is_taken_back_pays_again() -> None:
    environment = make(ManiSkillConfig(terminate_on_success=False))
    expert = ManiSkillConfig().build_expert(environment)
    start(environment, 0)
    while not environment.step(expert()).success:
        saved = environment.snapshot()
    after = environment.snapshot()
    assert saved["had_success"] == [0] and after["had_success"] == [1]
    for snapshot, had_success in ((saved, False), (after, True), (saved, False)):
        environment.restore(snapshot)
        assert environment._had_success is had_success
    # Banks from before there was this entry.
    environment.restore({name: x for name, x in after.items() if name != "had_success"})
    assert environment._had_success is False
    environment.close()


def test_instructions() -> None:
    environment = make(ManiSkillConfig())
    assert environment.instruction == "pick up the red cube and move it to the green goal"
    environment.close()
    environment = make(ManiSkillConfig(instruction="lift it"))
    assert environment.instruction == "lift it"
    environment.close()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"task": "PickCub-v1"}, ValueError, "did you mean PickCube-v1"),
        ({"task": "PickSingleYCB-v1"}, FileNotFoundError, "download_asset ycb"),
        ({"task": "TurnFaucet-v1"}, FileNotFoundError, "download_asset"),
        (
            {"task": "PutCarrotOnPlateInScene-v1"},
            FileNotFoundError,
            "download_asset bridge_v2_real2sim",
        ),
        ({"control_mode": "telepathy"}, ValueError, "pd_ee_delta_pose"),
        ({"task": "StackPyramid-v1", "reward": "dense"}, ValueError, "has no dense reward"),
        ({"robot": "pandas"}, ValueError, "no ManiSkill robot"),
        ({"initial_states": Path("nowhere.npz")}, FileNotFoundError, "no file nowhere.npz"),
    ],
)
def test_mistakes_are_explained(
    options: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make(ManiSkillConfig.model_validate(options))


def test_listing_builds_nothing_and_knows_what_is_missing() -> None:
    tasks = {task.name: task for task in list_tasks()}
    assert tasks["PickCube-v1"].has_fast_path and tasks["PickCube-v1"].has_expert
    assert tasks["PickCube-v1"].missing_assets == ()
    assert tasks["PickSingleYCB-v1"].missing_assets
    assert not tasks["LiftPegUpright-v1"].has_fast_path


def test_a_task_without_fast_path_takes_the_stock_one() -> None:
    environment = make(ManiSkillConfig(task="LiftPegUpright-v1"))
    assert not environment.is_fast
    start(environment, 0)
    outcome = environment.step(random_actions(environment, 1)[0])
    assert not outcome.success and environment.observe().state.shape == (32,)
    environment.close()


@pytest.mark.render
@needs_device
@pytest.mark.parametrize("fast_path", [True, False])
def test_images_and_measured_state(fast_path: bool) -> None:
    environment = make(ManiSkillConfig(observation="rgb", fast_path=fast_path))
    assert environment.is_fast is fast_path
    start(environment, 0)
    seen = environment.observe()
    picture = seen.images["base_camera"]
    assert picture.shape == (64, 64, 3) and picture.dtype == np.uint8
    assert picture.std() > 10
    # qpos 9, qvel 9, grasped 1, hand pose 7, goal 3: no pose of the cube.
    assert seen.state.shape == (29,)
    start(environment, 1)
    assert not np.array_equal(environment.observe().images["base_camera"], picture)
    assert environment.render().shape == (512, 512, 3)
    environment.close()


@pytest.mark.skipif(has_render_device(), reason="this machine can draw")
def test_without_a_device_images_say_what_to_install() -> None:
    with pytest.raises(RuntimeError, match="mesa-vulkan-drivers"):
        make(ManiSkillConfig(observation="rgb"))
    assert "VK_ICD_FILENAMES" in NO_RENDER_DEVICE
