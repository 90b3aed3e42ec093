"""`embodied-rl doctor policy`, `doctor simulator` and `doctor replay`: from words to the gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodied_rl import catalogue
from embodied_rl.config import ConfigError, load
from embodied_rl.correctness.config import PolicyCheck, ReplayCheck, SimulatorCheck
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


def replay(target: str, overrides: list[str]) -> tuple[list[Finding], dict[str, Any]]:
    """Demonstrations of a data set's folder, or of a run by its configuration, executed again; the
    same as figures."""
    from embodied_rl.correctness.replay import examine_replay, to_json
    from embodied_rl.training.lerobot_folder import OUR_FILE

    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        folder, options = _replay_of_run(path, overrides)
    else:
        folder, file = path, path / OUR_FILE
        if not file.is_file():
            raise ConfigError(
                f"{target} has no {OUR_FILE}, so it is no data set that `embodied-rl collect` "
                f"recorded; only of those the initial states are known"
            )
        simulator = json.loads(file.read_text())["simulator"]
        options = load(ReplayCheck, None, [*_as_overrides("simulator", simulator), *overrides])
    findings, result = examine_replay(folder, options)
    return findings, to_json(result)


def _replay_of_run(file: Path, overrides: list[str]) -> tuple[Path, ReplayCheck]:
    """Where a configuration's demonstrations are, the convention of its policy, and that of its
    checkpoint as far as the name of the statistics tells."""
    from embodied_rl.conventions.evidence import spoken_by
    from embodied_rl.run_config import RunConfig

    own = [t for t in overrides if t.split("=")[0].split(".")[0] in ("spoken", "episodes")]
    run = load(RunConfig, file, [text for text in overrides if text not in own])
    folder = run.demonstrations and run.demonstrations.path
    folder = folder or run.directory / "demonstrations"
    if not folder.exists():
        raise ConfigError(
            f"there are no demonstrations in {folder} yet; record them with `embodied-rl collect "
            f"{file} --output {folder}`, or set demonstrations.path"
        )
    convention = getattr(run.policy, "convention", None)
    given = _as_overrides("simulator", run.simulator.model_dump(mode="json"))
    if convention is not None:
        given.append(f"convention={json.dumps(convention.model_dump(mode='json'))}")
        if spoken := spoken_by(getattr(run.policy, "unnorm_key", None)):
            given.append(f"spoken={spoken.name}")
    return folder, load(ReplayCheck, None, [*given, *own])


def _as_overrides(kind: str, options: dict[str, Any]) -> list[str]:
    """Options of a part as they would be written on the command line."""
    rest = [f"{kind}.{k}={json.dumps(v)}" for k, v in options.items() if k != "type"]
    return [f"{kind}={options['type']}", *rest]


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
        given = _as_overrides("simulator", beside)
    given += _as_overrides("policy", stored["policy"])
    return load(PolicyCheck, None, [*given, *overrides])
