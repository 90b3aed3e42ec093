"""A policy folder gives back the very policy, or says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodied_rl.contracts import Contract
from embodied_rl.training.policy_folder import DamagedPolicy, load_policy, save_policy
from policies.config import FlowMLPConfig, GaussianMLPConfig

CONTRACT = Contract(
    state_dim=3,
    action_dim=2,
    action_low=(-1.0, -0.5),
    action_high=(1.0, 0.5),
    control_mode="pd_ee_delta_pose",
    control_hz=20.0,
    gripper="none",
    rotation="none",
)


def saved(folder: Path) -> Path:
    config = FlowMLPConfig()
    policy = config.build(CONTRACT)
    generator = torch.Generator().manual_seed(0)
    policy.fit_normalisation(
        torch.randn(50, 3, generator=generator) * 3 + 1,
        torch.rand(50, 2, generator=generator) - 0.5,
    )
    save_policy(policy, config, folder, {"simulator": {"task": "é"}})
    return folder


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    loaded = load_policy(folder)
    assert loaded.contract == CONTRACT == loaded.policy.contract
    assert loaded.config == FlowMLPConfig() and loaded.extra == {"simulator": {"task": "é"}}
    on_disk, held = load_file(folder / "policy.safetensors"), loaded.policy.state_dict()
    assert set(on_disk) == set(held)
    assert all(torch.equal(on_disk[name], held[name]) for name in held)
    fresh = FlowMLPConfig().build(CONTRACT).state_dict()
    buffers = set(held) - {name for name, _ in loaded.policy.named_parameters()}  # type: ignore[attr-defined]
    # Normalisation was fitted, so a fresh policy differs: it did travel.
    assert buffers and any(not torch.equal(fresh[name], held[name]) for name in buffers)


def test_the_description_says_what_made_it(tmp_path: Path) -> None:
    data = json.loads((saved(tmp_path / "a") / "policy.json").read_text())
    assert data["policy"]["type"] == "flow_mlp" and "torch" in data["versions"]
    assert data["contract_fingerprint"] == CONTRACT.fingerprint


def test_a_folder_that_is_no_policy_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must hold policy\.json and policy\.safetensors"):
        load_policy(tmp_path)


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    weights = saved(tmp_path / "a") / "policy.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamagedPolicy, match="was changed or cut off"):
        load_policy(tmp_path / "a")


def test_a_torn_description_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a") / "policy.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(DamagedPolicy, match=r"policy\.json cannot be read"):
        load_policy(tmp_path / "a")
    path.write_text("{}")
    with pytest.raises(DamagedPolicy, match=r"lacks policy, contract"):
        load_policy(tmp_path / "a")


def test_a_changed_contract_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a") / "policy.json"
    data = json.loads(path.read_text())
    data["contract"]["control_hz"] = 10.0
    path.write_text(json.dumps(data))
    with pytest.raises(DamagedPolicy, match=r"contract in .* was changed"):
        load_policy(tmp_path / "a")


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = GaussianMLPConfig(hidden_size=4)
    save_policy(config.build(CONTRACT), config, tmp_path / "a")
    path = tmp_path / "a" / "policy.json"
    data = json.loads(path.read_text())
    data["policy"].update(hidden_size=5, num_layers=3)
    path.write_text(json.dumps(data))
    with pytest.raises(DamagedPolicy, match=r"is missing.* has shape \[4.*instead of \[5"):
        load_policy(tmp_path / "a")


def test_a_policy_may_explore_in_another_way_than_it_was_saved_with(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    noisy = FlowMLPConfig(exploration="flow_noise")
    loaded = load_policy(folder, options=noisy)
    before, held = load_policy(folder).policy.state_dict(), loaded.policy.state_dict()
    assert all(torch.equal(before[name], held[name]) for name in before)
    assert {name for name in held if name not in before} == {
        *("head.transition.network.0.weight", "head.transition.network.0.bias"),
        *("head.transition.network.2.weight", "head.transition.network.2.bias"),
    }
    save_policy(loaded.policy, noisy, tmp_path / "b")
    back = load_policy(tmp_path / "b", options=FlowMLPConfig()).policy.state_dict()
    assert set(back) == set(before)
    # Without being asked, nothing may be missing.
    with pytest.raises(DamagedPolicy, match="does not fit these options"):
        load_policy(folder, options=FlowMLPConfig(hidden_size=64))
