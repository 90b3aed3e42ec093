"""Switches for speed and memory of lerobot's models change nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.algorithms.ppo import PPO
from embodied_rl.contracts import Contract
from embodied_rl.maths.randomness import standard_normal
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig
from learning import kept_bytes, learned
from policies.lerobot_config import LerobotFlowConfig
from seen_line import SeenLineConfig
from tiny_vla import (
    CHUNK_SIZE,
    CONTRACT,
    KINDS,
    MAX_DIM,
    STEPS,
    TINY,
    Native,
    native_batch,
    observation,
    tiny_sizes,
    words_of,
    write_checkpoint,
)

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with tiny_sizes():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(kind, base / kind) for kind in KINDS}


def build(folder: Path, contract: Contract = CONTRACT, **given: Any) -> Any:
    known = {"path": str(folder), "tokenizer": words_of(folder), "chunk": 2, "value_hidden_size": 8}
    torch.manual_seed(0)
    config = LerobotFlowConfig.model_validate({**known, "denoise_steps": STEPS, **given})
    return config.build(contract)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("pi0", {}),
        ("pi05", {}),
        ("smolvla", {}),
        ("smolvla", {"attention_mode": "self_attn"}),
        ("smolvla", {"num_expert_layers": 2, "self_attn_every_n_layers": 0}),
        ("smolvla", {"prefix_length": 80}),
    ],
)
def test_ten_steps_end_where_those_of_lerobot_do(
    kind: str, given: dict[str, Any], tmp_path: Path
) -> None:
    size = replace(TINY, steps=10)
    folder = write_checkpoint(kind, tmp_path / kind, size=size, **given)
    native, seen = Native(kind, folder, size=size), observation(5)
    noise = standard_normal((5, CHUNK_SIZE, MAX_DIM), seeded())
    wanted = native.actions(native.before(native_batch(seen)), noise)[:, :2]
    low, high = torch.tensor(CONTRACT.action_low), torch.tensor(CONTRACT.action_high)
    found = build(folder, denoise_steps=10).act(seen, seeded(), "deterministic").actions
    torch.testing.assert_close(found, wanted.clamp(low, high), atol=1e-5, rtol=0)


def test_an_image_that_is_missing_is_masked_as_lerobot_does(folders: dict[str, Path]) -> None:
    native, seen = Native("pi0", folders["pi0"]), observation(2)
    noise = standard_normal((2, CHUNK_SIZE, MAX_DIM), seeded())
    batch = native_batch(seen)
    del batch["observation.images.wrist"]
    low, high = torch.tensor(CONTRACT.action_low), torch.tensor(CONTRACT.action_high)
    wanted = native.actions(native.before(batch), noise)[:, :2].clamp(low, high)
    policy = build(folders["pi0"], cameras={"observation.images.front": "front"})
    found = policy.act(seen, seeded(), "deterministic").actions
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["pi0", "smolvla"])
def test_pictures_become_inputs_on_their_own_device(kind: str, folders: dict[str, Path]) -> None:
    """A meta tensor cannot be copied anywhere; pi0.5 does copy the state, which it reads as
    words."""
    policy, seen = build(folders[kind]), observation(2).to("meta")
    assert {image.dtype for image in seen.images.values()} == {torch.uint8}
    made = policy.processors.inputs(seen, policy._cameras)
    assert made["observation.images.front"].dtype == torch.float32
    tensors = [value for value in made.values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@every_kind
def test_checkpointed_gradients_are_the_same_and_keep_less(
    kind: str, folders: dict[str, Path]
) -> None:
    plain, seen = build(folders[kind], trainable="all"), observation(4)
    saving = build(folders[kind], trainable="all", gradient_checkpointing=True)
    trace = plain.act(seen, seeded(), "explore").trace
    wanted, found = learned(plain, seen, trace), learned(saving, seen, trace)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)
    assert kept_bytes(saving, seen, trace) < 0.5 * kept_bytes(plain, seen, trace)


@every_kind
def test_a_rounding_expert_learns_in_float32(kind: str, folders: dict[str, Path]) -> None:
    exact, seen = build(folders[kind]), observation(3)
    policy = build(folders[kind], precision="bfloat16")
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    x, time = standard_normal((3, CHUNK_SIZE, MAX_DIM), seeded()), torch.full((3,), 0.5)
    with torch.no_grad():
        one, other = (
            p.backbone.velocity(p.backbone.memory(p._prefix(seen)), x, time)
            for p in (exact, policy)
        )
    apart = float((one[0] - other[0]).abs().max() / one[0].abs().max())
    assert 1e-5 < apart < 0.05, "rounded, but about the same"
    assert one[0].dtype == other[0].dtype == other[1].dtype == torch.float32
    drawn = policy.act(seen, seeded(), "explore")
    scored = policy.evaluate(seen, drawn.trace)
    assert scored.log_prob.dtype == torch.float32
    torch.testing.assert_close(scored.log_prob, drawn.log_prob, atol=0.3, rtol=0)
    assert all(g.dtype == torch.float32 for g in learned(policy, seen, drawn.trace).values())


@every_kind
def test_a_rounded_prefix_is_kept_rounded(kind: str, folders: dict[str, Path]) -> None:
    policy, seen = build(folders[kind], dtype="bfloat16"), observation(2)
    made = policy.prepare(seen)
    assert made["keys"].dtype == made["values"].dtype == torch.bfloat16
    ready = replace(seen, images={}, prepared=made)
    wanted = policy.act(seen, seeded(), "explore").log_prob
    assert torch.equal(policy.act(ready, seeded(), "explore").log_prob, wanted)


def test_an_update_with_the_kept_prefix_is_the_same(tmp_path: Path) -> None:
    rollout = RolloutConfig(num_slots=4, halves=1, num_workers=0)
    simulator = build_simulator(SeenLineConfig(cameras=2), rollout, chunk=2)
    contract = simulator.spec.contract
    folder = write_checkpoint("pi0", tmp_path / "pi0", contract)
    options = PPOConfig(
        decisions_per_iteration=4,
        minibatch_size=8,
        epochs=2,
        critic_warmup_iterations=0,
        max_kl=None,
        learning_rate=1e-4,
    )
    first, second = (PPO(options, build(folder, contract), 0) for _ in range(2))
    before = {n: p.clone() for n, p in cast("Any", first.policy).named_parameters()}
    planner = TrainingPlanner("line", 0)
    batch = first.collector(simulator, planner, seeded(), 1).collect()
    assert batch.observation.prepared
    bare = replace(batch, observation=replace(batch.observation, prepared={}))
    found, wanted = first.update(batch, 0), second.update(bare, 0)
    assert found["policy_loss"] == pytest.approx(wanted["policy_loss"], abs=1e-6)
    others = second.policy.state_dict()
    moved = 0.0
    for name, weight in first.policy.state_dict().items():
        torch.testing.assert_close(weight, others[name], atol=1e-6, rtol=0)
        if name in before:
            moved = max(moved, float((weight - before[name]).detach().abs().max()))
    assert moved > 1e-4


def test_a_compiled_step_is_the_same(tmp_path: Path) -> None:
    size = replace(TINY, depth=1)
    folder, seen = write_checkpoint("pi0", tmp_path / "pi0", size=size), observation(3)
    with tiny_sizes(size):
        plain, policy = build(folder), build(folder, compile="default")
    other = copy.deepcopy(policy)
    wanted = plain.act(seen, seeded(), "explore")
    found = policy.act(seen, seeded(), "explore")
    torch.testing.assert_close(found.actions, wanted.actions, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.log_prob, wanted.log_prob, atol=1e-4, rtol=1e-5)
    gradients = learned(plain, seen, wanted.trace)
    compiled = learned(policy, seen, wanted.trace)
    assert gradients.keys() == compiled.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled[name], gradient, atol=1e-4, rtol=1e-4)
    for changed in (policy, plain):
        changed.native.model.action_in_proj.weight.data += 0.1
    moved = policy.act(seen, seeded(), "explore").actions
    assert (moved - found.actions).abs().max() > 1e-3
    torch.testing.assert_close(
        moved, plain.act(seen, seeded(), "explore").actions, atol=1e-5, rtol=0
    )
    # A copy, such as the one that a policy is kept near to, has weights of its own. Whether those
    # are used does not depend on compiling them again, which takes long.
    with torch.compiler.set_stance("force_eager"):
        stayed = other.act(seen, seeded(), "explore").actions
    torch.testing.assert_close(stayed, found.actions, atol=1e-5, rtol=0)


def test_what_compiling_needs_is_named(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"cuda_graphs needs a CUDA device.*compile=default"):
        build(folders["pi0"], compile="cuda_graphs")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"compile=default needs a C.. compiler, and no-such"):
        build(folders["pi0"], compile="default")
    monkeypatch.setenv("CXX", "ls")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ValueError, match=r"Python's headers, and .*Python\.h is missing"):
        build(folders["pi0"], compile="default")
