"""FAST: a chunk of actions as few tokens (Pertsch et al. 2025, arXiv:2501.09747, section 5).

Each action dimension is turned into its cosine coefficients over time, these are scaled and rounded
(equation 1 and algorithm 1 there), written as one character each, lowest frequency of all
dimensions first, and that text is shortened by byte-pair encoding. Reads the folders in which
`UniversalActionProcessor` of the Hub's physical-intelligence/fast keeps itself, without its code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, trainers
from torch import Tensor

from embodied_rl.maths.tokens import cosine_transform

_OPTIONS, _SPELLING = FILES = "processor_config.json", "tokenizer.json"
_NO_TEXT = "\ufffd"
"""What bytes that are no character are decoded to."""


class FastTokenizer:
    """Chunks [H, A] of numbers, usually in [-1, 1], to token numbers 0 .. size - 1 and back."""

    def __init__(
        self,
        options: dict[str, Any],
        spelling: Tokenizer,
        shape: tuple[int, int],
        reach: float = 1.0,
    ) -> None:
        """`options` are those of processor_config.json, `shape` is (H, A). Numbers may lie in
        [-reach, reach].

        Raises ValueError if the options do not fit the shape, or the spelling not the options.
        """
        for name, value in zip(("time_horizon", "action_dim"), shape, strict=True):
            if options.get(name) not in (None, value):
                raise ValueError(
                    f"the FAST processor has {name}={options[name]}, but chunks here are of "
                    f"{shape[0]} steps (policy.chunk) and {shape[1]} action dimensions"
                )
        spelling.no_padding()
        spelling.no_truncation()
        self._spelling, self._shape, self._reach = spelling, shape, reach
        self._scale, self._lowest = float(options["scale"]), int(options["min_token"])
        self.size = spelling.get_vocab_size()
        self.vocab_size = max(int(options["vocab_size"]), self.size)
        """Room for tokens, of which `size` exist."""
        self._transform = cosine_transform(shape[0])
        self._spellable = torch.tensor(list(self._find_spellable()), dtype=torch.long)
        if not len(self._spellable):
            raise ValueError(
                f"the FAST processor's {_SPELLING} has no token for any coefficient from "
                f"min_token={self._lowest}: it was made for something else"
            )
        # Byte-level spellings may need a token for each byte of a character.
        characters = [chr(number - self._lowest) for number in self._spellable.tolist()]
        widest = 1 if spelling.pre_tokenizer is None else max(len(c.encode()) for c in characters)
        self.longest = shape[0] * shape[1] * widest
        """Tokens that `encode` gives at most."""

    @classmethod
    def load(cls, folder: Path, shape: tuple[int, int], reach: float = 1.0) -> FastTokenizer:
        """Read a processor's folder; raises ValueError saying what is wrong with it."""
        for name in (_OPTIONS, _SPELLING):
            if not (folder / name).is_file():
                raise ValueError(
                    f"policy.processor={folder} is no folder of a FAST processor: it has no "
                    f"{name}. Download all files of physical-intelligence/fast, or leave the "
                    f"option out to fit one to the demonstrations"
                )
        try:
            options = json.loads((folder / _OPTIONS).read_text())
            spelling = json.loads((folder / _SPELLING).read_text())
        except ValueError as error:
            raise ValueError(f"policy.processor={folder} cannot be read: {error}") from None
        return cls.from_json({"options": options, "spelling": spelling}, shape, reach)

    def save(self, folder: Path) -> None:
        """Write the two files that `load` reads."""
        folder.mkdir()
        data = self.to_json()
        (folder / _OPTIONS).write_text(json.dumps(data["options"], indent=2))
        (folder / _SPELLING).write_text(json.dumps(data["spelling"]))

    @classmethod
    def fit(
        cls, chunks: Tensor, scale: float, vocab_size: int, shape: tuple[int, int]
    ) -> FastTokenizer:
        """A new one for chunks like these [N, H, A], none included, with at most `vocab_size`
        tokens.

        Unlike the original's, a token never holds a part of a coefficient, and every coefficient
        that numbers in [-1, 1] can have is a token, seen in `chunks` or not.
        """
        most = _largest_coefficient(scale, shape[0])
        if 2 * most + 1 > vocab_size:
            raise ValueError(
                f"policy.vocabulary={vocab_size} has no room for the {2 * most + 1} different "
                f"coefficients of {shape[0]} steps at policy.scale={scale:g}; raise vocabulary or "
                f"lower scale"
            )
        options = {"scale": scale, "min_token": -most, "vocab_size": vocab_size}
        options |= {"time_horizon": shape[0], "action_dim": shape[1]}
        # Without chunks to learn from, the alphabet alone.
        plain = cls(options, _spelling((), 2 * most + 1, vocab_size), shape)
        return cls(options, _spelling(plain.spell(chunks), 2 * most + 1, vocab_size), shape)

    @classmethod
    def from_json(
        cls, data: dict[str, Any], shape: tuple[int, int], reach: float = 1.0
    ) -> FastTokenizer:
        """From what `to_json` gave, or from the two files of a processor's folder."""
        try:
            options = {"scale": float(data["options"]["scale"])}
            options |= {name: int(data["options"][name]) for name in ("min_token", "vocab_size")}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the FAST processor's {_OPTIONS} needs numbers scale, min_token and vocab_size: "
                f"{error!r}"
            ) from None
        if not options["scale"] > 0:
            raise ValueError(f"the FAST processor has scale={options['scale']:g}, not above 0")
        options |= {name: data["options"].get(name) for name in ("time_horizon", "action_dim")}
        try:
            spelling = Tokenizer.from_str(json.dumps(data["spelling"]))
        except Exception as error:  # tokenizers raises nothing more specific
            raise ValueError(f"the FAST processor's {_SPELLING} is broken: {error}") from None
        return cls(options, spelling, shape, reach)

    def to_json(self) -> dict[str, Any]:
        """Plain data: the content of processor_config.json and of tokenizer.json."""
        options = {
            "scale": self._scale,
            "min_token": self._lowest,
            "vocab_size": self.vocab_size,
            "time_horizon": self._shape[0],
            "action_dim": self._shape[1],
        }
        return {"options": options, "spelling": json.loads(self._spelling.to_str())}

    def spell(self, chunks: Tensor) -> list[str]:
        """The coefficients of chunks [N, H, A], a character each."""
        values = chunks.detach().cpu().double().clamp(-self._reach, self._reach)
        rounded = (self._transform @ values * self._scale).round().long()
        known = self._nearest(rounded.flatten(1)) - self._lowest
        return ["".join(map(chr, row)) for row in known.tolist()]

    def encode(self, chunks: Tensor) -> list[list[int]]:
        """The tokens of chunks [N, H, A]. Numbers out of reach are cut."""
        found = self._spelling.encode_batch(self.spell(chunks), add_special_tokens=False)
        return [list(encoding.ids) for encoding in found]

    def decode(self, spoken: Sequence[Sequence[int]]) -> Tensor:
        """Chunks [N, H, A] that these tokens mean, whatever they are.

        Coefficients that are missing are 0 and those too many are dropped (as lerobot's relaxed
        decoding does); tokens that are no text at all mean a chunk of zeros, as in the original.
        """
        horizon, action_dim = self._shape
        coefficients = torch.zeros(len(spoken), horizon * action_dim, dtype=torch.float64)
        for row, numbers in enumerate(spoken):
            text = self._spelling.decode(list(numbers), skip_special_tokens=False)
            if _NO_TEXT in text:
                continue
            values = [ord(character) + self._lowest for character in text][: horizon * action_dim]
            coefficients[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
        shaped = coefficients.view(-1, horizon, action_dim) / self._scale
        return (self._transform.T @ shaped).float()

    def _find_spellable(self) -> Iterator[int]:
        """Coefficients that have a spelling, rising: a byte-pair encoding drops what it does not
        know without a word."""
        most = _largest_coefficient(self._reach * self._scale, self._shape[0])
        # Characters beyond are no letters of any processor; some are no characters at all.
        highest = min(most, self._lowest + 0xD7FF)
        for number in range(max(-most, self._lowest), highest + 1):
            character = chr(number - self._lowest)
            ids = self._spelling.encode(character, add_special_tokens=False).ids
            if self._spelling.decode(ids, skip_special_tokens=False) == character:
                yield number

    def _nearest(self, numbers: Tensor) -> Tensor:
        known = self._spellable
        above = torch.searchsorted(known, numbers).clamp_max(len(known) - 1)
        below = (above - 1).clamp_min(0)
        nearer = (numbers - known[below]).abs() < (known[above] - numbers).abs()
        return torch.where(nearer, known[below], known[above])


def _spelling(texts: Iterable[str], num_characters: int, vocab_size: int) -> Tokenizer:
    """A byte-pair encoding of texts in the first `num_characters` characters."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=[chr(i) for i in range(num_characters)],
        max_token_length=10_000,
    )
    spelling = Tokenizer(models.BPE())
    # Tokens are joined without a space between.
    spelling.decoder = decoders.Fuse()
    spelling.train_from_iterator(iter(texts), trainer=trainer)
    return spelling


def _largest_coefficient(scale: float, horizon: int) -> int:
    """Numbers in [-1, 1] have no larger coefficients: all ones have the largest."""
    return round(scale * math.sqrt(horizon))
