"""A likelihood-free ratio for flow policies (FPO; McAllister et al. 2025, arXiv:2507.21053)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied_rl.maths import flow
from embodied_rl.maths.randomness import standard_normal, uniform_numbers

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness


class FPO:
    """Scores an action by how well the flow would reconstruct it.

    The policy samples along the plain ODE, so it explores by the noise that it starts from. In
    place of the log-probability stands minus the flow-matching loss of the action at M fixed pairs
    of noise and time; the ratio is then the paper's exp(loss_old - loss_new) (section 3.3). It is
    no likelihood: an entropy or a divergence from it means nothing.
    """

    def __init__(
        self, num_samples: int, executed: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        """`executed` takes from a network's [..., H, A] the part whose error counts."""
        self._num_samples, self._executed = num_samples, executed

    def draw(
        self, velocity: Any, prefix: Any, action: Tensor, randomness: Randomness
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The score [B, H] of sampled actions [B, H, A] in normalised units, and its trace."""
        batch, device = len(action), action.device
        time = uniform_numbers((batch, self._num_samples), randomness, device)
        noise = standard_normal((batch, self._num_samples, *action.shape[1:]), randomness, device)
        # One sample at a time: the prefix belongs to B rows.
        losses = [
            self._losses(velocity, prefix, action, noise[:, m], time[:, m])
            for m in range(self._num_samples)
        ]
        score = -torch.stack(losses).mean(dim=0)
        return score, {"action": action, "noise": noise, "time": time}

    def score(self, velocity: Any, prefixes: Any, trace: Mapping[str, Tensor]) -> Tensor:
        """The score [B, H] with the present weights; `prefixes` belongs to B * M rows."""
        time, noise = trace["time"], trace["noise"]
        action = trace["action"][:, None].expand_as(noise).flatten(0, 1)
        losses = self._losses(velocity, prefixes, action, noise.flatten(0, 1), time.flatten())
        return -losses.view(*time.shape, -1).mean(dim=1)

    def _losses(
        self, velocity: Any, prefix: Any, action: Tensor, noise: Tensor, time: Tensor
    ) -> Tensor:
        """Flow-matching loss [B, H] of each control step, summed over the action dimensions."""
        found, _ = velocity(prefix, flow.noisy_action(action, noise, time), time)
        wanted = flow.velocity_target(action, noise)
        errors: Tensor = self._executed(found.float() - wanted).square().sum(dim=-1)
        return errors
