"""REINFORCE (Williams 1992) with a baseline taken from other episodes.

`leave_one_out`: the mean return of the others from the same initial state (RLOO, Ahmadian et al.
2024, arXiv:2402.14740). `batch`: mean and deviation of all returns (REINFORCE++, Hu 2025,
arXiv:2501.03262, without its clipping: there is one gradient step per batch, so nothing to clip).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied_rl.algorithms.config import REINFORCEConfig
from embodied_rl.algorithms.steps import (
    NonFinite,
    Reference,
    after_update,
    means,
    minibatches,
    require_ratio_one,
    schedule,
    scored_steps,
    step_with_gradients,
)
from embodied_rl.contracts import Policy
from embodied_rl.maths.advantages import leave_one_out_advantage, normalise
from embodied_rl.maths.losses import executed_mask, kl_to_reference, log_ratio, masked_mean
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.groups import GroupCollector, Growth, all_ran, returns_differ

if TYPE_CHECKING:
    from embodied_rl.contracts import Simulator
    from embodied_rl.rollout.planner import TrainingPlanner


class REINFORCE:
    """Turns whole episodes into better policies; the loop around it collects them."""

    def __init__(self, config: REINFORCEConfig, policy: Policy, seed: int) -> None:
        self.config, self.policy = config, policy
        self.seed, self.progress = seed, 0.0
        self.group_size = config.group_size
        self.optimizer = torch.optim.Adam(
            policy.policy_parameters(), config.learning_rate, eps=1e-5
        )
        self.reference = Reference(policy) if config.kl_coefficient else None

    def collector(
        self,
        simulator: Simulator,
        planner: TrainingPlanner,
        generator: torch.Generator,
        halves: int,
    ) -> GroupCollector:
        """Whole episodes, `groups_per_iteration` groups at a time."""
        wanted = self.config.groups_per_iteration
        limit = round(wanted * self.config.max_refill)
        device = str(generator.device)
        options = self.config
        growth = Growth(options.extra_groups, options.hard_success, options.branches)
        # Against the mean of the whole batch, a group of equal returns teaches as well.
        teaches = all_ran if self.config.baseline == "batch" else returns_differ
        return GroupCollector(
            simulator, self.policy, planner, device, halves, wanted, limit, growth, teaches
        )

    def set_progress(self, share: float) -> None:
        """How much of the run [0, 1] is done, for schedules."""
        self.progress = share
        if self.reference:
            self.reference.set_progress(share)

    def update(self, batch: Batch, iteration: int) -> dict[str, float]:
        """One step along the policy gradient; returns the training curve's values.

        Raises `RatioError` and `NonFinite` as PPO does.
        """
        config = self.config
        rate = config.learning_rate * schedule(config.learning_rate_schedule, self.progress)
        self.optimizer.param_groups[0]["lr"] = rate
        advantage = self.advantages(batch)
        self.optimizer.zero_grad(set_to_none=True)
        history: list[dict[str, float]] = []
        for rows in minibatches(batch.valid, config.minibatch_size, 1, self.seed, iteration):
            loss, values = self._loss(batch, advantage, rows, first=not history)
            if not torch.isfinite(loss):
                raise NonFinite(f"the loss is {loss.item()}; lower the learning rate")
            # Minibatches only save memory: together they are the gradient of the whole batch.
            loss.backward()  # type: ignore[no-untyped-call]
            history.append(values)
        found = means(history) | {"learning_rate": rate, "num_updates": float(bool(history))}
        if history:
            norms = step_with_gradients(self.optimizer, config.max_grad_norm, self.policy)
            found["grad_norm"] = float(norms[0])
        after_update(self.policy, batch)
        return found

    def advantages(self, batch: Batch) -> Tensor:
        """Advantage of every row [N]: that of its episode."""
        score = torch.tensor([r.total_reward for r in batch.results], device=batch.value.device)
        group = torch.tensor([r.episode.group for r in batch.results], device=batch.value.device)
        if self.config.baseline == "leave_one_out":
            return leave_one_out_advantage(score, group)[batch.episode]
        ran = torch.tensor([r.error is None for r in batch.results], device=score.device)
        return normalise(score, ran)[batch.episode]

    def _loss(
        self, batch: Batch, advantage: Tensor, rows: Tensor, first: bool
    ) -> tuple[Tensor, dict[str, float]]:
        """What these rows add to the batch's loss, which is a mean over decisions for the policy
        and over control steps for entropy and divergence; and values for the curves."""
        config = self.config
        trace = {name: tensor[rows] for name, tensor in batch.trace.items()}
        observation = batch.observation.select(rows)
        seen = self.policy.evaluate(observation, trace)
        scored = scored_steps(batch, config.scored_steps)
        steps = executed_mask(scored[rows], seen.log_prob.shape[1])
        # Before any change the ratio is 1 and its gradient that of the log-probability.
        change, mask = log_ratio(seen.log_prob, batch.log_prob[rows], steps, "chunk")
        values: dict[str, float] = {}
        if first:
            values["first_log_ratio"] = require_ratio_one(change, config.ratio_tolerance)
        entropy = masked_mean(seen.entropy, steps)
        policy_loss = -masked_mean(change * advantage[rows], mask)
        of_rows = len(rows) / int(batch.valid.sum())
        of_steps = float(steps.sum()) / int(scored[batch.valid].sum())
        loss = of_rows * policy_loss - of_steps * config.entropy_coefficient * entropy
        if self.reference:
            known = self.reference.log_prob(observation, trace)
            away = kl_to_reference(seen.log_prob, known, steps, config.kl_estimator)
            loss = loss + of_steps * config.kl_coefficient * away
            values["kl_to_reference"] = float(away.detach())
        return loss, values | {"entropy": float(entropy.detach())}

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.optimizer.load_state_dict(state)
