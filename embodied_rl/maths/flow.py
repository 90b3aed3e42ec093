"""Flow matching and its stochastic sampler Flow-SDE.

Time t runs from 1 (noise) to 0 (action): x_t = t * noise + (1 - t) * action, and the network learns
the velocity v = noise - action, as pi0 does (arXiv:2410.24164). Flow-SDE is that of piRL
(arXiv:2510.25889, section 4.2), after Flow-GRPO (arXiv:2505.05470, eq. 9): an SDE with the same
marginals as the ODE dx = v dt, so that a denoising step has a probability.

Letters: B rows, H control steps, A action dimensions, K denoising steps; k = 0 is the noisiest.
Everything is computed in float32 whatever the network's type.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def time_of(step: Tensor, num_steps: int) -> Tensor:
    """Time t in float32 at which denoising step k of K starts: 1 - k / K."""
    # In this order it is rounded once, as if it were computed in float64.
    return (num_steps - step.float()) / num_steps


def noisy_action(action: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """x_t between action [B, H, A] and noise [B, H, A] at time [B]."""
    t = time[:, None, None]
    return t * noise + (1.0 - t) * action


def velocity_target(action: Tensor, noise: Tensor) -> Tensor:
    """What the network should say at every x_t of this pair."""
    return noise - action


def flow_matching_loss(velocity: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Mean squared error of velocities [B, H, A] over the control steps where valid [B, H]."""
    error = (velocity.float() - target.float()).square().mean(dim=-1)
    counted = torch.where(valid, error, torch.zeros_like(error))
    return counted.sum() / valid.sum().clamp_min(1)


def ode_step(x: Tensor, velocity: Tensor, num_steps: int) -> Tensor:
    """One Euler step of the ODE towards the action."""
    return x - velocity.float() / num_steps


def sde_noise_rate(step: Tensor, num_steps: int, noise_level: float) -> Tensor:
    """sigma of Flow-SDE at denoising step k: noise_level * sqrt(t / (1 - t)).

    At t = 1 it would be infinite; there the denominator takes the next step's 1 - t, which is 1/K.
    """
    t = time_of(step, num_steps)
    rest = torch.where(step == 0, torch.full_like(t, 1.0 / num_steps), 1.0 - t)
    return noise_level * (t / rest).sqrt()


def sde_step(
    x: Tensor, velocity: Tensor, step: Tensor, num_steps: int, noise_level: float
) -> tuple[Tensor, Tensor]:
    """Mean [B, H, A] and standard deviation [B, 1, 1] of the stochastic denoising step k [B].

    Euler-Maruyama on the SDE with the ODE's marginals: the extra drift -sigma^2 / (2 t) times the
    noise estimate x + (1 - t) v takes back exactly the variance that the noise brings in.
    """
    delta = 1.0 / num_steps
    t = time_of(step, num_steps)[:, None, None]
    sigma = sde_noise_rate(step, num_steps, noise_level)[:, None, None]
    v = velocity.float()
    noise_estimate = x + (1.0 - t) * v
    mean = x - delta * v - (sigma.square() * delta / (2.0 * t)) * noise_estimate
    return mean, sigma * math.sqrt(delta)


def normal_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density [B, H] of x [B, H, A] under independent normals, summed over the dimensions A."""
    z = (x - mean) / std
    per_dimension = -0.5 * z.square() - std.log() - 0.5 * math.log(2.0 * math.pi)
    return per_dimension.expand_as(x).sum(dim=-1)


def normal_entropy(std: Tensor) -> Tensor:
    """Entropy of a normal distribution, elementwise: log(std) + log(2 pi e) / 2."""
    return std.log() + 0.5 * math.log(2.0 * math.pi * math.e)
