"""Folders as the Hub's physical-intelligence/fast: byte-level, with transformers' own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer, trainers
from transformers import PreTrainedTokenizerFast


def write_processor(
    folder: Path, texts: list[str], min_token: int, alphabet: int, vocab_size: int = 400
) -> Any:
    """A processor trained on texts of coefficients; returns what transformers makes of it."""
    spelling: Any = ByteLevelBPETokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=[chr(i) for i in range(alphabet)],
        max_token_length=10_000,
    )
    spelling._tokenizer.train_from_iterator(iter(texts), trainer=trainer)
    make: Any = PreTrainedTokenizerFast
    wrapped: Any = make(tokenizer_object=spelling, clean_up_tokenization_spaces=False)
    wrapped.save_pretrained(folder)
    options = {
        "action_dim": None,
        "auto_map": {"AutoProcessor": "processing_action_tokenizer.UniversalActionProcessor"},
        "min_token": min_token,
        "processor_class": "UniversalActionProcessor",
        "scale": 10,
        "time_horizon": None,
        "vocab_size": vocab_size,
    }
    (folder / "processor_config.json").write_text(json.dumps(options))
    (folder / "processing_action_tokenizer.py").write_text("raise RuntimeError('never run')\n")
    return wrapped


def every_text(min_token: int, largest: int) -> list[str]:
    """Every coefficient twice, so that a byte-level spelling knows all its bytes."""
    return ["".join(chr(i) for i in range(largest - min_token + 1))] * 2
