"""OpenVLA-OFT: chunks in one pass, with tokens or by regression."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from embodied_rl.config import ConfigError, load
from embodied_rl.contracts import Camera, Contract, Observation
from embodied_rl.correctness.policy import GATES, examine_policy
from embodied_rl.rollout.build import build_simulator
from embodied_rl.run_config import RolloutConfig, RunConfig
from embodied_rl.training.policy_folder import load_policy, save_policy
from policies.checkpoints import BadCheckpoint
from policies.openvla import OpenVLA
from policies.openvla_actions import token_values
from policies.openvla_config import OpenVLAConfig, OpenVLAOFTConfig
from policies.openvla_oft import OpenVLAOFT
from seen_line import SeenLineConfig
from tiny_openvla import statistics, write_openvla

CONTRACT = Contract(
    state_dim=8,
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
    cameras=(Camera("front", 64, 64), Camera("wrist", 32, 32)),
)
TEXTS = ("pick up the cube", "go", "stack the red cube on the green one", "go")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_openvla(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the public releases for LIBERO: a regression head and the state."""
    return write_openvla(tmp_path_factory.mktemp("numbers"), state_dim=8, head_for=7)


def build(folder: Path, contract: Contract = CONTRACT, **options: Any) -> OpenVLAOFT:
    torch.manual_seed(0)
    given = {"path": str(folder), "chunk": 3, **options}
    made = OpenVLAOFTConfig.model_validate(given).build(contract)
    assert isinstance(made, OpenVLAOFT)
    return made


def seen(rows: int = 4) -> Observation:
    generator = torch.Generator().manual_seed(1)
    images = {
        camera.name: torch.randint(
            0, 256, (rows, camera.height, camera.width, 3), generator=generator, dtype=torch.uint8
        )
        for camera in CONTRACT.cameras
    }
    return Observation(images, torch.randn(rows, 8, generator=generator), TEXTS[:rows])


def stop_learning(policy: OpenVLA) -> None:
    for parameter in policy.parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.6, "top_k": 40, "top_p": 0.95}])
def test_scores_are_reproduced_in_other_batches(tokens: Path, options: dict[str, Any]) -> None:
    policy = build(tokens, **options)
    stop_learning(policy)
    random = [torch.Generator().manual_seed(row) for row in range(4)]
    decision = policy.act(seen(), random, "explore")
    old = decision.token_log_prob
    assert decision.actions.shape == (4, 3, 7)
    assert old is not None
    for row in range(4):
        one = seen().select(torch.tensor([row]))
        trace = {name: tensor[row : row + 1] for name, tensor in decision.trace.items()}
        found = policy.evaluate(one, trace)
        assert found.token_log_prob is not None
        assert torch.allclose(found.token_log_prob[0], old[row], atol=5e-6, rtol=0)
        assert torch.allclose(found.value[0], decision.value[row], atol=1e-5, rtol=0)
        alone = policy.act(one, [torch.Generator().manual_seed(row)], "explore")
        assert torch.equal(alone.actions[0], decision.actions[row])
    assert torch.allclose(policy.value(seen()), decision.value, atol=1e-5, rtol=0)


def test_a_token_does_not_depend_on_the_others(tokens: Path) -> None:
    policy = build(tokens)
    stop_learning(policy)
    spoken = torch.zeros(4, 3, 7, dtype=torch.int64)
    other = spoken.clone()
    other[:, 0, 0] = 9
    one, two = (policy.evaluate(seen(), {"tokens": t}).token_log_prob for t in (spoken, other))
    assert one is not None and two is not None
    assert torch.equal(one[:, 1:], two[:, 1:])
    assert not torch.equal(one[:, 0], two[:, 0])


