"""The classic continuous-control policy: a Gaussian around a tanh network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation, Observation
from embodied_rl.maths.flow import normal_log_prob
from embodied_rl.maths.randomness import standard_normal
from embodied_rl.maths.statistics import merge_moments
from policies.layers import Normaliser, fit_state, mlp, require_observation
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.config import GaussianMLPConfig

_LARGEST_STATE = 10.0


class GaussianMLP(nn.Module):
    """For learning from scratch; meets contracts.Policy.

    Actions are drawn in units where the environment's bounds are -1 and 1. The log-probability is
    that of the draw before it is cut to the bounds.
    """

    low: Tensor
    high: Tensor
    num_seen: Tensor

    def __init__(self, config: GaussianMLPConfig, contract: Contract) -> None:
        super().__init__()
        if not contract.state_dim:
            raise ValueError("gaussian_mlp needs a state, and this simulator gives none")
        self.contract, self.chunk = contract, config.chunk
        self.register_buffer("low", torch.tensor(contract.action_low), persistent=False)
        self.register_buffer("high", torch.tensor(contract.action_high), persistent=False)
        if not (self.low.isfinite().all() and self.high.isfinite().all()):
            raise ValueError(
                f"gaussian_mlp needs bounded actions, got low={contract.action_low} and "
                f"high={contract.action_high}"
            )
        self.state_normaliser = Normaliser(contract.state_dim)
        self._keeps_running = config.normalise_state
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.float64))
        hidden = [config.hidden_size] * config.num_layers
        outputs = config.chunk * contract.action_dim
        root2 = 2**0.5
        self.mean_network = mlp([contract.state_dim, *hidden, outputs], nn.Tanh, root2, 0.01)
        self.value_network = ValueHead(config, contract.state_dim, hidden)
        start = math.log(config.initial_std)
        self.log_std = nn.Parameter(torch.full((contract.action_dim,), start))

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Decide for B environments (contracts.Policy)."""
        with torch.no_grad():
            state = self._see(observation)
            mean, value = self._mean(state), self._estimate(state).value
            if mode == "deterministic":
                log_prob = torch.zeros(mean.shape[:2], device=mean.device)
                return Decision(self._to_actions(mean), log_prob, value, {})
            std = self.log_std.exp()
            drawn = mean + std * standard_normal(mean.shape, generator, mean.device)
            log_prob = normal_log_prob(drawn, mean, std)
            return Decision(self._to_actions(drawn), log_prob, value, {"drawn": drawn})

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded decisions (contracts.Policy)."""
        state = self._see(observation)
        mean = self._mean(state)
        log_prob = normal_log_prob(trace["drawn"], mean, self.log_std.exp())
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        found = self._estimate(state)
        return Evaluation(log_prob, entropy.expand_as(log_prob), found.value, found.histogram)

    def value(self, observation: Observation) -> Tensor:
        """Expected return [B]."""
        return self.estimate(observation).value

    def estimate(self, observation: Observation) -> Estimate:
        """Expected return, with the histogram that it is the mean of if there is one."""
        return self._estimate(self._see(observation))

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Negative log-likelihood of demonstrated chunks per control step (contracts.Policy)."""
        target = (actions - self._middle) / self._half_range
        log_prob = normal_log_prob(target, self._mean(self._see(observation)), self.log_std.exp())
        counted = torch.where(valid, log_prob, torch.zeros_like(log_prob))
        return -counted.sum() / valid.sum().clamp_min(1)

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Take the statistics of demonstrated states (contracts.Policy)."""
        fit_state(self.state_normaliser, state)
        # The demonstrations count among what was seen, else the first batch would replace them.
        self.num_seen.fill_(len(state))

    def after_update(self, observation: Observation, valid: Tensor) -> None:
        """Take the batch's states into the running statistics.

        Called once the batch has been learned from: in between, `evaluate` must see the same
        statistics as `act` did.
        """
        if not self._keeps_running:
            return
        normaliser = self.state_normaliser
        mean, variance, count = merge_moments(
            (normaliser.mean, normaliser.std.square(), self.num_seen), observation.state[valid]
        )
        normaliser.mean.copy_(mean)
        normaliser.std.copy_((variance + 1e-8).sqrt())
        self.num_seen.copy_(count)

    def policy_parameters(self) -> list[nn.Parameter]:
        """The mean network's and the deviations."""
        return [*self.mean_network.parameters(), self.log_std]

    def value_parameters(self) -> list[nn.Parameter]:
        """The value network's."""
        return list(self.value_network.parameters())

    @property
    def _middle(self) -> Tensor:
        return (self.high + self.low) / 2

    @property
    def _half_range(self) -> Tensor:
        return (self.high - self.low) / 2

    def _see(self, observation: Observation) -> Tensor:
        require_observation(self.contract, observation)
        seen: Tensor = self.state_normaliser(observation.state.float())
        # Without running statistics a state keeps its unit, in which large values are ordinary.
        return seen.clamp(-_LARGEST_STATE, _LARGEST_STATE) if self._keeps_running else seen

    def _estimate(self, state: Tensor) -> Estimate:
        found: Estimate = self.value_network(state)
        return found

    def _mean(self, state: Tensor) -> Tensor:
        mean: Tensor = self.mean_network(state).view(len(state), self.chunk, -1)
        return mean

    def _to_actions(self, units: Tensor) -> Tensor:
        return torch.clamp(units * self._half_range + self._middle, self.low, self.high)
