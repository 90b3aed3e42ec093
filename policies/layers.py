"""Pieces that several policies share."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from embodied_rl.contracts import Contract, Observation


class Normaliser(nn.Module):
    """Shifts and scales vectors to about zero mean and unit deviation.

    Its statistics are buffers, so they are saved, loaded and moved with the policy.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def fit(self, data: Tensor, smallest_std: Tensor | float) -> None:
        """Take the statistics of rows [N, size]; deviations are not taken as less than a floor."""
        self.mean.copy_(data.mean(dim=0))
        std = data.std(dim=0, unbiased=False)
        self.std.copy_(torch.maximum(std, torch.as_tensor(smallest_std, device=std.device)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised values."""
        return (x - self.mean) / self.std

    def inverse(self, x: Tensor) -> Tensor:
        """The values that `forward` would normalise to x."""
        return x * self.std + self.mean


LARGEST_STATE = 5.0
"""Normalised states are cut here, so that a state never seen in training does no harm."""

SMALLEST_STATE_STD = 1e-3
"""A state that never moves in the demonstrations keeps its unit; below this it counts as still."""


def fit_state(normaliser: Normaliser, state: Tensor) -> None:
    """Fit to demonstrated states [N, S]; entries that never move are only shifted."""
    normaliser.fit(state, 0.0)
    still = normaliser.std < SMALLEST_STATE_STD
    normaliser.std[still] = 1.0


def normalised_state(normaliser: Normaliser, state: Tensor) -> Tensor:
    """State [B, S] as the networks see it."""
    seen: Tensor = normaliser(state.float())
    return seen.clamp(-LARGEST_STATE, LARGEST_STATE)


def mlp(
    sizes: list[int],
    activation: Callable[[], nn.Module],
    gain: float | None = None,
    last_gain: float | None = None,
) -> nn.Sequential:
    """Linear layers with an activation between; orthogonal weights if gains are given."""
    layers: list[nn.Module] = []
    for position, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(inputs, outputs)
        is_last = position == len(sizes) - 2
        wanted = last_gain if is_last else gain
        if wanted is not None:
            nn.init.orthogonal_(linear.weight, wanted)
            nn.init.zeros_(linear.bias)
        layers += [linear] if is_last else [linear, activation()]
    return nn.Sequential(*layers)


class TimeEmbedding(nn.Module):
    """Sines and cosines of the denoising time, from slow to fast."""

    frequencies: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        # From half a turn to 64 turns over the unit interval: finer than any step that is used.
        exponents = torch.linspace(0.0, 7.0, size // 2)
        self.register_buffer("frequencies", math.pi * 2.0**exponents, persistent=False)

    def forward(self, time: Tensor) -> Tensor:
        """Features [B, size] of times [B]."""
        angles = time.float()[:, None] * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class WordBag(nn.Module):
    """An instruction as the mean of learned vectors of its words and of pairs of neighbours, which
    tell `a on b` from `b on a`: enough to tell tasks apart.

    Words meet their vectors through a hash, so no vocabulary has to be known.
    """

    def __init__(self, size: int, num_vectors: int = 512) -> None:
        super().__init__()
        self.vectors = nn.EmbeddingBag(num_vectors, size, mode="mean")

    def forward(self, instructions: tuple[str, ...]) -> Tensor:
        """Features [B, size] of B instructions; zeros for an empty one."""
        different = list(dict.fromkeys(instructions))
        words = [_words_and_pairs(text) for text in different]
        count = self.vectors.num_embeddings
        device = self.vectors.weight.device
        # Not Python's hash, which differs from process to process.
        numbers = [zlib.crc32(word.encode()) % count for row in words for word in row]
        starts = list(itertools.accumulate((len(row) for row in words[:-1]), initial=0))
        features: Tensor = self.vectors(
            torch.tensor(numbers, dtype=torch.long, device=device),
            torch.tensor(starts, dtype=torch.long, device=device),
        )
        rows = [different.index(text) for text in instructions]
        return features[torch.tensor(rows, dtype=torch.long, device=device)]


def _words_and_pairs(text: str) -> list[str]:
    words = text.lower().split()
    return [*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))]


def require_observation(contract: Contract, observation: Observation) -> None:
    """Raise ValueError naming what of an observation does not fit the policy's contract."""
    if observation.state.shape[-1] != contract.state_dim:
        raise ValueError(
            f"the policy was made for a state of {contract.state_dim} entries, got "
            f"{observation.state.shape[-1]}"
        )
    for camera in contract.cameras:
        image = observation.images.get(camera.name)
        if image is None:
            raise ValueError(
                f"the policy looks through camera {camera.name!r}, but the observation has "
                f"{', '.join(sorted(observation.images)) or 'no camera'}"
            )
        if tuple(image.shape[1:]) != (camera.height, camera.width, 3):
            raise ValueError(
                f"camera {camera.name!r} must give [{camera.height}, {camera.width}, 3] images, "
                f"got {list(image.shape[1:])}"
            )
