"""The gradient of a minibatch part by part, where all of it at once would take too much memory.

Every part's loss is what its rows add to the minibatch's mean, so the parts' gradients add up to
that of the minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.algorithms.config import ClipConfig
from embodied_rl.algorithms.steps import ratios, require_finite, scored_steps
from embodied_rl.contracts import Policy
from embodied_rl.maths.losses import executed_mask
from embodied_rl.rollout.batch import Batch


@dataclass(frozen=True)
class Whole:
    """What the means over a minibatch divide by."""

    ratios: Tensor
    """int64 []: ratios that count, of decisions, steps or tokens by `ratio_level`."""
    steps: Tensor
    """int64 []: control steps that count."""


def micro_batches(num_rows: int, size: int | None) -> Sequence[Tensor]:
    """Numbers of the rows of each part: as few even parts as have at most `size` rows each; None
    leaves them all together."""
    count = 1 if size is None else -(-num_rows // size)
    return torch.arange(num_rows).tensor_split(max(1, count))


def whole_of(config: ClipConfig, policy: Policy, batch: Batch, rows: Tensor) -> Whole | None:
    """Of the minibatch of these rows [n], before it is divided; None if it is not.

    How many tokens a decision has, only the policy knows: with ratios per token it looks at the
    decisions once more.
    """
    parts = micro_batches(len(rows), config.micro_batch_size)
    if len(parts) == 1:
        return None
    scored = scored_steps(batch, config.scored_steps)[rows]
    steps = executed_mask(scored, batch.log_prob.shape[1])
    if config.ratio_level == "step":
        return Whole(steps.sum(), steps.sum())
    if config.ratio_level == "chunk":
        return Whole(steps.any(dim=1).sum(), steps.sum())
    tokens = [_num_tokens(policy, batch, rows[part], scored[part]) for part in parts]
    return Whole(torch.stack(tokens).sum(), steps.sum())


@torch.no_grad()
def _num_tokens(policy: Policy, batch: Batch, rows: Tensor, scored: Tensor) -> Tensor:
    trace = {name: tensor[rows] for name, tensor in batch.trace.items()}
    seen = policy.evaluate(batch.observation.select(rows), trace)
    return ratios(seen, batch, rows, scored, "token")[1].sum()


def accumulate(loss: Tensor) -> None:
    """Add a part's gradients to those that are there; `NonFinite` if its loss is not finite."""
    require_finite(loss)
    loss.backward()  # type: ignore[no-untyped-call]


def added(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """What the parts of a minibatch add up to, of each value."""
    return {name: sum(part[name] for part in parts) for name in parts[0]}
