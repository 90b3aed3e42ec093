"""Cameras, an instruction and the state as a prefix; a transformer expert turns noise into actions.

The prefix is encoded once per observation. Every layer of the action expert attends to the prefix
through keys and values that are also computed once, and are shared by all denoising steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation, Observation
from policies.flow_head import FlowHead
from policies.layers import Normaliser, TimeEmbedding, normalised_state, require_observation
from policies.prefix import PrefixEncoder, feed_forward, heads_of, join_heads
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.config import FlowVLAConfig

_TIME_SIZE = 64


@dataclass(frozen=True)
class Prefix:
    """An encoded observation: per expert layer, keys and values [B, heads, L, D], and which of the
    L tokens are real [B, 1, 1, L]."""

    keys_values: list[tuple[Tensor, Tensor]]
    mask: Tensor

    def repeat(self, times: int) -> Prefix:
        """Every row this many times in succession."""
        return Prefix(
            [
                (k.repeat_interleave(times, 0), v.repeat_interleave(times, 0))
                for k, v in self.keys_values
            ],
            self.mask.repeat_interleave(times, 0),
        )


class FlowVLA(nn.Module):
    """A vision-language-action flow policy; meets contracts.Policy."""

    exploration_weights = ("head.transition.",)
    """Weights that only draw noise: a policy loaded to explore in another way gets new ones."""

    def __init__(self, config: FlowVLAConfig, contract: Contract) -> None:
        super().__init__()
        self.contract, self.chunk = contract, config.chunk
        self.head = FlowHead(config, contract, config.hidden_size)
        self.state_normaliser = Normaliser(contract.state_dim)
        self.encoder = PrefixEncoder(config, contract)
        self.expert = ActionExpert(config, contract)
        # Read from the encoder, without gradients into it: the value must not bend what it sees.
        hidden = config.value_hidden_size
        features = config.hidden_size + contract.state_dim
        self.value_network = ValueHead(config, features, [hidden, hidden])

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Decide for B environments (contracts.Policy)."""
        with torch.no_grad():
            prefix, found = self._encode(observation)
            return self.head.sample(self.expert, prefix, found.value, generator, mode)

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded decisions (contracts.Policy)."""
        prefix, found = self._encode(observation)
        num_scored = self.head.num_scored(trace)
        return self.head.score(self.expert, prefix.repeat(num_scored), found, trace)

    def value(self, observation: Observation) -> Tensor:
        """Expected return [B]."""
        return self.estimate(observation).value

    def estimate(self, observation: Observation) -> Estimate:
        """Expected return, with the histogram that it is the mean of if there is one."""
        state = self._see(observation)
        tokens, mask = self.encoder(observation, state)
        return self._estimate(tokens, mask, state)

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Flow-matching loss (contracts.Policy)."""
        prefix, _ = self._encode(observation)
        return self.head.loss(self.expert, prefix, actions, valid, generator)

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Take statistics from demonstrations (contracts.Policy)."""
        self.head.fit(self.state_normaliser, state, actions)

    def policy_parameters(self) -> list[nn.Parameter]:
        """Encoder, action expert, and the noise network if there is one."""
        return [
            *self.encoder.parameters(),
            *self.expert.parameters(),
            *self.head.parameters(),
        ]

    def value_parameters(self) -> list[nn.Parameter]:
        """The value network's."""
        return list(self.value_network.parameters())

    def set_progress(self, share: float) -> None:
        """Anneal the exploration noise (FlowHead.set_progress)."""
        self.head.set_progress(share)

    def _see(self, observation: Observation) -> Tensor:
        require_observation(self.contract, observation)
        return normalised_state(self.state_normaliser, observation.state)

    def _encode(self, observation: Observation) -> tuple[Prefix, Estimate]:
        state = self._see(observation)
        tokens, mask = self.encoder(observation, state)
        return self.expert.read(tokens, mask), self._estimate(tokens, mask, state)

    def _estimate(self, tokens: Tensor, mask: Tensor, state: Tensor) -> Estimate:
        weight = mask[..., None].to(tokens.dtype)
        pooled = (tokens.detach() * weight).sum(1) / weight.sum(1)
        found: Estimate = self.value_network(torch.cat([pooled, state], dim=-1))
        return found


class ActionExpert(nn.Module):
    """Velocity of noisy action tokens, given a prefix's keys and values."""

    def __init__(self, config: FlowVLAConfig, contract: Contract) -> None:
        super().__init__()
        width, self._heads = config.hidden_size, config.num_heads
        self.time = TimeEmbedding(_TIME_SIZE)
        self.time_in = nn.Sequential(
            nn.Linear(_TIME_SIZE, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.action_in = nn.Linear(contract.action_dim, width)
        self.positions = nn.Parameter(0.02 * torch.randn(config.chunk, width))
        count = config.num_expert_layers
        self.keys_values = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(count))
        self.layers = nn.ModuleList(ExpertBlock(width, self._heads) for _ in range(count))
        self.norm = nn.LayerNorm(width)
        self.action_out = nn.Linear(width, contract.action_dim)

    def read(self, tokens: Tensor, mask: Tensor) -> Prefix:
        """What all denoising steps need of the prefix tokens [B, L, width]."""
        pairs = []
        for layer in self.keys_values:
            keys, values = layer(tokens).chunk(2, dim=-1)
            pairs.append((heads_of(keys, self._heads), heads_of(values, self._heads)))
        return Prefix(pairs, mask[:, None, None])

    def forward(self, prefix: Prefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity [B, H, A] at x_t [B, H, A] and time [B], and the tokens it is read from."""
        tokens = self.action_in(x) + self.positions + self.time_in(self.time(time))[:, None]
        for layer, (keys, values) in zip(self.layers, prefix.keys_values, strict=True):
            tokens = layer(tokens, keys, values, prefix.mask)
        features: Tensor = self.norm(tokens)
        return self.action_out(features), features


class ExpertBlock(nn.Module):
    """Action tokens attend to the prefix and to each other in one attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = feed_forward(width)

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Action tokens [B, H, width] with the prefix's keys, values [B, heads, L, D] and mask."""
        q, k, v = (heads_of(x, self._heads) for x in self.qkv(self.norm1(tokens)).chunk(3, dim=-1))
        own = torch.ones(*mask.shape[:3], tokens.shape[1], dtype=torch.bool, device=mask.device)
        seen = scaled_dot_product_attention(
            q,
            torch.cat([keys, k], dim=2),
            torch.cat([values, v], dim=2),
            attn_mask=torch.cat([mask, own], dim=3),
        )
        tokens = tokens + self.out(join_heads(seen))
        mixed: Tensor = tokens + self.feed_forward(self.norm2(tokens))
        return mixed
