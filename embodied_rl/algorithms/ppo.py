"""Proximal policy optimisation on decisions (Schulman et al. 2017, arXiv:1707.06347).

With a Flow-SDE policy this is the method of the piRL paper (arXiv:2510.25889): the policy's
log-probability is that of its stochastic denoising step. The same file trains any policy that can
evaluate its own decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied_rl.algorithms.actor import actor_loss, judge, losses_by_task
from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.algorithms.critic import Critic, PopArt, estimate
from embodied_rl.algorithms.stale import View, fresh, seen_again
from embodied_rl.algorithms.steps import (
    NonFinite,
    RatioError,
    Reference,
    after_update,
    descend,
    descend_without_conflicts,
    epochs_of,
    mean,
    means,
    order_of_conflicts,
    require_ratio_level,
    require_ratio_one,
    schedule,
)
from embodied_rl.contracts import Policy
from embodied_rl.maths.advantages import (
    chunk_reward,
    explained_variance,
    gae,
    normalise,
    normalise_each,
    vtrace,
)
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.collector import Collector

if TYPE_CHECKING:
    from embodied_rl.contracts import Simulator
    from embodied_rl.rollout.planner import TrainingPlanner


class PPO:
    """Turns batches of decisions into better policies; the loop around it collects them."""

    group_size = 1

    def __init__(self, config: PPOConfig, policy: Policy, seed: int) -> None:
        require_ratio_level(policy, config.ratio_level)
        self.config = config
        self.policy = policy
        self.seed, self.progress = seed, 0.0
        self.optimizer = torch.optim.Adam(
            [
                {"params": policy.policy_parameters(), "lr": config.learning_rate},
                {"params": policy.value_parameters(), "lr": config.value_learning_rate},
            ],
            eps=1e-5,
        )
        self.reference = Reference(policy) if config.kl_coefficient else None
        self._conflicts = order_of_conflicts(seed, 0)
        self.critic: Critic = Critic()

    def collector(
        self,
        simulator: Simulator,
        planner: TrainingPlanner,
        generator: torch.Generator,
        halves: int,
    ) -> Collector:
        """Slots run on from update to update, `decisions_per_iteration` at a time."""
        if self.config.value_normalisation == "popart" and not isinstance(self.critic, PopArt):
            self.critic = self._popart(len(planner.tasks), generator.device)
        num_decisions = self.config.decisions_per_iteration
        return Collector(simulator, self.policy, planner, generator, halves, num_decisions)

    def _popart(self, num_tasks: int, device: torch.device) -> PopArt:
        """Scales of the planned tasks' returns, which learn with the value head."""
        made = PopArt(num_tasks, self.config.popart_decay).to(device)
        rate = self.config.value_learning_rate
        self.optimizer.add_param_group({"params": list(made.parameters()), "lr": rate})
        return made

    def set_progress(self, share: float) -> None:
        """How much of the run [0, 1] is done, for schedules."""
        self.progress = share
        if self.reference:
            self.reference.set_progress(share)

    def update(self, batch: Batch, iteration: int) -> dict[str, float]:
        """Improve the policy on freshly collected decisions; returns the training curve's values.

        Raises `RatioError` if the policy does not reproduce the batch's log-probabilities before
        its first change, and `NonFinite` naming the first bad tensor.
        """
        config = self.config
        self._set_learning_rates()
        advantage, target = self.advantages(batch)
        explained = explained_variance(
            self._returns(batch.value, batch)[batch.valid], target[batch.valid]
        )
        self.critic.observe(target[batch.valid], batch.task[batch.valid])
        self._conflicts = order_of_conflicts(self.seed, iteration)
        only_critic = iteration < config.critic_warmup_iterations
        history: list[dict[str, float]] = []
        epochs = epochs_of(batch.valid, config.minibatch_size, config.epochs, self.seed, iteration)
        for epoch, parts in enumerate(epochs):
            if epoch and config.advantages == "vtrace":
                view = seen_again(self.policy, batch, config.minibatch_size, config.scored_steps)
                advantage, target = self.advantages(batch, view)
            if only_critic:
                history += [self._critic_step(batch, target, rows) for rows in parts]
            elif self._epoch(batch, advantage, target, parts, history):
                break
        after_update(self.policy, batch)
        return means(history) | {
            "explained_variance": explained,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "num_updates": float(len(history)),
        }

    def _epoch(
        self,
        batch: Batch,
        advantage: Tensor,
        target: Tensor,
        parts: Sequence[Tensor],
        history: list[dict[str, float]],
    ) -> bool:
        """A step on each minibatch; true once the policy has moved too far."""
        limit = self.config.max_kl
        for rows in parts:
            history.append(self._step(batch, advantage, target, rows, first=not history))
            if limit and _recent_kl(history) > limit:
                return True
        return False

    def advantages(self, batch: Batch, view: View | None = None) -> tuple[Tensor, Tensor]:
        """Advantage and value target of every row, each [N], as the batch was collected or as the
        policy sees it now."""
        config, view = self.config, view or fresh(batch)
        shape = (batch.num_decisions, -1)
        value = self._returns(view.value, batch)
        following = self._returns(view.next_value, batch)
        following = torch.where(batch.bootstraps, following, 0.0)
        decisions = {
            "reward": chunk_reward(batch.reward, batch.executed, config.discount).view(shape),
            "value": value.view(shape),
            "next_value": following.view(shape),
            "discount": (config.discount**batch.executed).view(shape),
            "done": batch.done.view(shape),
            "valid": batch.valid.view(shape),
        }
        if config.advantages == "vtrace":
            found, correction = vtrace(
                **decisions,
                trace_decay=config.gae_lambda,
                ratio=view.ratio.view(shape),
                rho_bar=config.vtrace_rho_bar,
                c_bar=config.vtrace_c_bar,
            )
        else:
            found = correction = gae(**decisions, trace_decay=config.gae_lambda)
        advantage, target = found.flatten(), correction.flatten() + value
        if config.normalise_advantages == "batch":
            advantage = normalise(advantage, batch.valid)
        if config.normalise_advantages == "task":
            advantage = normalise_each(advantage, batch.valid, batch.task)
        return advantage, target

    @torch.no_grad()
    def _returns(self, value: Tensor, batch: Batch) -> Tensor:
        """Expected returns [N] of the policy's values [N] of a batch's rows."""
        return self.critic.returns(value, batch.task)

    def _step(
        self, batch: Batch, advantage: Tensor, target: Tensor, rows: Tensor, first: bool
    ) -> dict[str, float]:
        config = self.config
        weight = advantage[rows]
        if config.normalise_advantages == "minibatch":
            weight = normalise(weight, torch.ones_like(weight, dtype=torch.bool))
        judged = judge(config, self.policy, self.reference, batch, rows, weight)
        further = self.critic.curves(judged.seen, target[rows])
        if first:
            ratio = require_ratio_one(judged.change, config.ratio_tolerance)
            further["first_log_ratio"] = ratio
        actor = actor_loss(config, judged)
        critic = self.critic.loss(judged.seen, target[rows], batch.task[rows])
        value_part = config.value_coefficient * critic
        if config.task_gradients == "pcgrad":
            losses = losses_by_task(config, judged, batch.task[rows])
            norms = descend_without_conflicts(
                self.optimizer,
                losses,
                value_part,
                config.max_grad_norm,
                self.policy,
                self._conflicts,
            )
        else:
            norms = self._descend(actor.loss + value_part)
        values = actor.curves | {
            "value_loss": critic,
            "grad_norm": norms[0],
            "value_grad_norm": norms[1],
        }
        return {name: float(value.detach()) for name, value in values.items()} | further

    def _critic_step(self, batch: Batch, target: Tensor, rows: Tensor) -> dict[str, float]:
        found = estimate(self.policy, batch.observation.select(rows))
        critic = self.critic.loss(found, target[rows], batch.task[rows])
        norms = self._descend(self.config.value_coefficient * critic)
        values = {"value_loss": float(critic.detach()), "value_grad_norm": float(norms[1])}
        return values | self.critic.curves(found, target[rows])

    def _descend(self, loss: Tensor) -> list[Tensor]:
        return descend(self.optimizer, loss, self.config.max_grad_norm, self.policy)

    def _set_learning_rates(self) -> None:
        factor = schedule(self.config.learning_rate_schedule, self.progress)
        policy, *values = self.optimizer.param_groups
        policy["lr"] = self.config.learning_rate * factor
        for group in values:
            group["lr"] = self.config.value_learning_rate * factor

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state, and the scales of returns if there are any; weights are the
        policy's own, and the rest follows from the iteration number."""
        critic = self.critic.state_dict()
        return self.optimizer.state_dict() | ({"critic": critic} if critic else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.optimizer.load_state_dict(state)
        if isinstance(self.critic, PopArt):
            self.critic.load_state_dict(state["critic"])


def _recent_kl(history: list[dict[str, float]], window: int = 8) -> float:
    return mean([step["approx_kl"] for step in history[-window:]])


__all__ = ["PPO", "NonFinite", "RatioError"]
