"""pi0, pi0.5 and SmolVLA against lerobot itself: tiny random checkpoints of its own classes."""

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
from embodied_rl.maths.randomness import standard_normal
from embodied_rl.memory.policy_bytes import measure_policy
from embodied_rl.rollout.build import build_simulator
from embodied_rl.run_config import RolloutConfig
from embodied_rl.training.policy_folder import DamagedPolicy, load_policy, save_policy
from policies.checkpoints import BadCheckpoint
from policies.lerobot_config import LerobotFlowConfig
from seen_line import SeenLineConfig
from tiny_vla import (
    ACTION,
    CHUNK_SIZE,
    CONTRACT,
    KINDS,
    MAX_DIM,
    STEPS,
    native_actions,
    observation,
    tiny_sizes,
    words_of,
    write_checkpoint,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
LOW, HIGH = torch.tensor(CONTRACT.action_low), torch.tensor(CONTRACT.action_high)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with tiny_sizes():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(kind, base / kind) for kind in KINDS}


def options(folder: Path, **given: Any) -> LerobotFlowConfig:
    known = {"path": str(folder), "tokenizer": words_of(folder), "chunk": 2}
    return LerobotFlowConfig.model_validate(
        {**known, "denoise_steps": STEPS, "value_hidden_size": 8, **given}
    )


def build(folder: Path, **given: Any) -> Any:
    torch.manual_seed(0)
    return options(folder, **given).build(CONTRACT)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def perturb(parameters: list[Tensor], scale: float = 0.02) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:
            parameter += scale * torch.randn_like(parameter)


def ours(policy: Any, seen: Observation, seed: int = 0) -> Tensor:
    actions: Tensor = policy.act(seen, seeded(seed), "deterministic").actions
    return actions


def theirs(kind: str, folder: Path, seen: Observation, tokenizer: Path) -> Tensor:
    noise = standard_normal((len(seen), CHUNK_SIZE, MAX_DIM), seeded())
    return native_actions(kind, folder, seen, noise, tokenizer)[:, :2].clamp(LOW, HIGH)


@every_kind
def test_deterministic_actions_are_those_of_lerobot(kind: str, folders: dict[str, Path]) -> None:
    seen = observation(3)
    found = ours(build(folders[kind]), seen)
    assert found.shape == (3, 2, ACTION)
    torch.testing.assert_close(
        found, theirs(kind, folders[kind], seen, words_of(folders[kind])), atol=1e-5, rtol=0
    )
    # They depend on what is seen, said and felt, or the equality above would say little.
    for other in (
        observation(3, seed=1).images,
        {name: image.flip(0) for name, image in seen.images.items()},
    ):
        changed = Observation(other, seen.state, seen.instruction)
        assert (ours(build(folders[kind]), changed) - found).abs().max() > 1e-3
    changed = Observation(seen.images, seen.state + 0.5, seen.instruction)
    assert (ours(build(folders[kind]), changed) - found).abs().max() > 1e-3
    changed = Observation(seen.images, seen.state, ("red plate",) * 3)
    assert (ours(build(folders[kind]), changed) - found).abs().max() > 1e-3


@every_kind
@pytest.mark.parametrize(
    "exploration",
    [
        {},
        {"stochastic_steps": "all", "skip_last_step": False},
        {"exploration": "flow_noise"},
        {"exploration": "fpo"},
        {"value_from": "expert"},
    ],
    ids=["one", "all", "noise", "fpo", "expert_value"],
)
def test_decisions_are_scored_as_they_were_drawn(
    kind: str, exploration: dict[str, Any], folders: dict[str, Path]
) -> None:
    policy, seen = build(folders[kind], **exploration), observation(3)
    decision = policy.act(seen, seeded(), "explore")
    assert decision.log_prob.shape == (3, 2)
    again = policy.evaluate(seen, decision.trace)
    torch.testing.assert_close(again.log_prob, decision.log_prob, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again.value, decision.value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.value(seen), decision.value, atol=1e-5, rtol=1e-5)


