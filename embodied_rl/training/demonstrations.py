"""Demonstrations as LeRobotDataset v3 folders: reading them for imitation."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.contracts import Contract, ContractMismatch, Observation

OUR_FILE = "meta/embodied_rl.json"
"""Beside lerobot's own metadata: contract, simulator options, how it was recorded."""

_IMAGES = "observation.images."


class BadDemonstrations(ValueError):
    """A data set that cannot be learned from."""


@dataclass(frozen=True)
class Demonstrations:
    """N frames of several episodes, in order."""

    observation: Observation
    """N rows."""
    actions: Tensor
    """float32 [N, A]."""
    episode: Tensor
    """int64 [N]: number of the frame's episode, from 0."""

    @property
    def num_episodes(self) -> int:
        """Episodes."""
        return int(self.episode.max()) + 1

    def subset(self, episodes: Tensor) -> Demonstrations:
        """Only these episodes, numbered anew."""
        rows = torch.isin(self.episode, episodes).nonzero()[:, 0]
        numbers = torch.searchsorted(episodes.sort().values, self.episode[rows])
        return Demonstrations(self.observation.select(rows), self.actions[rows], numbers)

    def chunks(self, rows: Tensor, length: int) -> tuple[Observation, Tensor, Tensor]:
        """Observations, chunks [B, length, A] that begin at these frames, and which of their steps
        are still in the episode [B, length]. Steps past its end repeat the last action."""
        last = self._last_frame()[rows]
        steps = rows[:, None] + torch.arange(length)
        valid = steps <= last[:, None]
        actions = self.actions[torch.minimum(steps, last[:, None])]
        return self.observation.select(rows), actions, valid

    def _last_frame(self) -> Tensor:
        counts = torch.bincount(self.episode)
        return (counts.cumsum(0) - 1)[self.episode]


def load(path: Path, contract: Contract, num_episodes: int | None = None) -> Demonstrations:
    """Read a LeRobotDataset v3 folder, ours or another's.

    Raises FileNotFoundError, ContractMismatch naming the field that does not fit, or
    `BadDemonstrations` for too few episodes or values that are not finite.
    """
    dataset, frames, episode = _frames(path, contract, num_episodes)
    count = len(episode)
    state = _column(frames, "observation.state", contract.state_dim, path)[:count]
    actions = _column(frames, "action", contract.action_dim, path)[:count]
    tasks = {int(row.task_index): str(name) for name, row in dataset.meta.tasks.iterrows()}
    indices = np.asarray(frames["task_index"]).reshape(-1)[:count]
    observation = Observation(
        images={camera.name: _images(dataset, camera.name, count) for camera in contract.cameras},
        state=state,
        instruction=tuple(tasks[int(index)] for index in indices),
    )
    return Demonstrations(observation, actions, episode)


def load_actions(path: Path, contract: Contract, num_episodes: int | None = None) -> list[Tensor]:
    """The actions [L, A] of each episode alone; raises what `load` raises."""
    _, frames, episode = _frames(path, contract, num_episodes)
    actions = _column(frames, "action", contract.action_dim, path)[: len(episode)]
    return list(torch.split(actions, torch.bincount(episode).tolist()))


def _frames(path: Path, contract: Contract, num_episodes: int | None) -> tuple[Any, Any, Tensor]:
    """The data set, its frames, and the number of the episode of each frame that is wanted [N]."""
    if not (path / "meta" / "info.json").is_file():
        raise FileNotFoundError(
            f"{path} is not a LeRobotDataset v3 folder: it has no meta/info.json. Record one with "
            f"`embodied-rl collect`, or leave out demonstrations.path"
        )
    _check_contract(path, contract)
    dataset = open_dataset(path)
    frames = dataset.hf_dataset.with_format("numpy")
    episode = torch.from_numpy(np.asarray(frames["episode_index"]).astype(np.int64).reshape(-1))
    total = int(episode.max()) + 1
    if num_episodes is None:
        return dataset, frames, episode
    if num_episodes > total:
        raise BadDemonstrations(
            f"{path} holds {total} episodes, but demonstrations.episodes={num_episodes}"
        )
    return dataset, frames, episode[: int((episode < num_episodes).sum())]


def open_dataset(path: Path) -> Any:
    """The folder as lerobot's own class, without asking a hub for anything."""
    quiet_lerobot()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset("local/demonstrations", root=path, video_backend="pyav")


def quiet_lerobot() -> None:
    """Keep progress bars and notes of the data-set libraries out of ours."""
    for name in ("lerobot", "datasets", "huggingface_hub", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import datasets

    datasets.disable_progress_bars()


def _check_contract(path: Path, contract: Contract) -> None:
    ours = path / OUR_FILE
    if ours.is_file():
        stored = Contract.from_json(json.loads(ours.read_text())["contract"])
        stored.require_equal(contract, f"the data set {path}", "the simulator")
        return
    features = json.loads((path / "meta" / "info.json").read_text())["features"]
    for camera in contract.cameras:
        if f"{_IMAGES}{camera.name}" not in features:
            have = [name for name in features if name.startswith(_IMAGES)]
            raise ContractMismatch(
                f"the data set {path} has no {_IMAGES}{camera.name}; it has {have or 'no images'}"
            )


def _column(frames: Any, name: str, size: int, path: Path) -> Tensor:
    if name not in frames.column_names:
        raise BadDemonstrations(
            f"{path} has no column {name!r}; it has {', '.join(frames.column_names)}"
        )
    values = np.stack([np.asarray(row, dtype=np.float32).reshape(-1) for row in frames[name]])
    if values.shape[1] != size:
        raise ContractMismatch(
            f"the data set {path} has {values.shape[1]} entries in {name}, the simulator {size}"
        )
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise BadDemonstrations(f"{path}: {name} is not finite in frame {bad[0]}")
    return torch.from_numpy(values)


def _images(dataset: Any, camera: str, count: int) -> Tensor:
    """uint8 [N, height, width, 3] of one camera, from image or video columns."""
    pictures = []
    for row in range(count):
        picture = dataset[row][f"{_IMAGES}{camera}"]  # float [3, height, width] in 0..1
        pictures.append((picture * 255.0).round().to(torch.uint8).permute(1, 2, 0))
    return torch.stack(pictures)
