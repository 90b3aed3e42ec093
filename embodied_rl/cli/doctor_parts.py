"""`embodied-rl doctor policy` and `doctor simulator`: from words to the gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodied_rl import catalogue
from embodied_rl.config import ConfigError, load
from embodied_rl.correctness.config import PolicyCheck, SimulatorCheck
from embodied_rl.correctness.gates import Finding


def simulator(name: str, overrides: list[str]) -> list[Finding]:
    """The gates of a simulator, by its name."""
    from embodied_rl.correctness.simulator import examine_simulator

    options = load(SimulatorCheck, None, [f"simulator={name}", *overrides])
    return examine_simulator(options.simulator)


def policy(target: str, overrides: list[str]) -> list[Finding]:
    """The gates of a policy: a new one by its name, or a saved one by its folder."""
    import torch

    from embodied_rl.correctness.policy import examine_policy
    from embodied_rl.rollout.build import build_simulator
    from embodied_rl.run_config import RolloutConfig
    from embodied_rl.training.policy_folder import load_policy, policy_in

    folder = policy_in(Path(target))
    if folder is None and target not in catalogue.names("policy"):
        raise ConfigError(
            f"{target!r} is neither a policy's name ({', '.join(catalogue.names('policy'))}) nor a "
            f"policy's or run's folder"
        )
    options = _both(target, overrides) if folder is None else _saved(folder, overrides)
    config: Any = options.policy
    rollout = RolloutConfig(num_slots=4, halves=1, num_workers=0)
    if getattr(options.simulator, "batched", False):
        rollout = RolloutConfig(num_slots=4, halves=1)
    chunk: int = getattr(config, "chunk", 1)
    running = build_simulator(options.simulator, rollout, chunk)
    try:
        torch.manual_seed(0)
        made = load_policy(folder).policy if folder else config.build(running.spec.contract)
        return examine_policy(made, config, running)
    finally:
        running.close()


def _both(name: str, overrides: list[str]) -> PolicyCheck:
    """A new policy, on ManiSkill where no simulator is given."""
    chosen = overrides
    if not any(text.partition("=")[0] == "simulator" for text in overrides):
        needs_cameras = getattr(catalogue.config_class("policy", name), "needs_cameras", False)
        images = ["simulator.observation=rgb"] if needs_cameras else []
        chosen = ["simulator=maniskill", *images, *overrides]
    return load(PolicyCheck, None, [f"policy={name}", *chosen])


def _saved(folder: Path, overrides: list[str]) -> PolicyCheck:
    """A saved policy, on the simulator that was saved beside it."""
    stored = json.loads((folder / "policy.json").read_text())
    foreign = [text for text in overrides if not text.startswith("simulator")]
    if foreign:
        raise ConfigError(f"a saved policy keeps its options, got {foreign[0]!r}")
    beside = stored["extra"].get("simulator")
    given: list[str] = []
    if not any(text.partition("=")[0] == "simulator" for text in overrides):
        if beside is None:
            raise ConfigError(f"{folder} does not say where it acts; add simulator=NAME")
        kept = {key: value for key, value in beside.items() if key != "type"}
        given = [f"simulator={beside['type']}"]
        given += [f"simulator.{key}={json.dumps(value)}" for key, value in kept.items()]
    known = stored["policy"]
    given += [f"policy={known['type']}"]
    given += [f"policy.{k}={json.dumps(v)}" for k, v in known.items() if k != "type"]
    return load(PolicyCheck, None, [*given, *overrides])
