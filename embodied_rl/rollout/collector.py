"""Collecting decisions for an algorithm, with simulation and inference overlapped.

Slots run on: an episode may span several collections, and an ended one is followed at once by the
next planned one. While the policy decides for one half of the slots, the other half simulates.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import ChunkResult, Decision, Episode, Observation, Policy, Simulator
from embodied_rl.rollout.batch import Batch, EpisodeResult
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.running import Running, halves_of, join, prepared


@dataclass
class _Step:
    """One decision of one half, before and after it was executed."""

    observation: Observation
    decision: Decision
    episodes: list[Episode]
    valid: Tensor
    next_value: Tensor
    bootstraps: Tensor
    result: ChunkResult | None = None


class Collector:
    """Keeps all slots busy with the plan's episodes and records what the policy decides."""

    def __init__(
        self,
        simulator: Simulator,
        policy: Policy,
        planner: TrainingPlanner,
        generator: torch.Generator,
        halves: int,
        num_decisions: int,
    ) -> None:
        self._simulator, self._policy = simulator, policy
        self.num_decisions = num_decisions
        self._planner, self._generator = planner, generator
        self._device = generator.device
        self._halves = halves_of(simulator.num_slots, halves)
        self._running: list[Running] = []
        self._seen: list[Observation] = []
        self._offers: dict[int, list[Episode]] = {}
        self._clock: dict[str, float] = {}
        self._results: list[EpisodeResult] = []
        self._num_lost = 0
        self._failed_once: set[str] = set()

    @torch.no_grad()
    def collect(self) -> Batch:
        """The next `num_decisions` decisions of every slot."""
        num_decisions = self.num_decisions
        began = time.monotonic()
        self._clock = {"infer": 0.0, "wait": 0.0}
        self._results = []
        self._num_lost = 0
        if not self._running:
            self._begin()
        self._first = [0] * self._simulator.num_slots
        steps: list[list[_Step]] = [[] for _ in self._halves]
        for half in range(len(self._halves)):
            steps[half].append(self._decide(half))
        for t in range(num_decisions):
            for half in range(len(self._halves)):
                self._finish(half, t, steps[half])
                if t + 1 < num_decisions:
                    following = self._decide(half)
                    self._set_next_value(steps[half][t], following.decision.value)
                    steps[half].append(following)
        for half in range(len(self._halves)):
            # The next collection begins with the same observation.
            self._seen[half] = prepared(self._policy, self._seen[half].to(self._device))
            self._set_next_value(steps[half][-1], self._value(self._seen[half]))
        self._clock["total"] = time.monotonic() - began
        return self._batch(num_decisions, steps)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Episodes in flight with the actions that they executed, and the plan."""
        chunks = [chunk for running in self._running for chunk in running.actions]
        tensors = {"actions": torch.stack(chunks)} if chunks else {}
        state = {
            "planner": self._planner.state_dict(),
            "episodes": [asdict(running.episode) for running in self._running],
            "num_chunks": [len(running.actions) for running in self._running],
            "failed_once": sorted(self._failed_once),
        }
        return tensors, state

    def load_state_dict(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Put every slot back into its episode by executing its actions again."""
        self._planner.load_state_dict(state["planner"])
        self._failed_once = set(state.get("failed_once", ()))
        self._running, self._seen = [], []
        if not state["episodes"]:
            return
        chunks = iter(tensors.get("actions", torch.zeros(0)))
        episodes = [Episode.from_json(episode) for episode in state["episodes"]]
        actions = [[next(chunks) for _ in range(count)] for count in state["num_chunks"]]
        self._running = [Running(episode) for episode in episodes]
        self._seen = [
            self._simulator.start(half, [episodes[slot] for slot in half]) for half in self._halves
        ]
        for half, slots in enumerate(self._halves):
            self._replay(half, slots, actions)

    def _begin(self) -> None:
        self._running, self._seen = [], []
        for slots in self._halves:
            episodes = self._planner.take(len(slots))
            self._running += [Running(episode) for episode in episodes]
            self._seen.append(self._simulator.start(slots, episodes))

    def _replay(self, half: int, slots: list[int], actions: list[list[Tensor]]) -> None:
        begun = {slot: self._running[slot] for slot in slots}
        for i in range(max(len(actions[slot]) for slot in slots)):
            # A slot that was lost on the way runs another episode by now.
            rows = [
                row
                for row, slot in enumerate(slots)
                if i < len(actions[slot]) and self._running[slot] is begun[slot]
            ]
            if not rows:
                return
            busy = [slots[row] for row in rows]
            chunk = torch.stack([actions[slot][i] for slot in busy]).to(self._device)
            offers = self._planner.take(len(busy))
            self._simulator.send(busy, chunk, offers)
            result = self._simulator.receive(busy)
            for position, slot in enumerate(busy):
                self._running[slot].actions.append(chunk[position])
            self._advance(busy, result, offers)
            self._seen[half] = _replace_rows(self._seen[half], rows, result.observation)

    def _decide(self, half: int) -> _Step:
        slots, observation = self._halves[half], self._seen[half]
        began = time.monotonic()
        seen = prepared(self._policy, observation.to(self._device))
        decision = self._policy.act(seen, self._generator, "explore")
        self._clock["infer"] += time.monotonic() - began
        offers = self._planner.take(len(slots))
        self._offers[half] = offers
        self._simulator.send(slots, decision.actions, offers)
        count = len(slots)
        return _Step(
            observation=seen,
            decision=decision,
            episodes=[self._running[slot].episode for slot in slots],
            valid=torch.ones(count, dtype=torch.bool),
            next_value=torch.zeros(count),
            bootstraps=torch.zeros(count, dtype=torch.bool),
        )

    def _finish(self, half: int, t: int, steps: list[_Step]) -> None:
        slots, step = self._halves[half], steps[t]
        began = time.monotonic()
        result = self._simulator.receive(slots)
        self._clock["wait"] += time.monotonic() - began
        step.result = result
        cut = (result.truncated & ~result.lost).nonzero()[:, 0]
        if len(cut):
            step.next_value[cut.cpu()] = self._value(result.final_observation.select(cut))
            step.bootstraps[cut.cpu()] = True
        for row, slot in enumerate(slots):
            self._running[slot].actions.append(step.decision.actions[row].cpu())
            if result.lost[row]:
                # The worker died: what the episode did so far in this batch does not count.
                for earlier in range(self._first[slot], t + 1):
                    steps[earlier].valid[row] = False
            if result.lost[row] or result.done[row]:
                self._first[slot] = t + 1
        self._results += self._advance(slots, result, self._offers.pop(half))
        self._seen[half] = result.observation

    def _advance(
        self, slots: list[int], result: ChunkResult, offers: list[Episode]
    ) -> list[EpisodeResult]:
        """Move slots whose episode ended or was lost to the episode that they began.

        A lost episode runs once more; if that fails as well, it is a failure with an error.
        """
        ended, unused, lost = [], [], []
        for row, slot in enumerate(slots):
            running = self._running[slot]
            if result.lost[row]:
                self._num_lost += 1
                if running.episode.key in self._failed_once:
                    error = result.errors.get(slot, "lost")
                    ended.append(running.result(error=error))
                else:
                    self._failed_once.add(running.episode.key)
                    lost.append(running.episode)
            else:
                running.add(result, row)
                if result.done[row]:
                    ended.append(running.result())
            if result.refilled[row]:
                self._running[slot] = Running(offers[row])
            else:
                unused.append(offers[row])
        self._planner.put_back([*lost, *unused])
        return ended

    def _set_next_value(self, step: _Step, following: Tensor) -> None:
        assert step.result is not None
        going_on = ~(step.result.done | step.result.lost).cpu()
        step.next_value = torch.where(going_on, following.cpu(), step.next_value)
        step.bootstraps = step.bootstraps | going_on

    def _value(self, observation: Observation) -> Tensor:
        began = time.monotonic()
        value = self._policy.value(observation.to(self._device)).cpu()
        self._clock["infer"] += time.monotonic() - began
        return value

    def _batch(self, num_decisions: int, steps: list[list[_Step]]) -> Batch:
        # Time-major: all slots' first decisions, then all slots' second ones.
        ordered = [half[t] for t in range(num_decisions) for half in steps]
        results = [step.result for step in ordered if step.result is not None]
        device = self._device
        episodes = [episode for step in ordered for episode in step.episodes]
        preludes = sum(result.simulated - result.num_steps for result in self._results)
        ended = {result.episode.key: i for i, result in enumerate(self._results)}

        found = [step.decision.token_log_prob for step in ordered]
        by_token = [part for part in found if part is not None]

        def cat(parts: list[Tensor]) -> Tensor:
            return torch.cat([part.to(device) for part in parts])

        return Batch(
            num_decisions=num_decisions,
            observation=join([step.observation for step in ordered]),
            trace={
                name: cat([step.decision.trace[name] for step in ordered])
                for name in ordered[0].decision.trace
            },
            log_prob=cat([step.decision.log_prob for step in ordered]),
            token_log_prob=cat(by_token) if by_token else None,
            value=cat([step.decision.value for step in ordered]),
            next_value=cat([step.next_value for step in ordered]),
            bootstraps=cat([step.bootstraps for step in ordered]),
            reward=cat([result.reward for result in results]),
            executed=cat([result.executed for result in results]),
            done=cat([result.done for result in results]),
            valid=cat([step.valid for step in ordered]),
            group=torch.tensor([episode.group for episode in episodes], device=device),
            task=torch.tensor([self._planner.tasks.index(e.task) for e in episodes], device=device),
            episode=torch.tensor([ended.get(e.key, -1) for e in episodes], device=device),
            results=self._results,
            num_lost=self._num_lost,
            num_steps=preludes + sum(int(result.executed.sum()) for result in results),
            seconds=dict(self._clock),
        )


def _replace_rows(known: Observation, rows: list[int], seen: Observation) -> Observation:
    index = torch.tensor(rows, device=known.state.device)
    instruction = list(known.instruction)
    for row, text in zip(rows, seen.instruction, strict=True):
        instruction[row] = text
    return Observation(
        images={
            name: image.index_copy(0, index, seen.images[name])
            for name, image in known.images.items()
        },
        state=known.state.index_copy(0, index, seen.state),
        instruction=tuple(instruction),
    )