@every_kind
def test_a_row_does_not_depend_on_the_batch(kind: str, folders: dict[str, Path]) -> None:
    policy, seen = build(folders[kind]), observation(3)
    together = policy.act(seen, [seeded(i) for i in range(3)], "explore")
    for row in range(3):
        alone = policy.act(seen.select(torch.tensor([row])), [seeded(row)], "explore")
        torch.testing.assert_close(alone.actions[0], together.actions[row], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.log_prob[0], together.log_prob[row], atol=2e-5, rtol=1e-5)


@every_kind
def test_padding_and_unexecuted_steps_have_no_probability(
    kind: str, folders: dict[str, Path]
) -> None:
    policy, seen = build(folders[kind]), observation(3)
    decision = policy.act(seen, seeded(), "explore")
    assert decision.trace["before"].shape == (3, 1, CHUNK_SIZE, MAX_DIM)
    assert decision.trace["after"].shape == (3, 1, 2, ACTION)
    policy.evaluate(seen, decision.trace).log_prob.sum().backward()
    gradient = policy.native.model.action_out_proj.weight.grad
    assert (gradient[:ACTION].abs().amax(dim=1) > 0).all()
    assert (gradient[ACTION:] == 0).all()
    # Imitation leaves padded dimensions out as well, but learns all steps that are planned.
    policy.zero_grad()
    chunks = torch.zeros(3, CHUNK_SIZE, ACTION)
    valid = torch.ones(3, CHUNK_SIZE, dtype=torch.bool)
    assert policy.imitated_steps == CHUNK_SIZE
    policy.imitation_loss(seen, chunks, valid, seeded()).backward()
    assert (policy.native.model.action_out_proj.weight.grad[ACTION:] == 0).all()

    def loss() -> float:
        with torch.no_grad():
            return float(policy.imitation_loss(seen, chunks, valid, seeded()))

    # Far away in the last step: it counts while it is in the episode.
    before = loss()
    chunks[:, -1] += 100.0
    assert loss() > 100 * before
    valid[:, -1] = False
    assert loss() < 10 * before


@every_kind
def test_exactly_what_is_named_learns(kind: str, folders: dict[str, Path]) -> None:
    seen = observation(2)
    for trainable, learns_language in (("expert", False), ("all", True), ("lora", False)):
        policy = build(folders[kind], trainable=trainable, lora_rank=2)
        mine = {id(p) for p in policy.policy_parameters()}
        assert all((id(p) in mine) == p.requires_grad for p in policy.native.parameters())
        decision = policy.act(seen, seeded(), "explore")
        scored = policy.evaluate(seen, decision.trace)
        (scored.log_prob.sum() + scored.value.sum()).backward()
        reached = [n for n, p in policy.named_parameters() if p.grad is not None]
        assert reached and all(dict(policy.named_parameters())[n].requires_grad for n in reached)
        assert any("vlm.model" in n or "paligemma.model" in n for n in reached) == learns_language
        if trainable == "lora":
            assert all(".lora_" in n for n in reached if n.startswith("native."))
        if trainable != "lora":
            # Nothing that is said to learn is left without a gradient.
            idle = [n for n, p in policy.named_parameters() if p.requires_grad and p.grad is None]
            assert idle == []


