"""FAST tokens: the transform, the spelling, the Hub's layout, and what decoding forgives."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.maths.tokens import cosine_transform
from fast_processor import every_text, write_processor
from policies.fast_tokens import FastTokenizer


def smooth(count: int, steps: int, seed: int = 0) -> Tensor:
    """Waves of two action dimensions [count, steps, 2] in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    speed = torch.rand(count, 1, 2, generator=generator) * 4
    phase = torch.rand(count, 1, 2, generator=generator) * 6
    return torch.sin(torch.linspace(0, 1, steps)[None, :, None] * speed + phase)


def fitted(chunks: Tensor, scale: float = 10.0, vocab_size: int = 256) -> FastTokenizer:
    return FastTokenizer.fit(chunks, scale, vocab_size, (chunks.shape[1], chunks.shape[2]))


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_the_cosine_transform_is_scipys_and_orthonormal(length: int) -> None:
    fft: Any = pytest.importorskip("scipy.fft")
    matrix = cosine_transform(length)
    values = torch.randn(length, 3, generator=torch.Generator().manual_seed(0)).double()
    expected = torch.from_numpy(fft.dct(values.numpy(), axis=0, norm="ortho"))
    assert torch.allclose(matrix @ values, expected)
    assert torch.allclose(matrix.T @ matrix, torch.eye(length, dtype=torch.float64))


def test_a_tiny_chunk_by_hand() -> None:
    """Of (1, -1) the coefficients are 0 and sqrt(2), of (1, 1) the other way round. At scale 10
    they round to 14, the largest that there is, so character 14 is coefficient 0."""
    made = fitted(torch.zeros(0, 2, 1))
    assert made.size == 29
    chunks = torch.tensor([[[1.0], [-1.0]], [[1.0], [1.0]], [[0.0], [0.0]]])
    assert made.spell(chunks) == ["\x0e\x1c", "\x1c\x0e", "\x0e\x0e"]
    assert made.encode(chunks) == [[14, 28], [28, 14], [14, 14]]
    found = made.decode([[14, 28]])[0, :, 0].tolist()
    assert found == pytest.approx([1.4 / math.sqrt(2), -1.4 / math.sqrt(2)])


def test_coefficients_are_written_lowest_frequency_of_all_dimensions_first() -> None:
    made = fitted(torch.zeros(0, 2, 2))
    chunk = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    # Step 0 of both dimensions is 0; then 14 for the first dimension and 0 for the second.
    assert made.encode(chunk) == [[14, 14, 28, 14]]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 12), scale=st.floats(2.0, 40.0))
