"""Best of N: candidate chunks are tried out from where each slot is, and the best is executed.

A policy's value is that of an observation, V(o), and says nothing about an action. So each
candidate is executed by the simulator, which is then put back: the simulator is used as a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.contracts import ChunkResult, Observation, Policy, Simulator
from embodied_rl.maths.advantages import chunk_reward

type Score = Callable[[ChunkResult], Tensor]
"""How good the outcomes of n chunks are [n], higher is better. Rows that are done have no next
observation; lost rows may get any score."""

_ROUNDING = 1e-5
"""Share by which a score must be higher: less than that is rounding, which depends on the batch."""


@dataclass(frozen=True)
class BestOf:
    """How decisions are chosen."""

    num_candidates: int
    """N; the first candidate is the policy's deterministic decision."""
    score: Score


def choose(
    best_of: BestOf,
    simulator: Simulator,
    policy: Policy,
    slots: Sequence[int],
    observation: Observation,
    generators: Sequence[Sequence[torch.Generator]],
    first: Tensor,
) -> tuple[Tensor, list[int]]:
    """The best of `first` [n, H, A] and N - 1 chunks in which the policy explores.

    `generators` has N for each of the n rows; candidate i draws from the row's generator i, so that
    it does not depend on the other rows. Returns the chunks [n, H, A] and, per row, the control
    steps that trying them out took.
    """
    best = first
    best_score = torch.full((len(slots),), -torch.inf)
    steps = torch.zeros(len(slots), dtype=torch.int64)
    for number in range(best_of.num_candidates):
        candidate = first
        if number:
            mine = [of_row[number] for of_row in generators]
            candidate = policy.act(observation, mine, "explore").actions
        result = simulator.look(slots, candidate)
        steps += result.executed.cpu()
        score = best_of.score(result).cpu()
        # Equal candidates must not take turns; a score of NaN never wins.
        is_better = score > best_score + _ROUNDING * best_score.abs().clamp(1.0, 1e30)
        best_score = torch.where(is_better, score, best_score)
        best = torch.where(is_better.to(best.device)[:, None, None], candidate, best)
    return best, steps.tolist()


def reward_and_value(policy: Policy, discount: float, device: str = "cpu") -> Score:
    """Discounted reward of the chunk, plus the policy's value of what follows: nothing follows an
    episode's end, be it the task's or the time limit's. `discount` is that of a control step.

    A chunk with a success counts as a reward of at least 1 at its last step, as sparse rewards
    have it.
    """

    def score(result: ChunkResult) -> Tensor:
        executed = result.executed.cpu()
        reward = chunk_reward(result.reward.cpu(), executed, discount)
        of_success = discount ** (executed - 1).clamp_min(0)
        succeeded = result.success_once.cpu()
        reward = torch.where(succeeded, torch.maximum(reward, of_success), reward)
        following = discount**executed * policy.value(result.observation.to(device)).cpu()
        return reward + torch.where(result.done.cpu(), torch.zeros_like(following), following)

    return score
