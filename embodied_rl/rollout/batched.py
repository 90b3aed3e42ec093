"""Simulators that step all slots as one batch, with the same rules inside a chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodied_rl.contracts import (
    BatchEnvironment,
    CannotLookAhead,
    ChunkResult,
    Episode,
    Observation,
    SimulatorSpec,
)
from embodied_rl.rollout.chunk import require_variations


class BatchedSimulator:
    """A BatchEnvironment as a contracts.Simulator. Tensors stay where the environment has them."""

    def __init__(self, batch: BatchEnvironment) -> None:
        self._batch = batch
        self._pending: dict[tuple[int, ...], ChunkResult] = {}

    @property
    def spec(self) -> SimulatorSpec:
        """What the simulator offers."""
        return self._batch.spec

    @property
    def num_slots(self) -> int:
        """Scenes in the batch."""
        return self._batch.num_slots

    def start(self, slots: Sequence[int], episodes: Sequence[Episode]) -> Observation:
        """Begin these episodes (contracts.Simulator)."""
        for episode in episodes:
            require_variations(self.spec, episode)
        self._batch.reset(slots, episodes)
        return self._batch.observe(slots)

    def send(self, slots: Sequence[int], actions: Tensor, offers: Sequence[Episode | None]) -> None:
        """Execute a chunk at once (contracts.Simulator)."""
        self._pending[tuple(slots)] = self._execute(slots, actions, offers)

    def receive(self, slots: Sequence[int]) -> ChunkResult:
        """What the chunk did (contracts.Simulator)."""
        return self._pending.pop(tuple(slots))

    def look(self, slots: Sequence[int], actions: Tensor) -> ChunkResult:
        """Not possible (contracts.Simulator)."""
        raise CannotLookAhead(
            f"{self.spec.task} runs as one batch of scenes, of which single ones cannot go back"
        )

    def close(self) -> None:
        """Close the environment."""
        self._batch.close()

    def _execute(
        self, slots: Sequence[int], actions: Tensor, offers: Sequence[Episode | None]
    ) -> ChunkResult:
        device, (count, chunk, size) = actions.device, actions.shape
        rows = torch.tensor(list(slots), device=device)
        active = torch.ones(count, dtype=torch.bool, device=device)
        false = torch.zeros(count, dtype=torch.bool, device=device)
        terminated, truncated, once, now = (false.clone() for _ in range(4))
        reward = torch.zeros(count, chunk, device=device)
        executed = torch.zeros(count, dtype=torch.int64, device=device)
        final: Observation | None = None
        for i in range(chunk):
            everywhere = torch.zeros(self.num_slots, dtype=torch.bool, device=device)
            everywhere[rows] = active
            all_actions = torch.zeros(self.num_slots, size, device=device)
            all_actions[rows] = actions[:, i]
            outcome = self._batch.step(all_actions, everywhere)
            reward[:, i] = torch.where(active, outcome.reward[rows], reward[:, i])
            executed += active
            success = outcome.success[rows] & active
            once |= success
            now = torch.where(active, success, now)
            ended = outcome.terminated[rows] & active
            cut = outcome.truncated[rows] & active & ~ended
            terminated |= ended
            truncated |= cut
            if cut.any():
                seen = self._batch.observe(slots)
                final = seen if final is None else _merge(final, seen, cut)
            active &= ~(ended | cut)
            if not active.any():
                break
        done = terminated | truncated
        starting = [i for i in done.nonzero()[:, 0].tolist() if offers[i] is not None]
        if starting:
            fresh = [offer for i in starting if (offer := offers[i]) is not None]
            self._batch.reset([slots[i] for i in starting], fresh)
        refilled = false.clone()
        refilled[starting] = True
        observation = self._batch.observe(slots)
        return ChunkResult(
            reward=reward,
            executed=executed,
            prelude_steps=torch.zeros_like(executed),  # Options refuse preludes for batches.
            terminated=terminated,
            truncated=truncated,
            success_once=once,
            success_now=now,
            stage=torch.zeros_like(executed),  # Batches tell no stages.
            observation=observation,
            final_observation=observation if final is None else final,
            refilled=refilled,
            lost=false,
        )


def _merge(known: Observation, seen: Observation, rows: Tensor) -> Observation:
    """`known`, with these rows [n] taken from `seen`."""

    def pick(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(rows.view(-1, *[1] * (old.dim() - 1)), new, old)

    return Observation(
        images={name: pick(known.images[name], image) for name, image in seen.images.items()},
        state=pick(known.state, seen.state),
        instruction=tuple(
            new if chosen else old
            for old, new, chosen in zip(
                known.instruction, seen.instruction, rows.tolist(), strict=True
            )
        ),
    )
