"""Films can be played, and tell how the episode ended."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.contracts import (
    Contract,
    Decision,
    Environment,
    EnvironmentObservation,
    Episode,
    Observation,
    SimulatorSpec,
    StepOutcome,
)
from embodied_rl.training.video import film_episodes, write_video

av = pytest.importorskip("av")


def stream_of(path: Path) -> dict[str, Any]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return {
            "codec": stream.codec_context.name,
            "format": stream.codec_context.pix_fmt,
            "rate": stream.average_rate,
            "frames": frames,
        }


@pytest.mark.parametrize("rate", [20.0, 12.5, 0.5])
def test_a_film_has_its_frames_and_rate(tmp_path: Path, rate: float) -> None:
    frames = [np.full((32, 64, 3), 40 * i, np.uint8) for i in range(5)]
    write_video(tmp_path / "videos" / "a.mp4", frames, rate)
    film = stream_of(tmp_path / "videos" / "a.mp4")
    assert film["codec"] == "h264" and film["format"] == "yuv420p"
    assert film["rate"] == Fraction(rate)
    # Lossy, and through YUV: near is enough.
    assert [round(float(f.mean()) / 40) for f in film["frames"]] == [0, 1, 2, 3, 4]
    assert [p.name for p in (tmp_path / "videos").iterdir()] == ["a.mp4"]


def test_odd_sizes_are_padded_not_cut(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", [np.full((33, 65, 3), 200, np.uint8)] * 3, 20.0)
    frame = stream_of(tmp_path / "a.mp4")["frames"][0]
    assert frame.shape == (34, 66, 3)
    assert frame[:32, :64].min() > 150 and frame[:, 65].mean() < 120


def test_no_frames_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="would have no frames"):
        write_video(tmp_path / "a.mp4", [], 20.0)


class Corridor:
    """Even initial states succeed at step 3; odd ones run into the time limit at step 5."""

    def __init__(self, can_render: bool) -> None:
        contract = Contract(1, 1, (-1.0,), (1.0,), "walk", 10.0, "none", "none")
        self.spec = SimulatorSpec("corridor", contract, 5, can_render)
        self.instruction = "walk"
        self.closed = False

    def reset(self, episode: Episode) -> None:
        self._good, self._step = episode.initial_state % 2 == 0, 0

    def step(self, action: Any) -> StepOutcome:
        self._step += 1
        success = self._good and self._step == 3
        return StepOutcome(float(success), success, self._step == 5, success)

    def observe(self) -> EnvironmentObservation:
        return EnvironmentObservation({}, np.array([self._step], np.float32))

    def snapshot(self) -> dict[str, Any]:
        raise NotImplementedError

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def render(self) -> Any:
        return np.full((16, 16, 3), 40 * self._step, np.uint8)

    def close(self) -> None:
        self.closed = True


class Walker:
    """Always walks, two steps per decision, and notes how it was asked."""

    def __init__(self) -> None:
        self.modes: set[str] = set()

    def act(self, observation: Observation, generator: Any, mode: str) -> Decision:
        self.modes.add(mode)
        empty = torch.zeros(1)
        return Decision(torch.ones(1, 2, 1), empty, empty, {})


def film(tmp_path: Path, can_render: bool) -> tuple[list[Path], Corridor, Walker]:
    world, walker = Corridor(can_render), Walker()
    environment: Environment = world
    simulator = SimpleNamespace(build_environment=lambda: environment)
    episodes = [Episode(f"e/{i}", "corridor", i, seed=i) for i in (4, 7)]
    policy: Any = walker
    return film_episodes(simulator, policy, lambda _: episodes, tmp_path, "final"), world, walker


def test_films_show_every_control_step_and_how_it_ended(tmp_path: Path) -> None:
    paths, world, walker = film(tmp_path, can_render=True)
    assert [p.name for p in paths] == ["final_state_4_success.mp4", "final_state_7_failure.mp4"]
    # The first view, then one frame per step, although a chunk would have gone on.
    assert [len(stream_of(path)["frames"]) for path in paths] == [4, 6]
    assert world.closed and walker.modes == {"deterministic"}


def test_without_a_device_nothing_is_filmed(tmp_path: Path) -> None:
    paths, world, _ = film(tmp_path, can_render=False)
    assert paths == [] and world.closed and not list(tmp_path.iterdir())
