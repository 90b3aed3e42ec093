"""Gymnasium environments alone and as a batch: spaces, limits, success, seeds, isolation."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from embodied_rl.contracts import Episode
from simulators.config import GymnasiumConfig
from simulators.gymnasium import GymnasiumBatch, GymnasiumEnvironment
from simulators.gymnasium_formats import (
    ActionFormat,
    EpisodeProgress,
    EpisodeRules,
    Layout,
    UnsupportedSpace,
)

Box = gymnasium.spaces.Box


class Counter(gymnasium.Env[Any, Any]):  # type: ignore[misc]
    """Counts its steps; ends by itself at `end_at`; its noise comes from `np_random`."""

    action_space = Box(-1.0, 1.0, (2,), np.float32)
    observation_space = gymnasium.spaces.Dict(
        {
            "wrist": Box(0, 255, (4, 6, 3), np.uint8),
            "arm": gymnasium.spaces.Dict(
                {"b": Box(-9, 9, (2, 2), np.float64), "a": Box(-9, 9, (1,), np.float32)}
            ),
            "top": Box(0, 255, (5, 5, 3), np.uint8),
        }
    )

    def __init__(self, end_at: int = 1000, success_at: int | None = None) -> None:
        self._end_at, self._success_at = end_at, success_at
        self._count, self._start = 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._count, self._start = 0, float(self.np_random.uniform())
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert np.isfinite(action).all()
        self._count += 1
        if self._count > self._end_at:
            raise RuntimeError("stepped after the end")
        info = {} if self._success_at is None else {"success": self._count == self._success_at}
        reward = float(self.np_random.uniform()) + 1.0
        return self._observe(), reward, self._count == self._end_at, False, info

    def _observe(self) -> dict[str, Any]:
        image = np.full((4, 6, 3), self._count, np.uint8)
        numbers = np.array([[1.0, 2.0], [3.0, float(self._count)]])
        return {
            "wrist": image,
            "top": np.zeros((5, 5, 3), np.uint8),
            "arm": {"a": np.array([self._start], np.float32), "b": numbers},
        }


@pytest.fixture(autouse=True)
def _counter_is_registered() -> Iterator[None]:
    gymnasium.register("Counter-v0", entry_point=lambda **options: Counter(**options))
    yield
    gymnasium.registry.pop("Counter-v0")


def episode(initial_state: int, seed: int = 0) -> Episode:
    return Episode(f"test/{initial_state}", "Counter-v0", initial_state, seed)


def counter(**options: Any) -> GymnasiumConfig:
    limit = options.pop("limit", 50)
    success_return = options.pop("success_return", None)
    return GymnasiumConfig(
        task="Counter-v0",
        max_episode_steps=limit,
        success_return=success_return,
        options=options,
        instruction="count",
    )


STILL = np.zeros(2, np.float32)


def test_a_flat_observation_becomes_the_state() -> None:
    environment = GymnasiumEnvironment(GymnasiumConfig(task="Pendulum-v1"))
    contract = environment.spec.contract
    assert (contract.state_dim, contract.action_dim, contract.cameras) == (3, 1, ())
    assert (contract.action_low, contract.action_high) == ((-2.0,), (2.0,))
    assert contract.control_hz == pytest.approx(20.0)
    assert environment.spec.max_episode_steps == 200
    environment.reset(episode(7))
    seen = environment.observe()
    expected = gymnasium.make("Pendulum-v1").reset(seed=7)[0]
    np.testing.assert_array_equal(seen.state, expected)
    assert seen.images == {}


def test_a_dictionary_becomes_cameras_and_a_state_in_sorted_order() -> None:
    environment = GymnasiumEnvironment(counter())
    cameras = environment.spec.contract.cameras
    sizes = [(camera.name, camera.height, camera.width) for camera in cameras]
    assert sizes == [("top", 5, 5), ("wrist", 4, 6)]
    environment.reset(episode(3))
    environment.step(STILL)
    seen = environment.observe()
    assert seen.state.dtype == np.float32
    np.testing.assert_array_equal(seen.state[1:], [1.0, 2.0, 3.0, 1.0])
    assert 0.0 < seen.state[0] < 1.0
    np.testing.assert_array_equal(seen.images["wrist"], np.ones((4, 6, 3)))
    assert environment.instruction == "count"


def test_a_bare_image_is_the_main_camera() -> None:
    layout = Layout.of(Box(0, 255, (8, 9, 3), np.uint8), "task")
    assert layout.sizes == {"main": (8, 9)}
    assert layout.read(np.ones((8, 9, 3), np.uint8)).state.shape == (0,)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (gymnasium.spaces.Discrete(4), "Discrete(4)"),
        (gymnasium.spaces.Dict({"goal": gymnasium.spaces.Discrete(4)}), "'goal'"),
        (Box(0, 255, (3, 8, 8), np.uint8), "(3, 8, 8)"),
    ],
)
def test_other_observations_are_refused_by_name(space: Any, words: str) -> None:
    with pytest.raises(UnsupportedSpace) as caught:
        Layout.of(space, "Odd-v0")
    assert words in str(caught.value) and "supported are" in str(caught.value)


def test_discrete_and_unbounded_actions_are_refused() -> None:
    with pytest.raises(UnsupportedSpace, match=r"CartPole-v1 takes actions in Discrete\(2\)"):
        GymnasiumEnvironment(GymnasiumConfig(task="CartPole-v1"))
    with pytest.raises(UnsupportedSpace, match="without bounds"):
        ActionFormat(Box(-np.inf, np.inf, (2,), np.float32), "Odd-v0")


def test_unknown_tasks_and_missing_limits_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"cannot find Pendulumm-v1.*package:Pendulumm-v1"):
        GymnasiumEnvironment(GymnasiumConfig(task="Pendulumm-v1"))
    with pytest.raises(ValueError, match=r"set simulator\.max_episode_steps"):
        GymnasiumEnvironment(counter(limit=None))
    with pytest.raises(ValueError, match=r"not simulator\.options"):
        GymnasiumEnvironment(counter(max_episode_steps=3))


def test_actions_are_clipped_to_the_bounds() -> None:
    action = ActionFormat(Box(-1.0, 2.0, (1, 2), np.float32), "task")
    np.testing.assert_array_equal(action.from_row(np.array([-5, 5], np.float32)), [[-1.0, 2.0]])


def test_the_limit_truncates_and_the_end_terminates() -> None:
    limited = GymnasiumEnvironment(counter(limit=2, end_at=5))
    limited.reset(episode(0))
    outcomes = [limited.step(STILL) for _ in range(2)]
    assert [(o.terminated, o.truncated) for o in outcomes] == [(False, False), (False, True)]
    ended = GymnasiumEnvironment(counter(limit=5, end_at=2))
    ended.reset(episode(0))
    outcomes = [ended.step(STILL) for _ in range(2)]
    assert [(o.terminated, o.truncated) for o in outcomes] == [(False, False), (True, False)]


def test_the_registered_limit_holds_unless_ours_is_longer() -> None:
    environment = GymnasiumEnvironment(GymnasiumConfig(task="Pendulum-v1", max_episode_steps=300))
    environment.reset(episode(0))
    cut = [environment.step(np.zeros(1, np.float32)).truncated for _ in range(300)]
    assert cut == [False] * 299 + [True]


def test_success_comes_from_the_info_before_the_return() -> None:
    rules = EpisodeRules(max_steps=9, success_key="success", success_return=3.0)
    progress = EpisodeProgress(rules)
    assert not progress.after(2.0, False, False, {}).success
    assert progress.after(1.0, False, False, {}).success
    assert not progress.after(1.0, False, False, {"success": False}).success
    never = EpisodeProgress(EpisodeRules(9, "success", None))
    assert not never.after(1e9, False, False, {}).success


def test_equal_initial_states_start_equal_and_the_seed_moves_the_noise() -> None:
    environment = GymnasiumEnvironment(counter())

    def run(initial_state: int, seed: int) -> tuple[float, float]:
        environment.reset(episode(initial_state, seed))
        return float(environment.observe().state[0]), environment.step(STILL).reward

    assert run(4, 1) == run(4, 1)
    assert run(4, 1)[0] == run(4, 2)[0] != run(5, 1)[0]
    assert run(4, 1)[1] != run(4, 2)[1]


def test_a_state_that_cannot_be_saved_says_so() -> None:
    environment = GymnasiumEnvironment(counter())
    environment.reset(episode(0))
    with pytest.raises(NotImplementedError, match="Counter-v0 has no state"):
        environment.snapshot()


@pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
def test_a_mujoco_state_is_restored_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log file where it runs.
    environment = GymnasiumEnvironment(GymnasiumConfig(task="HalfCheetah-v5"))
    environment.reset(episode(0))
    actions = np.random.default_rng(0).uniform(-1, 1, (40, 6)).astype(np.float32)
    for action in actions[:20]:
        environment.step(action)
    before, saved = environment.observe().state, environment.snapshot()
    rewards = [environment.step(action).reward for action in actions[20:]]
    after = environment.observe().state
    environment.restore(saved)
    np.testing.assert_allclose(environment.observe().state, before, rtol=0, atol=0)
    assert [environment.step(action).reward for action in actions[20:]] == rewards
    np.testing.assert_array_equal(environment.observe().state, after)
    assert environment.snapshot()["progress"][0] == 40
    with pytest.raises(ValueError, match="same task"):
        environment.restore({**saved, "physics": saved["physics"][:-1]})


def test_a_picture_is_given_or_refused_as_the_spec_says() -> None:
    environment = GymnasiumEnvironment(counter())
    assert not environment.spec.can_render
    with pytest.raises(RuntimeError, match="cannot be drawn here"):
        environment.render()


def rows(value: float, count: int = 3) -> torch.Tensor:
    return torch.full((count, 2), value)


def everywhere(*active: bool) -> torch.Tensor:
    return torch.tensor(active)


@pytest.fixture(params=["sync", "async"])
def batch(request: pytest.FixtureRequest) -> Iterator[GymnasiumBatch]:
    if request.param == "async":
        config = GymnasiumConfig(task="Pendulum-v1", options={"vectorization_mode": "async"})
    else:
        config = GymnasiumConfig(task="Pendulum-v1")
    made = GymnasiumBatch(config, 3, "cpu")
    yield made
    made.close()


def test_a_batch_equals_single_environments_with_partial_resets_and_pauses(
    batch: GymnasiumBatch,
) -> None:
    config = GymnasiumConfig(task="Pendulum-v1")
    singles = [GymnasiumEnvironment(config) for _ in range(3)]
    rng = np.random.default_rng(0)
    batch.reset([0, 1, 2], [episode(i) for i in range(3)])
    for slot, single in enumerate(singles):
        single.reset(episode(slot))
    for step in range(30):
        if step == 10:
            batch.reset([1], [episode(77)])
            singles[1].reset(episode(77))
        active = rng.random(3) < 0.7
        actions = rng.uniform(-2, 2, (3, 1)).astype(np.float32)
        outcome = batch.step(torch.from_numpy(actions), torch.from_numpy(active))
        for slot in range(3):
            reward = singles[slot].step(actions[slot]).reward if active[slot] else 0.0
            assert float(outcome.reward[slot]) == pytest.approx(reward, rel=1e-6)
        seen = batch.observe([2, 0, 1])
        expected = np.stack([singles[slot].observe().state for slot in (2, 0, 1)])
        np.testing.assert_array_equal(seen.state.numpy(), expected)
    assert batch.spec == singles[0].spec


def test_an_ended_slot_waits_and_the_others_go_on() -> None:
    batch = GymnasiumBatch(counter(end_at=2, limit=10, success_at=2), 3, "cpu")
    batch.reset([0], [episode(0)])
    first = batch.step(rows(0.0), everywhere(True, False, False))
    assert not first.terminated.any() and first.reward[1:].tolist() == [0.0, 0.0]
    batch.reset([1, 2], [episode(1), episode(2)])
    second = batch.step(rows(0.0), everywhere(True, True, True))
    assert second.terminated.tolist() == [True, False, False]
    assert second.success.tolist() == [True, False, False]
    # The environment itself raises if it is stepped after its end.
    third = batch.step(rows(0.0), everywhere(False, True, True))
    assert third.terminated.tolist() == [False, True, True]
    assert not third.truncated.any()
    batch.reset([0], [episode(0)])
    seen = batch.observe([0, 1])
    assert seen.state[:, -1].tolist() == [0.0, 2.0]
    assert seen.images["wrist"].shape == (2, 4, 6, 3)
    assert seen.instruction == ("count", "count")
    batch.close()


def test_what_was_observed_does_not_change_later() -> None:
    batch = GymnasiumBatch(counter(), 2, "cpu")
    batch.reset([0, 1], [episode(0), episode(1)])
    seen = batch.observe([0, 1])
    batch.step(rows(0.0, 2), everywhere(True, True))
    assert seen.state[:, -1].tolist() == [0.0, 0.0]
    assert int(seen.images["wrist"].max()) == 0


def test_a_vector_environment_that_steps_all_at_once_is_refused() -> None:
    config = counter(vectorization_mode="vector_entry_point")
    with pytest.raises(ValueError, match="only sync and async"):
        GymnasiumBatch(config, 2, "cpu")
