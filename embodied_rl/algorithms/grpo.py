"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) on whole episodes.

Several episodes start from the same state; an episode's advantage is its return against those of
its group, the same for all its decisions. No critic. With the options of DAPO (arXiv:2503.14476:
clip-higher, dynamic sampling, one weight per decision) and Dr. GRPO (arXiv:2503.20783: no division
by the deviation or by the length).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied_rl.algorithms.actor import actor_loss, judge, losses_by_task
from embodied_rl.algorithms.config import GRPOConfig
from embodied_rl.algorithms.steps import (
    Reference,
    after_update,
    descend,
    descend_without_conflicts,
    mean,
    means,
    minibatches,
    order_of_conflicts,
    require_ratio_level,
    require_ratio_one,
    schedule,
    scored_steps,
)
from embodied_rl.contracts import Policy
from embodied_rl.maths.advantages import episode_weights, group_advantage
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.groups import GroupCollector, Growth

if TYPE_CHECKING:
    from embodied_rl.contracts import Simulator
    from embodied_rl.rollout.planner import TrainingPlanner


class GRPO:
    """Turns groups of episodes into better policies; the loop around it collects them."""

    def __init__(self, config: GRPOConfig, policy: Policy, seed: int) -> None:
        require_ratio_level(policy, config.ratio_level, config.length_normalisation)
        self.config, self.policy = config, policy
        self.seed, self.progress = seed, 0.0
        self.group_size = config.group_size
        self.longest = 1
        self.optimizer = torch.optim.Adam(
            policy.policy_parameters(), config.learning_rate, eps=1e-5
        )
        self.reference = Reference(policy) if config.kl_coefficient else None
        self._conflicts = order_of_conflicts(seed, 0)

    def collector(
        self,
        simulator: Simulator,
        planner: TrainingPlanner,
        generator: torch.Generator,
        halves: int,
    ) -> GroupCollector:
        """Whole episodes, `groups_per_iteration` groups at a time."""
        limit = simulator.spec.max_episode_steps
        per_chunk, steps = self.config.ratio_level == "chunk", self.policy.chunk
        most_decisions = -(-limit // steps)
        most_scored = limit if self.config.scored_steps == "executed" else most_decisions * steps
        self.longest = most_decisions if per_chunk else most_scored
        wanted = self.config.groups_per_iteration
        most = round(wanted * self.config.max_refill)
        device = str(generator.device)
        options = self.config
        growth = Growth(options.extra_groups, options.hard_success, options.branches)
        return GroupCollector(simulator, self.policy, planner, device, halves, wanted, most, growth)

    def set_progress(self, share: float) -> None:
        """How much of the run [0, 1] is done, for schedules."""
        self.progress = share
        if self.reference:
            self.reference.set_progress(share)

    def update(self, batch: Batch, iteration: int) -> dict[str, float]:
        """Improve the policy on freshly collected groups; returns the training curve's values.

        Raises `RatioError` and `NonFinite` as PPO does.
        """
        config = self.config
        rate = config.learning_rate * schedule(config.learning_rate_schedule, self.progress)
        self.optimizer.param_groups[0]["lr"] = rate
        advantage = self.advantages(batch)
        self._conflicts = order_of_conflicts(self.seed, iteration)
        history: list[dict[str, float]] = []
        for rows in minibatches(
            batch.valid, config.minibatch_size, config.epochs, self.seed, iteration
        ):
            history.append(self._step(batch, advantage, rows, first=not history))
            if config.max_kl and mean([s["approx_kl"] for s in history[-8:]]) > config.max_kl:
                break
        after_update(self.policy, batch)
        return means(history) | {
            "learning_rate": rate,
            "num_updates": float(len(history)),
            "num_groups": float(len(set(batch.group[batch.valid].tolist()))),
        }

    def advantages(self, batch: Batch) -> Tensor:
        """Advantage of every row [N], weighted for the episode's length."""
        score = torch.tensor([r.total_reward for r in batch.results], device=batch.value.device)
        group = torch.tensor([r.episode.group for r in batch.results], device=batch.value.device)
        relative = group_advantage(score, group, self.config.scale)[batch.episode]
        rule = self.config.length_normalisation
        per_chunk = self.config.ratio_level == "chunk"
        steps = scored_steps(batch, self.config.scored_steps)
        size = batch.valid * (1 if per_chunk else steps)
        return relative * episode_weights(batch.episode, size, rule, self.longest)

    def _step(self, batch: Batch, advantage: Tensor, rows: Tensor, first: bool) -> dict[str, float]:
        config = self.config
        judged = judge(config, self.policy, self.reference, batch, rows, advantage[rows])
        gate = {}
        if first:
            gate["first_log_ratio"] = require_ratio_one(judged.change, config.ratio_tolerance)
        actor = actor_loss(config, judged)
        limit = config.max_grad_norm
        if config.task_gradients == "pcgrad":
            losses = losses_by_task(config, judged, batch.task[rows])
            norms = descend_without_conflicts(
                self.optimizer, losses, None, limit, self.policy, self._conflicts
            )
        else:
            norms = descend(self.optimizer, actor.loss, limit, self.policy)
        values = actor.curves | {"grad_norm": norms[0]}
        return {name: float(value.detach()) for name, value in values.items()} | gate

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.optimizer.load_state_dict(state)
