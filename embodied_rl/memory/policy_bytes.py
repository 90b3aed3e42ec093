"""The memory of a policy: its weights on paper, and what it takes to decide and to learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import Contract, Observation, Policy
from embodied_rl.memory.arithmetic import gib
from embodied_rl.memory.parts import Growing, PolicyBytes
from embodied_rl.memory.tracking import bytes_of, peak_of
from embodied_rl.rollout.running import prepared
from embodied_rl.run_config import RunConfig

_ROWS = (2, 4)
"""Sizes of the batches that are measured; the rest lies on the line through them."""


def measure_policy(policy: Policy, seen: Observation, device: str) -> PolicyBytes:
    """A policy on the first of the observations, repeated. It may have no statistics yet."""
    rehearsal: Any = getattr(policy, "rehearsal", nullcontext)
    with rehearsal():
        return _measured(policy, seen, device)


def _measured(policy: Policy, seen: Observation, device: str) -> PolicyBytes:
    weights, contract = policy.state_dict(), policy.contract
    imitated = [p for p in policy.policy_parameters() if p.requires_grad]
    learned = [*imitated, *(p for p in policy.value_parameters() if p.requires_grad)]
    plain = [
        seen.to(device).select(torch.zeros(rows, dtype=torch.int64, device=device))
        for rows in _ROWS
    ]
    generator = torch.Generator(device).manual_seed(0)
    # What a frozen part makes of an observation is kept with the decision.
    batches = [prepared(policy, batch) for batch in plain]
    decisions = [policy.act(batch, generator, "explore") for batch in batches]

    def update(row: int) -> None:
        found = policy.evaluate(batches[row], decisions[row].trace)
        _backward([found.log_prob, found.entropy, found.value])

    def imitate(row: int) -> None:
        rows = _ROWS[row]
        steps: int = getattr(policy, "imitated_steps", policy.chunk)
        middle = torch.zeros(rows, steps, contract.action_dim, device=device)
        valid = torch.ones(rows, steps, dtype=torch.bool, device=device)
        _backward([policy.imitation_loss(plain[row], middle, valid, generator)])

    def act(row: int) -> None:
        policy.act(prepared(policy, plain[row]), generator, "explore")

    update(0)  # Gradients are then there, and what is only made once.
    lines = []
    for compute in (update, imitate, act):
        few, many = (peak_of(partial(compute, row), device) for row in (0, 1))
        lines.append(Growing.through((_ROWS[0], few), (_ROWS[1], many)))
    for parameter in learned:
        parameter.grad = None
    one = decisions[0]
    kept = [
        one.actions,
        one.log_prob,
        one.value,
        *one.trace.values(),
        *batches[0].prepared.values(),
    ]
    kept += [one.token_log_prob] if one.token_log_prob is not None else []
    reward = 4 * policy.chunk
    return PolicyBytes(
        weights=bytes_of(weights.values()),
        learned=bytes_of(learned),
        imitated=bytes_of(imitated),
        update=lines[0],
        imitation=lines[1],
        act=lines[2],
        observation=bytes_of([batches[0].state, *batches[0].images.values()]) // _ROWS[0],
        decision=bytes_of(kept) // _ROWS[0] + reward,
        action=4 * contract.action_dim + 8,
    )


def _backward(values: Sequence[Tensor]) -> None:
    total = torch.stack([value.float().sum() for value in values]).sum()
    total.backward()  # type: ignore[no-untyped-call]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory left, of whichever kind."""
    known = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, known) or "can't allocate memory" in str(error)


def weights_on_paper(config: RunConfig, contract: Contract) -> int | None:
    """Bytes of a run's first policy, without making it: from the header of the files that it is
    read from, else from the shapes that its options give. None where neither tells."""
    build: Any = config.policy
    folder = config.initial_policy or getattr(build, "path", None)
    if folder is not None:
        itemsize = 2 if getattr(build, "dtype", "float32") == "bfloat16" else 4
        return sum(map(_numbers_in, Path(folder).glob("*.safetensors"))) * itemsize or None
    try:
        with torch.device("meta"):
            policy = build.build(contract)
        return bytes_of(policy.state_dict().values())
    except Exception:  # Not every policy, least of all one from outside, can be built like that.
        return None


def _numbers_in(file: Path) -> int:
    """How many numbers a safetensors file holds: its header says it. None of a damaged one, of
    which whoever loads it will say more."""
    try:
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, OverflowError, MemoryError, TypeError, KeyError, AttributeError):
        return 0


def too_large(weights: int | None, left: int) -> str:
    """What to say of a policy that does not fit even alone."""
    known = f" (its weights alone are {gib(weights)})" if weights else ""
    return (
        f"this run does not fit: the policy{known} and {_ROWS[1]} rows of what it computes take "
        f"more than the {gib(left)} of memory that are free; choose a smaller policy or other "
        f"weights (policy.path), or run it where there is more memory"
    )
