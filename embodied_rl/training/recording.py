"""Recording a scripted expert's successful episodes into a LeRobotDataset v3 folder."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.contracts import (
    Contract,
    Environment,
    EnvironmentObservation,
    Episode,
    Expert,
    StepOutcome,
)
from embodied_rl.files import new_folder, write_json
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.training.lerobot_folder import OUR_FILE, quiet_lerobot
from embodied_rl.versions import package_versions

_MOST_ATTEMPTS_PER_EPISODE = 10

_SMALLEST_VIDEO = 32
"""Pixels; the AV1 encoder takes the whole process down with smaller pictures."""


@dataclass(frozen=True)
class RecordingSummary:
    """How the recording went."""

    episodes: int
    """Successful episodes written."""
    attempts: int
    frames: int
    seconds: float


class ExpertFails(RuntimeError):
    """The expert hardly ever succeeds."""


type _Frame = tuple[EnvironmentObservation, Any, StepOutcome]


def record(
    simulator: Any,
    path: Path,
    episodes: int | Mapping[str, int],
    action_noise: float,
    seed: int,
    on_progress: Callable[[int, int], None] | None = None,
    video: bool = False,
) -> RecordingSummary:
    """Record `episodes` successes, so many in all or of each task, from training initial states;
    `on_progress` is told successes and attempts. Pictures are stored one by one as PNG, or as
    `video`.

    With action noise, the noisy action is executed and the clean one recorded. The folder takes
    its name only when it is complete. Raises FileExistsError if there is one, ValueError if the
    task has no expert or pictures are too small for videos, `ExpertFails` if it needs ten times as
    many attempts.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already; choose another folder or remove it")
    began = time.monotonic()
    environment: Environment = simulator.build_environment()
    try:
        expert: Expert = simulator.build_expert(environment)
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(path) as unfinished:
            dataset = _create(unfinished / "data_set", environment, video)
            recorder = _Recorder(environment, expert, action_noise, seed)
            frames = recorder.record(dataset, episodes, on_progress)
            dataset.finalize()
            (unfinished / "data_set").rename(unfinished / "finished")
            description = {
                "contract": environment.spec.contract.to_json(),
                "simulator": simulator.model_dump(mode="json"),
                "episodes": [asdict(episode) for episode in recorder.recorded],
                "attempts": recorder.attempts,
                "action_noise": action_noise,
                "versions": package_versions(),
            }
            write_json(unfinished / "finished" / OUR_FILE, description)
            for part in (unfinished / "finished").iterdir():
                part.rename(unfinished / part.name)
            (unfinished / "finished").rmdir()
    finally:
        environment.close()
    return RecordingSummary(
        len(recorder.recorded), recorder.attempts, frames, time.monotonic() - began
    )


class _Recorder:
    def __init__(
        self, environment: Environment, expert: Expert, action_noise: float, seed: int
    ) -> None:
        spec = environment.spec
        self._environment, self._expert = environment, expert
        self._planner = TrainingPlanner(spec.all_tasks, seed, spec.states)
        self._random = np.random.default_rng(seed)
        self._low = np.asarray(spec.contract.action_low, dtype=np.float32)
        self._high = np.asarray(spec.contract.action_high, dtype=np.float32)
        self._noise = action_noise * (self._high - self._low)
        if spec.contract.gripper != "none":
            # The gripper, the last dimension, opens or closes: noise would only drop things.
            self._noise[-1] = 0.0
        self.attempts = 0
        self.recorded: list[Episode] = []

    def record(
        self,
        dataset: Any,
        episodes: int | Mapping[str, int],
        on_progress: Callable[[int, int], None] | None,
    ) -> int:
        """Fill the data set; returns the frames written."""
        num_frames = 0
        wanted = episodes if isinstance(episodes, int) else sum(episodes.values())
        done: Counter[str] = Counter()
        while len(self.recorded) < wanted:
            if self.attempts >= _MOST_ATTEMPTS_PER_EPISODE * wanted:
                raise ExpertFails(
                    f"only {len(self.recorded)} of {self.attempts} attempts succeeded; lower "
                    f"demonstrations.action_noise or raise simulator.max_episode_steps"
                )
            episode = self._planner.take(1)[0]
            if not isinstance(episodes, int) and done[episode.task] >= episodes[episode.task]:
                continue
            self.attempts += 1
            frames = self._run(episode)
            if frames[-1][2].success:
                self._write(dataset, frames)
                self.recorded.append(episode)
                done[episode.task] += 1
                num_frames += len(frames)
            if on_progress:
                on_progress(len(self.recorded), self.attempts)
        return num_frames

    def _run(self, episode: Episode) -> list[_Frame]:
        self._environment.reset(episode)
        frames: list[_Frame] = []
        while True:
            seen = self._environment.observe()
            clean = np.clip(self._expert(), self._low, self._high)
            noise = self._random.standard_normal(clean.shape).astype(np.float32) * self._noise
            outcome = self._environment.step(np.clip(clean + noise, self._low, self._high))
            frames.append((seen, clean, outcome))
            if outcome.success or outcome.terminated or outcome.truncated:
                return frames

    def _write(self, dataset: Any, frames: list[_Frame]) -> None:
        for position, (seen, action, outcome) in enumerate(frames):
            is_last = position == len(frames) - 1
            frame: dict[str, Any] = {
                "observation.state": seen.state,
                "action": action.astype(np.float32),
                "next.reward": np.array([outcome.reward], dtype=np.float32),
                "next.done": np.array([is_last]),
                "next.success": np.array([outcome.success]),
                "task": self._environment.instruction or self._environment.spec.task,
            }
            for name, image in seen.images.items():
                frame[f"observation.images.{name}"] = image
            dataset.add_frame(frame)
        # lerobot would encode each camera in a process forked from the one that renders.
        dataset.save_episode(parallel_encoding=False)


def _create(path: Path, environment: Environment, video: bool) -> Any:
    contract: Contract = environment.spec.contract
    small = [c for c in contract.cameras if min(c.height, c.width) < _SMALLEST_VIDEO]
    if video and small:
        raise ValueError(
            f"demonstrations.video=true needs pictures of at least {_SMALLEST_VIDEO} x "
            f"{_SMALLEST_VIDEO}, but the camera {small[0].name} gives {small[0].height} x "
            f"{small[0].width}; leave video out"
        )
    quiet_lerobot()
    if video:
        _quiet_encoders()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    one = {"shape": (1,), "names": None}
    features: dict[str, Any] = {
        "observation.state": _vector("state", contract.state_dim),
        "action": _vector("action", contract.action_dim),
        "next.reward": {"dtype": "float32", **one},
        "next.done": {"dtype": "bool", **one},
        "next.success": {"dtype": "bool", **one},
    }
    for camera in contract.cameras:
        features[f"observation.images.{camera.name}"] = {
            "dtype": "video" if video else "image",
            "shape": (camera.height, camera.width, 3),
            "names": ["height", "width", "channels"],
        }
    return LeRobotDataset.create(
        "local/demonstrations",
        fps=round(contract.control_hz),
        features=features,
        root=path,
        use_videos=video,
        video_backend="pyav",
    )


def _quiet_encoders() -> None:
    os.environ.setdefault("SVT_LOG", "1")  # errors alone
    import av

    av.logging.set_libav_level(av.logging.ERROR)


def _vector(name: str, size: int) -> dict[str, Any]:
    names = [f"{name}_{i}" for i in range(size)]
    return {"dtype": "float32", "shape": (size,), "names": names}
