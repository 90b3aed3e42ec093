"""The policy gradient of flow policies against the pathwise one: two ways to one number.

The expected reward of a chunk has a gradient that needs no likelihood: differentiate through the
sampler with its noise held fixed. `log_prob` times reward must give the same one in expectation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodied_rl.contracts import Contract, Estimate
from embodied_rl.maths import flow
from policies.config import FlowMLPConfig
from policies.flow_head import FlowHead

ROWS, STEPS, GOAL = 40_000, 4, torch.tensor([0.6, -0.4])
CONTRACT = Contract(
    state_dim=1,
    action_dim=2,
    action_low=(-100.0, -100.0),
    action_high=(100.0, 100.0),
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
)


class Velocity(nn.Module):
    """A small smooth network that depends on the whole chunk x and t."""

    def __init__(self, chunk: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_features = 16
        self.first = nn.Linear(2 * chunk + 1, 16)
        self.out = nn.Linear(16, 2 * chunk)
        if chunk > 1:  # Its steps have much to do with each other.
            nn.init.normal_(self.first.weight)
            nn.init.normal_(self.out.weight, std=0.5)

    def forward(self, prefix: None, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        features = self.first(torch.cat([x.flatten(1), time[:, None]], -1)).tanh()
        return self.out(features).view_as(x), features[:, None].expand(-1, x.shape[1], -1)


def reward(chunk: Tensor) -> Tensor:
    """A smooth bump at the goal, [B]."""
    return torch.exp(-(chunk[:, 0] - GOAL).square().sum(-1))


def flat_gradient(value: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])


def through_the_sampler(head: FlowHead, network: Velocity, live: Tensor) -> Tensor:
    """Mean reward to differentiate through the chain; the parameters count only at each row's
    random steps `live` [B, K], because that is what the likelihood scores."""
    generator = torch.Generator().manual_seed(2)
    chunk = network.out.out_features // 2
    x = torch.randn(ROWS, chunk, 2, generator=generator)
    frozen = Velocity(chunk)
    frozen.load_state_dict(network.state_dict())
    frozen.requires_grad_(False)
    for k in range(STEPS):
        step = torch.full((ROWS,), k)
        time = flow.time_of(step, STEPS)
        mean, std = head.transition(x, *network(None, x, time), step, 1.0)
        random = mean + std * torch.randn(x.shape, generator=generator)
        calm = flow.ode_step(x, frozen(None, x, time)[0], STEPS)
        x = torch.where(live[:, k, None, None], random, calm)
    return reward(x).mean()


def two_gradients(options: dict[str, Any], scored: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Of the expected reward of the first control step of a chunk: by the log-probability of its
    first `scored` steps, and pathwise."""
    config = FlowMLPConfig.model_validate({"chunk": chunk, "denoise_steps": STEPS} | options)
    torch.manual_seed(1)
    network = Velocity(chunk)
    head = FlowHead(config, CONTRACT, network.num_features)
    for parameter in head.parameters():  # The untrained noise network is blind to its features.
        nn.init.normal_(parameter, std=0.5)
    parameters = [*network.parameters(), *head.parameters()]
    value = torch.zeros(ROWS)
    decision = head.sample(network, None, value, torch.Generator().manual_seed(1), "explore")
    gain = reward(decision.actions)
    log_prob = head.score(network, None, Estimate(value), decision.trace).log_prob
    scored_sum = log_prob[:, :scored].sum(dim=1)
    by_likelihood = flat_gradient((scored_sum * (gain - gain.mean())).mean(), parameters)

    live = torch.zeros(ROWS, STEPS, dtype=torch.bool)
    live.scatter_(1, decision.trace["step"], True)
    return by_likelihood, flat_gradient(through_the_sampler(head, network, live), parameters)


every_exploration = pytest.mark.parametrize(
    "options",
    [
        {"stochastic_steps": "all", "skip_last_step": False},
        {"stochastic_steps": "one", "skip_last_step": False},
        {"exploration": "flow_noise", "noise_std": [0.2, 0.6]},
    ],
    ids=["all", "one", "flow_noise"],
)


@every_exploration
def test_likelihood_gradient_equals_the_pathwise_one(options: dict[str, Any]) -> None:
    by_likelihood, pathwise = two_gradients(options, scored=1, chunk=1)
    assert torch.cosine_similarity(by_likelihood, pathwise, dim=0) > 0.99
    assert float(by_likelihood.norm() / pathwise.norm()) == pytest.approx(1.0, abs=0.06)


@every_exploration
def test_a_chunk_that_ends_early_needs_all_its_steps_for_the_exact_gradient(
    options: dict[str, Any],
) -> None:
    # Only the first of two steps is executed, but the noise of the second was stirred into it.
    whole, pathwise = two_gradients(options, scored=2, chunk=2)
    assert torch.cosine_similarity(whole, pathwise, dim=0) > 0.96
    assert float(whole.norm() / pathwise.norm()) == pytest.approx(1.0, abs=0.08)
    executed, _ = two_gradients(options, scored=1, chunk=2)
    # Of the layer's weights [4, 16] after 96 others: those that move the second step alone.
    later = slice(96 + 32, 96 + 64)
    assert torch.cosine_similarity(whole[later], pathwise[later], dim=0) > 0.8
    assert pathwise[later].norm() > 0 and executed[later].norm() == 0.0
