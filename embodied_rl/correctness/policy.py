"""Does a policy keep the promises of contracts.Policy? Each gate is one of them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from embodied_rl.config import Config
from embodied_rl.contracts import Decision, Policy, Simulator
from embodied_rl.correctness.gates import Broken, Doubtful, Finding, Gate, pass_through
from embodied_rl.maths.losses import executed_mask, log_ratio
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.collector import Collector
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.training.policy_folder import load_policy, save_policy

LARGEST_LOG_RATIO = 1e-3
"""As training itself allows before the first update (algorithm.ratio_tolerance)."""

_DECISIONS = 6


@dataclass(frozen=True)
class PolicyBench:
    """A policy and decisions that it took in a running simulator."""

    policy: Policy
    config: Config
    batch: Batch


def examine_policy(policy: Policy, config: Config, simulator: Simulator) -> list[Finding]:
    """Every gate on decisions that the policy takes in the simulator.

    Raises ContractMismatch if the two do not fit.
    """
    policy.contract.require_equal(simulator.spec.contract, "the policy", "the simulator")
    planner = TrainingPlanner(simulator.spec.all_tasks, 0, simulator.spec.states)
    generator = torch.Generator().manual_seed(0)
    batch = Collector(simulator, policy, planner, generator, 1, _DECISIONS).collect()
    return pass_through(PolicyBench(policy, config, batch), GATES)


def shapes(bench: PolicyBench) -> str:
    """Shapes and bounds of a decision, exploring and deterministic."""
    for mode in ("explore", "deterministic"):
        decision = _act(bench, 0, mode)
        _require_shapes(bench, decision, mode)
    return f"actions {list(decision.actions.shape)} within bounds"


def _require_shapes(bench: PolicyBench, decision: Decision, mode: str) -> None:
    policy, rows, contract = bench.policy, len(bench.batch.observation), bench.policy.contract
    wanted = {
        "actions": (decision.actions, (rows, policy.chunk, contract.action_dim)),
        "log_prob": (decision.log_prob, (rows, policy.chunk)),
        "value": (decision.value, (rows,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise Broken(
                f"{name} ({mode}) is {tensor.dtype} {list(tensor.shape)}; it must be float32 "
                f"{list(shape)}"
            )
        if not tensor.isfinite().all():
            raise Broken(f"{name} ({mode}) has entries that are not finite")
    low, high = torch.tensor(contract.action_low), torch.tensor(contract.action_high)
    if (decision.actions < low).any() or (decision.actions > high).any():
        raise Broken(f"actions ({mode}) leave the contract's bounds; cut them after they are drawn")
    for name, tensor in decision.trace.items():
        if len(tensor) != rows:
            raise Broken(f"trace[{name!r}] has {len(tensor)} rows for {rows} decisions")


def ratio(bench: PolicyBench) -> str:
    """`evaluate` on collected decisions gives the log-probability that `act` gave."""
    worst = float(_change(bench, torch.arange(len(bench.batch.log_prob))).abs().max())
    if not worst <= LARGEST_LOG_RATIO:
        raise Broken(
            f"before any update the largest log-ratio is {worst:.3g} instead of 0: look for "
            f"dropout, statistics that move between act and evaluate, reduced precision, or a "
            f"trace that does not hold what was drawn"
        )
    return f"largest log-ratio before any update {worst:.1e}"


def tokens(bench: PolicyBench) -> str:
    """Log-probabilities of tokens, if there are any, are reproduced and add up to `log_prob`."""
    batch = bench.batch
    seen = bench.policy.evaluate(batch.observation, batch.trace)
    new, old, step = seen.token_log_prob, batch.token_log_prob, seen.token_step
    if new is None or old is None or step is None:
        if not (new is None and old is None and step is None):
            raise Broken(
                "token_log_prob (of act and evaluate) and token_step go together: give all or none"
            )
        return "the policy has no tokens"
    worst = float((new - old).detach().abs().max())
    if not worst <= LARGEST_LOG_RATIO:
        raise Broken(f"evaluate changes the log-probability of a token by {worst:.3g}")
    padded = step < 0
    total = torch.zeros_like(batch.log_prob).scatter_add(
        1, step.clamp_min(0), old.masked_fill(padded, 0.0)
    )
    away = float((total - batch.log_prob).abs().max())
    if not away <= LARGEST_LOG_RATIO:
        raise Broken(f"token_log_prob, added up by token_step, differs from log_prob by {away:.3g}")
    return f"reproduced to {worst:.1e}, and {int((~padded).sum(1).max())} at most add up"


def minibatches(bench: PolicyBench) -> str:
    """A decision's log-probability does not depend on which others it is evaluated with."""
    count = len(bench.batch.log_prob)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    parts = [_log_prob(bench, rows) for rows in torch.split(order, max(1, count // 3))]
    whole = _log_prob(bench, torch.arange(count))[order]
    worst = float((torch.cat(parts) - whole).detach().abs().max())
    if not worst <= LARGEST_LOG_RATIO:
        raise Broken(
            f"in minibatches of another order the log-probability changes by {worst:.3g}: rows "
            f"influence each other (batch normalisation, padding, a shared random number)"
        )
    return f"largest change in other minibatches {worst:.1e}"


def rows(bench: PolicyBench) -> str:
    """With a generator per row, a row's decision does not depend on the rest of the batch."""
    seen = bench.batch.observation
    everyone = list(range(len(seen)))
    some = everyone[::2]
    together = bench.policy.act(seen, _generators(everyone), "explore")
    apart = bench.policy.act(seen.select(torch.tensor(some)), _generators(some), "explore")
    worst = float((together.actions[some] - apart.actions).abs().max())
    if not worst <= 1e-4:
        raise Broken(
            f"the same row decides otherwise in another batch (by {worst:.3g}): draw every random "
            f"number from the row's own generator"
        )
    return f"largest change in another batch {worst:.1e}"


def seeds(bench: PolicyBench) -> str:
    """Randomness comes from the generator alone."""
    first, again, other = _act(bench, 0), _act(bench, 0), _act(bench, 1)
    if not torch.equal(first.actions, again.actions):
        raise Broken("the same generator gives other actions: something draws without it")
    if torch.equal(first.actions, other.actions):
        raise Broken("another generator gives the same actions: nothing is explored")
    calm = [_act(bench, 0, "deterministic") for _ in range(2)]
    if not torch.equal(calm[0].actions, calm[1].actions):
        raise Broken("a deterministic decision is not repeatable")
    if calm[0].trace or calm[0].log_prob.any():
        raise Broken("a deterministic decision must have log_prob 0 and an empty trace")
    spread = float((first.actions - calm[0].actions).abs().mean())
    return f"repeatable; exploration moves actions by {spread:.2g} on average"


def gradients(bench: PolicyBench) -> str:
    """Gradients of the log-probability reach the policy's parameters and are finite."""
    rows = torch.arange(len(bench.batch.log_prob))
    parameters = bench.policy.policy_parameters()
    found = torch.autograd.grad(_log_prob(bench, rows).sum(), parameters, allow_unused=True)
    reached = [gradient for gradient in found if gradient is not None]
    if not reached or not any(gradient.any() for gradient in reached):
        raise Broken("no gradient of the log-probability reaches policy_parameters()")
    if not all(gradient.isfinite().all() for gradient in reached):
        raise Broken("gradients of the log-probability are not finite: guard a division or a log")
    if len(reached) < len(parameters):
        missing = len(parameters) - len(reached)
        raise Doubtful(
            f"{missing} of {len(parameters)} policy parameters get no gradient: does the policy "
            f"use them?"
        )
    return f"finite, and all {len(parameters)} policy parameters get one"


def value_apart(bench: PolicyBench) -> str:
    """The value loss does not bend what the policy knows."""
    policy = bench.policy
    parameters = policy.policy_parameters()
    value = policy.value(bench.batch.observation)
    evaluated = policy.evaluate(bench.batch.observation, bench.batch.trace).value
    worst = float((value - evaluated).detach().abs().max())
    if not worst <= 1e-4:
        raise Broken(f"value() and evaluate() differ in the value by {worst:.3g}")
    if not value.requires_grad:
        raise Broken("the value has no gradient: nothing could be learned from returns")
    found = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
    touched = sum(gradient is not None and bool(gradient.any()) for gradient in found)
    if touched:
        raise Doubtful(
            f"the value loss also changes {touched} policy parameters; detach the features if "
            f"that is not wanted"
        )
    return "the value has its own parameters"


def parameters(bench: PolicyBench) -> str:
    """Every trainable parameter belongs to the policy or to the value, and to one alone."""
    policy: Any = bench.policy
    mine = {id(p) for p in policy.policy_parameters()}
    values = {id(p) for p in policy.value_parameters()}
    if mine & values:
        raise Broken(f"{len(mine & values)} parameters are both the policy's and the value's")
    left = [
        name
        for name, p in policy.named_parameters()
        if p.requires_grad and id(p) not in mine | values
    ]
    if left:
        raise Doubtful(f"never trained, because in neither list: {', '.join(left[:4])}")
    return f"{len(mine)} of the policy, {len(values)} of the value"


def folder(bench: PolicyBench) -> str:
    """A saved and loaded policy decides the same, to the bit."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "policy"
        save_policy(bench.policy, bench.config, path)
        again = load_policy(path).policy
    before = _act(bench, 0)
    after = _act(PolicyBench(again, bench.config, bench.batch), 0)
    if not torch.equal(before.actions, after.actions):
        worst = float((before.actions - after.actions).abs().max())
        raise Broken(
            f"after saving and loading, actions differ by {worst:.3g}: some state is no parameter "
            f"or persistent buffer"
        )
    return "decides the same after saving and loading"


GATES: dict[str, Gate[PolicyBench]] = {
    "shapes": shapes,
    "ratio": ratio,
    "tokens": tokens,
    "minibatches": minibatches,
    "rows": rows,
    "seeds": seeds,
    "gradients": gradients,
    "value": value_apart,
    "parameters": parameters,
    "folder": folder,
}


def _act(
    bench: PolicyBench, seed: int, mode: Literal["explore", "deterministic"] = "explore"
) -> Decision:
    generator = torch.Generator().manual_seed(seed)
    return bench.policy.act(bench.batch.observation, generator, mode)


def _generators(seeds: list[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def _log_prob(bench: PolicyBench, rows: Tensor) -> Tensor:
    trace = {name: tensor[rows] for name, tensor in bench.batch.trace.items()}
    return bench.policy.evaluate(bench.batch.observation.select(rows), trace).log_prob


def _change(bench: PolicyBench, rows: Tensor) -> Tensor:
    """Joint log-ratio [N] of the executed steps of each decision."""
    batch = bench.batch
    mask = executed_mask(batch.executed[rows], batch.log_prob.shape[1])
    return log_ratio(_log_prob(bench, rows), batch.log_prob[rows], mask, "chunk")[0].detach()
