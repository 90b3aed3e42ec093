"""Drawing and scoring action chunks with a velocity network: what all flow policies share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation
from embodied_rl.maths import flow
from embodied_rl.maths.randomness import standard_normal
from policies.flow_fpo import FPO
from policies.flow_transitions import FlowNoise, FlowSDE
from policies.layers import Normaliser, fit_state

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.config import FlowConfig

SMALLEST_ACTION_STD = 0.15
"""Floor of an action dimension's deviation, as a share of half its range. Without it, the noise of
a dimension that hardly moves in the demonstrations would shrink to nothing and could not be
explored, and its tiny motions would be blown up to the size of real ones."""


type Velocity[P] = Callable[[P, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Velocity [B, H, A] in normalised action space, and the features [B, H, F] that it was read from,
of a prefix, x_t [B, H, A] and time [B]. The prefix is what was made of the observation, once, for
all denoising steps. H and A are those of the network (`ChainSize`)."""


class Scaling(Protocol):
    """Between actions in the environment's units and those that the network speaks of."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def inverse(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class ChainSize:
    """What a network denoises, and the first steps and dimensions of it that are executed.

    A network may plan more steps than are executed and be padded to more dimensions than a robot
    has. All of it is noise at first and is stirred by the random steps, as in training; but only
    what is executed has a probability: the rest is left out of sums and gets no gradient.
    """

    steps: int
    dims: int
    executed_steps: int
    executed_dims: int

    def executed(self, x: Tensor) -> Tensor:
        """That part of x [..., H, A], which may have ones to expand instead."""
        return x[..., : self.executed_steps, : self.executed_dims]


class FlowHead(nn.Module):
    """Noise in, actions out, with the log-probability of what was random on the way.

    The log-probability is the exact joint one of the random steps given where each began: the sum
    over them. With `chain_log_prob="mean"` it is divided by K + 1, which tempers the ratio.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        config: FlowConfig,
        contract: Contract,
        feature_size: int,
        size: ChainSize | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        """By default the network denoises exactly what is executed, and actions are scaled by the
        statistics of demonstrations."""
        super().__init__()
        dims = contract.action_dim
        self.size = size or ChainSize(config.chunk, dims, config.chunk, dims)
        self.num_steps = config.denoise_steps
        self.actions: Scaling = scaling or Normaliser(dims)
        self.register_buffer("low", torch.tensor(contract.action_low), persistent=False)
        self.register_buffer("high", torch.tensor(contract.action_high), persistent=False)
        self.transition: FlowSDE | FlowNoise = (
            FlowNoise(config, feature_size, self.size.dims)
            if config.exploration == "flow_noise"
            else FlowSDE(config)
        )
        self._fpo = (
            FPO(config.fpo_samples, self.size.executed) if config.exploration == "fpo" else None
        )
        # pi_RL's public code takes the mean over the K steps and the constant term of the noise.
        self.temper = 1.0 / (config.denoise_steps + 1) if config.chain_log_prob == "mean" else 1.0
        self._final_noise, self.noise_left = config.final_noise, 1.0

    def set_progress(self, share: float) -> None:
        """Anneal the noise to the share of the run [0, 1] that is done."""
        self.noise_left = 1.0 - (1.0 - self._final_noise) * share

    def fit(self, state: Normaliser, states: Tensor, actions: Tensor) -> None:
        """Fit the statistics of states [N, S] and actions [N, A]."""
        assert isinstance(self.actions, Normaliser)
        fit_state(state, states)
        half_range = (self.high - self.low) / 2
        finite = torch.where(half_range.isfinite(), half_range, torch.zeros_like(half_range))
        self.actions.fit(actions, (SMALLEST_ACTION_STD * finite).clamp_min(1e-6))

    def loss[P](
        self,
        velocity: Velocity[P],
        prefix: P,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
        time: Tensor | None = None,
    ) -> Tensor:
        """Flow-matching loss against demonstrated chunks [B, H, A] of all steps that the network
        plans, at times [B] that are drawn uniformly by default. Padded dimensions do not count."""
        dims = self.size.executed_dims
        target = pad(self.actions(actions.float()), (0, self.size.dims - dims))
        noise = standard_normal(target.shape, generator, target.device)
        if time is None:
            uniform = torch.rand(len(target), generator=generator, device=generator.device)
            time = uniform.to(target.device)
        x = flow.noisy_action(target, noise, time)
        found, _ = velocity(prefix, x, time)
        wanted = flow.velocity_target(target, noise)
        return flow.flow_matching_loss(found[..., :dims], wanted[..., :dims], valid)

    @torch.no_grad()
    def sample[P](
        self,
        velocity: Velocity[P],
        prefix: P,
        value: Tensor,
        randomness: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Draw chunks for the B rows of `value` [B]."""
        batch, device = len(value), value.device
        x = standard_normal((batch, self.size.steps, self.size.dims), randomness, device)
        if mode == "explore" and not self._fpo:
            return self._explore(velocity, prefix, value, x, randomness)
        for k in range(self.num_steps):
            step = torch.full((batch,), k, device=device)
            found, _ = velocity(prefix, x, flow.time_of(step, self.num_steps))
            x = flow.ode_step(x, found, self.num_steps)
        log_prob = torch.zeros(batch, self.size.executed_steps, device=device)
        trace: dict[str, Tensor] = {}
        if mode == "explore" and self._fpo:
            log_prob, trace = self._fpo.draw(velocity, prefix, x, randomness)
        return Decision(self._to_actions(x), log_prob, value, trace)

    def _explore[P](
        self,
        velocity: Velocity[P],
        prefix: P,
        value: Tensor,
        x: Tensor,
        randomness: Randomness,
    ) -> Decision:
        batch, device = len(value), value.device
        # [B, M]: which denoising steps are random. All draw from the same numbers per row.
        chosen = self.transition.draw_steps(batch, randomness, device)
        executed = self.size.executed
        before = x.new_zeros((batch, chosen.shape[1], *x.shape[1:]))
        after = torch.zeros_like(executed(before))
        log_prob = x.new_zeros(batch, self.size.executed_steps)
        for k in range(self.num_steps):
            step = torch.full((batch,), k, device=device)
            found, features = velocity(prefix, x, flow.time_of(step, self.num_steps))
            calm = flow.ode_step(x, found, self.num_steps)
            mean, std = self.transition(x, found, features, step, self.noise_left)
            stirred = mean + std * standard_normal(x.shape, randomness, device)
            is_random = chosen == k
            row_is_random = is_random.any(dim=1)[:, None, None]
            following = torch.where(row_is_random, stirred, calm)
            slot = is_random[:, :, None, None]
            before = torch.where(slot, x[:, None], before)
            after = torch.where(slot, executed(following)[:, None], after)
            scored = flow.normal_log_prob(executed(following), executed(mean), executed(std))
            log_prob = log_prob + torch.where(row_is_random[..., 0], scored, 0.0)
            x = following
        trace = {"before": before, "after": after, "step": chosen.contiguous()}
        return Decision(self._to_actions(x), self.temper * log_prob, value, trace)

    @staticmethod
    def num_scored(trace: Mapping[str, Tensor]) -> int:
        """M: how many times the velocity is evaluated to score a decision."""
        return trace["time" if "time" in trace else "step"].shape[1]

    def score[P](
        self, velocity: Velocity[P], prefixes: P, estimate: Estimate, trace: Mapping[str, Tensor]
    ) -> Evaluation:
        """Log-probability of recorded random steps with the present weights.

        `prefixes` belongs to B * M rows: each observation's prefix, repeated `num_scored` times.
        """
        if self._fpo:
            log_prob = self._fpo.score(velocity, prefixes, trace)
            return Evaluation(
                log_prob, torch.zeros_like(log_prob), estimate.value, estimate.histogram
            )
        before, after, step = trace["before"], trace["after"], trace["step"]
        flat = before.flatten(0, 1)
        steps = step.flatten()
        found, features = velocity(prefixes, flat, flow.time_of(steps, self.num_steps))
        mean, std = self.transition(flat, found, features, steps, self.noise_left)

        def over_the_chain(terms: Tensor) -> Tensor:
            return self.temper * terms.view(*step.shape, -1).sum(dim=1)

        mean, std = self.size.executed(mean), self.size.executed(std)
        log_prob = over_the_chain(flow.normal_log_prob(after.flatten(0, 1), mean, std))
        entropy = self.transition.entropy(std)
        spread = torch.zeros_like(log_prob) if entropy is None else over_the_chain(entropy)
        return Evaluation(log_prob, spread, estimate.value, estimate.histogram)

    def _to_actions(self, x: Tensor) -> Tensor:
        """Chunks in the environment's convention. Cut to its bounds after the fact: the
        log-probability is that of the uncut chunk."""
        return torch.clamp(self.actions.inverse(self.size.executed(x)), self.low, self.high)
