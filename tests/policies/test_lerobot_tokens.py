"""pi0-FAST against lerobot itself: tiny checkpoints of its own class."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied_rl.contracts import Contract, Observation
from embodied_rl.correctness.policy import GATES, examine_policy
from embodied_rl.memory.policy_bytes import measure_policy
from embodied_rl.ratio_levels import refusal
from embodied_rl.rollout.build import build_simulator
from embodied_rl.run_config import RolloutConfig
from embodied_rl.training.policy_folder import load_policy, save_policy
from policies.checkpoints import BadCheckpoint
from policies.lerobot_config import LerobotFlowConfig, LerobotTokensConfig
from policies.word_sequences import END
from seen_line import SeenLineConfig
from tiny_fast import (
    CHUNK_SIZE,
    native_action_tokens,
    native_fast_actions,
    processor_of,
    tiny_fast,
    words_of,
    write_fast_checkpoint,
)
from tiny_vla import ACTION, CONTRACT, observation

LOW, HIGH = torch.tensor(CONTRACT.action_low), torch.tensor(CONTRACT.action_high)
EMBEDDINGS = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
WORD_HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with tiny_fast():
        yield


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, which talk of anything."""
    return write_fast_checkpoint(tmp_path_factory.mktemp("checkpoints") / "fresh")


@pytest.fixture(scope="module")
def trained(fresh: Path) -> Path:
    """A few chunks learned by heart: a plain lerobot speaks of actions alone."""
    policy = build(fresh, trainable="all")
    imitate(policy, chunks(), 120, 3e-3)
    folder = fresh.with_name("trained")
    save_policy(policy, policy._config, folder)
    return folder


def options(folder: Path, **given: Any) -> LerobotTokensConfig:
    known: dict[str, Any] = {"path": str(folder), "chunk": 2, "value_hidden_size": 8}
    if words_of(folder).is_dir():
        known |= {"tokenizer": words_of(folder), "processor": processor_of(folder)}
    return LerobotTokensConfig.model_validate({**known, **given})


def build(folder: Path, **given: Any) -> Any:
    torch.manual_seed(0)
    return options(folder, **given).build(CONTRACT)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chunks(seed: int = 3) -> Tensor:
    """Of four rows; one stands still, which takes few words."""
    actions = 0.6 * torch.randn(4, CHUNK_SIZE, ACTION, generator=seeded(seed))
    actions[0] = actions[0, :1]
    return actions.clamp(LOW, HIGH)


def everything(actions: Tensor) -> Tensor:
    return torch.ones(actions.shape[:2], dtype=torch.bool)


def imitate(policy: Any, actions: Tensor, steps: int, rate: float) -> None:
    optimizer = torch.optim.Adam(policy.policy_parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        policy.imitation_loss(observation(4), actions, everything(actions), seeded()).backward()
        optimizer.step()


def ours(policy: Any, seen: Observation) -> Tensor:
    actions: Tensor = policy.act(seen, seeded(), "deterministic").actions
    return actions


def theirs(folder: Path, words: Path, fast: Path) -> tuple[Tensor, list[list[str]]]:
    actions, texts = native_fast_actions(folder, observation(4), words, fast)
    return actions[:, :2].clamp(LOW, HIGH), texts


def test_greedy_actions_are_those_of_lerobot(trained: Path, fresh: Path) -> None:
    seen = observation(4)
    plain, texts = theirs(trained, words_of(fresh), processor_of(fresh))
    found = ours(build(trained), seen)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)
    # Both decode what was learned, which differs in length, and not the same for everybody.
    assert (found - chunks()[:, :2]).abs().max() < 0.1
    ends = [text.index("|") for text in texts]
    assert all(text[:2] == ["Action", ":"] for text in texts) and len(set(ends)) > 1
    # lerobot goes on after the end, and we do not hear it.
    assert any(set(text[end + 1 :]) - {"<pad>"} for text, end in zip(texts, ends, strict=True))
    assert found.std(dim=0).min() > 0.03


def test_decisions_depend_on_what_is_seen_said_and_felt(fresh: Path) -> None:
    policy, seen = build(fresh), observation(3)
    before = policy.act(seen, seeded(), "explore")
    for changed in (
        Observation(observation(3, seed=1).images, seen.state, seen.instruction),
        Observation(seen.images, seen.state + 0.5, seen.instruction),
        Observation(seen.images, seen.state, ("red plate",) * 3),
    ):
        after = policy.evaluate(changed, before.trace)
        assert (after.token_log_prob - before.token_log_prob).abs().amax(dim=1).min() > 1e-3
        assert (policy.value(changed) - before.value).abs().min() > 1e-4


