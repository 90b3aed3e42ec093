"""Proximal policy optimisation on decisions (Schulman et al. 2017, arXiv:1707.06347).

With a Flow-SDE policy this is the method of the piRL paper (arXiv:2510.25889): the policy's
log-probability is that of its stochastic denoising step. The same file trains any policy that can
evaluate its own decisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.algorithms.critic import Critic, PopArt, estimate
from embodied_rl.algorithms.steps import (
    NonFinite,
    RatioError,
    Reference,
    descend,
    mean,
    means,
    minibatches,
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
)
from embodied_rl.maths.losses import (
    clipped_policy_loss,
    executed_mask,
    kl_to_reference,
    log_ratio,
    masked_mean,
)
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.collector import Collector

if TYPE_CHECKING:
    from embodied_rl.contracts import Simulator
    from embodied_rl.rollout.planner import TrainingPlanner


class PPO:
    """Turns batches of decisions into better policies; the loop around it collects them."""

    group_size = 1

    def __init__(self, config: PPOConfig, policy: Policy, iterations: int, seed: int) -> None:
        self.config = config
        self.policy = policy
        self.iterations = iterations
        self.seed = seed
        self.optimizer = torch.optim.Adam(
            [
                {"params": policy.policy_parameters(), "lr": config.learning_rate},
                {"params": policy.value_parameters(), "lr": config.value_learning_rate},
            ],
            eps=1e-5,
        )
        self.reference = Reference(policy) if config.kl_coefficient else None
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

    def update(self, batch: Batch, iteration: int) -> dict[str, float]:
        """Improve the policy on freshly collected decisions; returns the training curve's values.

        Raises `RatioError` if the policy does not reproduce the batch's log-probabilities before
        its first change, and `NonFinite` naming the first bad tensor.
        """
        config = self.config
        self._set_learning_rates(iteration)
        advantage, target = self.advantages(batch)
        before = self._returns(batch.value, batch)
        self.critic.observe(target[batch.valid], batch.task[batch.valid])
        only_critic = iteration < config.critic_warmup_iterations
        history: list[dict[str, float]] = []
        for rows in minibatches(
            batch.valid, config.minibatch_size, config.epochs, self.seed, iteration
        ):
            if only_critic:
                history.append(self._critic_step(batch, target, rows))
            else:
                first = not history
                history.append(self._step(batch, advantage, target, rows, first))
                if config.max_kl and _recent_kl(history) > config.max_kl:
                    break
        after_update = getattr(self.policy, "after_update", None)
        if after_update is not None:
            after_update(batch.observation, batch.valid)
        return means(history) | {
            "explained_variance": explained_variance(before[batch.valid], target[batch.valid]),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "num_updates": float(len(history)),
        }

    def advantages(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Advantage and value target of every row, each [N]."""
        config = self.config
        shape = (batch.num_decisions, -1)
        value = self._returns(batch.value, batch)
        following = self._returns(batch.next_value, batch)
        following = torch.where(batch.bootstraps, following, 0.0)
        advantage = gae(
            reward=chunk_reward(batch.reward, batch.executed, config.discount).view(shape),
            value=value.view(shape),
            next_value=following.view(shape),
            discount=(config.discount**batch.executed).view(shape),
            done=batch.done.view(shape),
            valid=batch.valid.view(shape),
            trace_decay=config.gae_lambda,
        ).flatten()
        target = advantage + value
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
        trace = {name: tensor[rows] for name, tensor in batch.trace.items()}
        seen = self.policy.evaluate(batch.observation.select(rows), trace)
        steps = executed_mask(batch.executed[rows], seen.log_prob.shape[1])
        change, mask = log_ratio(seen.log_prob, batch.log_prob[rows], steps, config.ratio_level)
        gate = self.critic.curves(seen, target[rows])
        if first:
            gate["first_log_ratio"] = require_ratio_one(change, config.ratio_tolerance)
        weight = advantage[rows]
        everything = torch.ones_like(weight, dtype=torch.bool)
        if config.normalise_advantages == "minibatch":
            weight = normalise(weight, everything)
        if config.ratio_level == "step":
            weight = weight[:, None].expand_as(change)
        policy = clipped_policy_loss(
            change, weight, mask, config.clip, config.clip_high, config.dual_clip
        )
        entropy = masked_mean(seen.entropy, steps)
        critic = self.critic.loss(seen, target[rows], batch.task[rows])
        loss = policy.loss - config.entropy_coefficient * entropy
        if self.reference:
            known = self.reference.log_prob(batch.observation.select(rows), trace)
            away = kl_to_reference(seen.log_prob, known, steps, config.kl_estimator)
            loss = loss + config.kl_coefficient * away
            gate["kl_to_reference"] = float(away.detach())
        norms = self._descend(loss + config.value_coefficient * critic)
        values = {
            "policy_loss": policy.loss,
            "value_loss": critic,
            "approx_kl": policy.approx_kl,
            "clip_fraction": policy.clip_fraction,
            "entropy": entropy,
            "grad_norm": norms[0],
            "value_grad_norm": norms[1],
        }
        return {name: float(value.detach()) for name, value in values.items()} | gate

    def _critic_step(self, batch: Batch, target: Tensor, rows: Tensor) -> dict[str, float]:
        found = estimate(self.policy, batch.observation.select(rows))
        critic = self.critic.loss(found, target[rows], batch.task[rows])
        norms = self._descend(self.config.value_coefficient * critic)
        values = {"value_loss": float(critic.detach()), "value_grad_norm": float(norms[1])}
        return values | self.critic.curves(found, target[rows])

    def _descend(self, loss: Tensor) -> list[Tensor]:
        return descend(self.optimizer, loss, self.config.max_grad_norm, self.policy)

    def _set_learning_rates(self, iteration: int) -> None:
        factor = schedule(self.config.learning_rate_schedule, iteration / max(1, self.iterations))
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
