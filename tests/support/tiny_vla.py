"""Tiny random checkpoints of lerobot's flow policies, in its own file layout, made offline.

lerobot writes the sizes of pi0 and pi0.5 into its code, so folders of those are written and read
within `tiny_sizes`. SmolVLA takes its sizes from a folder and needs nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import Camera, Contract, Observation

KINDS = ("pi0", "pi05", "smolvla")
CHUNK_SIZE, MAX_DIM, STEPS = 6, 10, 4
STATE, ACTION = 5, 3
WORDS = "pick up the red cube and place it on the plate Task: push, State: 0 17 100 255;\nAction: "

CONTRACT = Contract(
    state_dim=STATE,
    action_dim=ACTION,
    action_low=(-1.0, -2.0, 0.0),
    action_high=(1.0, 2.0, 1.0),
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
    cameras=(Camera("front", 32, 32), Camera("wrist", 32, 32)),
)


@dataclass(frozen=True)
class PiSize:
    """How large pi0 and pi0.5 are built: of the language model, of the action expert (which has the
    same depth and heads), and of what sees."""

    width: int = 32
    depth: int = 2
    expert_width: int = 16
    head_dim: int = 8
    vision_width: int = 16
    vision_depth: int = 1
    image: int = 56
    chunk: int = CHUNK_SIZE
    steps: int = STEPS
    is_real: bool = False
    """Leave lerobot's own sizes as they are; image, chunk and steps still count."""


TINY = PiSize()
MEDIUM = PiSize(512, 8, 256, 64, 256, 4, 112, 50, 10)
REAL = PiSize(image=224, chunk=50, steps=10, is_real=True)


@contextlib.contextmanager
def tiny_sizes(size: PiSize = TINY) -> Iterator[None]:
    """pi0 and pi0.5 are built tiny, or as large as said."""
    if size.is_real:
        yield
        return
    modules = [importlib.import_module(f"lerobot.policies.{k}.modeling_{k}") for k in KINDS[:2]]
    names = (
        "get_gemma_config",
        "PaliGemmaForConditionalGenerationWithPiGemma",
        "PiGemmaForCausalLM",
    )
    before = [{name: getattr(module, name) for name in names} for module in modules]
    for module, real in zip(modules, before, strict=True):
        _shrink(module, size, *(real[name] for name in names[1:]))
    try:
        yield
    finally:
        for module, real in zip(modules, before, strict=True):
            for name, value in real.items():
                setattr(module, name, value)


def _shrink(module: Any, size: PiSize, vision_language: Any, expert: Any) -> None:
    width, vocabulary, eye = size.width, 512, size.vision_width
    small = size.expert_width
    sizes = {
        "gemma_2b": (width, size.depth, 2 * width, 8, 1, size.head_dim),
        "gemma_300m": (small, size.depth, 2 * small, 8, 1, size.head_dim),
    }

    def small_vision_language(config: Any) -> Any:
        vision = {
            "hidden_size": eye,
            "intermediate_size": 2 * eye,
            "num_hidden_layers": size.vision_depth,
        }
        for name, value in {**vision, "num_attention_heads": 2, "patch_size": 14}.items():
            setattr(config.vision_config, name, value)
        config.vision_config.projection_dim = config.projection_dim = width
        text = config.text_config
        text.vocab_size, text.pad_token_id = vocabulary, 0
        text.eos_token_id, text.bos_token_id = 1, 2
        config.image_token_index = config.image_token_id = vocabulary - 1
        return vision_language(config=config)

    def small_expert(config: Any) -> Any:
        config.vocab_size, config.pad_token_id = 8, 0
        return expert(config=config)

    module.get_gemma_config = lambda variant: module.GemmaConfig(*sizes[variant])
    module.PaliGemmaForConditionalGenerationWithPiGemma = small_vision_language
    module.PiGemmaForCausalLM = small_expert


