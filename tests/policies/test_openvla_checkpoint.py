"""Folders of OpenVLA's releases: names, sizes, loading, saving, and all ways to be bad."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm import create_model
from transformers import LlamaForCausalLM

from embodied_rl.contracts import Camera, Contract
from policies.checkpoints import BadCheckpoint
from policies.openvla_checkpoint import load_model, read, resolve
from policies.openvla_config import OpenVLAConfig, OpenVLAOFTConfig
from policies.openvla_model import OpenVLAModel
from tiny_openvla import config_json, description_of, statistics, write_openvla

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

DINO_BLOCK = [
    *("norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias"),
    *("attn.proj.weight", "attn.proj.bias", "ls1.scale_factor", "norm2.weight", "norm2.bias"),
    *("mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias", "ls2.scale_factor"),
]
SIGLIP_BLOCK = [name for name in DINO_BLOCK if "scale_factor" not in name]
LLAMA_LAYER = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
]
_WB = "weight", "bias"
POOL = [f"{p}.{w}" for p in ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2") for w in _WB]


def published_names() -> set[str]:
    """The weights of openvla/openvla-7b, as its model.safetensors.index.json lists them."""
    dino, siglip = "vision_backbone.featurizer", "vision_backbone.fused_featurizer"
    llama = "language_model.model"
    return {
        *(f"{dino}.{name}" for name in ("cls_token", "reg_token", "pos_embed")),
        f"{siglip}.pos_embed",
        f"{siglip}.attn_pool.latent",
        *(f"{siglip}.attn_pool.{name}" for name in POOL),
        *(f"{vit}.patch_embed.proj.{w}" for vit in (dino, siglip) for w in _WB),
        *(f"{vit}.norm.{w}" for vit in (dino, siglip) for w in _WB),
        *(f"{dino}.blocks.{i}.{name}" for i in range(24) for name in DINO_BLOCK),
        *(f"{siglip}.blocks.{i}.{name}" for i in range(27) for name in SIGLIP_BLOCK),
        *(f"projector.fc{i}.{w}" for i in (1, 2, 3) for w in _WB),
        *(f"{llama}.layers.{i}.{name}" for i in range(32) for name in LLAMA_LAYER),
        *(f"{llama}.embed_tokens.weight", f"{llama}.norm.weight"),
        "language_model.lm_head.weight",
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_openvla(tmp_path_factory.mktemp("openvla") / "tiny")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "copy")
    return tmp_path / "copy"


def build(folder: Path, contract: Contract = CONTRACT, **options: Any) -> Any:
    return OpenVLAConfig.model_validate({"path": str(folder), **options}).build(contract)


def test_names_and_sizes_are_those_of_the_7b_release() -> None:
    config = config_json(None) | {"image_sizes": [224, 224], "timm_model_args": [{}, {}]}
    # As in the release, whose other sizes are transformers' defaults.
    given = {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064}
    config["text_config"] = given | {"torch_dtype": "bfloat16"}
    with torch.device("meta"):
        model = OpenVLAModel(description_of(config), None, None)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert set(shapes) == published_names()
    assert shapes["projector.fc1.weight"] == (8704, 2176)
    assert shapes["projector.fc3.weight"] == (4096, 4096)
    assert shapes["language_model.lm_head.weight"] == (32064, 4096)
    assert shapes["language_model.model.layers.31.mlp.up_proj.weight"] == (11008, 4096)
    assert shapes["vision_backbone.featurizer.pos_embed"] == (1, 256, 1024)
    assert shapes["vision_backbone.fused_featurizer.blocks.26.mlp.fc1.weight"] == (4304, 1152)
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == 7_541_237_184
    llama = model.language_model.config
    assert llama.rms_norm_eps == 1e-6
    assert llama.rope_parameters["rope_theta"] == 10000.0


def test_vision_is_timms_second_to_last_layer(tiny: Path) -> None:
    model = load_model(read(tiny), torch.float32)
    image = torch.randn(2, 6, 28, 28, generator=torch.Generator().manual_seed(0))
    found = model.vision_backbone(image)
    expected = []
    for number, name in enumerate(("featurizer", "fused_featurizer")):
        sizes = config_json(None)
        network: Any = create_model(
            sizes["timm_model_ids"][number],
            num_classes=0,
            img_size=28,
            **sizes["timm_model_args"][number],
        )
        prefix = f"vision_backbone.{name}."
        weights = {
            key.removeprefix(prefix).replace("scale_factor", "gamma"): tensor
            for key, tensor in load_file(tiny / "model.safetensors").items()
            if key.startswith(prefix)
        }
        network.load_state_dict(weights)
        view = image[:, 3 * number : 3 * number + 3]
        # The interface of DINO, which the release's code calls.
        expected.append(network.eval().get_intermediate_layers(view, n=[1])[0])
    assert found.shape == (2, 4, 64)
    assert torch.allclose(found, torch.cat(expected, dim=-1), atol=1e-5)


def test_shards_load_as_one_file_does(tiny: Path, tmp_path: Path) -> None:
    parts = write_openvla(tmp_path / "parts", shards=3)
    assert not (parts / "model.safetensors").exists()
    one, other = (load_model(read(f), torch.float32).state_dict() for f in (tiny, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_code_in_the_folder_is_not_run_and_not_kept(tiny: Path, tmp_path: Path) -> None:
    policy = build(tiny)
    policy.save_native(tmp_path)
    assert (tiny / "modeling_prismatic.py").exists()
    assert not list(tmp_path.glob("*.py"))


def test_saving_keeps_the_layout(tiny: Path, tmp_path: Path) -> None:
    build(tiny).save_native(tmp_path)
    names = {path.name for path in tiny.iterdir()} - {"modeling_prismatic.py"}
    assert {path.name for path in tmp_path.iterdir()} == names | {"dataset_statistics.json"}
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tiny, tmp_path)]
    assert configs[0] == configs[1]
    for name in ("tokenizer.json", "preprocessor_config.json", "special_tokens_map.json"):
        assert (tiny / name).read_bytes() == (tmp_path / name).read_bytes()
    # What transformers reads of it, without our code.
    prefix = "language_model."
    text = {n.removeprefix(prefix): t for n, t in after.items() if n.startswith(prefix)}
    sizes = build(tmp_path).model.language_model.config
    make: Any = LlamaForCausalLM
    make(sizes).load_state_dict(text, strict=True)


def test_half_precision_is_loaded_and_saved(tiny: Path, tmp_path: Path) -> None:
    policy = build(tiny, dtype="bfloat16")
    frozen = {p.dtype for p in policy.model.parameters() if not p.requires_grad}
    learned = {p.dtype for p in policy.policy_parameters()}
    assert (frozen, learned) == ({torch.bfloat16}, {torch.float32})
    policy.save_native(tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return apply


def rewrite(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


def pickled(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(b"not read")

    return apply


def index_without_file(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"projector.fc1.weight": "model-00001-of-00002.safetensors"}})
    )


FC1 = "projector.fc1.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), r"there is no .*config.json; policy.path must be"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json; download all"),
        (lambda f: (f / "preprocessor_config.json").unlink(), "has no preprocessor_config.json"),
        (edit("config.json", lambda d: d.update(model_type="llava")), "model_type 'llava'"),
        (edit("config.json", lambda d: d.pop("image_sizes")), "config.json lacks image_sizes"),
        (
            edit("config.json", lambda d: d.update(use_fused_vision_backbone=False)),
            "two vision transformers",
        ),
        (
            edit("config.json", lambda d: d["text_config"].update(model_type="phi")),
            "of type 'phi'; only llama",
        ),
        (edit("preprocessor_config.json", lambda d: d.pop("stds")), "lacks stds"),
        (
            edit("preprocessor_config.json", lambda d: d.update(interpolations=["bilinear"] * 2)),
            "only bicubic is supported",
        ),
        (
            edit("preprocessor_config.json", lambda d: d.update(input_sizes=[[3, 30, 30]] * 2)),
            r"images of \[\[30, 30\], \[30, 30\]\], but config.json has image_sizes \[28, 28\]",
        ),
        (rewrite(lambda w: w.pop(FC1)), f"do not fit its config.json: {FC1} is missing"),
        (rewrite(lambda w: w.update(extra=torch.zeros(1))), "extra is not known"),
        (
            rewrite(lambda w: w.update({FC1: torch.zeros(2, 2)})),
            rf"{FC1} has shape \[2, 2\] instead of \[256, 64\]",
        ),
        (
            rewrite(lambda w: [w.pop(name) for name in list(w)[:9]]),
            "is missing and 4 more",
        ),
        (pickled("pytorch_model.bin"), r"Pickled weights \(pytorch_model.bin\) are not read"),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda f: (f / "model.safetensors").write_bytes(b"cut"), "cannot be read"),
        (index_without_file, "names model-00001-of-00002.safetensors, which the folder has not"),
        (
            lambda f: (f / "action_head--5_checkpoint.pt").write_bytes(b"x"),
            r"is pickled, and such files are not read.*torch.load\('.*5_checkpoint.pt', weights",
        ),
        (
            lambda f: save_file({"fc1.bias": torch.zeros(1)}, f / "action_head--5_c.safetensors"),
            "is no action_head of OpenVLA-OFT: it has no model.fc1.weight",
        ),
        (
            lambda f: (f / "action_head--5_checkpoint.safetensors").write_bytes(b"x"),
            "action_head--5_checkpoint.safetensors cannot be read",
        ),
        (
            lambda f: [(f / f"action_head--{i}_c.safetensors").write_bytes(b"x") for i in (1, 2)],
            "several of one kind: action_head--1_c.safetensors, action_head--2_c.safetensors",
        ),
        (
            lambda f: (f / "noisy_action_projector--5_checkpoint.pt").write_bytes(b"x"),
            "diffusion head is not supported",
        ),
        (
            lambda f: (f / "vision_backbone--5_checkpoint.pt").write_bytes(b"x"),
            r"FiLM-conditioned vision \(OFT\+\) is not supported",
        ),
    ],
)
def test_a_bad_folder_is_named(copy: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(copy)
    with pytest.raises(BadCheckpoint, match=words):
        build(copy)


def test_a_path_that_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"policy.path is needed.*such as openvla/openvla-7b"):
        OpenVLAConfig().build(CONTRACT)
    with pytest.raises(ValueError, match="such as moojink/openvla-7b-oft"):
        OpenVLAOFTConfig().build(CONTRACT)
    with pytest.raises(BadCheckpoint, match=r"nowhere is no folder; give one"):
        resolve(str(tmp_path / "nowhere"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadCheckpoint, match=r"openvla/nothing-7b is no folder here and cannot"):
        resolve("openvla/nothing-7b")


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="dtype=bfloat16 does not fit trainable=all"):
        OpenVLAConfig(dtype="bfloat16", trainable="all")
    with pytest.raises(ValueError, match="needs a name for the new statistics: set unnorm_key"):
        OpenVLAConfig(fit_statistics=True)
    with pytest.raises(ValueError, match=r"sees one image, got cameras=\['a', 'b'\]; openvla_oft"):
        OpenVLAConfig(cameras=("a", "b"))


def cameras(*sizes: tuple[int, int]) -> Contract:
    found = tuple(Camera(f"camera{i}", *size) for i, size in enumerate(sizes))
    return Contract(**{**vars(CONTRACT), "cameras": found})


@pytest.mark.parametrize(
    ("contract", "options", "words"),
    [
        (cameras(), {}, "OpenVLA looks through a camera, but the simulator has no camera"),
        (CONTRACT, {"cameras": ["top"]}, "names top, but the simulator has front"),
        (cameras((64, 64), (64, 64)), {}, r"sees one image, .*set policy.cameras=\[camera0\]"),
        (
            CONTRACT,
            {"unnorm_key": "bridge"},
            "unnorm_key=bridge is not known: .* statistics of tiny",
        ),
        (
            Contract(**{**vars(CONTRACT), "action_dim": 3, "action_low": (-1,) * 3}),
            {},
            "actions have 3 entries, but those of tiny in the checkpoint .* have 7",
        ),
    ],
)
def test_a_simulator_that_does_not_fit(
    tiny: Path, contract: Contract, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        build(tiny, contract, **options)


def test_of_several_data_sets_one_must_be_chosen(copy: Path) -> None:
    both = {"libero": statistics(), "bridge": statistics(width=0.25)}
    (copy / "dataset_statistics.json").write_text(json.dumps(both))
    with pytest.raises(BadCheckpoint, match=r"unnorm_key is needed: .* of bridge, libero"):
        build(copy)
    # The file beside config.json counts, as in the release's evaluation.
    assert build(copy, unnorm_key="bridge").robot.actions.high.tolist() == [0.25] * 7


def test_images_that_are_not_square_need_a_plain_resize(copy: Path) -> None:
    wide = cameras((48, 64))
    build(copy, wide)
    edit("preprocessor_config.json", lambda d: d.update(image_resize_strategy="letterbox"))(copy)
    build(copy)
    with pytest.raises(BadCheckpoint, match=r"48 x 64, .*'letterbox'; make the camera square"):
        build(copy, wide)
