"""The network that estimates returns: as one number, or as a histogram whose mean is the value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from embodied_rl.contracts import Estimate, Histogram
from embodied_rl.maths.hl_gauss import bin_edges, histogram_mean
from policies.layers import mlp

if TYPE_CHECKING:
    from policies.config import ValueConfig

_FEW_LOGITS = 0.01
"""Gain of the last layer of a histogram, which begins nearly flat: no return is favoured."""


class ValueHead(nn.Sequential):
    """A tanh network from features [B, F] to the expected return.

    A sequence, so that its weights have the names that they had before there were histograms.
    """

    edges: Tensor

    def __init__(self, config: ValueConfig, num_features: int, hidden: list[int]) -> None:
        is_histogram = config.value_head == "hl_gauss"
        outputs = config.value_bins if is_histogram else 1
        last_gain = _FEW_LOGITS if is_histogram else 1.0
        super().__init__(
            *mlp([num_features, *hidden, outputs], nn.Tanh, gain=2**0.5, last_gain=last_gain)
        )
        self._is_histogram = is_histogram
        edges = bin_edges(*config.value_range, config.value_bins)
        self.register_buffer("edges", edges, persistent=False)

    def forward(self, features: Tensor) -> Estimate:
        """What is estimated for each row of features [B, F]."""
        outputs: Tensor = super().forward(features)  # type: ignore[no-untyped-call]
        if not self._is_histogram:
            return Estimate(outputs[:, 0])
        return Estimate(histogram_mean(outputs, self.edges), Histogram(outputs, self.edges))
