"""Demonstrations as LeRobotDataset v3 folders: reading them for imitation."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.contracts import Contract, ContractMismatch, Observation
from embodied_rl.run_config import DemonstrationsConfig
from embodied_rl.training.lerobot_folder import (
    BadDemonstrations,
    check_folder,
    image_keys,
    open_dataset,
)
from embodied_rl.training.pictures import Pictures

_MOST_WORKERS = 8

type Batch = tuple[Observation, Tensor, Tensor]


@dataclass(frozen=True)
class Demonstrations:
    """N frames of several episodes, in order."""

    observation: Observation
    """N rows; without images where `pictures` has them."""
    actions: Tensor
    """float32 [N, A]."""
    episode: Tensor
    """int64 [N]: number of the frame's episode, from 0."""
    pictures: Pictures | None = None
    """N rows that are decoded when they are asked for, where they are too many for the memory."""

    @property
    def num_episodes(self) -> int:
        """Episodes."""
        return int(self.episode.max()) + 1

    def subset(self, episodes: Tensor) -> Demonstrations:
        """Only these episodes, numbered anew."""
        rows = torch.isin(self.episode, episodes).nonzero()[:, 0]
        numbers = torch.searchsorted(episodes.sort().values, self.episode[rows])
        pictures = self.pictures.select(rows) if self.pictures else None
        return Demonstrations(self.observation.select(rows), self.actions[rows], numbers, pictures)

    def chunks(self, rows: Tensor, length: int) -> Batch:
        """Observations, chunks [B, length, A] that begin at these frames, and which of their steps
        are still in the episode [B, length]. Steps past its end repeat the last action."""
        return self._chunks(rows, length, self.pictures.read(rows) if self.pictures else None)

    def batches(self, parts: Iterable[Tensor], length: int) -> Generator[Batch]:
        """`chunks` of one part after the other; pictures are decoded ahead by worker processes, so
        that `parts` is then read sooner than batches are taken."""
        if self.pictures is None:
            for rows in parts:
                yield self.chunks(rows, length)
            return
        ahead: deque[Tensor] = deque()

        def noted() -> Iterator[Tensor]:
            for rows in parts:
                ahead.append(rows)
                yield rows

        with closing(self.pictures.stream(noted())) as stream:
            for images in stream:
                yield self._chunks(ahead.popleft(), length, images)

    def _chunks(self, rows: Tensor, length: int, images: dict[str, Tensor] | None) -> Batch:
        last = self._last_frame[rows]
        steps = rows[:, None] + torch.arange(length)
        valid = steps <= last[:, None]
        actions = self.actions[torch.minimum(steps, last[:, None])]
        observation = self.observation.select(rows)
        if images is not None:
            observation = replace(observation, images=images)
        return observation, actions, valid

    @cached_property
    def _last_frame(self) -> Tensor:
        counts = torch.bincount(self.episode)
        return (counts.cumsum(0) - 1)[self.episode]


def load(
    path: Path, contract: Contract, options: DemonstrationsConfig | None = None
) -> Demonstrations:
    """Read a LeRobotDataset v3 folder, ours or another's; all of it by default. Pictures that would
    take more than `options.in_memory_mib` are left in it, to be decoded when they are asked for.

    Raises FileNotFoundError, ContractMismatch naming the field that does not fit, or
    `BadDemonstrations` for too few episodes, values that are not finite or a damaged folder.
    """
    options = options or DemonstrationsConfig(path=path, episodes=None)
    dataset, episode = _open(path, contract, options)
    observation = Observation(
        images={},
        state=_values(dataset, "observation.state", contract.state_dim, path)
        if contract.state_dim
        else torch.zeros((len(episode), 0)),
        instruction=_instructions(dataset),
    )
    actions = _values(dataset, "action", contract.action_dim, path)
    if not contract.cameras:
        return Demonstrations(observation, actions, episode)
    workers = options.workers
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    pictures = Pictures(
        dataset,
        contract.cameras,
        image_keys(contract.cameras, options.cameras),
        options.resize,
        workers,
        frames=torch.arange(len(episode)),
    )
    if pictures.num_bytes > options.in_memory_mib * 2**20:
        return Demonstrations(observation, actions, episode, pictures)
    return Demonstrations(replace(observation, images=pictures.read_all()), actions, episode)


@dataclass(frozen=True)
class Vectors:
    """N frames of several episodes, in order, without pictures."""

    state: Tensor
    """float32 [N, S]."""
    actions: Tensor
    """float32 [N, A]."""
    episode: Tensor
    """int64 [N]: number of the frame's episode, from 0."""

    def by_episode(self) -> list[Tensor]:
        """The actions [L, A] of each episode."""
        return list(torch.split(self.actions, torch.bincount(self.episode).tolist()))


def load_vectors(path: Path, contract: Contract, options: DemonstrationsConfig) -> Vectors:
    """States and actions alone; raises what `load` raises."""
    dataset, episode = _open(path, contract, options)
    state, actions = (
        _values(dataset, name, size, path)
        for name, size in (
            ("observation.state", contract.state_dim),
            ("action", contract.action_dim),
        )
    )
    return Vectors(state, actions, episode)


def load_actions(path: Path, contract: Contract, options: DemonstrationsConfig) -> list[Tensor]:
    """The actions [L, A] of each episode alone; raises what `load` raises."""
    dataset, episode = _open(path, contract, options)
    actions = _values(dataset, "action", contract.action_dim, path)
    return list(torch.split(actions, torch.bincount(episode).tolist()))


def _open(path: Path, contract: Contract, options: DemonstrationsConfig) -> tuple[Any, Tensor]:
    """The data set with the wanted episodes, and the number of the episode of each frame [N]."""
    check_folder(path, contract, options)
    dataset = open_dataset(path, options.limit)
    numbers = dataset.hf_dataset.data.column("episode_index").to_numpy()
    return dataset, torch.from_numpy(numbers.astype(np.int64))


def _instructions(dataset: Any) -> tuple[str, ...]:
    tasks = {int(row.task_index): str(name) for name, row in dataset.meta.tasks.iterrows()}
    indices = dataset.hf_dataset.data.column("task_index").to_numpy()
    return tuple(tasks[index] for index in indices.tolist())


def _values(dataset: Any, name: str, size: int, path: Path) -> Tensor:
    """float32 [N, size] of one column."""
    table = dataset.hf_dataset
    if name not in table.column_names:
        raise BadDemonstrations(
            f"{path} has no column {name!r}; it has {', '.join(table.column_names)}"
        )
    column = table.data.column(name).combine_chunks()
    while not hasattr(column, "to_numpy") or column.type.num_fields:
        column = column.flatten()
    values = column.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(table), -1)
    if values.shape[1] != size:
        raise ContractMismatch(
            f"the data set {path} has {values.shape[1]} entries in {name}, the simulator {size}"
        )
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise BadDemonstrations(f"{path}: {name} is not finite in frame {bad[0]}")
    return torch.from_numpy(values)
