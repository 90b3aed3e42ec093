"""Running planned episodes to their ends: for evaluation, and for groups to learn from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from embodied_rl.contracts import ChunkResult, Decision, Episode, Observation, Policy, Simulator
from embodied_rl.rollout.batch import EpisodeResult
from embodied_rl.rollout.lookahead import BestOf, choose
from embodied_rl.rollout.running import Running, gather, halves_of, prepared

type Mode = Literal["explore", "deterministic"]


class Recorder(Protocol):
    """Looks on while episodes run."""

    def decided(
        self, episodes: Sequence[Episode], observation: Observation, decision: Decision
    ) -> None:
        """One row per episode was decided."""
        ...

    def executed(self, episodes: Sequence[Episode], result: ChunkResult) -> None:
        """The chunks of these episodes' last decisions were executed, or lost."""
        ...

    def ended(self, result: EpisodeResult) -> Sequence[Episode]:
        """An episode is over; returns further ones to run."""
        ...


def run_episodes(
    simulator: Simulator,
    policy: Policy,
    episodes: Sequence[Episode],
    halves: int,
    seed: int,
    on_result: Callable[[EpisodeResult], None] | None = None,
    mode: Mode = "deterministic",
    device: str = "cpu",
    best_of: BestOf | None = None,
) -> list[EpisodeResult]:
    """Run every episode once and return the results in the plan's order; with `best_of`, execute
    the best of several candidates for each decision.

    An episode's randomness depends on `seed` and the episode alone, so its result does not depend
    on the number of slots or workers. An episode whose worker dies is run once more; if that fails
    as well, it is a failure with an error. Ended slots are neither simulated nor decided for.
    """
    recorder = _Tell(on_result) if on_result else None
    run = EpisodeRun(simulator, policy, episodes, seed, mode, device, recorder, best_of)
    run.all(halves_of(simulator.num_slots, halves))
    return [run.results[episode.key] for episode in episodes]


