"""A flow policy on the state alone: a multilayer perceptron as velocity, another as value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation, Observation
from policies.flow_head import FlowHead
from policies.layers import (
    Normaliser,
    TimeEmbedding,
    WordBag,
    mlp,
    normalised_state,
    require_observation,
)
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.config import FlowMLPConfig

_TIME_SIZE = 32


class FlowMLP(nn.Module):
    """Small and quick; meets contracts.Policy."""

    exploration_weights = ("head.transition.",)
    """Weights that only draw noise: a policy loaded to explore in another way gets new ones."""

    def __init__(self, config: FlowMLPConfig, contract: Contract) -> None:
        super().__init__()
        if not contract.state_dim:
            raise ValueError("flow_mlp needs a state, and this simulator gives none; use flow_vla")
        self.contract, self.chunk = contract, config.chunk
        self.state_normaliser = Normaliser(contract.state_dim)
        self.head = FlowHead(config, contract, config.hidden_size)
        self.time = TimeEmbedding(_TIME_SIZE)
        chunk_size = config.chunk * contract.action_dim
        hidden = [config.hidden_size] * config.num_layers
        self.words = WordBag(config.instruction_size) if config.instruction_size else None
        seen = contract.state_dim + config.instruction_size
        inputs = seen + chunk_size + _TIME_SIZE
        self.network = mlp([inputs, *hidden, chunk_size], nn.SiLU)
        # The value has its own network: learning it must not disturb what the policy knows.
        self.value_network = ValueHead(config, seen, [config.value_hidden_size] * 2)

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Decide for B environments (contracts.Policy)."""
        with torch.no_grad():
            seen = self._see(observation)
            return self.head.sample(
                self._velocity, seen, self._estimate(seen).value, generator, mode
            )

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded decisions (contracts.Policy)."""
        seen = self._see(observation)
        repeated = seen.repeat_interleave(self.head.num_scored(trace), dim=0)
        return self.head.score(self._velocity, repeated, self._estimate(seen), trace)

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
        """Flow-matching loss (contracts.Policy)."""
        return self.head.loss(self._velocity, self._see(observation), actions, valid, generator)

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Take statistics from demonstrations (contracts.Policy)."""
        self.head.fit(self.state_normaliser, state, actions)

    def policy_parameters(self) -> list[nn.Parameter]:
        """The velocity network's, and those of the noise network and the words if there are any."""
        words = self.words.parameters() if self.words else ()
        return [*self.network.parameters(), *self.head.parameters(), *words]

    def value_parameters(self) -> list[nn.Parameter]:
        """The value network's."""
        return list(self.value_network.parameters())

    def _see(self, observation: Observation) -> Tensor:
        """What the networks see [B, S + words]."""
        require_observation(self.contract, observation)
        state = normalised_state(self.state_normaliser, observation.state)
        if self.words is None:
            return state
        return torch.cat([state, self.words(observation.instruction)], dim=-1)

    def _estimate(self, seen: Tensor) -> Estimate:
        # Without gradients into the words: the value must not bend what the policy sees.
        found: Estimate = self.value_network(seen.detach())
        return found

    def set_progress(self, share: float) -> None:
        """Anneal the exploration noise (FlowHead.set_progress)."""
        self.head.set_progress(share)

    def _velocity(self, seen: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([seen, x.flatten(1), self.time(time)], dim=-1)
        features: Tensor = self.network[:-1](inputs)
        velocity: Tensor = self.network[-1](features).view_as(x)
        return velocity, features[:, None].expand(-1, x.shape[1], -1)