def write_checkpoint(
    kind: str,
    folder: Path,
    contract: Contract = CONTRACT,
    statistics: bool = True,
    seed: int = 0,
    size: PiSize = TINY,
    patch: int = 16,
    **options: Any,
) -> Path:
    """A checkpoint with processors, tokenizer and random weights that depend on everything.
    SmolVLA sees patches of `patch` x `patch` pixels."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.factory import make_pre_post_processors

    tokenizer = _write_tokenizer(kind, folder.with_name(f"{folder.name}_words"), patch)
    image = contract.cameras[0].height
    inputs = {
        f"observation.images.{camera.name}": PolicyFeature(FeatureType.VISUAL, (3, image, image))
        for camera in contract.cameras
    }
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (contract.state_dim,))
    config_class, policy_class = _classes(kind)
    config = config_class(
        device="cpu",
        chunk_size=size.chunk,
        n_action_steps=2,
        max_action_dim=max(MAX_DIM, contract.action_dim),
        max_state_dim=max(MAX_DIM, contract.state_dim),
        tokenizer_max_length=64 + 4 * contract.state_dim if kind == "pi05" else 24,
        input_features=inputs,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (contract.action_dim,))},
        **_sizes(kind, tokenizer, size),
        **options,
    )
    torch.manual_seed(seed)
    with tiny_sizes(size), contextlib.redirect_stdout(None):
        policy = policy_class(config)
    scramble(policy, seed)
    policy.save_pretrained(folder)
    known = known_statistics(contract) if statistics else None
    with _words_of(tokenizer):
        for pipeline in make_pre_post_processors(config, dataset_stats=known):
            pipeline.save_pretrained(folder)
    return folder


def words_of(folder: Path) -> Path:
    """The tokenizer that belongs to a folder of `write_checkpoint`."""
    return folder.with_name(f"{folder.name}_words")


def scramble(module: torch.nn.Module, seed: int) -> None:
    """Random weights everywhere: some begin as zeros, and then nothing depends on time."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            scale = 0.5 if "embed" in name else 1.0 / math.sqrt(parameter[0].numel())
            parameter.data.copy_(scale * noise)
        else:
            parameter.data.add_(0.2 * noise)


def observation(batch: int, contract: Contract = CONTRACT, seed: int = 0) -> Observation:
    """Random observations, with instructions of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    images = {
        camera.name: torch.randint(
            256, (batch, camera.height, camera.width, 3), generator=generator, dtype=torch.uint8
        )
        for camera in contract.cameras
    }
    state = torch.randn(batch, contract.state_dim, generator=generator)
    sentences = ("pick up the red cube", "push", "place it on the plate")
    return Observation(images, state, tuple(sentences[row % 3] for row in range(batch)))


def native_batch(seen: Observation) -> dict[str, Any]:
    """The same for lerobot's preprocessor, written on its own."""
    images = {
        f"observation.images.{name}": image.permute(0, 3, 1, 2) / 255.0
        for name, image in seen.images.items()
    }
    return {**images, "observation.state": seen.state, "task": list(seen.instruction)}


class Native:
    """A plain lerobot: its own loading, processors and sampling."""

    def __init__(
        self, kind: str, folder: Path, tokenizer: Path | None = None, size: PiSize = TINY
    ) -> None:
        from lerobot.policies.factory import make_pre_post_processors

        with tiny_sizes(size), contextlib.redirect_stdout(None):
            self.policy = _classes(kind)[1].from_pretrained(folder)
        words = str(tokenizer or words_of(folder))
        self.before, self.after = make_pre_post_processors(
            self.policy.config,
            pretrained_path=str(folder),
            preprocessor_overrides={"tokenizer_processor": {"tokenizer_name": words}},
        )

    def actions(self, batch: dict[str, Any], noise: Tensor) -> Tensor:
        """Actions of a batch as `before` makes it, with given noise."""
        actions: Tensor = self.after(self.policy.predict_action_chunk(batch, noise=noise))
        return actions


