"""OpenVLA: exact likelihoods of its tokens, its numbers, its prompts and images."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as vision
from PIL import Image
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from embodied_rl.contracts import Camera, Contract, Observation
from embodied_rl.correctness.policy import GATES, examine_policy
from embodied_rl.rollout.build import build_simulator
from embodied_rl.run_config import RolloutConfig
from embodied_rl.training.policy_folder import DamagedPolicy, load_policy, save_policy
from policies.openvla import OpenVLA
from policies.openvla_actions import token_values, tokens_of
from policies.openvla_config import OpenVLAConfig
from policies.openvla_inputs import Prompts, cropped, resized
from seen_line import SeenLineConfig
from tiny_openvla import SIZE, statistics, write_openvla

CONTRACT = Contract(
    state_dim=8,
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
    cameras=(Camera("front", 64, 64),),
)
TEXTS = ("pick up the cube", "go", "stack the red cube on the green one", "GO", "push", "go")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_openvla(tmp_path_factory.mktemp("openvla") / "tiny")


@pytest.fixture(scope="module")
def policy(tiny: Path) -> OpenVLA:
    return build(tiny, trainable="all", chunk=2)


def build(folder: Path, contract: Contract = CONTRACT, **options: Any) -> OpenVLA:
    torch.manual_seed(0)
    made = OpenVLAConfig.model_validate({"path": str(folder), **options}).build(contract)
    assert isinstance(made, OpenVLA)
    return made


def seen(rows: int = 6, size: int = 64) -> Observation:
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (rows, size, size, 3), generator=generator, dtype=torch.uint8)
    state = torch.randn(rows, 8, generator=generator)
    return Observation({"front": image}, state, TEXTS[:rows])


def generators(rows: list[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(row) for row in rows]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.6}, {"temperature": 0.7, "top_k": 30, "top_p": 0.9}]
)
def test_cached_decoding_equals_one_teacher_forced_pass(
    tiny: Path, options: dict[str, Any]
) -> None:
    policy = build(tiny, chunk=2, **options)
    decision = policy.act(seen(), torch.Generator().manual_seed(0), "explore")
    found = policy.evaluate(seen(), decision.trace)
    old, new = decision.token_log_prob, found.token_log_prob
    assert old is not None and new is not None
    assert old.shape == (6, 14)
    assert float((new - old).detach().abs().max()) < 5e-6
    assert torch.allclose(found.log_prob, decision.log_prob, atol=2e-5, rtol=0)
    assert torch.allclose(found.value, decision.value, atol=1e-5, rtol=0)
    assert torch.allclose(policy.value(seen()), decision.value, atol=1e-5, rtol=0)
    assert (found.entropy > 0).all()
    step = found.token_step
    assert step is not None
    summed = torch.zeros(6, 2).scatter_add(1, step, old)
    assert torch.allclose(summed, decision.log_prob, atol=1e-5, rtol=0)


def test_only_action_tokens_have_probability(policy: OpenVLA) -> None:
    words = torch.arange(256).view(256, 1, 1)
    spoken = torch.zeros(256, 2, 7, dtype=torch.int64)
    spoken[:, :1, :1] = words
    observation = seen(1).select(torch.zeros(256, dtype=torch.int64))
    found = policy.evaluate(observation, {"tokens": spoken}).token_log_prob
    assert found is not None
    assert float(found[:, 0].detach().exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_row_does_not_depend_on_its_padding(policy: OpenVLA) -> None:
    together = policy.act(seen(), generators(list(range(6))), "explore")
    for row in range(6):
        one = seen().select(torch.tensor([row]))
        alone = policy.act(one, generators([row]), "explore")
        assert torch.equal(alone.actions[0], together.actions[row])
        assert torch.allclose(alone.log_prob[0], together.log_prob[row], atol=1e-5, rtol=0)
        assert torch.allclose(alone.value[0], together.value[row], atol=1e-5, rtol=0)


def test_every_input_counts(policy: OpenVLA) -> None:
    """Otherwise the tests above would hold for a policy that sees nothing."""
    trace = policy.act(seen(), torch.Generator().manual_seed(0), "explore").trace
    known = policy.evaluate(seen(), trace)
    assert known.token_log_prob is not None
    dark = replace(seen(), images={"front": torch.zeros_like(seen().images["front"])})
    other_words = replace(seen(), instruction=("drop it",) * 6)
    for changed in (dark, other_words):
        found = policy.evaluate(changed, trace)
        assert ((found.log_prob - known.log_prob).abs() > 1e-3).all()
        assert ((found.value - known.value).abs() > 1e-4).all()
    tokens = trace["tokens"].clone()
    tokens[:, 0, 0] = 255 - tokens[:, 0, 0]
    later = policy.evaluate(seen(), {"tokens": tokens}).token_log_prob
    assert later is not None
    assert not torch.allclose(later[:, 1:], known.token_log_prob[:, 1:], atol=1e-3)


def test_deterministic_decisions_are_those_of_transformers_generate(tiny: Path) -> None:
    """The language model as transformers alone builds and runs it, greedy over action tokens."""
    policy = build(tiny, trainable="all")
    sizes = policy.model.language_model.config.to_dict()
    make: Any = LlamaForCausalLM
    llama: Any = make(LlamaConfig(**sizes)).eval()
    llama.load_state_dict(policy.model.language_model.state_dict())
    decided = policy.act(seen(), torch.Generator(), "deterministic")
    assert not decided.trace and not decided.log_prob.any()
    for row in range(6):
        one = seen().select(torch.tensor([row]))
        prefix = policy._read(one)
        assert prefix.mask.all()
        ids = llama.generate(
            inputs_embeds=prefix.embeddings.detach(),
            attention_mask=prefix.mask.long(),
            max_new_tokens=7,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=[*range(31744), *range(32000, 32064)],
        )[0]
        assert decoded(ids, 0.5) == pytest.approx(decided.actions[row, 0].tolist(), abs=1e-6)


def decoded(ids: Tensor, half: float) -> list[float]:
    """Actions of seven token ids as the paper describes them, number by number; the statistics of
    the tiny checkpoint go from -half to half, and the gripper is not scaled."""
    found = []
    edges = [-1.0 + 2.0 * i / 255 for i in range(256)]
    for i, token in enumerate(ids.tolist()):
        low = min(32000 - token - 1, 254)
        middle = (edges[low] + edges[low + 1]) / 2
        found.append(middle if i == 6 else middle * half)
    return found


def test_numbers_of_tokens_by_hand() -> None:
    token = torch.tensor([255, 254, 128, 127, 2, 1, 0])
    found = token_values(token, 256).tolist()
    # Ids 31999, 31998, ... 31746, 31745, 31744, of which the last two mean the same.
    expected = [-254, -252, 0, 2, 252, 254, 254]
    assert found == pytest.approx([number / 255 for number in expected], abs=1e-12)


def test_tokens_of_numbers_by_hand() -> None:
    numbers = torch.tensor([-3.0, -1.0, -0.999, 0.0, 1e-6, 0.003, 0.004, 0.9999, 1.0, 7.0])
    # Edges lie at odd multiples of 1 / 255; 0 is the middle of bin 127, hence token 128.
    expected = [255, 255, 255, 128, 128, 128, 127, 1, 0, 0]
    assert tokens_of(numbers, 256).tolist() == expected
    every = torch.arange(1, 256)
    assert torch.equal(tokens_of(token_values(every, 256), 256), every)


def test_actions_are_scaled_by_the_chosen_statistics(tiny: Path) -> None:
    policy = build(tiny)
    units = torch.tensor([-1.0, 1.0])[:, None, None].expand(2, 1, 7)
    found = policy._to_environment(units)[:, 0]
    assert found[:, :6].tolist() == [pytest.approx([-0.5] * 6), pytest.approx([0.5] * 6)]
    assert found[:, 6].tolist() == [-1.0, 1.0]
    back = policy.robot.actions.to_units(policy.robot.to_checkpoint(found))
    assert back[:, :6].tolist() == [pytest.approx([-1.0] * 6), pytest.approx([1.0] * 6)]
    assert back[:, 6].tolist() == [-1.0, 1.0]


def test_actions_keep_the_environments_bounds(tiny: Path) -> None:
    narrow = replace(CONTRACT, action_low=(-0.1,) * 7, action_high=(0.1,) * 7)
    found = build(tiny, narrow).act(seen(), torch.Generator().manual_seed(0), "explore").actions
    assert found.abs().max() == pytest.approx(0.1)


def test_prompts_are_those_of_the_release(tiny: Path) -> None:
    policy = build(tiny)
    words = policy._prompts(("Pick UP", "go on then"), torch.device("cpu"))
    spell = Prompts(policy._checkpoint)._tokenizer
    for row, text in enumerate(("pick up", "go on then")):
        real = words.ids[row][words.mask[row]].tolist()
        assert (real[0], real[-1]) == (1, 29871)
        said = spell.decode(real[1:-1])
        assert said == f"In: What action should the robot take to {text}?\nOut:"
        assert set(words.ids[row][~words.mask[row]].tolist()) <= {32000}
    # The first token stays first; padding comes right after it.
    assert words.mask[:, 0].all() and words.mask[:, -1].all()
    short = int((~words.mask[0]).sum())
    assert short > 0
    assert not words.mask[0, 1 : 1 + short].any()


def test_images_are_resized_as_pillow_does() -> None:
    generator = np.random.default_rng(0)
    for shape in ((64, 64), (20, 30), (28, 28), (128, 96)):
        image = generator.integers(0, 256, (*shape, 3), dtype=np.uint8)
        wanted = vision.resize(
            Image.fromarray(image), [28, 28], interpolation=vision.InterpolationMode.BICUBIC
        )
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float()
        found = resized(pixels, 28)[0].permute(1, 2, 0).numpy()
        difference = np.abs(found - np.asarray(wanted, dtype=np.float32))
        # Pillow computes with whole numbers, which rounds otherwise where it is close.
        assert difference.max() <= 1.0
        assert (difference > 0).mean() < 0.01


def test_each_transformer_gets_its_own_normalisation(tiny: Path) -> None:
    policy = build(tiny)
    white = torch.full((1, 64, 64, 3), 255, dtype=torch.uint8)
    found = policy.images(replace(seen(1), images={"front": white}))
    assert found.shape == (1, 1, 6, SIZE, SIZE)
    expected = [(1 - 0.484375) / 0.228515625, (1 - 0.455078125) / 0.2236328125]
    expected += [(1 - 0.40625) / 0.224609375, 1.0, 1.0, 1.0]
    assert found.mean((0, 1, 3, 4)).tolist() == pytest.approx(expected)
    assert float(found.std((3, 4)).max()) < 1e-5


def test_the_middle_crop_shows_nine_tenths_of_the_area(tiny: Path) -> None:
    ramp = torch.arange(28.0).expand(1, 3, 28, 28) * 9
    found = cropped(ramp)[0, 0, 0]
    # Both ends lie (1 - sqrt(.9)) / 2 of 27 pixels further inside, 9 per pixel; then 255.5 / 255
    # of it, cut to whole numbers.
    inside = (1 - 0.9**0.5) / 2 * 27 * 9
    assert found[0] == int(inside * 255.5 / 255)
    assert found[-1] == int((27 * 9 - inside) * 255.5 / 255)
    flat = torch.full((1, 3, 28, 28), 200.0)
    assert torch.equal(cropped(flat), flat)
    plain, crop = (build(tiny, center_crop=c).images(seen(1)) for c in (False, True))
    assert not torch.allclose(plain, crop, atol=0.1)


def test_what_learns_gets_gradients_and_nothing_else_does(tiny: Path) -> None:
    for options, whole, vision_learns in (
        ({"trainable": "all"}, True, True),
        ({"trainable": "all", "freeze_vision": True}, True, False),
        ({"trainable": "lora"}, False, True),
        ({"trainable": "lora", "freeze_vision": True}, False, False),
    ):
        policy = build(tiny, **options)
        if not whole:
            stir_adapters(policy)
        trace = policy.act(seen(), torch.Generator().manual_seed(0), "explore").trace
        policy.evaluate(seen(), trace).log_prob.sum().backward()  # type: ignore[no-untyped-call]
        learned = {id(p) for p in policy.policy_parameters()}
        for name, parameter in policy.model.named_parameters():
            got = parameter.grad is not None and bool(parameter.grad.any())
            assert got == (id(parameter) in learned) == parameter.requires_grad, (name, options)
            assert got <= (vision_learns or not name.startswith("vision_backbone"))
            assert got <= (whole or ".lora_" in name)
        names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
        assert any(name.startswith("vision_backbone") for name in names) == vision_learns
        assert any(name.startswith("projector") for name in names)
        assert not any("blocks.2." in name or "attn_pool" in name for name in names)


def stir_adapters(policy: OpenVLA) -> None:
    """New adapters change nothing, and one half of them gets no gradient."""
    generator = torch.Generator().manual_seed(4)
    for name, parameter in policy.model.named_parameters():
        if ".lora_B." in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


def test_adapters_change_nothing_at_first_and_are_merged_on_saving(
    tiny: Path, tmp_path: Path
) -> None:
    plain, adapted = build(tiny, trainable="all"), build(tiny)
    random = torch.Generator().manual_seed(0)
    trace = plain.act(seen(), random, "explore").trace
    before = plain.evaluate(seen(), trace).log_prob
    assert torch.equal(adapted.evaluate(seen(), trace).log_prob, before)
    stir_adapters(adapted)
    changed = adapted.evaluate(seen(), trace).log_prob
    assert not torch.allclose(changed, before, atol=1e-2)
    adapted.save_native(tmp_path)
    merged = build(tmp_path, trainable="all").evaluate(seen(), trace).log_prob
    assert torch.allclose(merged, changed, atol=1e-4, rtol=0)
    # Saving left the adapters where they were.
    assert torch.equal(adapted.evaluate(seen(), trace).log_prob, changed)


def test_imitation_lowers_the_loss_of_demonstrated_actions_alone(tiny: Path) -> None:
    policy = build(tiny, chunk=2, trainable="all")
    actions = torch.rand(6, 2, 7, generator=torch.Generator().manual_seed(3)) - 0.5
    valid = torch.ones(6, 2, dtype=torch.bool)
    valid[3:, 1] = False
    generator = torch.Generator().manual_seed(0)
    # Statistics are the checkpoint's, whatever the demonstrations are.
    policy.fit_normalisation(seen().state, actions.flatten(0, 1) * 0.01)
    first = policy.imitation_loss(seen(), actions, valid, generator)
    past = torch.where(valid[..., None], actions, torch.zeros_like(actions))
    assert torch.equal(policy.imitation_loss(seen(), past, valid, generator), first)
    # The mean log-probability of the tokens that say the actions.
    units = policy.robot.actions.to_units(actions)
    found = policy.evaluate(seen(), {"tokens": tokens_of(units, 256)}).log_prob
    by_hand = -found[valid].sum() / (valid.sum() * 7)
    assert float(by_hand) == pytest.approx(float(first), abs=1e-5)
    optimizer = torch.optim.Adam(policy.policy_parameters(), lr=3e-3)
    for _ in range(30):
        loss = policy.imitation_loss(seen(), actions, valid, generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(loss) < 0.5 * float(first)
    decided = policy.act(seen(), generator, "deterministic").actions
    assert float((decided - actions)[valid].abs().median()) < 0.05


def test_statistics_of_a_new_robot_are_fitted_and_saved(tiny: Path, tmp_path: Path) -> None:
    options = {"fit_statistics": True, "unnorm_key": "mine"}
    arm = replace(CONTRACT, action_dim=3, action_low=(-2.0,) * 3, action_high=(2.0,) * 3)
    policy = build(tiny, arm, **options)
    assert policy.robot.actions.high.tolist() == [2.0] * 3
    actions = torch.linspace(0, 1, 101)[:, None].expand(-1, 3)
    policy.fit_normalisation(torch.randn(101, 8), actions)
    assert policy.robot.actions.low.tolist() == pytest.approx([0.01] * 3)
    assert policy.robot.actions.high.tolist() == pytest.approx([0.99] * 3)
    policy.save_native(tmp_path)
    again = build(tmp_path, arm, unnorm_key="mine")
    assert again.robot.actions.high.tolist() == pytest.approx([0.99] * 3)
    assert sorted(again.robot.statistics) == ["mine", "tiny"]
    assert again.robot.statistics["tiny"] == statistics()


def test_a_saved_policy_loads_without_the_checkpoint(tiny: Path, tmp_path: Path) -> None:
    config = OpenVLAConfig(path=str(tmp_path / "gone"), chunk=2)
    policy = build(tiny, chunk=2)
    stir_adapters(policy)
    save_policy(policy, config, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    random = [torch.Generator().manual_seed(0) for _ in range(2)]
    one = policy.act(seen(), random[0], "explore")
    other = loaded.policy.act(seen(), random[1], "explore")
    assert torch.equal(one.actions, other.actions)
    assert torch.allclose(one.value, other.value, atol=1e-5)
    # With other options, and as a checkpoint of its own.
    hotter = load_policy(tmp_path / "policy", options=OpenVLAConfig(chunk=2, temperature=2.0))
    assert torch.equal(
        hotter.policy.act(seen(), random[0], "deterministic").actions,
        policy.act(seen(), random[0], "deterministic").actions,
    )
    assert build(tmp_path / "policy", chunk=2).act(seen(), random[0], "deterministic")
    weights = tmp_path / "policy" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DamagedPolicy, match="changed"):
        load_policy(tmp_path / "policy")
    weights.unlink()
    with pytest.raises(DamagedPolicy, match=r"lacks model.safetensors"):
        load_policy(tmp_path / "policy")


def test_training_mode_changes_nothing(policy: OpenVLA) -> None:
    model = copy.deepcopy(policy)
    trace = policy.act(seen(), torch.Generator().manual_seed(0), "explore").trace
    model.train()
    assert not model.model.training
    assert torch.equal(
        model.evaluate(seen(), trace).log_prob, policy.evaluate(seen(), trace).log_prob
    )


@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_the_policy_keeps_its_promises(tmp_path: Path, trainable: str) -> None:
    folder = write_openvla(tmp_path, norm_stats={"line": statistics(action_dim=1)})
    rollout = RolloutConfig(num_slots=4, halves=1, num_workers=0)
    simulator = build_simulator(SeenLineConfig(), rollout, chunk=2)
    options = {"path": str(folder), "chunk": 2, "trainable": trainable}
    config = OpenVLAConfig.model_validate(options)
    findings = examine_policy(config.build(simulator.spec.contract), config, simulator)
    assert [f.name for f in findings] == [*GATES]
    assert [(f.name, f.text) for f in findings if f.state != "ok"] == []
