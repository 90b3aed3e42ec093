"""A policy that speaks FAST tokens: exact likelihoods of sequences that differ in length."""

from __future__ import annotations

import copy
import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.config import ConfigError, load
from embodied_rl.contracts import Contract, Observation
from embodied_rl.run_config import RunConfig
from embodied_rl.training.policy_folder import DamagedPolicy, load_policy, save_policy
from fast_processor import every_text, write_processor
from policies.config import FastVLAConfig
from policies.fast_vla import FastVLA

CONTRACT = Contract(
    state_dim=3,
    action_dim=2,
    action_low=(-1.0, -2.0),
    action_high=(1.0, 2.0),
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
)
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "chunk": 4,
    "vocabulary": 64,
    "max_instruction_bytes": 12,
}


def build(contract: Contract = CONTRACT, **options: Any) -> FastVLA:
    torch.manual_seed(0)
    return FastVLA(FastVLAConfig.model_validate(SMALL | options), contract)


def seen(batch: int, state_dim: int = 3) -> Observation:
    state = torch.randn(batch, state_dim, generator=torch.Generator().manual_seed(2))
    return Observation({}, state, tuple("go" * (row % 4) for row in range(batch)))


def willing_to_end(policy: FastVLA, bias: float = 3.0) -> FastVLA:
    """Sequences of a new policy hardly ever end; here they do, at several lengths."""
    head = policy.decoder.lm_head
    policy.decoder.lm_head = torch.nn.Linear(head.in_features, head.out_features)
    with torch.no_grad():
        policy.decoder.lm_head.weight.copy_(head.weight)
        policy.decoder.lm_head.bias.zero_()
        policy.decoder.lm_head.bias[policy._first_action_id] = bias
    return policy


def waves(batch: int) -> tuple[Observation, Tensor]:
    """Demonstrations whose shape follows from the instruction."""
    observation = seen(batch)
    time = torch.linspace(0, 1, 4)[:, None]
    rows = [
        torch.cat([torch.sin(time * 3 + len(t) / 2), time * (len(t) / 3 - 1)], dim=1)
        for t in observation.instruction
    ]
    return observation, torch.stack(rows)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.4, "top_k": 20, "top_p": 0.95}])
def test_cached_decoding_equals_one_teacher_forced_pass(options: dict[str, Any]) -> None:
    policy = willing_to_end(build(**options))
    observation = seen(40)
    decision = policy.act(observation, torch.Generator().manual_seed(0), "explore")
    found = policy.evaluate(observation, decision.trace)
    spoken = decision.trace["words"] >= 0
    assert len(set(spoken.sum(1).tolist())) > 3
    assert spoken.shape == (40, 4 * 2 + 1)
    assert found.token_log_prob is not None and decision.token_log_prob is not None
    assert torch.allclose(found.token_log_prob, decision.token_log_prob, atol=1e-5, rtol=0)
    assert torch.allclose(found.log_prob, decision.log_prob, atol=5e-5, rtol=0)
    assert (found.entropy[:, 0] > 0).all()


def test_step_0_holds_the_joint_and_padding_holds_nothing() -> None:
    policy = willing_to_end(build())
    decision = policy.act(seen(40), torch.Generator().manual_seed(0), "explore")
    found = policy.evaluate(seen(40), decision.trace)
    words, scores = decision.trace["words"], decision.token_log_prob
    assert scores is not None and found.token_step is not None
    assert torch.allclose(scores.sum(1), decision.log_prob[:, 0])
    for tensor in (decision.log_prob, found.log_prob, found.entropy):
        assert not tensor[:, 1:].any()
    ended = (words == 0).any(1)
    assert ended.any()
    for row, step, score in zip(words.tolist(), found.token_step, scores, strict=True):
        length = row.index(0) + 1 if 0 in row else len(row)
        assert set(row[length:]) <= {-1}
        assert step.tolist() == [0] * length + [-1] * (len(row) - length)
        assert (score[:length] < 0).all() and not score[length:].any()


