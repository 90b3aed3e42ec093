"""Does a run work at all? All of its phases for real, with next to no work in each."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from embodied_rl.contracts import Policy
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RunConfig
from embodied_rl.shrunk import shrunk
from embodied_rl.training.checkpoint import CheckpointStore
from embodied_rl.training.loop import TrainResult, device_of, simulator_of, train
from embodied_rl.training.metrics import read
from embodied_rl.training.policy_folder import load_policy


class DryRunFailed(RuntimeError):
    """A run that went through without doing what it is for."""


@dataclass(frozen=True)
class DryRun:
    """A dry run that passed."""

    changes: dict[str, tuple[Any, Any]]
    """Options that were made smaller: what they were, and what they were for the dry run."""
    checked: list[str]
    """What was done and found good, in words."""
    seconds: float


def dry_run(config: RunConfig) -> DryRun:
    """Go through a run made small, in a folder beside the real one's that is removed at the end.

    Raises whatever the run itself would raise, and `DryRunFailed` if it did not change the policy.
    """
    began = time.monotonic()
    small, changes = shrunk(config)
    is_new = not config.runs_dir.exists()
    config.runs_dir.mkdir(parents=True, exist_ok=True)
    try:
        # Not among the system's temporary files, which may lie in memory: policies can be large.
        with tempfile.TemporaryDirectory(
            prefix=f"{config.name}-dry-run-", dir=config.runs_dir
        ) as folder:
            small = small.model_copy(update={"runs_dir": Path(folder)})
            checked = _checked(small, train(small))
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                config.runs_dir.rmdir()
    return DryRun(changes, checked, time.monotonic() - began)


def _checked(config: RunConfig, result: TrainResult) -> list[str]:
    entries = read(config.directory)
    steps = f"the simulator executed {result.summary['env_steps']} control steps"
    found = [steps] if config.iterations else []
    if config.imitation and not config.initial_policy:
        found.append(f"imitation took {config.imitation.steps} steps")
    if config.iterations:
        found += _learning(config, [e["values"] for e in entries if e["phase"] == "rl"])
        if CheckpointStore(config.directory / "checkpoints", 1).latest() is None:
            raise DryRunFailed("the dry run failed: its checkpoint cannot be read back")
        found.append("the last checkpoint was read back")
    count = result.summary["after"]["episodes"]
    return [*found, f"start and final policy were saved, loaded and evaluated on {count} states"]


def _learning(config: RunConfig, curves: list[dict[str, float]]) -> list[str]:
    """What the updates did. Where no group had anything to teach, one is made up."""
    start, final = (
        load_policy(config.directory / "policies" / name).policy for name in ("start", "final")
    )
    ratios = [values["first_log_ratio"] for values in curves if "first_log_ratio" in values]
    how = f"{len(ratios)} iterations"
    if not ratios:
        ratio, final = _rehearsed(config)
        ratios = [ratio]
        how = "an update with made-up returns, because those of every group were equal,"
    limit: Any = getattr(config.algorithm, "ratio_tolerance", None)
    changed = _num_changed(start, final)
    if not changed:
        raise DryRunFailed(
            f"the dry run failed: {how} left all parameters of the policy as they were; is its "
            f"learning rate (algorithm.learning_rate) too small, or everything frozen?"
        )
    return [
        f"the policy reproduces its log-probabilities (largest log-ratio {max(ratios):.1e}, "
        f"allowed {limit:g})",
        f"{how} changed {changed} of {len(_deciding(start))} tensors of the policy",
    ]


def _rehearsed(config: RunConfig) -> tuple[float, Policy]:
    """One more iteration, whose episodes are said to have returned 0, 1, 2 and so on: the largest
    log-ratio before its update, and the policy after it."""
    device = device_of(config)
    policy = load_policy(config.directory / "policies" / "start", device).policy
    build: Any = config.algorithm
    algorithm = build.build(policy, config.seed)
    simulator = simulator_of(config)
    try:
        spec = simulator.spec
        planner = TrainingPlanner(spec.all_tasks, config.seed, spec.states, algorithm.group_size)
        generator = torch.Generator(device).manual_seed(config.seed)
        batch = algorithm.collector(simulator, planner, generator, config.rollout.halves).collect()
    finally:
        simulator.close()
    results = [replace(r, total_reward=float(i)) for i, r in enumerate(batch.results)]
    taught = replace(batch, results=results, valid=torch.ones_like(batch.valid))
    ratio: float = algorithm.update(taught, 0)["first_log_ratio"]
    return ratio, policy


def _num_changed(before: Policy, after: Policy) -> int:
    pairs = zip(_deciding(before), _deciding(after), strict=True)
    return sum(not torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def _deciding(policy: Policy) -> list[torch.nn.Parameter]:
    """All weights but the value's, also those that do not learn: adapters are merged into them when
    a policy is saved."""
    every: Any = getattr(policy, "parameters", policy.policy_parameters)
    value = {id(parameter) for parameter in policy.value_parameters()}
    return [parameter for parameter in every() if id(parameter) not in value]
