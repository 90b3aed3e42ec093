"""Action tokens from real transformers decoders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from embodied_rl.contracts import Camera, Contract, Observation
from embodied_rl.training.policy_folder import load_policy, save_policy
from policies.config import TokenVLAConfig
from policies.token_vla import TokenVLA

CONTRACT = Contract(
    state_dim=3,
    action_dim=2,
    action_low=(-1.0, -2.0),
    action_high=(1.0, 2.0),
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
    cameras=(Camera("front", 16, 16),),
)


SMALL = {"hidden_size": 32, "chunk": 2, "num_bins": 16, "max_instruction_bytes": 12}


def build(**options: Any) -> TokenVLA:
    torch.manual_seed(0)
    return TokenVLA(TokenVLAConfig.model_validate(SMALL | options), CONTRACT)


def seen(batch: int) -> Observation:
    generator = torch.Generator().manual_seed(2)
    image = torch.randint(0, 256, (batch, 16, 16, 3), generator=generator, dtype=torch.uint8)
    state = torch.randn(batch, 3, generator=generator)
    # Instructions of several lengths: their padding lies in the middle of the prefix.
    return Observation({"front": image}, state, tuple("go" * (row % 4) for row in range(batch)))


@pytest.mark.parametrize("decoder", ["llama", "qwen2"])
def test_cached_decoding_equals_one_teacher_forced_pass(decoder: str) -> None:
    policy = build(decoder=decoder, chunk=4)
    observation = seen(6)
    decision = policy.act(observation, torch.Generator().manual_seed(0), "explore")
    found = policy.evaluate(observation, decision.trace)
    assert torch.allclose(found.log_prob, decision.log_prob, atol=2e-5, rtol=0)
    assert (found.entropy > 0).all()


def test_padding_of_the_instruction_changes_nothing() -> None:
    narrow, wide = build(max_instruction_bytes=8), build(max_instruction_bytes=12)
    weights = narrow.state_dict()
    name = "encoder.byte_positions"
    own = wide.state_dict()[name].clone()
    own[:8] = weights[name]
    wide.load_state_dict(weights | {name: own})
    trace = narrow.act(seen(4), torch.Generator().manual_seed(0), "explore").trace
    a, b = narrow.evaluate(seen(4), trace), wide.evaluate(seen(4), trace)
    assert torch.allclose(a.log_prob, b.log_prob, atol=1e-5)


def test_later_tokens_depend_on_earlier_ones_only_when_decoded_in_turn() -> None:
    for decoding, depends in (("autoregressive", True), ("parallel", False)):
        policy = build(decoding=decoding)
        first = torch.zeros(1, 2, 2, dtype=torch.int64)
        other = first.clone()
        other[0, 0, 0] = 9
        a, b = (policy.evaluate(seen(1), {"tokens": t}).log_prob for t in (first, other))
        assert (not torch.allclose(a[0, 1], b[0, 1], atol=1e-4)) == depends


def test_bins_span_the_percentiles_of_the_demonstrations() -> None:
    policy = build(num_bins=4)
    actions = torch.stack([torch.linspace(0, 1, 101), torch.full((101,), 0.5)], dim=1)
    policy.fit_normalisation(torch.randn(101, 3), actions)
    low, high = policy.quantile_low, policy.quantile_high
    assert [float(low[0]), float(high[0])] == pytest.approx([0.01, 0.99])
    found = policy._to_actions(torch.tensor([[[0, 0], [3, 3]]]))
    # Middles of the outer quarters of .01 .. .99; a dimension that never moves stays.
    assert found.flatten().tolist() == pytest.approx([0.1325, 0.5, 0.8675, 0.5], abs=1e-5)


@pytest.mark.parametrize("decoding", ["autoregressive", "parallel"])
def test_imitation_learns_what_the_instruction_asks(decoding: str) -> None:
    policy = build(decoding=decoding)
    observation = seen(16)
    actions = torch.zeros(16, 2, 2)
    for row, text in enumerate(observation.instruction):
        actions[row] = len(text) / 4 - 0.7
    valid = torch.ones(16, 2, dtype=torch.bool)
    policy.fit_normalisation(observation.state, actions.flatten(0, 1))
    optimizer = torch.optim.Adam(policy.policy_parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        optimizer.zero_grad()
        loss = policy.imitation_loss(observation, actions, valid, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = policy.act(observation, generator, "deterministic").actions
    assert (found - actions).abs().max() < 0.15


def test_a_pretrained_decoder_is_loaded_from_its_own_layout(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    model.save_pretrained(tmp_path)
    policy = build(pretrained=str(tmp_path), num_bins=32)
    loaded = policy.decoder.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    decision = policy.act(seen(3), torch.Generator().manual_seed(0), "explore")
    found = policy.evaluate(seen(3), decision.trace)
    assert torch.allclose(found.log_prob, decision.log_prob, atol=2e-5)
    assert int(decision.trace["tokens"].max()) < 32


def test_a_saved_policy_needs_its_pretrained_folder_no_more(tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = LlamaConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    LlamaForCausalLM(sizes).save_pretrained(tmp_path / "model")
    config = TokenVLAConfig.model_validate(SMALL | {"pretrained": tmp_path / "model"})
    policy = config.build(CONTRACT)
    save_policy(policy, config, tmp_path / "policy")
    shutil.rmtree(tmp_path / "model")
    loaded = load_policy(tmp_path / "policy").policy
    before = policy.act(seen(3), torch.Generator().manual_seed(0), "explore")
    after = loaded.act(seen(3), torch.Generator().manual_seed(0), "explore")
    assert torch.equal(before.log_prob, after.log_prob)
    assert torch.equal(before.actions, after.actions)


def test_decoders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder of a transformers model.*no config\.json"):
        build(pretrained=str(tmp_path))
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=10,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"16 action tokens.*more than the decoder's vocabulary of 10"
    ):
        build(pretrained=str(tmp_path))
