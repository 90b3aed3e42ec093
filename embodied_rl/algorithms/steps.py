"""Steps that all policy-gradient algorithms take: minibatches, the ratio gate, one descent."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from embodied_rl.contracts import Evaluation, Observation, Policy
from embodied_rl.maths.gradients import project_conflicts
from embodied_rl.maths.losses import RatioLevel, executed_mask, log_ratio, token_mask
from embodied_rl.ratio_levels import refusal
from embodied_rl.rollout.batch import Batch


class RatioError(RuntimeError):
    """A policy does not reproduce the log-probabilities of its own fresh decisions."""


class NonFinite(RuntimeError):
    """A loss or gradient became NaN or infinite."""


def minibatches(
    valid: Tensor, size: int, epochs: int, seed: int, iteration: int
) -> Iterator[Tensor]:
    """Indices of valid rows [N] in a new random order every epoch, in parts of about `size`."""
    for parts in epochs_of(valid, size, epochs, seed, iteration):
        yield from parts


def epochs_of(
    valid: Tensor, size: int, epochs: int, seed: int, iteration: int
) -> Iterator[Sequence[Tensor]]:
    """The minibatches of one epoch after the other, as `minibatches` gives them.

    The order is a function of seed and iteration alone, so nothing random has to be saved.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + iteration)
    rows = valid.nonzero()[:, 0].cpu()
    if not len(rows):
        return
    for _ in range(epochs):
        order = rows[torch.randperm(len(rows), generator=generator)]
        count = max(1, round(len(order) / size))
        yield order.to(valid.device).tensor_split(count)


def descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, max_grad_norm: float, policy: Any
) -> list[Tensor]:
    """One optimiser step; the gradient norm of each parameter group before it was scaled down.

    Raises `NonFinite` naming the loss or the first parameter with a bad gradient.
    """
    optimizer.zero_grad(set_to_none=True)
    _require_finite(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    return step_with_gradients(optimizer, max_grad_norm, policy)


def descend_without_conflicts(
    optimizer: torch.optim.Optimizer,
    losses: Sequence[Tensor],
    rest: Tensor | None,
    max_grad_norm: float,
    policy: Policy,
    generator: torch.Generator,
) -> list[Tensor]:
    """`descend` on the tasks' losses, with conflicts between their gradients of the policy's
    parameters projected away (PCGrad), and on the rest of the loss."""
    optimizer.zero_grad(set_to_none=True)
    for loss in losses if rest is None else [*losses, rest]:
        _require_finite(loss)
    parameters = [p for p in policy.policy_parameters() if p.requires_grad]
    gradients = torch.stack([_flat_gradient(loss, parameters) for loss in losses])
    if rest is not None:
        rest.backward()  # type: ignore[no-untyped-call]
    joint = project_conflicts(gradients, generator)
    parts = torch.split(joint, [parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        own = part.view_as(parameter)
        parameter.grad = own if parameter.grad is None else parameter.grad + own
    return step_with_gradients(optimizer, max_grad_norm, policy)


def order_of_conflicts(seed: int, iteration: int) -> torch.Generator:
    """What draws the order in which an iteration's conflicts are projected away: a function of
    seed and iteration alone."""
    return torch.Generator().manual_seed(seed * 1_000_003 + iteration + 500_009)


def _flat_gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Gradient [P] with respect to all parameters in a row; the graph stays for the next loss."""
    found = torch.autograd.grad(
        loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([gradient.flatten() for gradient in found])


def _require_finite(loss: Tensor) -> None:
    if not torch.isfinite(loss):
        raise NonFinite(f"the loss is {loss.item()}; lower the learning rate or raise max_kl")


def step_with_gradients(
    optimizer: torch.optim.Optimizer, max_grad_norm: float, policy: Any
) -> list[Tensor]:
    """Clip the gradients that are there and step; the norms before, as `descend` returns them."""
    norms = [clip_grad_norm_(group["params"], max_grad_norm) for group in optimizer.param_groups]
    if not all(map(torch.isfinite, norms)):
        raise NonFinite(f"{_first_bad_gradient(policy)} has a gradient that is not finite")
    optimizer.step()
    return norms


def set_progress(policy: Policy, share: float) -> None:
    """Tell a policy whose exploration noise is annealed how much of the run [0, 1] is done."""
    anneal = getattr(policy, "set_progress", None)
    if anneal is not None:
        anneal(share)


def after_update(policy: Policy, batch: Batch) -> None:
    """Let a policy that keeps running statistics take in the states that were learned from."""
    take_in = getattr(policy, "after_update", None)
    if take_in is not None:
        take_in(batch.observation, batch.valid)


def require_ratio_level(policy: Policy, level: RatioLevel, length_rule: str = "decision") -> None:
    """Raise ValueError if the policy cannot compare its decisions at this level."""
    problem = refusal(policy, level, length_rule)
    if problem:
        raise ValueError(problem)


def scored_steps(batch: Batch, which: Literal["executed", "all"]) -> Tensor:
    """int64 [N]: how many control steps of each decision have a log-probability that counts
    (`UpdateConfig.scored_steps`); none of a decision of which nothing was executed."""
    if which == "executed":
        return batch.executed
    every = torch.full_like(batch.executed, batch.log_prob.shape[1])
    return torch.where(batch.executed > 0, every, batch.executed)


def ratios(
    seen: Evaluation, batch: Batch, rows: Tensor, scored: Tensor, level: RatioLevel
) -> tuple[Tensor, Tensor]:
    """Log-ratio of these rows [n] now to when they were decided, over their first `scored` [n]
    control steps, and its mask: [n], [n, H] or [n, P] (`log_ratio`)."""
    if level != "token":
        steps = executed_mask(scored, seen.log_prob.shape[1])
        return log_ratio(seen.log_prob, batch.log_prob[rows], steps, level)
    old, new, step = batch.token_log_prob, seen.token_log_prob, seen.token_step
    assert old is not None and new is not None and step is not None
    return log_ratio(new, old[rows], token_mask(step, scored), level)


def require_ratio_one(change: Tensor, tolerance: float) -> float:
    """The largest log-ratio before the first update; raises `RatioError` if it is not about 0."""
    worst = float(change.detach().abs().max())
    if not worst <= tolerance:
        raise RatioError(
            f"before any update the policy gives its own decisions another probability than "
            f"when it made them: largest log-ratio {worst:.3g}, allowed "
            f"{tolerance:g} (algorithm.ratio_tolerance). Usual causes: "
            f"dropout or another random layer, normalisation statistics that changed in "
            f"between, reduced precision in one of the two, or a trace that does not hold "
            f"what was drawn."
        )
    return worst


class Reference:
    """A frozen copy of the policy that the run began with, to stay near."""

    def __init__(self, policy: Policy) -> None:
        self._policy = copy.deepcopy(policy)
        for parameter in [*self._policy.policy_parameters(), *self._policy.value_parameters()]:
            parameter.requires_grad_(False)

    def set_progress(self, share: float) -> None:
        """Anneal its exploration noise with the policy's: only weights should set them apart."""
        set_progress(self._policy, share)

    @torch.no_grad()
    def log_prob(self, observation: Observation, trace: Mapping[str, Tensor]) -> Tensor:
        """Its log-probability [B, H] of recorded decisions."""
        return self._policy.evaluate(observation, trace).log_prob


def schedule(kind: Literal["constant", "linear", "cosine"], done: float) -> float:
    """Share of the learning rate that is left when a share `done` of the run is over."""
    return {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[kind]


def means(history: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each value over the steps that have it."""
    names = sorted({name for step in history for name in step})
    return {name: mean([step[name] for step in history if name in step]) for name in names}


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def _first_bad_gradient(policy: Any) -> str:
    named = getattr(policy, "named_parameters", dict)
    for name, parameter in dict(named()).items():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"parameter {name}"
    return "a parameter"
