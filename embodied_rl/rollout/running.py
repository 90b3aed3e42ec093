"""Bookkeeping of an episode while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from embodied_rl.contracts import ChunkResult, Episode, Observation, Policy
from embodied_rl.rollout.batch import EpisodeResult, Path


@dataclass
class Running:
    """One episode in flight."""

    episode: Episode
    total_reward: float = 0.0
    num_steps: int = 0
    num_looked: int = 0
    stage: int = 0
    success_once: bool = False
    success_now: bool = False
    actions: list[Tensor] = field(default_factory=list)
    """Chunks [H, A] executed so far; with them a deterministic simulator gets here again."""
    prelude_steps: int = 0
    steps_to_success: int | None = None
    """Control steps up to the end of the first chunk that succeeded."""

    def add(self, result: ChunkResult, row: int) -> None:
        """Count what row `row` of a result did."""
        self.total_reward += float(result.reward[row].sum())
        self.num_steps += int(result.executed[row])
        self.prelude_steps = int(result.prelude_steps[row])
        self.stage = max(self.stage, int(result.stage[row]))
        if result.success_once[row] and not self.success_once:
            self.steps_to_success = self.num_steps
        self.success_once |= bool(result.success_once[row])
        self.success_now = bool(result.success_now[row])

    def result(self, error: str | None = None) -> EpisodeResult:
        """How the episode went."""
        return EpisodeResult(
            episode=self.episode,
            success_once=self.success_once and error is None,
            success_at_end=self.success_now and error is None,
            total_reward=self.total_reward,
            num_steps=self.num_steps,
            num_looked=self.num_looked,
            error=error,
            stage=self.stage,
            path=None if error else self._path(),
        )

    def _path(self) -> Path:
        # Chunks are executed in full but for the last one.
        own = torch.cat(self.actions)[: self.steps_to_success or self.num_steps].numpy()
        prelude = np.array(self.episode.prelude[: self.prelude_steps], dtype=np.float32)
        actions = np.concatenate([prelude.reshape(-1, own.shape[1]), own])
        return Path(actions, self.prelude_steps, len(self.actions[0]))


def halves_of(num_slots: int, halves: int) -> list[list[int]]:
    """Slots 0 to num_slots - 1 in equal consecutive parts."""
    size = num_slots // halves
    return [list(range(start, start + size)) for start in range(0, num_slots, size)]


def gather(rows: Sequence[tuple[Observation, int]]) -> Observation:
    """One observation from single rows of several."""
    first = rows[0][0]
    return Observation(
        images={
            name: torch.stack([observation.images[name][row] for observation, row in rows])
            for name in first.images
        },
        state=torch.stack([observation.state[row] for observation, row in rows]),
        instruction=tuple(observation.instruction[row] for observation, row in rows),
        prepared={
            name: torch.stack([observation.prepared[name][row] for observation, row in rows])
            for name in first.prepared
        },
    )


def join(observations: Sequence[Observation]) -> Observation:
    """The rows of several observations, one after the other."""
    first = observations[0]
    return Observation(
        images={name: torch.cat([o.images[name] for o in observations]) for name in first.images},
        state=torch.cat([o.state for o in observations]),
        instruction=tuple(text for o in observations for text in o.instruction),
        prepared={
            name: torch.cat([o.prepared[name] for o in observations]) for name in first.prepared
        },
    )


def prepared(policy: Policy, observation: Observation) -> Observation:
    """With what the policy makes of it for good, if it does so."""
    make = getattr(policy, "prepare", None)
    if make is None or observation.prepared:
        return observation
    return replace(observation, prepared=make(observation))