@every_kind
@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_what_is_saved_is_a_checkpoint_of_lerobot(
    kind: str, trainable: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    words = shutil.copytree(words_of(folders[kind]), tmp_path / "words")
    given: dict[str, Any] = {"trainable": trainable, "lora_rank": 2, "tokenizer": words}
    config = options(folders[kind], exploration="flow_noise", **given)
    torch.manual_seed(0)
    policy: Any = config.build(CONTRACT)
    before = ours(policy, observation(3))
    perturb([*policy.policy_parameters(), *policy.value_parameters()], 0.05)
    seen = observation(3)
    changed = ours(policy, seen)
    assert (changed - before).abs().max() > 1e-3
    save_policy(policy, config, tmp_path / "saved")
    plain = theirs(kind, tmp_path / "saved", seen, tmp_path / "saved" / "tokenizer")
    torch.testing.assert_close(plain, changed, atol=1e-5, rtol=0)
    # Ours comes back without the checkpoint and the tokenizer that it began with.
    shutil.rmtree(words)
    loaded: Any = load_policy(tmp_path / "saved").policy
    torch.testing.assert_close(ours(loaded, seen), changed, atol=1e-5, rtol=0)
    torch.testing.assert_close(loaded.value(seen), policy.value(seen), atol=1e-5, rtol=0)
    drawn, again = (p.act(seen, seeded(), "explore") for p in (policy, loaded))
    torch.testing.assert_close(again.log_prob, drawn.log_prob, atol=1e-4, rtol=1e-5)


@every_kind
def test_a_prefix_is_made_once_and_stays_as_it_is(kind: str, folders: dict[str, Path]) -> None:
    policy, seen = build(folders[kind]), observation(3)
    made = policy.prepare(seen)
    assert made and all(len(tensor) == 3 for tensor in made.values())
    kept = {name: tensor.clone() for name, tensor in made.items()}
    ready = Observation({}, seen.state, seen.instruction, prepared=made)
    for _ in range(2):
        drawn = policy.act(ready, seeded(), "explore")
        assert torch.equal(drawn.log_prob, policy.act(seen, seeded(), "explore").log_prob)
        scored = policy.evaluate(ready, drawn.trace)
        torch.testing.assert_close(scored.log_prob, drawn.log_prob, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(made[name], kept[name]) for name in made)
    assert build(folders[kind], trainable="all").prepare(seen) == {}
    assert build(folders[kind], reuse_prefix=False).prepare(seen) == {}


@every_kind
def test_rounding_the_frozen_part_keeps_the_ratio(kind: str, folders: dict[str, Path]) -> None:
    policy, seen = build(folders[kind], dtype="bfloat16"), observation(3)
    kinds = {p.dtype for p in policy.native.parameters()}
    assert kinds == {torch.float32, torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in policy.policy_parameters())
    drawn = policy.act(seen, seeded(), "explore")
    scored = policy.evaluate(seen, drawn.trace)
    assert scored.log_prob.dtype == torch.float32
    torch.testing.assert_close(scored.log_prob, drawn.log_prob, atol=1e-4, rtol=1e-4)
    exact = build(folders[kind]).act(seen, seeded(), "deterministic").actions
    assert (policy.act(seen, seeded(), "deterministic").actions - exact).abs().max() < 0.05


@every_kind
def test_every_gate_of_the_doctor_passes(kind: str, tmp_path: Path) -> None:
    rollout = RolloutConfig(num_slots=2, halves=1, num_workers=0)
    simulator = build_simulator(SeenLineConfig(cameras=2), rollout, chunk=2)
    folder = write_checkpoint(kind, tmp_path / kind, simulator.spec.contract)
    config = options(folder)
    torch.manual_seed(0)
    findings = examine_policy(config.build(simulator.spec.contract), config, simulator)
    assert [f.name for f in findings] == [*GATES]
    assert [(f.name, f.text) for f in findings if f.state != "ok"] == []


@every_kind
def test_statistics_of_the_checkpoint_are_kept_and_missing_ones_fitted(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    seen, policy = observation(3), build(folders[kind])
    before = ours(policy, seen)
    state, actions = torch.randn(50, CONTRACT.state_dim), torch.rand(50, ACTION)
    policy.fit_normalisation(state, actions)
    assert torch.equal(ours(policy, seen), before)

    bare = build(write_checkpoint(kind, tmp_path / "bare", statistics=False))
    with pytest.raises(BadCheckpoint, match=r"no statistics to scale.*set demonstrations"):
        ours(bare, seen)
    # Its memory can be looked at all the same, which changes nothing.
    missing = bare.processors.missing_statistics
    assert measure_policy(bare, seen, "cpu").learned > 0
    assert bare.processors.missing_statistics == missing
    with pytest.raises(BadCheckpoint, match="no statistics"):
        ours(bare, seen)
    bare.fit_normalisation(state, actions)
    first = ours(bare, seen)
    assert first.isfinite().all()
    measure_policy(bare, seen, "cpu")
    assert torch.equal(ours(bare, seen), first)


def test_a_damaged_checkpoint_is_never_replaced_by_random_weights(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for kind in ("pi0", "smolvla"):
        for change, words in (
            (lambda w: w.pop("model.action_out_proj.bias"), r"action_out_proj\.bias is missing"),
            (lambda w: w.update(extra=torch.zeros(1)), "extra is not known"),
            (
                lambda w: w.update({"model.action_out_proj.bias": torch.zeros(3)}),
                r"action_out_proj\.bias|size mismatch",
            ),
        ):
            folder = tmp_path / "damaged"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(folders[kind], folder)
            weights = load_file(folder / "model.safetensors")
            change(weights)  # type: ignore[no-untyped-call]
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
            with pytest.raises(BadCheckpoint, match=words):
                build(folder, tokenizer=words_of(folders[kind]))


def test_what_cannot_be_loaded_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    good = folders["pi0"]

    def copy(name: str, remove: str | None = None) -> Path:
        folder = tmp_path / name
        shutil.copytree(good, folder)
        if remove:
            (folder / remove).unlink()
        return folder

    with pytest.raises(ValueError, match=r"policy\.path is needed"):
        LerobotFlowConfig(path=None).build(CONTRACT)
    with pytest.raises(BadCheckpoint, match="is no folder"):
        build(tmp_path / "nowhere")
    with pytest.raises(BadCheckpoint, match="cannot be fetched from the Hugging Face Hub"):
        LerobotFlowConfig(path="lerobot/pi0").build(CONTRACT)
    pickled = copy("pickled", "model.safetensors")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"Pickled weights \(pytorch_model\.bin\)"):
        build(pickled)
    with pytest.raises(BadCheckpoint, match=r"no policy_preprocessor\.json"):
        build(copy("bare", "policy_preprocessor.json"))
    act = copy("act")
    data = json.loads((act / "config.json").read_text())
    (act / "config.json").write_text(json.dumps(data | {"type": "act"}))
    with pytest.raises(BadCheckpoint, match=r"type 'act'.*knows pi0, pi05, smolvla"):
        build(act)
    (act / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="is not JSON"):
        build(act)
    with pytest.raises(BadCheckpoint, match=r"tokenizer is google/paligemma.*policy\.tokenizer"):
        build(good, tokenizer=None)
    with pytest.raises(BadCheckpoint, match="chunk=7 is more than the 6 steps"):
        build(good, chunk=7)
    with pytest.raises(BadCheckpoint, match=r"lora_targets=nothing"):
        build(good, trainable="lora", lora_targets="nothing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state_dim": 4}, r"scales observation\.state of 5 entries, the simulator has 4"),
        ({"action_dim": 2, "action_low": [0, 0], "action_high": [1, 1]}, r"scales action of 3"),
        ({"cameras": []}, r"checkpoint has .*front.*the simulator none.*policy\.cameras="),
    ],
)
def test_another_robot_is_refused(
    change: dict[str, Any], words: str, folders: dict[str, Path]
) -> None:
    contract = Contract.from_json(CONTRACT.to_json() | change)
    with pytest.raises(BadCheckpoint, match=words):
        options(folders["pi0"]).build(contract)