def test_probabilities_of_all_sequences_add_up_to_one() -> None:
    """One number with coefficients -1, 0 and 1, so at most two words: 13 sequences in all."""
    contract = replace(CONTRACT, action_dim=1, action_low=(-1.0,), action_high=(1.0,))
    policy = build(contract, chunk=1, scale=1.0, vocabulary=3)
    assert (policy.tokenizer.size, policy.longest) == (3, 2)
    pairs = itertools.product(range(1, 4), range(4))
    words = torch.tensor([[0, -1], *map(list, pairs)])
    observation = seen(1).select(torch.zeros(13, dtype=torch.long))
    found = policy.evaluate(observation, {"words": words}).log_prob[:, 0].detach()
    assert float(found.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    # And they are drawn that often.
    many = seen(1).select(torch.zeros(4000, dtype=torch.long))
    drawn = policy.act(many, torch.Generator().manual_seed(0), "explore").trace["words"]
    shares = torch.stack([(drawn == row).all(1).float().mean() for row in words])
    assert float(shares.sum()) == pytest.approx(1.0)
    assert (shares - found.exp()).abs().max() < 0.03


def test_what_comes_after_the_end_of_another_row_changes_nothing() -> None:
    policy = willing_to_end(build())
    trace = policy.act(seen(40), torch.Generator().manual_seed(0), "explore").trace
    whole = policy.evaluate(seen(40), trace).log_prob
    length = (trace["words"] >= 0).sum(1)
    rows = (length <= 3).nonzero()[:, 0]
    assert 0 < len(rows) < 40
    alone = policy.evaluate(seen(40).select(rows), {"words": trace["words"][rows]}).log_prob
    assert torch.allclose(alone, whole[rows], atol=1e-5)


@pytest.mark.parametrize("from_folder", [False, True])
def test_imitation_learns_the_shape_that_the_instruction_asks_for(
    from_folder: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"vocabulary": 96}
    if from_folder:
        write_processor(tmp_path, every_text(-160, 20), -160, 181)
        options = {"processor": tmp_path}
    policy = build(**options)
    observation, actions = waves(16)
    valid = torch.ones(16, 4, dtype=torch.bool)
    policy.fit_normalisation(observation.state, actions.flatten(0, 1))
    optimizer = torch.optim.Adam(policy.policy_parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = policy.imitation_loss(observation, actions, valid, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    found = policy.act(observation, generator, "deterministic").actions
    assert (found - actions).abs().max() < 0.15


def test_the_loss_is_the_cross_entropy_of_the_encoded_chunk() -> None:
    policy = build()
    observation, actions = waves(6)
    policy.fit_normalisation(observation.state, actions.flatten(0, 1))
    words = policy._to_words(actions)
    found = policy.evaluate(observation, {"words": words})
    assert found.token_log_prob is not None
    expected = -found.token_log_prob.sum() / (words >= 0).sum()
    valid = torch.ones(6, 4, dtype=torch.bool)
    loss = policy.imitation_loss(observation, actions, valid, torch.Generator())
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_beyond_the_episodes_end_the_last_action_is_held() -> None:
    policy = build()
    observation, actions = waves(4)
    valid = torch.ones(4, 4, dtype=torch.bool)
    valid[:, 2:] = False
    held, wild = actions.clone(), actions.clone()
    held[:, 2:] = actions[:, 1:2]
    wild[:, 2:] = 7.0
    everything = torch.ones_like(valid)
    generator = torch.Generator()
    a = policy.imitation_loss(observation, held, everything, generator)
    b = policy.imitation_loss(observation, wild, valid, generator)
    assert torch.equal(a, b)
    none = policy.imitation_loss(observation, wild, torch.zeros_like(valid), generator)
    assert float(none.detach()) == 0.0


def test_any_words_mean_actions_within_bounds() -> None:
    policy = build()
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, policy.tokenizer.size + 1, (200, policy.longest), generator=generator)
    actions = policy._to_actions(words)
    assert actions.shape == (200, 4, 2) and actions.isfinite().all()
    assert (actions >= policy.low).all() and (actions <= policy.high).all()


def test_a_saved_policy_needs_its_processor_no_more(tmp_path: Path) -> None:
    write_processor(tmp_path / "fast", every_text(-20, 20), -20, 41)
    config = FastVLAConfig.model_validate(SMALL | {"processor": tmp_path / "fast"})
    policy = config.build(CONTRACT)
    save_policy(policy, config, tmp_path / "policy")
    shutil.rmtree(tmp_path / "fast")
    loaded = load_policy(tmp_path / "policy").policy
    before = policy.act(seen(5), torch.Generator().manual_seed(0), "explore")
    after = loaded.act(seen(5), torch.Generator().manual_seed(0), "explore")
    assert torch.equal(before.actions, after.actions)
    assert torch.equal(before.log_prob, after.log_prob)


def test_a_fitted_tokenizer_is_saved_and_copied_with_the_policy(tmp_path: Path) -> None:
    config = FastVLAConfig.model_validate(SMALL)
    policy: Any = config.build(CONTRACT)
    observation, actions = waves(50)
    plain = policy.tokenizer.size
    policy.fit_normalisation(observation.state, actions.flatten(0, 1))
    assert policy.tokenizer.size > plain
    save_policy(policy, config, tmp_path / "policy")
    copies: list[Any] = [load_policy(tmp_path / "policy").policy, copy.deepcopy(policy)]
    for other in copies:
        assert other.tokenizer.to_json() == policy.tokenizer.to_json()
        assert torch.equal(other._to_words(actions), policy._to_words(actions))
    # How actions are drawn may change with a saved policy, the meaning of its tokens may not.
    warm = config.model_copy(update={"temperature": 2.0, "scale": 3.0})
    hot: Any = load_policy(tmp_path / "policy", options=warm).policy
    assert hot.tokenizer.to_json() == policy.tokenizer.to_json()
    longer = config.model_copy(update={"chunk": 5})
    with pytest.raises(ValueError, match=r"time_horizon=4, but chunks here are of 5 steps"):
        load_policy(tmp_path / "policy", options=longer)


def test_a_policy_folder_without_its_tokenizer_is_damaged(tmp_path: Path) -> None:
    config = FastVLAConfig.model_validate(SMALL)
    save_policy(config.build(CONTRACT), config, tmp_path / "policy")
    file = tmp_path / "policy" / "policy.json"
    file.write_text(file.read_text().replace('"spelling"', '"spoiled"'))
    with pytest.raises((DamagedPolicy, ValueError), match="spelling"):
        load_policy(tmp_path / "policy")


def test_control_steps_have_no_ratios_of_their_own(tmp_path: Path) -> None:
    overrides = ["simulator=gymnasium", "policy=fast_vla", "algorithm=grpo", f"runs_dir={tmp_path}"]
    for level in ("chunk", "token"):
        load(RunConfig, None, [*overrides, f"algorithm.ratio_level={level}"])
    with pytest.raises(ConfigError, match=r"describe the chunk as a whole; allowed: chunk, token"):
        load(RunConfig, None, [*overrides, "algorithm.ratio_level=step"])