class EpisodeRun:
    """Episodes on slots, until none is left; see `run_episodes`."""

    def __init__(
        self,
        simulator: Simulator,
        policy: Policy,
        episodes: Sequence[Episode],
        seed: int,
        mode: Mode,
        device: str,
        recorder: Recorder | None,
        best_of: BestOf | None = None,
    ) -> None:
        self._simulator, self._policy, self._seed = simulator, policy, seed
        self._mode, self._device, self._recorder = mode, device, recorder
        self._best_of = best_of
        self._queue = deque(episodes)
        self._running: dict[int, tuple[Running, list[torch.Generator]]] = {}
        """With the generators of its candidates."""
        self._seen: dict[int, tuple[Observation, int]] = {}
        self._failed_once: set[str] = set()
        self.results: dict[str, EpisodeResult] = {}
        self.seconds = {"infer": 0.0, "wait": 0.0}

    @torch.no_grad()
    def all(self, halves: list[list[int]]) -> None:
        """Run until nothing is left."""
        flying: list[tuple[list[int], list[Episode | None]]] = [([], []) for _ in halves]
        while True:
            for half, slots in enumerate(halves):
                if flying[half][0]:
                    self._receive(*flying[half])
                self._fill(slots)
                flying[half] = self._send([slot for slot in slots if slot in self._running])
            if not any(busy for busy, _ in flying):
                return

    def _fill(self, slots: list[int]) -> None:
        """Give waiting episodes to frozen slots."""
        idle = [slot for slot in slots if slot not in self._running][: len(self._queue)]
        if not idle:
            return
        episodes = [self._queue.popleft() for _ in idle]
        began = time.monotonic()
        observation = self._simulator.start(idle, episodes)
        self.seconds["wait"] += time.monotonic() - began
        for row, (slot, episode) in enumerate(zip(idle, episodes, strict=True)):
            self._begin(slot, episode, observation, row)

    def _begin(self, slot: int, episode: Episode, observation: Observation, row: int) -> None:
        count = self._best_of.num_candidates if self._best_of else 1
        generators = [self._generator(episode, number) for number in range(count)]
        self._running[slot] = (Running(episode), generators)
        self._seen[slot] = (observation, row)

    def _generator(self, episode: Episode, number: int) -> torch.Generator:
        """The first candidate's is that of an episode without candidates, and candidate i's is the
        same however many there are."""
        words = [self._seed, episode.seed, episode.initial_state, *([number] if number else [])]
        drawn = np.random.SeedSequence(words).generate_state(1, np.uint64)[0]
        return torch.Generator(self._device).manual_seed(int(drawn >> 1))

    def _send(self, busy: list[int]) -> tuple[list[int], list[Episode | None]]:
        if not busy:
            return [], []
        began = time.monotonic()
        observation = gather([self._seen[slot] for slot in busy]).to(self._device)
        if self._mode == "explore" or self._best_of:
            observation = prepared(self._policy, observation)
        first = [self._running[slot][1][0] for slot in busy]
        decision = self._policy.act(observation, first, self._mode)
        if self._recorder:
            self._recorder.decided(self._episodes(busy), observation, decision)
        self.seconds["infer"] += time.monotonic() - began
        offers: list[Episode | None] = [
            self._queue.popleft() if self._queue else None for _ in busy
        ]
        actions = self._best(busy, observation, decision) if self._best_of else decision.actions
        self._simulator.send(busy, actions, offers)
        for slot, chunk in zip(busy, actions.cpu(), strict=True):
            self._running[slot][0].actions.append(chunk)
        return busy, offers

    def _best(self, busy: list[int], observation: Observation, decision: Decision) -> Tensor:
        assert self._best_of
        began = time.monotonic()
        generators = [self._running[slot][1] for slot in busy]
        actions, looked = choose(
            self._best_of,
            self._simulator,
            self._policy,
            busy,
            observation,
            generators,
            decision.actions,
        )
        for slot, steps in zip(busy, looked, strict=True):
            self._running[slot][0].num_looked += steps
        self.seconds["wait"] += time.monotonic() - began
        return actions

    def _receive(self, busy: list[int], offers: list[Episode | None]) -> None:
        began = time.monotonic()
        result = self._simulator.receive(busy)
        self.seconds["wait"] += time.monotonic() - began
        if self._recorder:
            self._recorder.executed(self._episodes(busy), result)
        again, unused = [], []
        for row, (slot, offer) in enumerate(zip(busy, offers, strict=True)):
            running = self._running[slot][0]
            self._seen[slot] = (result.observation, row)
            if result.lost[row]:
                episode = running.episode
                if episode.key in self._failed_once:
                    self._end(running.result(error=result.errors.get(slot, "lost")))
                else:
                    self._failed_once.add(episode.key)
                    again.append(episode)
            else:
                running.add(result, row)
                if result.done[row]:
                    self._end(running.result())
            if not (result.lost[row] or result.done[row]):
                if offer is not None:
                    unused.append(offer)
            elif result.refilled[row] and offer is not None:
                self._begin(slot, offer, result.observation, row)
            else:
                if offer is not None:
                    unused.append(offer)
                del self._running[slot]
        self._queue.extendleft(reversed([*unused, *again]))

    def _episodes(self, slots: list[int]) -> list[Episode]:
        return [self._running[slot][0].episode for slot in slots]

    def _end(self, result: EpisodeResult) -> None:
        self.results[result.episode.key] = result
        if self._recorder:
            self._queue.extend(self._recorder.ended(result))


class _Tell:
    """A recorder that only passes results on."""

    def __init__(self, on_result: Callable[[EpisodeResult], None]) -> None:
        self._on_result = on_result

    def decided(
        self, episodes: Sequence[Episode], observation: Observation, decision: Decision
    ) -> None:
        """Nothing to do."""

    def executed(self, episodes: Sequence[Episode], result: ChunkResult) -> None:
        """Nothing to do."""

    def ended(self, result: EpisodeResult) -> Sequence[Episode]:
        """Pass it on."""
        self._on_result(result)
        return ()
