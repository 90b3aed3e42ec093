"""Recording, and reading back with lerobot's own class and with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.contracts import (
    Camera,
    Contract,
    ContractMismatch,
    Environment,
    EnvironmentObservation,
    Expert,
    StepOutcome,
)
from embodied_rl.rollout.planner import initial_states
from embodied_rl.run_config import DemonstrationsConfig
from embodied_rl.training.demonstrations import Demonstrations, load
from embodied_rl.training.lerobot_folder import OUR_FILE, BadDemonstrations, open_dataset
from embodied_rl.training.recording import ExpertFails, record
from line_world import Line, LineConfig


class Watched(Line):
    """Remembers what was executed, and shows its position as a picture."""

    size = (8, 12)
    executed: list[np.ndarray]  # type: ignore[type-arg]

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        data = self.spec.contract.to_json() | {
            "cameras": [{"name": "top", "height": self.size[0], "width": self.size[1]}]
        }
        object.__setattr__(self.spec, "contract", Contract.from_json(data))
        self.executed = []

    def step(self, action: np.ndarray) -> StepOutcome:  # type: ignore[type-arg]
        self.executed.append(action.copy())
        return super().step(action)

    def observe(self) -> EnvironmentObservation:
        value = int(100 * (self.x + 1)) % 256
        picture = np.full((*self.size, 3), value, dtype=np.uint8)
        picture[0, 0] = (value, 0, 255)
        return EnvironmentObservation({"top": picture}, super().observe().state)


class WatchedConfig(LineConfig):
    """Builds one watched line, and keeps it for the test."""

    def build_environment(self) -> Environment:
        environment = Watched(self)
        MADE.append(environment)
        return environment

    def build_expert(self, environment: Environment) -> Expert:
        assert isinstance(environment, Line)
        return lambda: np.array([np.clip(-environment.x, -0.3, 0.3)], dtype=np.float32)


MADE: list[Watched] = []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes with images and noise on the executed actions."""
    path = tmp_path_factory.mktemp("data") / "line"
    summary = record(WatchedConfig(limit=8), path, episodes=6, action_noise=0.1, seed=3)
    assert summary.episodes == 6 and summary.attempts >= 6
    return path


def contract() -> Contract:
    return Watched(WatchedConfig()).spec.contract


def test_lerobot_itself_reads_what_was_recorded(recorded: Path) -> None:
    dataset = open_dataset(recorded)
    assert dataset.num_episodes == 6 and dataset.fps == 10
    frame = dataset[0]
    assert frame["observation.state"].shape == (2,)
    assert frame["action"].numel() == 1
    assert frame["task"].startswith("go home from ")
    assert frame["observation.images.top"].shape == (3, 8, 12)
    assert "q01" in dataset.meta.stats["action"]
    successes = np.asarray(dataset.hf_dataset.with_format("numpy")["next.success"]).reshape(-1)
    assert successes.sum() == 6  # one per episode, at its last frame


def test_the_clean_action_is_recorded_and_the_noisy_one_executed(recorded: Path) -> None:
    data = load(recorded, contract())
    clean = np.clip(-data.observation.state[:, :1].numpy(), -0.3, 0.3)
    assert np.allclose(data.actions.numpy(), clean, atol=1e-6)
    executed = np.concatenate(MADE[0].executed)
    assert not np.isin(np.round(executed, 5), np.round(clean, 5)).all()


def test_pictures_and_states_come_back_exactly(recorded: Path) -> None:
    data = load(recorded, contract())
    expected = (100 * (data.observation.state[:, 0].double() + 1)).long() % 256
    pictures = data.observation.images["top"]
    assert pictures.dtype == torch.uint8 and pictures.shape[1:] == (8, 12, 3)
    assert (pictures[:, 4, 4, 0].long() - expected).abs().max() <= 1  # float32 state
    assert (pictures[:, 0, 0, 2] == 255).all() and (pictures[:, 0, 0, 1] == 0).all()


def test_episodes_are_successes_from_training_states(recorded: Path) -> None:
    described = json.loads((recorded / OUR_FILE).read_text())
    states = [episode["initial_state"] for episode in described["episodes"]]
    train = initial_states("train", None)
    assert len(set(states)) == 6 and all(state in train for state in states)
    data = load(recorded, contract())
    texts = dict(zip(data.episode.tolist(), data.observation.instruction, strict=True))
    assert [texts[i] for i in range(6)] == [f"go home from {state}" for state in states]


