"""How a denoising step becomes random: with the fixed noise of Flow-SDE or a learned one.

Both turn a velocity into a normal distribution of the following x, so that what was drawn has a
probability. `flow_head.FlowHead` draws from them and scores what was drawn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from embodied_rl.maths import flow
from embodied_rl.maths.randomness import uniform_integers
from policies.layers import mlp

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.config import FlowConfig

_HIDDEN = 64


class Transition(Protocol):
    """The random denoising step of a flow policy."""

    def draw_steps(self, batch: int, randomness: Randomness, device: torch.device) -> Tensor:
        """int64 [B, M]: the denoising steps of each row that are random."""
        ...

    def __call__(
        self, x: Tensor, velocity: Tensor, features: Tensor, step: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, [B, H, A] or expandable to it, of what follows x_t.

        `features` [B, H, F] is what the velocity was read from, `step` [B] the denoising step, and
        `factor` the share of the noise that is left.
        """
        ...

    def entropy(self, std: Tensor) -> Tensor | None:
        """Entropy of a step per control step [B, H]; None if there is nothing to learn in it."""
        ...


class FlowSDE(nn.Module):
    """Flow-SDE (piRL, arXiv:2510.25889, section 4.2): noise that keeps the ODE's marginals.

    With `stochastic_steps="one"` each row draws which denoising step is random and the others
    follow the ODE, the two-layer decision process of the paper.
    """

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self._num_steps, self._level = config.denoise_steps, config.noise_level
        self._all = config.stochastic_steps == "all"
        self._num_candidates = config.denoise_steps - (1 if config.skip_last_step else 0)

    def draw_steps(self, batch: int, randomness: Randomness, device: torch.device) -> Tensor:
        """All candidates, or one of them per row."""
        if self._all:
            return torch.arange(self._num_candidates, device=device).expand(batch, -1)
        return uniform_integers(self._num_candidates, batch, randomness, device)[:, None]

    def forward(
        self, x: Tensor, velocity: Tensor, features: Tensor, step: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """The SDE's step; its noise depends on the denoising step alone."""
        return flow.sde_step(x, velocity, step, self._num_steps, self._level * factor)

    def entropy(self, std: Tensor) -> None:
        """The noise is fixed."""
        return


class FlowNoise(nn.Module):
    """Flow-Noise (piRL, arXiv:2510.25889, section 4.1): a network sets the noise of every step.

    The mean is the ODE's step. The deviation lies within `noise_std` and is even in its logarithm,
    so the untrained network gives the geometric mean of the bounds.
    """

    def __init__(self, config: FlowConfig, feature_size: int, action_dim: int) -> None:
        super().__init__()
        self._num_steps = config.denoise_steps
        low, high = (math.log(bound) for bound in config.noise_std)
        self._middle, self._reach = (low + high) / 2, (high - low) / 2
        self.network = mlp([feature_size, _HIDDEN, action_dim], nn.Tanh, gain=1.0, last_gain=0.0)

    def draw_steps(self, batch: int, randomness: Randomness, device: torch.device) -> Tensor:
        """All steps."""
        return torch.arange(self._num_steps, device=device).expand(batch, -1)

    def forward(
        self, x: Tensor, velocity: Tensor, features: Tensor, step: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """The ODE's step with learned noise [B, H, A]."""
        log_std = self._middle + self._reach * torch.tanh(self.network(features).float())
        return flow.ode_step(x, velocity, self._num_steps), log_std.exp() * factor

    def entropy(self, std: Tensor) -> Tensor:
        """That of independent normals, summed over the action dimensions."""
        return flow.normal_entropy(std).sum(dim=-1)
