"""FPO's score: numbers by hand, and one from the policy that it comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.contracts import Contract, Observation
from policies.config import FlowMLPConfig
from policies.flow_fpo import FPO

CONTRACT = Contract(
    state_dim=3,
    action_dim=2,
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    control_mode="delta",
    control_hz=10.0,
    gripper="none",
    rotation="none",
)


def test_the_score_is_minus_the_mean_flow_matching_loss() -> None:
    def still(prefix: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), x

    trace = {
        "action": torch.tensor([[[1.0, 0.0]]]),
        "noise": torch.tensor([[[[3.0, 1.0]], [[1.0, 4.0]]]]),
        "time": torch.tensor([[0.25, 0.75]]),
    }
    # A velocity of zero misses noise - action: (2, 1) costs 5 and (0, 4) costs 16.
    score = FPO(2).score(still, torch.zeros(2), trace)
    torch.testing.assert_close(score, torch.tensor([[-10.5]]))


def test_each_sample_is_scored_at_its_own_point() -> None:
    def echo(prefix: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return x + prefix[:, None, None], x

    trace = {
        "action": torch.tensor([[[2.0]]]),
        "noise": torch.tensor([[[[4.0]], [[0.0]]]]),
        "time": torch.tensor([[0.5, 0.25]]),
    }
    # x is 3 and 1.5; with the prefix 1 the velocity is 4 and 2.5, wanted are 2 and -2.
    score = FPO(2).score(echo, torch.ones(2), trace)
    torch.testing.assert_close(score, torch.tensor([[-(4.0 + 20.25) / 2]]))


def test_evaluate_repeats_act_and_explores_like_the_ode() -> None:
    torch.manual_seed(0)
    config = FlowMLPConfig(exploration="fpo", chunk=3, hidden_size=16, fpo_samples=5)
    policy = config.build(CONTRACT)
    seen = Observation({}, torch.randn(4, 3), ("",) * 4)
    drawn = policy.act(seen, torch.Generator().manual_seed(1), "explore")
    plain = policy.act(seen, torch.Generator().manual_seed(1), "deterministic")
    assert torch.equal(drawn.actions, plain.actions)
    assert drawn.trace["noise"].shape == (4, 5, 3, 2)
    found = policy.evaluate(seen, drawn.trace)
    torch.testing.assert_close(found.log_prob, drawn.log_prob, atol=1e-5, rtol=0.0)
    found.log_prob.sum().backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in policy.policy_parameters()]
    assert all(g is not None and g.abs().sum() > 0 for g in grads)
