"""The batched ManiSkill backend: its code on one CPU scene here, whole batches on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.contracts import Episode
from simulators.config import ManiSkillConfig
from simulators.maniskill import ManiSkillEnvironment, save_initial_states
from simulators.maniskill_gpu import ManiSkillBatch


def episode(initial_state: int) -> Episode:
    return Episode(f"test/{initial_state}", "PushCube-v1", initial_state, seed=0)


def config(**options: object) -> ManiSkillConfig:
    return ManiSkillConfig.model_validate({"task": "PushCube-v1", **options})


ON = torch.tensor([True])
OFF = torch.tensor([False])


@pytest.fixture(scope="module")
def one_scene() -> Iterator[ManiSkillBatch]:
    made = ManiSkillBatch(config(), 1, "cpu", sim_backend="physx_cpu")
    yield made
    made.close()


def test_one_scene_goes_as_the_cpu_backend_does(one_scene: ManiSkillBatch) -> None:
    single = ManiSkillEnvironment(config(fast_path=False))
    fresh = ManiSkillBatch(config(), 1, "cpu", sim_backend="physx_cpu")
    actions = np.random.default_rng(0).uniform(-1, 1, (8, 7)).astype(np.float32)
    single.reset(episode(5))
    fresh.reset([0], [episode(5)])
    assert fresh.spec == single.spec
    np.testing.assert_array_equal(fresh.observe([0]).state[0].numpy(), single.observe().state)
    for action in actions:
        expected = single.step(action)
        outcome = fresh.step(torch.from_numpy(action)[None], ON)
        assert bool(outcome.success[0]) == expected.success
        seen = fresh.observe([0])
        np.testing.assert_allclose(seen.state[0].numpy(), single.observe().state, atol=1e-5)
    assert seen.instruction == ("push the cube onto the target",)
    single.close()
    fresh.close()


def test_equal_numbers_start_equal_and_others_differ(one_scene: ManiSkillBatch) -> None:
    starts = []
    for number in (3, 4, 3):
        one_scene.reset([0], [episode(number)])
        starts.append(one_scene.observe([0]).state)
    torch.testing.assert_close(starts[0], starts[2], rtol=0, atol=1e-6)
    assert not torch.allclose(starts[0], starts[1])


def test_a_paused_slot_stays_where_it_is(one_scene: ManiSkillBatch) -> None:
    one_scene.reset([0], [episode(0)])
    one_scene.step(torch.full((1, 7), 0.5), ON)
    before = one_scene.observe([0]).state
    outcome = one_scene.step(torch.full((1, 7), -1.0), OFF)
    torch.testing.assert_close(one_scene.observe([0]).state, before, rtol=0, atol=1e-6)
    assert not (outcome.truncated | outcome.terminated | outcome.success).any()
    assert outcome.reward.tolist() == [0.0]


def test_success_pays_once_and_the_limit_cuts() -> None:
    batch = ManiSkillBatch(
        config(terminate_on_success=False, max_episode_steps=2), 1, "cpu", sim_backend="physx_cpu"
    )
    batch.reset([0], [episode(0)])
    batch.base.evaluate = lambda: {"success": torch.tensor([True])}
    first, second = (batch.step(torch.zeros(1, 7), ON) for _ in range(2))
    assert (first.reward.item(), second.reward.item()) == (1.0, 0.0)
    assert (first.truncated.item(), second.truncated.item()) == (False, True)
    assert not second.terminated.item() and second.success.item()
    batch.close()


def test_success_terminates() -> None:
    batch = ManiSkillBatch(config(), 1, "cpu", sim_backend="physx_cpu")
    batch.reset([0], [episode(0)])
    batch.base.evaluate = lambda: {"success": torch.tensor([True])}
    outcome = batch.step(torch.zeros(1, 7), ON)
    assert outcome.terminated.item() and not outcome.truncated.item()
    batch.close()


def test_states_come_back(one_scene: ManiSkillBatch) -> None:
    one_scene.reset([0], [episode(1)])
    one_scene.step(torch.full((1, 7), 0.3), ON)
    saved, before = one_scene.snapshot([0]), one_scene.observe([0]).state
    one_scene.reset([0], [episode(2)])
    one_scene.restore([0], saved)
    torch.testing.assert_close(one_scene.observe([0]).state, before, rtol=0, atol=1e-6)


def test_a_bank_of_states_is_obeyed_and_checked(tmp_path: Path) -> None:
    source = ManiSkillEnvironment(config())
    snapshots, views = [], []
    for number in (8, 9):
        source.reset(episode(number))
        snapshots.append(source.snapshot())
        views.append(source.observe().state)
    source.close()
    save_initial_states(tmp_path / "bank.npz", snapshots)
    options = config(initial_states=tmp_path / "bank.npz")
    batch = ManiSkillBatch(options, 1, "cpu", sim_backend="physx_cpu")
    assert batch.spec.num_initial_states == 2
    for number in (1, 0):
        batch.reset([0], [episode(number)])
        np.testing.assert_allclose(batch.observe([0]).state[0].numpy(), views[number], atol=1e-6)
    with pytest.raises(IndexError, match="there are 2 initial states, 0 to 1; got 2"):
        batch.reset([0], [episode(2)])
    batch.close()
    other = config(task="StackCube-v1", initial_states=tmp_path / "bank.npz")
    with pytest.raises(ValueError, match="do not belong to StackCube-v1"):
        ManiSkillBatch(other, 1, "cpu", sim_backend="physx_cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_set() -> None:
    with pytest.raises(RuntimeError, match=r"set simulator\.backend=cpu"):
        ManiSkillBatch(config(backend="gpu"), 4, "cpu")


@pytest.mark.gpu
def test_slots_are_independent_on_a_gpu() -> None:
    batch = ManiSkillBatch(config(backend="gpu"), 4, "cuda")
    batch.reset([0, 1, 2, 3], [episode(i) for i in (6, 7, 6, 6)])
    start = batch.observe([0, 1, 2, 3]).state
    assert start.is_cuda
    torch.testing.assert_close(start[0], start[2], rtol=0, atol=1e-5)
    assert not torch.allclose(start[0], start[1])
    everywhere = torch.ones(4, dtype=torch.bool, device="cuda")
    for _ in range(3):
        batch.step(torch.full((4, 7), 0.4, device="cuda"), everywhere)
    before = batch.observe([1, 3]).state
    paused = torch.tensor([True, False, True, False], device="cuda")
    batch.step(torch.full((4, 7), -0.4, device="cuda"), paused)
    torch.testing.assert_close(batch.observe([1, 3]).state, before, rtol=0, atol=1e-4)
    batch.reset([0], [episode(6)])
    again = batch.observe([0, 1])
    torch.testing.assert_close(again.state[0], start[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(again.state[1], before[0], rtol=0, atol=1e-4)
    batch.close()


@pytest.mark.gpu
@pytest.mark.render
def test_images_stay_on_the_gpu() -> None:
    batch = ManiSkillBatch(config(backend="gpu", observation="rgb"), 3, "cuda")
    batch.reset([0, 1, 2], [episode(i) for i in range(3)])
    image = batch.observe([2, 0]).images["base_camera"]
    assert image.is_cuda and image.shape == (2, 64, 64, 3) and image.dtype == torch.uint8
    assert image.float().std() > 1
    batch.close()