def test_any_chunk_comes_back_to_within_the_rounding(seed: int, steps: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    chunks = torch.rand(5, steps, 2, generator=generator) * 2 - 1
    made = fitted(chunks, scale, vocab_size=512)
    spoken = made.encode(chunks)
    assert max(map(len, spoken)) <= made.longest == steps * 2
    away = (made.decode(spoken) - chunks).norm(dim=1)
    # Half a unit per coefficient; the transform keeps lengths.
    assert float(away.max()) <= 0.5 / scale * math.sqrt(steps) + 1e-5


def test_smooth_chunks_need_few_tokens_and_fitting_repeats() -> None:
    chunks = smooth(500, 16)
    made = fitted(chunks)
    spoken = made.encode(smooth(100, 16, seed=1))
    assert sum(map(len, spoken)) / 100 < 16  # of 32 numbers
    assert (made.decode(spoken) - smooth(100, 16, seed=1)).abs().mean() < 0.03
    assert made.to_json() == fitted(chunks).to_json()
    again = FastTokenizer.from_json(json.loads(json.dumps(made.to_json())), (16, 2))
    assert again.encode(chunks) == made.encode(chunks)
    assert again.to_json() == made.to_json()


def test_numbers_that_were_never_seen_can_be_spoken() -> None:
    made = fitted(torch.zeros(4, 8, 1))
    wild = torch.rand(20, 8, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert (made.decode(made.encode(wild)) - wild).abs().max() < 0.2
    outside = made.decode(made.encode(torch.full((1, 8, 1), 5.0)))
    assert torch.allclose(outside, torch.ones(1, 8, 1), atol=0.02)


def test_missing_coefficients_are_zero_and_those_too_many_are_dropped() -> None:
    made = fitted(torch.zeros(0, 2, 1))
    short, long, nothing = made.decode([[28], [28, 14, 3, 3, 3], []])
    assert torch.equal(short, long)
    assert short.flatten().tolist() == pytest.approx([1.4 / math.sqrt(2)] * 2)
    assert not nothing.any()


def test_the_hubs_layout_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Coefficients from -160 lie beyond ASCII: there a character is two bytes."""
    texts = fitted(smooth(300, 8), vocab_size=512).spell(smooth(300, 8))
    shifted = ["".join(chr(ord(c) - 28 + 160) for c in text) for text in texts]
    wrapped = write_processor(tmp_path, [*shifted, *every_text(-160, 40)], -160, 201)
    made = FastTokenizer.load(tmp_path, (8, 2))
    chunks = smooth(40, 8, seed=3)
    expected = [wrapped(text)["input_ids"] for text in made.spell(chunks)]
    assert made.encode(chunks) == expected
    assert [wrapped.decode(ids) for ids in expected] == made.spell(chunks)
    assert (made.decode(expected) - chunks).abs().max() < 0.15
    assert made.longest == 8 * 2 * 2
    assert made.vocab_size >= made.size


def test_bytes_that_are_no_text_mean_a_chunk_of_zeros(tmp_path: Path) -> None:
    wrapped = write_processor(tmp_path, every_text(-160, 40), -160, 201, vocab_size=260)
    made = FastTokenizer.load(tmp_path, (8, 2))
    half = wrapped.convert_tokens_to_ids("Â")  # the first byte of two
    assert "\ufffd" in wrapped.decode([half])
    assert not made.decode([[half, half]]).any()


def test_a_coefficient_without_a_token_becomes_its_neighbour(tmp_path: Path) -> None:
    """Byte-pair encoding would drop it and shift all that follow."""
    write_processor(tmp_path, every_text(-5, 5), -5, 11)
    made = FastTokenizer.load(tmp_path, (2, 1))
    chunks = torch.tensor([[[1.0], [-1.0]]])  # coefficients 0 and 14, of which 5 is the nearest
    found = made.decode(made.encode(chunks)).flatten().tolist()
    assert found == pytest.approx([0.5 / math.sqrt(2), -0.5 / math.sqrt(2)])


def broken(folder: Path, **options: Any) -> None:
    file = folder / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


def test_folders_that_hold_no_processor_say_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder of a FAST processor.*processor_config\.json"):
        FastTokenizer.load(tmp_path, (2, 1))
    good = tmp_path / "good"
    write_processor(good, every_text(-20, 20), -20, 41)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"scale": None}, r"needs numbers scale, min_token and vocab_size"),
        ({"scale": -1.0}, r"scale=-1, not above 0"),
        ({"min_token": "low"}, r"needs numbers scale"),
        ({"min_token": 30_000}, r"has no token for any coefficient"),
        (
            {"time_horizon": 50},
            r"time_horizon=50, but chunks here are of 2 steps \(policy\.chunk\)",
        ),
        ({"action_dim": 7}, r"action_dim=7, but chunks .* and 1 action dimensions"),
    ]
    for number, (options, message) in enumerate(cases):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        broken(folder, **options)
        with pytest.raises(ValueError, match=message):
            FastTokenizer.load(folder, (2, 1))
    (good / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is broken"):
        FastTokenizer.load(good, (2, 1))
    (good / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read"):
        FastTokenizer.load(good, (2, 1))
    (good / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        FastTokenizer.load(good, (2, 1))


def test_a_vocabulary_without_room_for_the_coefficients_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocabulary=40 has no room for the 57 different"):
        fitted(torch.zeros(0, 8, 1), vocab_size=40)


def test_numbers_beyond_the_usual_are_kept_where_they_may_be(tmp_path: Path) -> None:
    write_processor(tmp_path, every_text(-90, 90), -90, 181)
    chunk = torch.tensor([[[2.0], [-3.0], [2.5], [0.5]]])
    wide = FastTokenizer.load(tmp_path, (4, 1), reach=4.0)
    assert (wide.decode(wide.encode(chunk)) - chunk).abs().max() < 0.1
    usual = FastTokenizer.load(tmp_path, (4, 1))
    cut = usual.decode(usual.encode(chunk))
    assert (cut - chunk.clamp(-1.0, 1.0)).abs().max() < 0.1
    wide.save(tmp_path / "copy")
    again = FastTokenizer.load(tmp_path / "copy", (4, 1), reach=4.0)
    assert again.encode(chunk) == wide.encode(chunk) and again.to_json() == wide.to_json()