def test_attention_is_that_of_an_unmasked_llama(tokens: Path) -> None:
    """One row without padding: OFT's own transformers lets everything attend to everything, which
    eager attention of a plain LlamaForCausalLM does if its mask is zero."""
    policy = build(tokens, trainable="all", cameras=["wrist", "front"])
    stop_learning(policy)
    make: Any = LlamaForCausalLM
    sizes = LlamaConfig(**policy.model.language_model.config.to_dict())
    sizes._attn_implementation = "eager"
    llama: Any = make(sizes).eval()
    llama.load_state_dict(policy.model.language_model.state_dict())
    one = seen(1)
    prefix = policy._read(one)
    length = prefix.embeddings.shape[1] + 21 + 1
    with torch.no_grad():
        words = policy._prompts(one.instruction, torch.device("cpu")).ids[0]
        text = llama.get_input_embeddings()(words)[None]
        pixels = policy.images(one)[0]
        patches = policy.model.projector(policy.model.vision_backbone(pixels)).flatten(0, 1)[None]
        end = llama.get_input_embeddings()(torch.tensor([[2]]))
        inputs = torch.cat([text[:, :1], patches, text[:, 1:], torch.zeros(1, 21, 32), end], dim=1)
        assert inputs.shape[1] == length
        output = llama(inputs_embeds=inputs, attention_mask=torch.zeros(1, 1, length, length))
    # Patches of both images, then words; the answer to a token stands one place before it.
    first = 8 + len(words) - 1
    logits = output.logits[0, first : first + 21, 31744:32000]
    found, _ = policy._hear(prefix, torch.zeros(1, 21, dtype=torch.int64))
    assert torch.allclose(found[0], logits, atol=2e-5, rtol=0)
    decided = policy.act(one, torch.Generator(), "deterministic").actions
    expected = token_values(logits.argmax(-1), 256).view(3, 7)
    expected[:, :6] *= 0.5
    assert torch.allclose(decided[0], expected.float(), atol=1e-6)


def test_what_comes_later_is_seen(tokens: Path) -> None:
    policy = build(tokens)
    stop_learning(policy)
    short, long = (build(tokens, chunk=n) for n in (1, 3))
    stop_learning(short)
    one, other = (p._answers(p._read(seen()))[:, 0] for p in (short, long))
    assert not torch.allclose(one, other, atol=1e-3)


def test_every_camera_counts_and_their_order_too(tokens: Path) -> None:
    policy = build(tokens)
    spoken = {"tokens": torch.zeros(4, 3, 7, dtype=torch.int64)}
    known = policy.evaluate(seen(), spoken).log_prob
    for name in ("front", "wrist"):
        images = seen().images | {name: torch.zeros_like(seen().images[name])}
        found = policy.evaluate(replace(seen(), images=images), spoken).log_prob
        assert not torch.allclose(found, known, atol=1e-3)
    turned = build(tokens, cameras=["wrist", "front"]).evaluate(seen(), spoken).log_prob
    assert not torch.allclose(turned, known, atol=1e-3)
    one = build(tokens, cameras=["front"])
    assert one._read(seen()).mask.shape[1] == policy._read(seen()).mask.shape[1] - 4


def test_regression_reads_the_answers_by_hand(numbers: Path) -> None:
    policy = build(numbers, head="l1")
    stop_learning(policy)
    decision = policy.act(seen(), torch.Generator(), "deterministic")
    assert decision.actions.shape == (4, 3, 7)
    assert not decision.trace and not decision.log_prob.any()
    hidden = policy._answers(policy._read(seen())).reshape(4, 3, 7 * 32)
    w = {
        name.removeprefix("module.model."): tensor
        for name, tensor in load_file(numbers / "action_head--100_checkpoint.safetensors").items()
    }

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        shape = x.shape[-1:]
        weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
        return torch.nn.functional.layer_norm(x, shape, weight, bias)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = linear(norm(hidden, "layer_norm1"), "fc1").relu()
    for block in ("mlp_resnet_blocks.0.ffn", "mlp_resnet_blocks.1.ffn"):
        x = x + linear(norm(x, f"{block}.0"), f"{block}.1").relu()
    units = linear(norm(x, "layer_norm2"), "fc2")
    expected = torch.cat([units[..., :6] * 0.5, units[..., 6:]], dim=-1).clamp(-1, 1)
    assert torch.allclose(decision.actions, expected, atol=1e-5)


def test_the_state_is_one_more_embedding_after_the_patches(numbers: Path) -> None:
    policy = build(numbers, head="l1")
    stop_learning(policy)
    prefix = policy._read(seen())
    projector = policy.model.proprio_projector
    assert projector is not None
    # Its statistics go from -2 to 2, and what lies outside is cut.
    units = (seen().state / 2).clamp(-1, 1)
    assert torch.allclose(prefix.embeddings[:, 9], projector(units)[:, 0], atol=1e-5)
    other = replace(seen(), state=seen().state + 1)
    one, two = (policy.act(o, torch.Generator(), "deterministic").actions for o in (seen(), other))
    assert not torch.allclose(one, two, atol=1e-4)


