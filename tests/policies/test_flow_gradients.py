"""The policy gradient of Flow-SDE against the pathwise one: two independent ways to one number.

The expected reward of a chunk has a gradient that needs no likelihood: differentiate through the
sampler with its noise held fixed. `log_prob` times reward must give the same one in expectation.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from embodied_rl.contracts import Contract
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
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, prefix: None, x: Tensor, time: Tensor) -> Tensor:
        found: Tensor = self.layers(torch.cat([x, time[:, None, None].expand(-1, 1, 1)], -1))
        return found


def reward(chunk: Tensor) -> Tensor:
    """A smooth bump at the goal, [B]."""
    return torch.exp(-(chunk[:, 0] - GOAL).square().sum(-1))


def flat_gradient(value: Tensor, network: nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(network.parameters()))])


def through_the_sampler(head: FlowHead, network: Velocity, live: Tensor) -> Tensor:
    """Gradient of the mean reward by differentiating the chain; the parameters count only at each
    row's random steps `live` [B, K], because that is what the likelihood scores."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 1, 2, generator=generator)
    frozen = Velocity()
    frozen.load_state_dict(network.state_dict())
    frozen.requires_grad_(False)
    for k in range(STEPS):
        step = torch.full((ROWS,), k)
        time = flow.time_of(step, STEPS)
        mean, std = flow.sde_step(x, network(None, x, time), step, STEPS, head.noise_level)
        random = mean + std * torch.randn(x.shape, generator=generator)
        calm = flow.ode_step(x, frozen(None, x, time), STEPS)
        x = torch.where(live[:, k, None, None], random, calm)
    return flat_gradient(reward(x).mean(), network)


@pytest.mark.parametrize("kind", ["all", "one"])
def test_likelihood_gradient_equals_the_pathwise_one(kind: str) -> None:
    config = FlowMLPConfig.model_validate(
        {"chunk": 1, "denoise_steps": STEPS, "stochastic_steps": kind, "skip_last_step": False}
    )
    head, network = FlowHead(config, CONTRACT), Velocity()
    value = torch.zeros(ROWS)
    decision = head.sample(network, None, value, torch.Generator().manual_seed(1), "explore")
    gain = reward(decision.actions)
    scored = head.score(network, None, value, decision.trace).log_prob[:, 0]
    by_likelihood = flat_gradient((scored * (gain - gain.mean())).mean(), network)

    live = torch.zeros(ROWS, STEPS, dtype=torch.bool)
    live.scatter_(1, decision.trace["step"], True)
    pathwise = through_the_sampler(head, network, live)
    assert torch.cosine_similarity(by_likelihood, pathwise, dim=0) > 0.99
    assert float(by_likelihood.norm() / pathwise.norm()) == pytest.approx(1.0, abs=0.06)
