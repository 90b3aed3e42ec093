"""Whole episodes in groups that share task and initial state, for group-relative algorithms.

A group whose episodes all end with the same return has nothing to teach: its advantages are zero.
Such groups are replaced by further ones ("dynamic sampling" of DAPO, arXiv:2503.14476, section
3.2), so that an update always sees as many groups as it asked for. Before that, a group that hardly
ever succeeds may grow (after DARS, arXiv:2508.13755): a first success is worth more than another
state that is easy. Afterwards, a group that teaches may be followed by one that begins in the
middle of one of its episodes; see `branching`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import ChunkResult, Decision, Episode, Observation, Policy, Simulator
from embodied_rl.rollout.batch import Batch, EpisodeResult
from embodied_rl.rollout.branching import branch, level_of
from embodied_rl.rollout.episodes import EpisodeRun
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.running import gather, halves_of


class NothingRan(RuntimeError):
    """Not one episode of a collection could be run."""

    def __init__(self, example: EpisodeResult) -> None:
        episode = example.episode
        super().__init__(
            f"no episode of this collection could be run. The first, task {episode.task} from "
            f"initial state {episode.initial_state}, failed twice with: {example.error}"
        )


@dataclass(frozen=True)
class Growth:
    """When a group gets further episodes from its own start, as many again as it began with, and
    when it is followed by a group that begins within it."""

    times: int = 0
    """At most so often."""
    hard_success: float = 0.0
    """While at most this share of its episodes succeeded."""
    branches: int = 0
    """So often in a row, a group that teaches is followed by one from the middle of an episode."""


def returns_differ(results: Sequence[EpisodeResult]) -> bool:
    """Whether a group-relative advantage says anything about these episodes of a group."""
    return all_ran(results) and len({result.total_reward for result in results}) > 1


def all_ran(results: Sequence[EpisodeResult]) -> bool:
    """Whether every episode of a group could be run: enough where groups are not compared within
    themselves."""
    return not any(result.error for result in results)


class GroupCollector:
    """Collects `num_groups` groups that can be learned from, trying at most `max_groups`."""

    def __init__(
        self,
        simulator: Simulator,
        policy: Policy,
        planner: TrainingPlanner,
        device: str,
        halves: int,
        num_groups: int,
        max_groups: int,
        growth: Growth = Growth(),
        teaches: Callable[[Sequence[EpisodeResult]], bool] = returns_differ,
    ) -> None:
        self._growth, self._teaches = growth, teaches
        self._simulator, self._policy, self._planner = simulator, policy, planner
        self._device, self._halves = device, halves_of(simulator.num_slots, halves)
        self._num_groups, self._max_groups = num_groups, max_groups

    def collect(self) -> Batch:
        """Rows are ordered by episode, then by time: T = N decisions of one slot."""
        groups = _Groups(
            self._policy,
            self._planner,
            self._num_groups,
            self._max_groups,
            self._growth,
            self._teaches,
        )
        first = self._planner.take(self._num_groups * self._planner.group_size)
        run = EpisodeRun(
            self._simulator,
            self._policy,
            first,
            self._planner.seed,
            "explore",
            self._device,
            groups,
        )
        run.all(self._halves)
        return groups.batch(run.seconds, self._device)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The plan: no episode is in flight between collections."""
        return {}, {"planner": self._planner.state_dict()}

    def load_state_dict(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Continue a plan."""
        self._planner.load_state_dict(state["planner"])


@dataclass
class _Row:
    """One decision of one episode: where its tensors are, and what came of it."""

    observation: tuple[Observation, int]
    decision: tuple[Decision, int]
    reward: Tensor | None = None
    executed: int = 0
    done: bool = False
    next_value: float | None = None
    """None after a termination."""


@dataclass
class _Group:
    rows: dict[str, list[_Row]] = field(default_factory=dict)
    results: list[EpisodeResult] = field(default_factory=list)
    times_grown: int = 0


class _Groups:
    """The recorder behind `GroupCollector`."""

    def __init__(
        self,
        policy: Policy,
        planner: TrainingPlanner,
        num_groups: int,
        max_groups: int,
        growth: Growth,
        teaches: Callable[[Sequence[EpisodeResult]], bool],
    ) -> None:
        self._policy, self._planner, self._growth = policy, planner, growth
        self._teaches, self._num_steps = teaches, 0
        self._num_started, self._max_groups = num_groups, max_groups
        self._open: dict[int, _Group] = {}
        self._closed: list[_Group] = []
        self._dull: list[_Group] = []

    def decided(
        self, episodes: Sequence[Episode], observation: Observation, decision: Decision
    ) -> None:
        """Keep the decisions."""
        for i, episode in enumerate(episodes):
            rows = self._rows(episode)
            value = float(decision.value[i])
            if rows:
                rows[-1].next_value = value
            rows.append(_Row((observation, i), (decision, i)))

    def executed(self, episodes: Sequence[Episode], result: ChunkResult) -> None:
        """Keep what came of them; a lost episode starts again."""
        self._num_steps += int(result.executed.sum())
        cut = (result.truncated & ~result.terminated & ~result.lost).nonzero()[:, 0]
        values: dict[int, float] = {}
        if len(cut):
            seen = result.final_observation.select(cut)
            found = self._policy.value(seen.to(self._device_of(episodes[0])))
            values = dict(zip(cut.tolist(), found.tolist(), strict=True))
        for i, episode in enumerate(episodes):
            rows = self._rows(episode)
            if result.lost[i]:
                rows.clear()
                continue
            row = rows[-1]
            row.reward, row.executed = result.reward[i].cpu(), int(result.executed[i])
            row.done, row.next_value = bool(result.done[i]), values.get(i)

    def ended(self, result: EpisodeResult) -> Sequence[Episode]:
        """Close a group when its last episode is over; a hard one grows, a dull one is replaced,
        one that teaches branches. Branches are on top of the planned groups and are not replaced:
        which one's place they took would depend on who ended first."""
        self._num_steps += result.simulated - result.num_steps
        number = result.episode.group
        group = self._open.setdefault(number, _Group())
        group.results.append(result)
        if len(group.results) < self._planner.group_size * (1 + group.times_grown):
            return ()
        level, growth = level_of(number), self._growth
        may_grow = not level and group.times_grown < growth.times
        if may_grow and _is_hard(group, growth.hard_success):
            group.times_grown += 1
            return self._planner.again(result.episode, group.times_grown)
        del self._open[number]
        if self._teaches(group.results):
            self._closed.append(group)
            if level < growth.branches:
                return branch(group.results, self._planner.group_size, self._planner.seed)
            return ()
        self._dull.append(group)
        if level or self._num_started >= self._max_groups:
            return ()
        self._num_started += 1
        return self._planner.take(self._planner.group_size)

    def batch(self, seconds: dict[str, float], device: str) -> Batch:
        """The rows of the groups that teach, and the results of all episodes.

        In the plan's order, whatever order the slots and workers finished in. If no group teaches,
        one that does not stands for the batch, with all its rows invalid. Raises `NothingRan` if
        not even that is there.
        """
        stand_in = [group for group in self._dull if any(group.rows.values())][:1]
        kept = self._closed or stand_in
        if not kept:
            raise NothingRan(self._dull[0].results[0])
        dull = [group for group in self._dull if all(group is not one for one in kept)]
        kept.sort(key=lambda group: group.results[0].episode.group)
        results: list[EpisodeResult] = []
        rows: list[_Row] = []
        episode_of: list[int] = []
        for group in kept:
            for result in sorted(group.results, key=lambda r: r.episode.key):
                for row in group.rows.get(result.episode.key, ()):
                    rows.append(row)
                    episode_of.append(len(results))
                results.append(result)
        episodes = [results[i].episode for i in episode_of]
        results += [result for group in dull for result in group.results]
        teaches = bool(self._closed)
        groups = torch.tensor([episode.group for episode in episodes], device=device)
        tasks = [self._planner.tasks.index(episode.task) for episode in episodes]
        task = torch.tensor(tasks, device=device)
        return _assemble(
            rows, groups, task, episode_of, results, self._num_steps, seconds, device, teaches
        )

    def _rows(self, episode: Episode) -> list[_Row]:
        return self._open.setdefault(episode.group, _Group()).rows.setdefault(episode.key, [])

    def _device_of(self, episode: Episode) -> torch.device:
        return self._rows(episode)[-1].decision[0].value.device


def _is_hard(group: _Group, most: float) -> bool:
    """Whether at most this share succeeded. Where an episode could not be run, nothing is known."""
    if not all_ran(group.results):
        return False
    return sum(result.success_once for result in group.results) <= most * len(group.results)


def _assemble(
    rows: list[_Row],
    group: Tensor,
    task: Tensor,
    episodes: list[int],
    results: list[EpisodeResult],
    num_steps: int,
    seconds: dict[str, float],
    device: str,
    teaches: bool,
) -> Batch:
    decisions = [row.decision for row in rows]
    rewards = [row.reward for row in rows if row.reward is not None]
    found = [(decision.token_log_prob, i) for decision, i in decisions]
    by_token = [part[i] for part, i in found if part is not None]
    return Batch(
        num_decisions=len(rows),
        observation=gather([row.observation for row in rows]),
        trace={
            name: torch.stack([decision.trace[name][i] for decision, i in decisions])
            for name in decisions[0][0].trace
        },
        log_prob=torch.stack([decision.log_prob[i] for decision, i in decisions]),
        token_log_prob=torch.stack(by_token) if by_token else None,
        value=torch.stack([decision.value[i] for decision, i in decisions]),
        next_value=torch.tensor([row.next_value or 0.0 for row in rows], device=device),
        bootstraps=torch.tensor([row.next_value is not None for row in rows], device=device),
        reward=torch.stack(rewards).to(device),
        executed=torch.tensor([row.executed for row in rows], device=device),
        done=torch.tensor([row.done for row in rows], device=device),
        valid=torch.full((len(rows),), teaches, device=device),
        group=group,
        task=task,
        episode=torch.tensor(episodes, device=device),
        results=results,
        num_steps=num_steps,
        num_lost=sum(result.error is not None for result in results),
        seconds=seconds,
    )