def native_actions(
    kind: str, folder: Path, seen: Observation, noise: Tensor, tokenizer: Path | None = None
) -> Tensor:
    """Actions of a plain lerobot with given noise."""
    native = Native(kind, folder, tokenizer)
    return native.actions(native.before(native_batch(seen)), noise)


def _classes(kind: str) -> tuple[Any, Any]:
    name = {"pi0": "PI0", "pi05": "PI05", "smolvla": "SmolVLA"}[kind]
    package = f"lerobot.policies.{kind}"
    config = importlib.import_module(f"{package}.configuration_{kind}")
    model = importlib.import_module(f"{package}.modeling_{kind}")
    return getattr(config, f"{name}Config"), getattr(model, f"{name}Policy")


def _sizes(kind: str, tokenizer: Path, size: PiSize) -> dict[str, Any]:
    if kind == "smolvla":
        return {
            "vlm_model_name": str(tokenizer),
            "resize_imgs_with_padding": (64, 64),
            "num_steps": size.steps,
            "num_vlm_layers": 4,
            "expert_width_multiplier": 0.5,
        }
    return {"image_resolution": (size.image, size.image), "num_inference_steps": size.steps}


def known_statistics(contract: Contract) -> dict[str, dict[str, Tensor]]:
    def of(size: int) -> dict[str, Tensor]:
        middle = torch.linspace(-0.2, 0.3, size)
        reach = torch.linspace(0.4, 1.5, size)
        return {
            **{"mean": middle, "std": reach, "min": middle - 3 * reach, "max": middle + 3 * reach},
            **{"q01": middle - 2 * reach, "q99": middle + 2 * reach},
            **{"q10": middle - reach, "q90": middle + reach},
        }

    return {"observation.state": of(contract.state_dim), "action": of(contract.action_dim)}


def _write_tokenizer(kind: str, folder: Path, patch: int) -> Path:
    if kind == "smolvla":
        _write_smolvlm(folder, patch)
    else:
        _byte_pairs(("<pad>", "<eos>", "<bos>", "<unk>"), ()).save_pretrained(folder)
    return folder


def _byte_pairs(special: Sequence[str], extra: Sequence[str], **options: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pad, eos, bos, unknown = special
    made: Any = Tokenizer(models.BPE(unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*special, *extra],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([WORDS], trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
    )
    names = {"pad_token": pad, "eos_token": eos, "bos_token": bos, "unk_token": unknown}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names, **options)


def _write_smolvlm(folder: Path, patch: int) -> None:
    """What SmolVLA looks up by name: configuration and processor of its vision-language model."""
    from transformers import (
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    marks = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    }
    special = ("<pad_>", "<|im_end|>", "<|im_start|>", "<unk_>")
    extra = [*marks.values(), "<end_of_utterance>"]
    tokenizer = _byte_pairs(special, extra, extra_special_tokens=marks)
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config: Any = SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "vocab_size": len(tokenizer),
            **ids,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": patch,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(folder)
    edge = {"longest_edge": 64}
    video = {"fps": 1, "max_frames": 4, "video_size": edge}
    processor: Any = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size=edge, max_image_size=edge),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(
            size=edge, max_image_size=edge, num_frames=4, fps=1, video_sampling=video
        ),
        # Four neighbouring patches make one token.
        image_seq_len=(32 // patch) ** 2,
    )
    processor.save_pretrained(folder)


@contextlib.contextmanager
def _words_of(folder: Path) -> Iterator[None]:
    """New processors of pi0 ask the Hub for a tokenizer by name: here it is the one in a folder."""
    import lerobot.processor.tokenizer_processor as module
    from transformers import AutoTokenizer

    class Here:
        @staticmethod
        def from_pretrained(name: str) -> Any:
            return AutoTokenizer.from_pretrained(folder)

    before = module.AutoTokenizer
    module.AutoTokenizer = Here
    try:
        yield
    finally:
        module.AutoTokenizer = before
