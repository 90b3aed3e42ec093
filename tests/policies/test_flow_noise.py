"""Flow-Noise and Flow-SDE chains against torch's own distributions; bounds, entropy, annealing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from embodied_rl.contracts import Contract, Observation
from policies.config import FlowMLPConfig
from policies.flow_mlp import FlowMLP

CONTRACT = Contract(
    state_dim=5,
    action_dim=3,
    action_low=(-1.0, -2.0, 0.0),
    action_high=(1.0, 2.0, 1.0),
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
)
SEEN = Observation({}, torch.linspace(-1, 1, 40).view(8, 5), ("",) * 8)


def build(**options: Any) -> FlowMLP:
    torch.manual_seed(0)
    config = FlowMLPConfig.model_validate({"hidden_size": 32, "denoise_steps": 5} | options)
    policy = FlowMLP(config, CONTRACT)
    for parameter in policy.head.parameters():
        nn.init.normal_(parameter, std=0.5)
    return policy


def explicit_chain(policy: FlowMLP, trace: dict[str, Tensor]) -> Tensor:
    """Joint log-density [B, H] of the random steps, with formulas from the paper written anew."""
    state, num_steps = policy._see(SEEN), policy.head.num_steps
    total = torch.zeros(trace["before"].shape[0], trace["before"].shape[2], dtype=torch.float64)
    for m in range(trace["step"].shape[1]):
        x, k = trace["before"][:, m].double(), trace["step"][:, m]
        t = (1 - k.double() / num_steps)[:, None, None]
        with torch.no_grad():
            v, features = policy._velocity(state, trace["before"][:, m], t.flatten().float())
        v, clean, noise = v.double(), x - t * v, x + (1 - t) * v
        after = t - 1 / num_steps
        network = getattr(policy.head.transition, "network", None)
        if network is None:
            sigma = 0.5 * torch.sqrt(t / torch.where(k[:, None, None] == 0, 1 / num_steps, 1 - t))
            drift = sigma**2 / (num_steps * 2 * t)
            mean, std = (1 - after) * clean + (after - drift) * noise, sigma * num_steps**-0.5
        else:
            low, high = torch.tensor([0.08, 0.16], dtype=torch.float64).log()
            squashed = (torch.tanh(network(features).double()) + 1) / 2
            mean, std = (1 - after) * clean + after * noise, (low + (high - low) * squashed).exp()
        step = Independent(Normal(mean, std.expand_as(mean)), 1)
        total += step.log_prob(trace["after"][:, m].double())  # type: ignore[no-untyped-call]
    return total.detach()


@pytest.mark.parametrize(
    "options",
    [
        {"exploration": "flow_noise"},
        {"exploration": "flow_noise", "chain_log_prob": "mean"},
        {"stochastic_steps": "all"},
        {"stochastic_steps": "one"},
        {"stochastic_steps": "all", "skip_last_step": False},
    ],
)
def test_the_chain_has_the_density_that_torch_gives_it(options: dict[str, Any]) -> None:
    policy = build(**options)
    decision = policy.act(SEEN, torch.Generator().manual_seed(0), "explore")
    expected = explicit_chain(policy, decision.trace)
    if options.get("chain_log_prob") == "mean":
        expected = expected / 6
    found = policy.evaluate(SEEN, decision.trace).log_prob.detach().double()
    assert torch.allclose(found, expected, atol=1e-5, rtol=0)
    assert torch.allclose(decision.log_prob.double(), expected, atol=1e-5, rtol=0)


def test_entropy_is_the_expected_surprise() -> None:
    """Monte Carlo over chains: the mean of -log p equals the mean entropy of the steps."""
    policy = build(exploration="flow_noise")
    rows = 20_000
    seen = Observation({}, SEEN.state[:1].expand(rows, -1), ("",) * rows)
    decision = policy.act(seen, torch.Generator().manual_seed(0), "explore")
    with torch.no_grad():
        found = policy.evaluate(seen, decision.trace)
    error = (-found.log_prob).std(dim=0) / rows**0.5
    assert ((-found.log_prob - found.entropy).mean(dim=0).abs() < 4 * error).all()


def test_noise_stays_within_its_bounds_and_entropy_widens_it() -> None:
    policy = build(exploration="flow_noise", noise_std=[0.1, 0.3])
    for parameter in policy.head.parameters():
        nn.init.normal_(parameter, std=30.0)
    x = torch.randn(8, 4, 3)
    velocity, features = policy._velocity(policy._see(SEEN), x, torch.full((8,), 0.5))
    step = torch.full((8,), 2)
    std = policy.head.transition(x, velocity, features, step, 1.0)[1].detach()
    assert std.min() == pytest.approx(0.1, rel=1e-4)
    assert std.max() == pytest.approx(0.3, rel=1e-4)

    policy = build(exploration="flow_noise")
    trace = policy.act(SEEN, torch.Generator().manual_seed(0), "explore").trace
    before = policy.evaluate(SEEN, trace).entropy.mean()
    before.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in policy.head.parameters():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=0.1)
    assert policy.evaluate(SEEN, trace).entropy.mean() > before


@pytest.mark.parametrize("options", [{}, {"exploration": "flow_noise"}])
def test_noise_falls_over_the_run(options: dict[str, Any]) -> None:
    policy = build(final_noise=0.2, **options)
    x = torch.zeros(8, 4, 3)
    found = []
    for share in (0.0, 0.5, 1.0):
        policy.set_progress(share)
        velocity, features = policy._velocity(policy._see(SEEN), x, torch.full((8,), 0.5))
        step = torch.full((8,), 2)
        found.append(policy.head.transition(x, velocity, features, step, policy.head.noise_left)[1])
    assert torch.allclose(found[1], 0.6 * found[0])
    assert torch.allclose(found[2], 0.2 * found[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_std": [0.2, 0.1]}, r"noise_std=\[0.2, 0.1\] must be two rising"),
        ({"noise_std": [0.0, 0.1]}, "must be two rising"),
        ({"chain_log_prob": "mean"}, "belongs to exploration=flow_noise"),
        ({"noise_std": [0.1, 0.3]}, "noise_std=.* belongs to exploration=flow_noise"),
        ({"fpo_samples": 4}, "fpo_samples=4 belongs to exploration=fpo"),
        ({"exploration": "flow_noise", "noise_level": 0.3}, "would do nothing with .*flow_noise"),
        ({"exploration": "fpo", "stochastic_steps": "all"}, "belongs to exploration=flow_sde"),
        ({"exploration": "fpo", "final_noise": 0.5}, "exploration=fpo has none"),
    ],
)
def test_noise_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FlowMLPConfig.model_validate(options)
