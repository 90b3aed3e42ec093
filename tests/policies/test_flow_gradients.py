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
    """A small smooth network that depends on x and t."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_features = 16
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh())
        self.out = nn.Linear(16, 2)

    def forward(self, prefix: None, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        features = self.layers(torch.cat([x, time[:, None, None].expand(-1, 1, 1)], -1))
        return self.out(features), features


def reward(chunk: Tensor) -> Tensor:
    """A smooth bump at the goal, [B]."""
    return torch.exp(-(chunk[:, 0] - GOAL).square().sum(-1))


def flat_gradient(value: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])


def through_the_sampler(head: FlowHead, network: Velocity, live: Tensor) -> Tensor:
    """Mean reward to differentiate through the chain; the parameters count only at each row's
    random steps `live` [B, K], because that is what the likelihood scores."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 1, 2, generator=generator)
    frozen = Velocity()
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


@pytest.mark.parametrize(
    "options",
    [
        {"stochastic_steps": "all"},
        {"stochastic_steps": "one"},
        {"exploration": "flow_noise", "noise_std": [0.2, 0.6]},
    ],
    ids=["all", "one", "flow_noise"],
)
def test_likelihood_gradient_equals_the_pathwise_one(options: dict[str, Any]) -> None:
    config = FlowMLPConfig.model_validate(
        {"chunk": 1, "denoise_steps": STEPS, "skip_last_step": False} | options
    )
    torch.manual_seed(1)
    network = Velocity()
    head = FlowHead(config, CONTRACT, network.num_features)
    for parameter in head.parameters():  # The untrained noise network is blind to its features.
        nn.init.normal_(parameter, std=0.5)
    parameters = [*network.parameters(), *head.parameters()]
    value = torch.zeros(ROWS)
    decision = head.sample(network, None, value, torch.Generator().manual_seed(1), "explore")
    gain = reward(decision.actions)
    scored = head.score(network, None, Estimate(value), decision.trace).log_prob[:, 0]
    by_likelihood = flat_gradient((scored * (gain - gain.mean())).mean(), parameters)

    live = torch.zeros(ROWS, STEPS, dtype=torch.bool)
    live.scatter_(1, decision.trace["step"], True)
    pathwise = flat_gradient(through_the_sampler(head, network, live), parameters)
    assert torch.cosine_similarity(by_likelihood, pathwise, dim=0) > 0.99
    assert float(by_likelihood.norm() / pathwise.norm()) == pytest.approx(1.0, abs=0.06)