def test_cameras_can_be_told_apart(folders: dict[str, Path]) -> None:
    keys = [f"observation.images.{name}" for name in ("front", "wrist")]
    crossed = dict(zip(keys, ("wrist", "front"), strict=True))
    seen = observation(2)
    swapped = Observation(
        {"front": seen.images["wrist"], "wrist": seen.images["front"]},
        seen.state,
        seen.instruction,
    )
    found = ours(build(folders["pi0"], cameras=crossed), seen)
    assert torch.equal(found, ours(build(folders["pi0"]), swapped))
    with pytest.raises(BadCheckpoint, match=r"policy\.cameras names .*top"):
        build(folders["pi0"], cameras={keys[0]: "top"})


def test_a_saved_folder_that_was_changed_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config = options(folders["smolvla"])
    save_policy(config.build(CONTRACT), config, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    weights = load_file(path)
    name = "model.action_out_proj.bias"
    save_file(weights | {name: weights[name] + 1}, path, {"format": "pt"})
    with pytest.raises(DamagedPolicy, match=r"model\.safetensors.* was changed"):
        load_policy(tmp_path / "saved")
    path.unlink()
    with pytest.raises(DamagedPolicy, match=r"lacks model\.safetensors"):
        load_policy(tmp_path / "saved")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "bfloat16", "trainable": "all"}, "bfloat16 is for a frozen"),
        ({"lora_targets": "x"}, "belongs to trainable=lora"),
    ],
)
def test_options_that_cannot_go_together(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LerobotFlowConfig.model_validate(given)