def test_regression_learns_by_imitation_but_not_by_trial(numbers: Path) -> None:
    policy = build(numbers, head="l1")
    actions = (torch.rand(4, 3, 7, generator=torch.Generator().manual_seed(3)) - 0.5) / 2
    valid = torch.ones(4, 3, dtype=torch.bool)
    valid[1:, 2] = False
    random = torch.Generator().manual_seed(0)
    units, _ = policy._regress(seen())
    wanted = torch.cat([actions[..., :6] * 2, actions[..., 6:]], dim=-1)
    by_hand = (units - wanted).abs()[valid].mean()
    loss = policy.imitation_loss(seen(), actions, valid, random)
    assert float(loss.detach()) == pytest.approx(float(by_hand.detach()), abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in policy.model.named_parameters():
        if name.startswith(("action_head", "proprio_projector")):
            assert parameter.grad is not None and parameter.grad.any(), name
        assert parameter.requires_grad or parameter.grad is None
    for attempt in (
        lambda: policy.act(seen(), random, "explore"),
        lambda: policy.evaluate(seen(), {}),
    ):
        with pytest.raises(ValueError, match=r"policy.head=l1 gives one action without a likel"):
            attempt()


def test_reinforcement_learning_with_a_regression_head_is_refused_at_once() -> None:
    given = ["simulator=maniskill", "simulator.observation=rgb", "algorithm=ppo"]
    given += ["policy=openvla_oft", "policy.head=l1"]
    with pytest.raises(ConfigError, match=r"no likelihood to learn from by trial.*iterations=0"):
        load(RunConfig, None, given)
    assert load(RunConfig, None, [*given, "iterations=0"]).iterations == 0


def test_saving_keeps_all_parts(numbers: Path, tmp_path: Path) -> None:
    policy = build(numbers, head="l1")
    config = OpenVLAOFTConfig(chunk=3, head="l1")
    save_policy(policy, config, tmp_path / "policy")
    assert (tmp_path / "policy" / "action_head--100_checkpoint.safetensors").is_file()
    assert (tmp_path / "policy" / "proprio_projector--100_checkpoint.safetensors").is_file()
    assert "action_head" not in "".join(load_file(tmp_path / "policy" / "model.safetensors"))
    again = load_policy(tmp_path / "policy").policy
    one, other = (p.act(seen(), torch.Generator(), "deterministic") for p in (policy, again))
    assert torch.equal(one.actions, other.actions)
    assert torch.equal(one.value, other.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": "tokens"}, "has an action_head, so it was trained to give numbers.*head=l1"),
        ({"head": "l1", "action_dim": 6}, "action_head for 7 action dimensions, .* has 6"),
        ({"head": "l1", "state_dim": 5}, "state has 5 entries, but the checkpoint .* reads 8"),
    ],
)
def test_a_checkpoint_for_another_head_or_robot(
    numbers: Path, options: dict[str, Any], words: str
) -> None:
    dim, state = options.pop("action_dim", 7), options.pop("state_dim", 8)
    bounds = {"action_low": (-1.0,) * dim, "action_high": (1.0,) * dim}
    contract = replace(CONTRACT, action_dim=dim, state_dim=state, **bounds)
    with pytest.raises(BadCheckpoint, match=words):
        build(numbers, contract, **options)


def test_tokens_and_numbers_are_not_mixed_up(tokens: Path, numbers: Path, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"has no action_head; set policy.head=tokens"):
        build(tokens, head="l1")
    one = replace(CONTRACT, cameras=CONTRACT.cameras[:1])
    words = "has action_head and proprio_projector, so .* OpenVLA-OFT: set policy: openvla_oft"
    with pytest.raises(BadCheckpoint, match=words):
        OpenVLAConfig(path=str(numbers)).build(one)
    other = write_openvla(tmp_path, state_dim=8, norm_stats={"x": statistics(state_dim=6)})
    with pytest.raises(BadCheckpoint, match=r"states have 8 entries, but those of x .* have 6"):
        build(other)


def test_the_policy_keeps_its_promises(tmp_path: Path) -> None:
    norm_stats = {"line": statistics(action_dim=1, state_dim=2)}
    folder = write_openvla(tmp_path, norm_stats=norm_stats, state_dim=2)
    rollout = RolloutConfig(num_slots=4, halves=1, num_workers=0)
    simulator = build_simulator(SeenLineConfig(cameras=2), rollout, chunk=2)
    config = OpenVLAOFTConfig(path=str(folder), chunk=2)
    findings = examine_policy(config.build(simulator.spec.contract), config, simulator)
    assert [f.name for f in findings] == [*GATES]
    assert [(f.name, f.text) for f in findings if f.state != "ok"] == []
    assert json.loads((folder / "config.json").read_text())["model_type"] == "openvla"