@pytest.mark.parametrize("which", ["fresh", "trained"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.4, "top_k": 40, "top_p": 0.95}])
def test_decisions_are_scored_as_they_were_drawn(
    which: str, sampling: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    policy, seen = build(request.getfixturevalue(which), **sampling), observation(4)
    decision = policy.act(seen, seeded(), "explore")
    words = decision.trace["words"]
    assert words.shape == (4, policy.longest) and decision.log_prob.shape == (4, 2)
    found = policy.evaluate(seen, decision.trace)
    torch.testing.assert_close(found.token_log_prob, decision.token_log_prob, atol=5e-6, rtol=0)
    torch.testing.assert_close(found.value, decision.value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.value(seen), decision.value, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.token_step, torch.where(words < 0, -1, 0))
    assert not decision.token_log_prob[words < 0].any()
    torch.testing.assert_close(decision.token_log_prob.sum(1), decision.log_prob[:, 0])
    assert not decision.log_prob[:, 1:].any()
    if which == "trained":
        assert len(set((words >= 0).sum(1).tolist())) > 1 and (words == END).any()


def test_only_actions_and_the_end_can_be_said(fresh: Path) -> None:
    policy, seen = build(fresh, temperature=1.7), observation(1)
    assert policy.speech.action_ids.tolist()[:2] == [96, 512 - 1 - 128]
    first = torch.arange(policy.tokenizer.size + 1)[:, None]
    words = torch.nn.functional.pad(first, (0, policy.longest - 1), value=-1)
    everybody = seen.select(torch.zeros(len(words), dtype=torch.long))
    scores = policy.evaluate(everybody, {"words": words}).log_prob[:, 0]
    assert float(scores.detach().exp().sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("which", ["fresh", "trained"])
def test_a_row_does_not_depend_on_the_batch(which: str, request: pytest.FixtureRequest) -> None:
    policy, seen = build(request.getfixturevalue(which)), observation(4)
    together = policy.act(seen, [seeded(i) for i in range(4)], "explore")
    calm = ours(policy, seen)
    for row in range(4):
        one = seen.select(torch.tensor([row]))
        alone = policy.act(one, [seeded(row)], "explore")
        assert torch.equal(alone.trace["words"][0], together.trace["words"][row])
        torch.testing.assert_close(alone.actions[0], together.actions[row], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.log_prob[0], together.log_prob[row], atol=5e-5, rtol=0)
        torch.testing.assert_close(ours(policy, one)[0], calm[row], atol=1e-5, rtol=0)


def test_demonstrations_are_called_what_lerobot_calls_them(fresh: Path) -> None:
    policy, actions = build(fresh), chunks()
    # Far from the mean, as outliers are.
    actions[1, 2] = 2.0
    tokens, mask = native_action_tokens(
        fresh, observation(4), actions, words_of(fresh), processor_of(fresh)
    )
    named: list[tuple[Tensor, Tensor]] = []
    name = policy.speech.said

    def listening(words: Tensor) -> tuple[Tensor, Tensor]:
        named.append(name(words))
        return named[-1]

    policy.speech.said = listening
    policy.imitation_loss(observation(4), actions, everything(actions), seeded())
    said, real = named[-1]
    for row in range(4):
        # Theirs begin with the mark that is part of our prompt, and have another at the end.
        assert tokens[row][mask[row]].tolist()[1:-1] == said[row][real[row]].tolist()


def test_the_loss_counts_what_is_in_the_episode(fresh: Path) -> None:
    policy, actions = build(fresh), chunks()
    valid = everything(actions)
    valid[:, 2:] = False
    held, wild = actions.clone(), actions.clone()
    held[:, 2:] = actions[:, 1:2]
    wild[:, 2:] = 0.5

    def loss(rows: Tensor, counted: Tensor) -> float:
        with torch.no_grad():
            return float(policy.imitation_loss(observation(4), rows, counted, seeded()))

    assert loss(held, everything(actions)) == loss(wild, valid)
    assert loss(wild, everything(actions)) != loss(wild, valid)
    assert loss(wild, torch.zeros_like(valid)) == 0.0
    # A row without any step leaves the mean over the others.
    valid[1:] = False
    first = observation(4).select(torch.tensor([0]))
    one = policy.imitation_loss(first, actions[:1], valid[:1], seeded())
    assert loss(actions, valid) == pytest.approx(float(one.detach()), rel=1e-5)


@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_exactly_what_is_named_learns(trainable: str, fresh: Path) -> None:
    policy, seen = build(fresh, trainable=trainable, lora_rank=2), observation(2)
    decision = policy.act(seen, seeded(), "explore")
    scored = policy.evaluate(seen, decision.trace)
    (scored.log_prob.sum() + scored.value.sum()).backward()
    named = dict(policy.named_parameters())
    assert [n for n, p in named.items() if p.requires_grad != (p.grad is not None)] == []
    learning = {n for n, p in named.items() if p.requires_grad and n.startswith("speech.")}
    assert {id(named[n]) for n in learning} == {id(p) for p in policy.policy_parameters()}
    if trainable == "lora":
        assert learning and all(".language_model." in n and ".lora_" in n for n in learning)
    else:
        assert any("vision_tower" in n for n in learning)


@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_what_is_saved_is_a_checkpoint_of_lerobot(
    trainable: str, trained: Path, fresh: Path, tmp_path: Path
) -> None:
    for name in ("start", "start_words", "start_fast"):
        source = {"start": trained, "start_words": words_of(fresh)}.get(name, processor_of(fresh))
        shutil.copytree(source, tmp_path / name)
    config = options(tmp_path / "start", trainable=trainable, lora_rank=8)
    torch.manual_seed(0)
    policy: Any = config.build(CONTRACT)
    seen, before = observation(4), ours(policy, observation(4))
    imitate(policy, chunks(seed=4), 80, 1e-2 if trainable == "lora" else 3e-3)
    changed = ours(policy, seen)
    assert (changed - before).abs().amax(dim=(1, 2)).min() > 0.05
    save_policy(policy, config, tmp_path / "saved")
    # Ours comes back without the checkpoint that it began with, nor its tokenizers.
    for name in ("start", "start_words", "start_fast"):
        shutil.rmtree(tmp_path / name)
    loaded: Any = load_policy(tmp_path / "saved").policy
    torch.testing.assert_close(ours(loaded, seen), changed, atol=1e-5, rtol=0)
    torch.testing.assert_close(loaded.value(seen), policy.value(seen), atol=1e-5, rtol=0)
    drawn, again = (p.act(seen, seeded(), "explore") for p in (policy, loaded))
    torch.testing.assert_close(again.token_log_prob, drawn.token_log_prob, atol=1e-4, rtol=1e-5)
    plain, texts = theirs(tmp_path / "saved", words_of(fresh), processor_of(fresh))
    assert all("|" in text for text in texts)
    torch.testing.assert_close(plain, changed, atol=1e-5, rtol=0)
    stored = json.loads((tmp_path / "saved" / "policy_preprocessor.json").read_text())
    assert stored == json.loads((fresh / "policy_preprocessor.json").read_text())


def test_every_gate_of_the_doctor_passes(tmp_path: Path) -> None:
    rollout = RolloutConfig(num_slots=2, halves=1, num_workers=0)
    simulator = build_simulator(SeenLineConfig(cameras=2), rollout, chunk=2)
    config = options(write_fast_checkpoint(tmp_path / "line", simulator.spec.contract))
    torch.manual_seed(0)
    findings = examine_policy(config.build(simulator.spec.contract), config, simulator)
    assert [f.name for f in findings] == [*GATES]
    assert [(f.name, f.text) for f in findings if f.state != "ok"] == []


def test_statistics_of_the_checkpoint_are_kept_and_missing_ones_fitted(
    fresh: Path, tmp_path: Path
) -> None:
    seen, policy = observation(3), build(fresh)
    before = ours(policy, seen)
    state, actions = torch.randn(50, CONTRACT.state_dim), torch.rand(50, ACTION)
    policy.fit_normalisation(state, actions)
    assert torch.equal(ours(policy, seen), before)

    bare = build(write_fast_checkpoint(tmp_path / "bare", statistics=False))
    assert measure_policy(bare, observation(1), "cpu").learned > 0
    with pytest.raises(BadCheckpoint, match=r"no statistics to scale.*set demonstrations"):
        ours(bare, seen)
    bare.fit_normalisation(state, actions)
    assert ours(bare, seen).isfinite().all()


def test_a_plain_lerobot_decodes_all_steps_that_were_said(trained: Path, fresh: Path) -> None:
    """With fewer action steps than planned it would take the first frequencies for all."""
    policy = build(trained)
    assert policy.speech.native.config.n_action_steps == CHUNK_SIZE
    few = trained.with_name("few")
    shutil.copytree(trained, few)
    data = json.loads((few / "config.json").read_text())
    (few / "config.json").write_text(json.dumps(data | {"n_action_steps": 2}))
    squeezed, _ = theirs(few, words_of(fresh), processor_of(fresh))
    found = build(few)
    assert (squeezed - ours(found, observation(4))).abs().max() > 0.05
    save_policy(found, found._config, few.with_name("few_saved"))
    plain, _ = theirs(few.with_name("few_saved"), words_of(fresh), processor_of(fresh))
    torch.testing.assert_close(plain, ours(found, observation(4)), atol=1e-5, rtol=0)


def test_a_damaged_checkpoint_is_never_replaced_by_random_weights(
    fresh: Path, tmp_path: Path
) -> None:
    norm = "model.paligemma_with_expert.paligemma.model.language_model.norm.weight"
    given = {"tokenizer": words_of(fresh), "processor": processor_of(fresh)}
    for change, words in (
        (lambda w: w.pop(norm), r"language_model\.norm\.weight is missing"),
        (lambda w: w.update(extra=torch.zeros(1)), "extra is not known"),
        (lambda w: w.update({norm: torch.zeros(3)}), r"norm\.weight|size mismatch"),
    ):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(fresh, folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)  # type: ignore[no-untyped-call]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(BadCheckpoint, match=words):
            build(folder, **given)
    # The embeddings may be left out where they are the word head's, as in the public release.
    weights = load_file(fresh / "model.safetensors")
    del weights[EMBEDDINGS]
    save_file(weights, tmp_path / "damaged" / "model.safetensors", {"format": "pt"})
    found = build(tmp_path / "damaged", **given).speech.native.state_dict()
    assert torch.equal(found[EMBEDDINGS], weights[WORD_HEAD])


def test_what_cannot_be_loaded_is_named(fresh: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy\.path is needed.*pi0_fast"):
        LerobotTokensConfig(path=None).build(CONTRACT)
    with pytest.raises(BadCheckpoint, match=r"type 'pi0_fast'.*it is one for.*lerobot_tokens"):
        LerobotFlowConfig(path=str(fresh)).build(CONTRACT)
    with pytest.raises(BadCheckpoint, match=r"tokenizer is google/paligemma.*policy\.tokenizer"):
        build(fresh, tokenizer=None)
    with pytest.raises(BadCheckpoint, match=r"FAST processor 'lerobot/fast.*policy\.processor="):
        build(fresh, processor=None)
    with pytest.raises(BadCheckpoint, match=r"has no processor_config\.json.*policy\.processor="):
        build(fresh, processor=words_of(fresh))
    with pytest.raises(BadCheckpoint, match="chunk=7 is more than the 6 steps"):
        build(fresh, chunk=7)
    for targets in ("nothing", r".*lm_head", "("):
        with pytest.raises(BadCheckpoint, match=r"lora_targets="):
            build(fresh, lora_targets=targets)
    with pytest.raises(ValueError, match="belongs to trainable=lora"):
        options(fresh, lora_targets=".*", trainable="all")
    folder = tmp_path / "skipping"
    shutil.copytree(fresh, folder)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"fast_skip_tokens": 300}))
    with pytest.raises(BadCheckpoint, match=r"512 tokens.*269 and.*do not belong together"):
        build(folder, tokenizer=words_of(fresh), processor=processor_of(fresh))
    words = tmp_path / "no_end"
    shutil.copytree(words_of(fresh), words)
    file = words / "tokenizer.json"
    file.write_text(file.read_text().replace('"|"', '"no bar"'))
    with pytest.raises(BadCheckpoint, match=r"no word '\|', which ends the actions"):
        build(fresh, tokenizer=words)
    other = Contract.from_json(CONTRACT.to_json() | {"state_dim": 4})
    with pytest.raises(BadCheckpoint, match=r"scales observation\.state of 5 entries"):
        options(fresh).build(other)


def test_control_steps_have_no_ratios_of_their_own(fresh: Path) -> None:
    for holder in (LerobotTokensConfig, build(fresh)):
        assert refusal(holder, "chunk") is None and refusal(holder, "token") is None
        assert "allowed: chunk, token" in str(refusal(holder, "step"))