def test_fewer_episodes_can_be_read_but_not_more(recorded: Path) -> None:
    data = load(recorded, contract(), DemonstrationsConfig(episodes=2))
    assert data.num_episodes == 2
    with pytest.raises(BadDemonstrations, match=r"holds 6 episodes, but .*episodes=7"):
        load(recorded, contract(), DemonstrationsConfig(episodes=7))


def test_what_does_not_fit_is_named(recorded: Path, tmp_path: Path) -> None:
    other = Contract.from_json(contract().to_json() | {"control_mode": "absolute"})
    with pytest.raises(ContractMismatch, match=r"control_mode: the data set .* has 'delta'"):
        load(recorded, other)
    with pytest.raises(FileNotFoundError, match="not a LeRobotDataset v3 folder"):
        load(tmp_path, contract())
    with pytest.raises(FileExistsError, match="is there already"):
        record(WatchedConfig(), recorded, 1, 0.0, 0)


def test_a_foreign_data_set_is_checked_by_its_columns(recorded: Path) -> None:
    ours = recorded / OUR_FILE
    text = ours.read_text()
    ours.unlink()
    try:
        assert load(recorded, contract()).num_episodes == 6
        wide = Contract.from_json(contract().to_json() | {"state_dim": 5})
        with pytest.raises(ContractMismatch, match=r"2 entries in observation.state, .* 5"):
            load(recorded, wide)
        camera = Camera("side", 8, 12)
        data: dict[str, Any] = contract().to_json() | {"cameras": [vars(camera)]}
        with pytest.raises(ContractMismatch, match=r"no observation.images.side"):
            load(recorded, Contract.from_json(data))
    finally:
        ours.write_text(text)


class Large(Watched):
    """Its pictures are large enough for videos."""

    size = (32, 48)


class LargeConfig(LineConfig):
    """Builds one large line."""

    def build_environment(self) -> Environment:
        return Large(self)


def test_videos_are_recorded(tmp_path: Path) -> None:
    path, config = tmp_path / "data", LargeConfig(limit=8)
    record(config, path, episodes=2, action_noise=0.0, seed=3, video=True)
    assert [file.name for file in path.rglob("*.mp4")] == ["file-000.mp4"]
    assert not list(path.rglob("*.png"))
    environment = config.build_environment()
    data = load(path, environment.spec.contract)
    seen = data.observation.images["top"]
    assert seen.shape[1:] == (32, 48, 3)
    expected = (100 * (data.observation.state[:, 0].double() + 1)).long() % 256
    assert (seen[:, 16, 24, 0].long() - expected).abs().max() <= 6  # lossy
    assert len(set(expected.tolist())) == 4


def test_pictures_too_small_for_videos_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at least 32 x 32, but the camera top gives 8 x 12"):
        record(WatchedConfig(), tmp_path / "data", 1, 0.0, 0, video=True)
    assert not any(tmp_path.iterdir())


class HopelessConfig(LineConfig):
    """Its expert runs away from the goal."""

    def build_expert(self, environment: Environment) -> Expert:
        assert isinstance(environment, Line)
        return lambda: np.array([0.5 if environment.x > 0 else -0.5], dtype=np.float32)


def test_an_expert_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExpertFails, match="only 0 of 20 attempts succeeded"):
        record(HopelessConfig(), tmp_path / "x" / "data", 2, 0.0, 0)
    assert not any((tmp_path / "x").iterdir())


def small() -> Demonstrations:
    from embodied_rl.contracts import Observation

    state = torch.arange(5.0)[:, None]
    return Demonstrations(
        Observation({}, state, tuple("abcde")), 10 * state, torch.tensor([0, 0, 0, 1, 1])
    )


def test_chunks_stop_at_the_end_of_the_episode() -> None:
    seen, actions, valid = small().chunks(torch.tensor([1, 4]), 3)
    assert seen.state[:, 0].tolist() == [1, 4] and seen.instruction == ("b", "e")
    assert actions[..., 0].tolist() == [[10, 20, 20], [40, 40, 40]]
    assert valid.tolist() == [[True, True, False], [True, False, False]]


def test_a_subset_is_numbered_anew() -> None:
    part = small().subset(torch.tensor([1]))
    assert part.episode.tolist() == [0, 0] and part.actions[:, 0].tolist() == [30, 40]
    both = small().subset(torch.tensor([1, 0]))
    assert both.num_episodes == 2 and len(both.actions) == 5
