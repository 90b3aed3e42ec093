"""Proximal policy optimisation on decisions (Schulman et al. 2017, arXiv:1707.06347).

With a Flow-SDE policy this is the method of the piRL paper (arXiv:2510.25889): the policy's
log-probability is that of its stochastic denoising step. The same file trains any policy that can
evaluate its own decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.contracts import Policy
from embodied_rl.maths.advantages import chunk_reward, explained_variance, gae, normalise
from embodied_rl.maths.losses import (
    clipped_policy_loss,
    executed_mask,
    log_ratio,
    masked_mean,
    value_loss,
)
from embodied_rl.rollout.batch import Batch


class RatioError(RuntimeError):
    """A policy does not reproduce the log-probabilities of its own fresh decisions."""


class NonFinite(RuntimeError):
    """A loss or gradient became NaN or infinite."""


class PPO:
    """Turns batches of decisions into better policies; the loop around it collects them."""

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

    @property
    def decisions_per_iteration(self) -> int:
        """T: decisions per slot collected between updates."""
        return self.config.decisions_per_iteration

    def update(self, batch: Batch, iteration: int) -> dict[str, float]:
        """Improve the policy on freshly collected decisions; returns the training curve's values.

        Raises `RatioError` if the policy does not reproduce the batch's log-probabilities before
        its first change, and `NonFinite` naming the first bad tensor.
        """
        self._set_learning_rates(iteration)
        advantage, target = self.advantages(batch)
        only_critic = iteration < self.config.critic_warmup_iterations
        history: list[dict[str, float]] = []
        for rows in self._minibatches(batch, iteration):
            if only_critic:
                history.append(self._critic_step(batch, target, rows))
            else:
                first = not history
                history.append(self._step(batch, advantage, target, rows, first))
                if self.config.max_kl and _recent_kl(history) > self.config.max_kl:
                    break
        after_update = getattr(self.policy, "after_update", None)
        if after_update is not None:
            after_update(batch.observation, batch.valid)
        return self._summary(batch, target, history)

    def advantages(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Advantage and value target of every row, each [N]."""
        config = self.config
        shape = (batch.num_decisions, -1)
        advantage = gae(
            reward=chunk_reward(batch.reward, batch.executed, config.discount).view(shape),
            value=batch.value.view(shape),
            next_value=batch.next_value.view(shape),
            discount=(config.discount**batch.executed).view(shape),
            done=batch.done.view(shape),
            valid=batch.valid.view(shape),
            trace_decay=config.gae_lambda,
        ).flatten()
        target = advantage + batch.value
        if config.normalise_advantages == "batch":
            advantage = normalise(advantage, batch.valid)
        return advantage, target

    def _minibatches(self, batch: Batch, iteration: int) -> Iterator[Tensor]:
        """Valid rows in a new random order every epoch; a function of seed and iteration alone."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + iteration)
        valid = batch.valid.nonzero()[:, 0].cpu()
        if not len(valid):
            return
        for _ in range(self.config.epochs):
            order = valid[torch.randperm(len(valid), generator=generator)]
            count = max(1, round(len(order) / self.config.minibatch_size))
            yield from order.to(batch.value.device).tensor_split(count)

    def _step(
        self, batch: Batch, advantage: Tensor, target: Tensor, rows: Tensor, first: bool
    ) -> dict[str, float]:
        config = self.config
        trace = {name: tensor[rows] for name, tensor in batch.trace.items()}
        seen = self.policy.evaluate(batch.observation.select(rows), trace)
        steps = executed_mask(batch.executed[rows], seen.log_prob.shape[1])
        change, mask = log_ratio(seen.log_prob, batch.log_prob[rows], steps, config.ratio_level)
        if first:
            self._require_ratio_one(change)
        weight = advantage[rows]
        everything = torch.ones_like(weight, dtype=torch.bool)
        if config.normalise_advantages == "minibatch":
            weight = normalise(weight, everything)
        if config.ratio_level == "step":
            weight = weight[:, None].expand_as(change)
        policy = clipped_policy_loss(change, weight, mask, config.clip)
        entropy = masked_mean(seen.entropy, steps)
        critic = value_loss(seen.value, target[rows], everything)
        loss = policy.loss - config.entropy_coefficient * entropy
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
        found = {name: float(value.detach()) for name, value in values.items()}
        if first:
            found["first_log_ratio"] = float(change.detach().abs().max())
        return found

    def _critic_step(self, batch: Batch, target: Tensor, rows: Tensor) -> dict[str, float]:
        value = self.policy.value(batch.observation.select(rows))
        critic = value_loss(value, target[rows], torch.ones_like(value, dtype=torch.bool))
        norms = self._descend(self.config.value_coefficient * critic)
        return {"value_loss": float(critic.detach()), "value_grad_norm": float(norms[1])}

    def _descend(self, loss: Tensor) -> list[Tensor]:
        """One optimiser step; the gradient norms of the policy and of the value head."""
        self.optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(loss):
            raise NonFinite(f"the loss is {loss.item()}; lower the learning rate or raise max_kl")
        loss.backward()  # type: ignore[no-untyped-call]
        norms = [
            clip_grad_norm_(group["params"], self.config.max_grad_norm)
            for group in self.optimizer.param_groups
        ]
        if not all(map(torch.isfinite, norms)):
            raise NonFinite(f"{self._first_bad_gradient()} has a gradient that is not finite")
        self.optimizer.step()
        return norms

    def _first_bad_gradient(self) -> str:
        named = getattr(self.policy, "named_parameters", dict)
        for name, parameter in dict(named()).items():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return f"parameter {name}"
        return "a parameter"

    def _require_ratio_one(self, change: Tensor) -> None:
        worst = float(change.detach().abs().max())
        if not worst <= self.config.ratio_tolerance:
            raise RatioError(
                f"before any update the policy gives its own decisions another probability than "
                f"when it made them: largest log-ratio {worst:.3g}, allowed "
                f"{self.config.ratio_tolerance:g} (algorithm.ratio_tolerance). Usual causes: "
                f"dropout or another random layer, normalisation statistics that changed in "
                f"between, reduced precision in one of the two, or a trace that does not hold "
                f"what was drawn."
            )

    def _set_learning_rates(self, iteration: int) -> None:
        done = iteration / max(1, self.iterations)
        factor = {
            "constant": 1.0,
            "linear": 1.0 - done,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        }[self.config.learning_rate_schedule]
        rates = (self.config.learning_rate, self.config.value_learning_rate)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor

    def _summary(
        self, batch: Batch, target: Tensor, history: list[dict[str, float]]
    ) -> dict[str, float]:
        names = {name for step in history for name in step}
        means = {name: _mean([s[name] for s in history if name in s]) for name in sorted(names)}
        return means | {
            "explained_variance": explained_variance(batch.value[batch.valid], target[batch.valid]),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "num_updates": float(len(history)),
        }

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state; weights are the policy's own, and the rest follows from the
        iteration number."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.optimizer.load_state_dict(state)


def _recent_kl(history: list[dict[str, float]], window: int = 8) -> float:
    return _mean([step["approx_kl"] for step in history[-window:]])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


__all__ = ["PPO", "NonFinite", "RatioError"]
