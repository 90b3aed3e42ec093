"""Tiny random checkpoints of lerobot's pi0-FAST, in its own file layout, made offline.

lerobot writes the sizes into its code and fetches two tokenizers by name, so a plain lerobot makes
and reads these folders within `tiny_fast`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import Contract, Observation
from fast_processor import every_text, write_processor
from tiny_vla import CONTRACT, WORDS, known_statistics, native_batch, scramble

CHUNK_SIZE, VOCABULARY, LOWEST = 6, 512, -60
SCALE = 10
_PACKAGE = "lerobot.policies.pi0_fast"


def words_of(folder: Path) -> Path:
    """The text tokenizer that belongs to a folder of `write_fast_checkpoint`."""
    return folder.with_name(f"{folder.name}_words")


def processor_of(folder: Path) -> Path:
    """The FAST processor that belongs to it."""
    return folder.with_name(f"{folder.name}_fast")


def write_fast_checkpoint(
    folder: Path,
    contract: Contract = CONTRACT,
    statistics: bool = True,
    seed: int = 0,
    **options: Any,
) -> Path:
    """A checkpoint with processors and random weights, and its two tokenizers beside it."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.factory import make_pre_post_processors

    words, fast = words_of(folder), processor_of(folder)
    _write_words(words)
    largest = 60
    texts = every_text(LOWEST, largest) + [chr(-LOWEST) * 12] * 4
    write_processor(fast, texts, LOWEST, largest - LOWEST + 1, vocab_size=270)
    image = contract.cameras[0].height
    inputs = {
        f"observation.images.{camera.name}": PolicyFeature(FeatureType.VISUAL, (3, image, image))
        for camera in contract.cameras
    }
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (contract.state_dim,))
    make: Any = importlib.import_module(f"{_PACKAGE}.configuration_pi0_fast").PI0FastConfig
    sizes = {
        "chunk_size": CHUNK_SIZE,
        "n_action_steps": CHUNK_SIZE,
        "image_resolution": (56, 56),
        "tokenizer_max_length": 48 + 6 * contract.state_dim,
        "max_decoding_steps": 24,
    }
    config = make(
        device="cpu",
        input_features=inputs,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (contract.action_dim,))},
        **{**sizes, **options},
    )
    known = known_statistics(contract) if statistics else None
    torch.manual_seed(seed)
    with tiny_fast(words, fast), contextlib.redirect_stdout(None):
        policy = _policy_class()(config)
        scramble(policy, seed)
        policy.save_pretrained(folder)
        for pipeline in make_pre_post_processors(config, dataset_stats=known):
            pipeline.save_pretrained(folder)
    return folder


def native_fast_actions(
    folder: Path, seen: Observation, words: Path, fast: Path
) -> tuple[Tensor, list[list[str]]]:
    """Actions of a plain lerobot, with its own loading, processors and greedy decoding, and the
    text that it spoke in each row."""
    from lerobot.policies.factory import make_pre_post_processors

    with tiny_fast(words, fast), contextlib.redirect_stdout(None):
        policy = _policy_class().from_pretrained(folder)
        before, after = make_pre_post_processors(policy.config, pretrained_path=str(folder))
        spoken: list[Tensor] = []
        decode = policy.detokenize_actions

        def listening(ids: Tensor, **given: Any) -> Any:
            spoken.append(ids)
            return decode(ids, **given)

        policy.detokenize_actions = listening
        actions: Tensor = after(policy.predict_action_chunk(before(native_batch(seen))))
        texts = [policy._paligemma_tokenizer.convert_ids_to_tokens(r) for r in spoken[0].tolist()]
    return actions, texts


def native_action_tokens(
    folder: Path, seen: Observation, actions: Tensor, words: Path, fast: Path
) -> tuple[Tensor, Tensor]:
    """What lerobot's own preprocessor makes of demonstrated chunks: text tokens and their mask."""
    from lerobot.processor import PolicyProcessorPipeline

    with tiny_fast(words, fast):
        before: Any = PolicyProcessorPipeline.from_pretrained(
            folder, config_filename="policy_preprocessor.json"
        )
        batch = before({**native_batch(seen), "action": actions})
    return batch["action.tokens"], batch["action.token_mask"]


@contextlib.contextmanager
def tiny_fast(words: Path | None = None, fast: Path | None = None) -> Iterator[None]:
    """pi0-FAST is built tiny; with folders given, a plain lerobot finds its tokenizers there."""
    model = importlib.import_module(f"{_PACKAGE}.modeling_pi0_fast")
    processor = importlib.import_module("lerobot.processor.tokenizer_processor")
    patches: list[tuple[Any, str, Any]] = [
        (model, "get_gemma_config", lambda variant: model.GemmaConfig(32, 2, 64, 8, 1, 8)),
        (
            model,
            "PaliGemmaForConditionalGenerationWithPiGemma",
            _small(model.PaliGemmaForConditionalGenerationWithPiGemma),
        ),
    ]
    if words is not None and fast is not None:
        for module in (model, processor):
            patches += [
                (module, "AutoTokenizer", SimpleNamespace(from_pretrained=_words_in(words))),
                (module, "AutoProcessor", SimpleNamespace(from_pretrained=_fast_in(fast))),
            ]
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _policy_class() -> Any:
    return importlib.import_module(f"{_PACKAGE}.modeling_pi0_fast").PI0FastPolicy


def _small(vision_language: Any) -> Any:
    def build(config: Any) -> Any:
        vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        for name, value in {
            **vision,
            "num_attention_heads": 2,
            "patch_size": 14,
            "image_size": 56,
        }.items():
            setattr(config.vision_config, name, value)
        text = config.text_config
        config.vision_config.projection_dim = config.projection_dim = text.hidden_size
        text.vocab_size, text.pad_token_id = VOCABULARY, 0
        text.eos_token_id, text.bos_token_id = 1, 2
        config.image_token_index = config.image_token_id = VOCABULARY - 1
        return vision_language(config=config)

    return build


def _words_in(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return lambda name, trust_remote_code=None, **given: AutoTokenizer.from_pretrained(
        folder, **given
    )


def _fast_in(folder: Path) -> Any:
    """What lerobot uses of the processor, as the Hub's code makes it of these files."""
    from transformers import PreTrainedTokenizerFast

    dct = importlib.import_module("scipy.fft").dct

    class Processor:
        def __init__(self) -> None:
            self.bpe_tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
            self.min_token, self.scale = LOWEST, SCALE

        def __call__(self, chunk: Any) -> list[list[int]]:
            rounded = (dct(chunk, axis=1, norm="ortho") * self.scale).round().astype(int)
            texts = ["".join(chr(n - self.min_token) for n in row.flatten()) for row in rounded]
            return [self.bpe_tokenizer(text)["input_ids"] for text in texts]

    return lambda name, **given: Processor()


def _write_words(folder: Path) -> None:
    """A text tokenizer that writes spaces as PaliGemma's does and knows its location tokens."""
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    made: Any = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[A-Za-z]+|[^A-Za-z]"), "isolated")
    made.decoder = decoders.Replace("▁", " ")
    letters = [chr(i) for i in range(33, 127)] + ["▁", "\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=140, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator([WORDS] * 4, trainer)
    data = json.loads(made.to_str())
    vocabulary = data["model"]["vocab"]
    for number in range(len(vocabulary), VOCABULARY):
        vocabulary[f"<loc{number:04d}>"] = number
    made = Tokenizer.from_str(json.dumps(data))
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", made.token_to_id("<bos>"))]
    )
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), special, strict=True))
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    wrapped.save_pretrained(folder)
