"""Simulators that run inside the training process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from embodied_rl.contracts import ChunkResult, Environment, Episode, Observation, SimulatorSpec
from embodied_rl.rollout.arrays import Arrays, layout
from embodied_rl.rollout.chunk import Kept, begin, execute, go_back, look


class InlineSimulator:
    """Environments stepped one after the other in this process (contracts.Simulator)."""

    def __init__(self, environments: Sequence[Environment], chunk: int) -> None:
        self._environments = list(environments)
        self._spec = environments[0].spec
        self._arrays = Arrays(layout(self._spec, len(environments), chunk))
        self._instruction = [""] * len(environments)
        self._ended_instruction = [""] * len(environments)
        self._kept: Kept = {}

    @property
    def spec(self) -> SimulatorSpec:
        """What the simulator offers."""
        return self._spec

    @property
    def num_slots(self) -> int:
        """Environments."""
        return len(self._environments)

    def start(self, slots: Sequence[int], episodes: Sequence[Episode]) -> Observation:
        """Begin these episodes (contracts.Simulator)."""
        for slot, episode in zip(slots, episodes, strict=True):
            self._kept.pop(slot, None)
            self._instruction[slot] = begin(self._environments[slot], slot, episode, self._arrays)
        return self._arrays.observation(slots, [self._instruction[slot] for slot in slots])

    def send(self, slots: Sequence[int], actions: Tensor, offers: Sequence[Episode | None]) -> None:
        """Execute a chunk at once (contracts.Simulator)."""
        self._arrays["actions"][list(slots)] = actions.detach().cpu().numpy()
        for slot, offer in zip(slots, offers, strict=True):
            self._ended_instruction[slot] = self._instruction[slot]
            environment = self._environments[slot]
            go_back(environment, slot, self._kept)
            if execute(environment, slot, offer is not None, self._arrays) and offer:
                self._instruction[slot] = begin(environment, slot, offer, self._arrays)

    def receive(self, slots: Sequence[int]) -> ChunkResult:
        """What the chunk did (contracts.Simulator)."""
        return self._arrays.result(
            slots,
            [self._instruction[slot] for slot in slots],
            [self._ended_instruction[slot] for slot in slots],
            [False] * len(slots),
            {},
        )

    def look(self, slots: Sequence[int], actions: Tensor) -> ChunkResult:
        """Try a chunk out (contracts.Simulator)."""
        self._arrays["actions"][list(slots)] = actions.detach().cpu().numpy()
        for slot in slots:
            look(self._environments[slot], slot, self._arrays, self._kept)
            self._ended_instruction[slot] = self._instruction[slot]
        return self.receive(slots)

    def close(self) -> None:
        """Close all environments."""
        for environment in self._environments:
            environment.close()
        self._environments.clear()
