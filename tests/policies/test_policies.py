"""What every policy must keep: reproduced log-probabilities, gradients, independence of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from embodied_rl.contracts import Camera, Contract, ContractMismatch, Observation, Policy
from embodied_rl.training.policy_folder import DamagedPolicy, load_policy, save_policy
from policies.config import (
    FastVLAConfig,
    FlowMLPConfig,
    FlowVLAConfig,
    GaussianMLPConfig,
    TokenVLAConfig,
)
from policies.layers import WordBag

CONTRACT = Contract(
    state_dim=5,
    action_dim=3,
    action_low=(-1.0, -2.0, 0.0),
    action_high=(1.0, 2.0, 1.0),
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
    cameras=(Camera("front", 16, 16), Camera("wrist", 16, 8)),
)
SMALL = {"chunk": 4, "denoise_steps": 4}
BLIND = replace(CONTRACT, cameras=())
CONFIGS: dict[str, Any] = {
    "flow_mlp": FlowMLPConfig(hidden_size=32, **SMALL),
    "flow_mlp_all": FlowMLPConfig(hidden_size=32, stochastic_steps="all", **SMALL),
    "flow_mlp_last": FlowMLPConfig(hidden_size=32, skip_last_step=False, **SMALL),
    "flow_mlp_two_steps": FlowMLPConfig(chunk=1, denoise_steps=2, noise_level=2.0),
    "flow_noise": FlowMLPConfig(hidden_size=32, exploration="flow_noise", **SMALL),
    "flow_noise_mean": FlowMLPConfig(
        hidden_size=32, exploration="flow_noise", chain_log_prob="mean", **SMALL
    ),
    "flow_vla": FlowVLAConfig(hidden_size=32, max_instruction_bytes=12, **SMALL),
    "flow_vla_noise": FlowVLAConfig(
        hidden_size=32, max_instruction_bytes=12, exploration="flow_noise", **SMALL
    ),
    "token_vla": TokenVLAConfig(
        hidden_size=32, max_instruction_bytes=12, chunk=2, num_bins=16, temperature=1.3, top_p=0.9
    ),
    "token_vla_parallel": TokenVLAConfig(
        hidden_size=32,
        max_instruction_bytes=12,
        chunk=2,
        num_bins=16,
        decoding="parallel",
        top_k=8,
        decoder="qwen2",
    ),
    "fast_vla": FastVLAConfig(
        hidden_size=32, max_instruction_bytes=12, chunk=2, vocabulary=48, temperature=1.3, top_k=20
    ),
    "gaussian": GaussianMLPConfig(chunk=2, hidden_size=16),
}


def build(name: str, contract: Contract = CONTRACT) -> Any:
    torch.manual_seed(0)
    policy = CONFIGS[name].build(contract)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(200, 5, generator=generator) * torch.tensor([1.0, 5, 0.1, 0, 2])
    policy.fit_normalisation(states, torch.rand(200, 3, generator=generator))
    return policy


def observation(batch: int, seed: int = 2) -> Observation:
    generator = torch.Generator().manual_seed(seed)

    def image(height: int, width: int) -> torch.Tensor:
        shape = (batch, height, width, 3)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    return Observation(
        images={"front": image(16, 16), "wrist": image(16, 8)},
        state=torch.randn(batch, 5, generator=generator),
        instruction=tuple(f"do {row % 3}" for row in range(batch)),
    )


@pytest.fixture(params=list(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", ["flow_vla", "token_vla"])
def test_an_instruction_that_is_too_long_is_refused(name: str) -> None:
    seen = observation(2)
    long = Observation(seen.images, seen.state, ("do it", "do it näher"))
    build(name).value(long)
    longer = Observation(seen.images, seen.state, ("do it", "do it nearer!"))
    with pytest.raises(ValueError, match=r"nearer!' has 13 bytes.*max_instruction_bytes=13 or"):
        build(name).value(longer)


def test_an_instruction_need_not_be_read() -> None:
    config = CONFIGS["flow_vla"].model_copy(update={"max_instruction_bytes": 0})
    policy, seen = config.build(CONTRACT), observation(3)
    other = Observation(seen.images, seen.state, ("something else altogether", "", "x"))
    assert torch.equal(policy.value(seen), policy.value(other))
    policy.value(seen).sum().backward()


def test_the_order_of_words_counts() -> None:
    torch.manual_seed(0)
    bag = WordBag(8)
    orders = bag(("put a on b", "put b on a", "put a on b"))
    assert torch.equal(orders[0], orders[2])
    assert not torch.allclose(orders[0], orders[1])
    assert torch.equal(bag(("",)), torch.zeros(1, 8))


def test_evaluate_reproduces_act(name: str) -> None:
    policy: Policy = build(name)
    seen = observation(64)
    decision = policy.act(seen, torch.Generator().manual_seed(0), "explore")
    evaluated = policy.evaluate(seen, decision.trace)
    assert decision.log_prob.shape == (64, policy.chunk)
    assert (evaluated.log_prob - decision.log_prob).abs().max() < 1e-5
    assert torch.equal(policy.value(seen).detach(), decision.value) or torch.allclose(
        policy.value(seen), decision.value, atol=1e-6
    )
    rows = torch.tensor([5, 3, 40])
    part = policy.evaluate(seen.select(rows), {k: v[rows] for k, v in decision.trace.items()})
    assert (part.log_prob - decision.log_prob[rows]).abs().max() < 5e-5


def test_actions_respect_the_contract(name: str) -> None:
    policy = build(name)
    for mode in ("explore", "deterministic"):
        actions = policy.act(observation(32), torch.Generator().manual_seed(0), mode).actions
        assert actions.shape == (32, policy.chunk, 3)
        assert (actions >= torch.tensor(CONTRACT.action_low)).all()
        assert (actions <= torch.tensor(CONTRACT.action_high)).all()


def test_a_row_does_not_depend_on_the_rest_of_the_batch(name: str) -> None:
    policy = build(name)
    seen = observation(6)
    for mode in ("explore", "deterministic"):
        together = policy.act(seen, [torch.Generator().manual_seed(i) for i in range(6)], mode)
        alone = policy.act(seen.select(torch.tensor([4])), [torch.Generator().manual_seed(4)], mode)
        assert torch.allclose(together.actions[4], alone.actions[0], atol=1e-5)
        assert torch.allclose(together.log_prob[4], alone.log_prob[0], atol=1e-4)


def test_wrong_number_of_generators(name: str) -> None:
    with pytest.raises(ValueError, match="2 generators for a batch of 3"):
        build(name).act(observation(3), [torch.Generator(), torch.Generator()], "explore")


def test_every_parameter_belongs_to_policy_or_value(name: str) -> None:
    policy = build(name)
    mine = [id(p) for p in [*policy.policy_parameters(), *policy.value_parameters()]]
    assert sorted(mine) == sorted(id(p) for p in policy.parameters())


def test_value_gradients_stay_in_the_value_network(name: str) -> None:
    policy = build(name)
    policy.value(observation(4)).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.policy_parameters())
    assert all(p.grad is not None for p in policy.value_parameters())


def test_unexecuted_steps_have_no_gradient_when_masked(name: str) -> None:
    policy = build(name)
    seen = observation(8)
    trace = policy.act(seen, torch.Generator().manual_seed(0), "explore").trace
    log_prob = policy.evaluate(seen, trace).log_prob
    mask = torch.zeros_like(log_prob, dtype=torch.bool)
    torch.autograd.backward(torch.where(mask, log_prob, 0.0).sum())
    assert all(p.grad is None or not p.grad.any() for p in policy.policy_parameters())


@pytest.mark.parametrize("name", ["flow_mlp", "flow_mlp_all", "gaussian"])
def test_gradient_matches_finite_differences(name: str) -> None:
    policy = build(name).double()
    seen = observation(8)
    trace = {
        key: value.double() if value.is_floating_point() else value
        for key, value in build(name)
        .act(seen, torch.Generator().manual_seed(0), "explore")
        .trace.items()
    }
    parameter = policy.policy_parameters()[0]

    def loss() -> torch.Tensor:
        total: torch.Tensor = policy.evaluate(seen, trace).log_prob.sum()
        return total

    (gradient,) = torch.autograd.grad(loss(), parameter)
    index, step = (0, 0), 1e-3
    with torch.no_grad():
        parameter[index] += step
        above = loss()
        parameter[index] -= 2 * step
        below = loss()
    numeric = float((above - below) / (2 * step))
    assert float(gradient[index]) == pytest.approx(numeric, rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("name", ["flow_mlp", "flow_vla"])
def test_the_random_step_is_drawn_per_environment(name: str) -> None:
    policy = build(name)
    trace = policy.act(observation(256), torch.Generator().manual_seed(0), "explore").trace
    counts = torch.bincount(trace["step"].flatten(), minlength=4)
    assert counts[3] == 0  # the last step stays calm
    assert (counts[:3] > 50).all()


def test_all_steps_but_the_last_are_random_when_asked_for() -> None:
    policy = build("flow_mlp_all")
    trace = policy.act(observation(4), torch.Generator().manual_seed(0), "explore").trace
    assert trace["step"].tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("what", ["front", "wrist", "instruction", "state"])
def test_everything_that_flow_vla_sees_matters(what: str) -> None:
    policy = build("flow_vla")
    seen, other = observation(4), observation(4, seed=9)
    images = dict(seen.images)
    if what in images:
        images[what] = other.images[what]
    changed = Observation(
        images,
        other.state if what == "state" else seen.state,
        ("jump",) * 4 if what == "instruction" else seen.instruction,
    )
    generators = [[torch.Generator().manual_seed(i) for i in range(4)] for _ in range(2)]
    a = policy.act(seen, generators[0], "deterministic").actions
    b = policy.act(changed, generators[1], "deterministic").actions
    assert (a - b).abs().max() > 1e-6


def test_the_prefix_is_left_as_it_was() -> None:
    policy = build("flow_vla")
    prefix, _ = policy._encode(observation(3))
    x, t = torch.zeros(3, 4, 3), torch.ones(3)
    assert torch.equal(policy.expert(prefix, x, t)[0], policy.expert(prefix, x, t)[0])
    assert not torch.allclose(policy.expert(prefix, x, t)[0], policy.expert(prefix, x, t / 2)[0])


def test_flow_vla_grows_to_hundreds_of_millions_by_options_alone() -> None:
    config = FlowVLAConfig(
        hidden_size=1024, num_heads=16, num_prefix_layers=12, num_expert_layers=12
    )
    with torch.device("meta"):
        policy: Any = config.build(CONTRACT)
    assert 250e6 < sum(p.numel() for p in policy.parameters()) < 500e6


def test_image_size_must_fit_the_patches() -> None:
    with pytest.raises(ValueError, match=r"'wrist' gives images of 16 x 8.*patch_size=16"):
        FlowVLAConfig(patch_size=16).build(CONTRACT)


def test_observations_that_do_not_fit_are_refused() -> None:
    policy = build("flow_vla")
    seen = observation(2)
    with pytest.raises(ValueError, match="state of 5 entries, got 4"):
        policy.value(Observation(seen.images, seen.state[:, :4], seen.instruction))
    with pytest.raises(ValueError, match="camera 'wrist', but the observation has front"):
        policy.value(Observation({"front": seen.images["front"]}, seen.state, seen.instruction))


def test_the_expected_ratio_is_one() -> None:
    """E_old[new / old] = 1 for any new policy: holds only if log_prob is the exact density."""
    policy = build("flow_mlp", BLIND)
    seen = Observation({}, torch.zeros(40_000, 5), ("",) * 40_000)
    decision = policy.act(seen, torch.Generator().manual_seed(0), "explore")
    with torch.no_grad():
        for parameter in policy.policy_parameters():
            parameter += 0.03 * torch.randn_like(parameter)
        new = policy.evaluate(seen, decision.trace).log_prob.sum(1)
    ratio = (new - decision.log_prob.sum(1)).exp()
    assert ratio.std() > 0.05
    assert float(ratio.mean()) == pytest.approx(1.0, abs=4 * float(ratio.std()) / 200)


def test_flow_mlp_learns_two_modes() -> None:
    torch.manual_seed(0)
    config = FlowMLPConfig(chunk=1, denoise_steps=10, hidden_size=64, num_layers=2)
    policy: Any = config.build(BLIND)
    modes = torch.tensor([-0.6, 0.6])[torch.arange(512) % 2]
    actions = torch.stack([modes, torch.zeros(512), torch.full((512,), 0.5)], -1)[:, None]
    seen = Observation({}, torch.zeros(512, 5), ("",) * 512)
    policy.fit_normalisation(seen.state, actions[:, 0])
    optimizer = torch.optim.Adam(policy.policy_parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    valid = torch.ones(512, 1, dtype=torch.bool)
    for _ in range(1500):
        loss = policy.imitation_loss(seen, actions, valid, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drawn = policy.act(seen, generator, "deterministic").actions[:, 0, 0]
    assert ((drawn.abs() - 0.6).abs() < 0.25).float().mean() > 0.85
    assert 0.35 < (drawn > 0).float().mean() < 0.65


def test_running_statistics_change_only_after_the_update() -> None:
    policy: Any = CONFIGS["gaussian"].build(CONTRACT)
    seen = observation(32)
    trace = policy.act(seen, torch.Generator().manual_seed(0), "explore").trace
    before = policy.evaluate(seen, trace).log_prob
    assert torch.equal(policy.evaluate(seen, trace).log_prob, before)
    policy.after_update(seen, torch.ones(32, dtype=torch.bool))
    assert torch.allclose(policy.state_normaliser.mean, seen.state.mean(0), atol=1e-5)
    assert not torch.equal(policy.evaluate(seen, trace).log_prob, before)


def test_demonstrations_count_among_the_states_seen() -> None:
    policy = build("gaussian")
    shown = torch.cat([torch.zeros(30, 5), torch.full((66, 5), 4.0)])
    policy.fit_normalisation(shown, torch.zeros(96, 3))
    seen = Observation({}, torch.full((4, 5), 29.0), ("",) * 4)
    policy.after_update(seen, torch.ones(4, dtype=torch.bool))
    # 66 fours and 4 twenty-nines among 100 rows: (264 + 116) / 100.
    assert policy.state_normaliser.mean.tolist() == pytest.approx([3.8] * 5)


@pytest.mark.parametrize("name", ["flow_mlp", "flow_vla", "gaussian"])
def test_a_policy_folder_gives_the_same_policy(name: str, tmp_path: Path) -> None:
    policy = build(name)
    save_policy(policy, CONFIGS[name], tmp_path / "p", {"note": 1})
    loaded = load_policy(tmp_path / "p")
    assert loaded.contract == CONTRACT and loaded.extra == {"note": 1}
    assert loaded.config == CONFIGS[name]
    a = policy.act(observation(3), torch.Generator().manual_seed(0), "deterministic").actions
    b = loaded.policy.act(observation(3), torch.Generator().manual_seed(0), "deterministic")
    assert torch.equal(a, b.actions)


def test_damaged_policy_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a policy folder"):
        load_policy(tmp_path)
    folder = tmp_path / "p"
    save_policy(build("flow_mlp"), CONFIGS["flow_mlp"], folder)
    weights = folder / "policy.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4])
    with pytest.raises(DamagedPolicy, match="changed or cut off"):
        load_policy(folder)
    weights.write_bytes(content)
    other = CONFIGS["flow_mlp"].model_copy(update={"hidden_size": 16})
    save_policy(build("flow_mlp"), other, folder)
    with pytest.raises(DamagedPolicy, match=r"network.0.weight has shape \[32"):
        load_policy(folder)


def test_contract_mismatch_names_field_and_values() -> None:
    data = CONTRACT.to_json()
    assert Contract.from_json(data) == CONTRACT
    other = Contract.from_json(data | {"control_mode": "joints", "control_hz": 5.0})
    assert other.fingerprint != CONTRACT.fingerprint
    with pytest.raises(ContractMismatch) as error:
        CONTRACT.require_equal(other, "the policy", "the robot")
    text = str(error.value)
    assert "control_mode: the policy has 'test', the robot has 'joints'" in text
    assert "control_hz: the policy has 10.0, the robot has 5.0" in text
    assert "action_dim" not in text


def test_policies_are_modules(name: str) -> None:
    assert isinstance(build(name), nn.Module)
