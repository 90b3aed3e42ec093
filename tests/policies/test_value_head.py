"""Value heads of all policies: one number or a histogram."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.contracts import Camera, Contract, Observation
from embodied_rl.training.policy_folder import load_policy, save_policy
from policies.config import FlowMLPConfig, FlowVLAConfig, GaussianMLPConfig, TokenVLAConfig

CONTRACT = Contract(
    state_dim=2,
    action_dim=1,
    action_low=(-1.0,),
    action_high=(1.0,),
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
    cameras=(Camera("front", 16, 16),),
)
SEES: dict[str, Any] = {"hidden_size": 16, "num_prefix_layers": 1, "num_heads": 2}
CONFIGS: dict[str, Any] = {
    "flow_mlp": FlowMLPConfig(hidden_size=16, instruction_size=4),
    "flow_vla": FlowVLAConfig(**SEES),
    "token_vla": TokenVLAConfig(**SEES, num_decoder_layers=1, num_bins=8, chunk=1),
    "gaussian": GaussianMLPConfig(hidden_size=16),
}
OBSERVATION = Observation(
    {"front": torch.zeros(6, 16, 16, 3, dtype=torch.uint8)},
    torch.linspace(-1.0, 1.0, 12).view(6, 2),
    ("go",) * 6,
)


def build(name: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = CONFIGS[name].model_copy(update=options)
    return config.build(CONTRACT), config


@pytest.fixture(params=list(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_weights_of_one_number_have_the_names_that_saved_policies_know(name: str) -> None:
    policy, _ = build(name)
    found = {key for key in policy.state_dict() if key.startswith("value_network")}
    wanted = {f"value_network.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")}
    assert found == wanted
    assert policy.state_dict()["value_network.4.weight"].shape[0] == 1
    assert policy.estimate(OBSERVATION).histogram is None


def test_the_value_is_the_mean_of_the_histogram(name: str) -> None:
    options = {"value_head": "hl_gauss", "value_range": (1.0, 5.0), "value_bins": 4}
    policy, _ = build(name, **options)
    # Centres 1.5, 2.5, 3.5 and 4.5 with probabilities 1/8, 1/8, 1/4 and 1/2: 3.625.
    with torch.no_grad():
        policy.value_network[4].weight.zero_()
        policy.value_network[4].bias.copy_(torch.tensor([1.0, 1.0, 2.0, 4.0]).log())
    decision = policy.act(OBSERVATION, torch.Generator().manual_seed(0), "explore")
    seen = policy.evaluate(OBSERVATION, decision.trace)
    for value in (decision.value, seen.value, policy.value(OBSERVATION)):
        assert value.tolist() == pytest.approx([3.625] * 6)
    assert seen.histogram.logits.shape == (6, 4)
    assert seen.histogram.edges.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert torch.equal(policy.estimate(OBSERVATION).histogram.logits, seen.histogram.logits)


def test_a_new_histogram_favours_nothing_and_is_apart_from_the_policy(name: str) -> None:
    policy, _ = build(name, value_head="hl_gauss")
    found = policy.estimate(OBSERVATION)
    assert found.value.tolist() == pytest.approx([0.5] * 6, abs=0.02)
    found.histogram.logits.square().sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.policy_parameters())
    assert any(p.grad.any() for p in policy.value_parameters())


def test_a_histogram_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    policy, config = build(name, value_head="hl_gauss", value_range=(-3.0, 2.0), value_bins=9)
    save_policy(policy, config, tmp_path / "p")
    again = load_policy(tmp_path / "p").policy
    assert torch.equal(again.value(OBSERVATION), policy.value(OBSERVATION))


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (1.0, -1.0)])
def test_a_range_must_rise(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"value_range=.* must be two rising numbers"):
        FlowMLPConfig(value_range=bounds)
