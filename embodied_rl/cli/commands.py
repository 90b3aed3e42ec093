"""What each command does. A command returns plain words and the same as data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl import catalogue
from embodied_rl.cli import best_of
from embodied_rl.cli import plan as plans
from embodied_rl.config import GROUPS, Config, ConfigError, load
from embodied_rl.run_config import RolloutConfig, RunConfig

if TYPE_CHECKING:
    from embodied_rl.contracts import Episode, Simulator
    from embodied_rl.training.policy_folder import LoadedPolicy

type Answer = tuple[str, Any]


def train(given: argparse.Namespace) -> Answer:
    """`embodied-rl train`."""
    config = load(RunConfig, given.config, given.overrides)
    if given.dry_run and given.resume:
        raise ConfigError("--dry-run begins anew and leaves nothing behind; leave out --resume")
    if given.dry_run:
        return _dry_run(config, None if given.force else plans.require_memory(config))
    from embodied_rl.training.loop import train as run

    watch = {} if given.force else {"watch": plans.watch(config)}
    result = run(config, given.resume, **watch)
    return f"{result.line}\neverything is in {config.directory}", result.summary


def _dry_run(config: RunConfig, memory: str | None) -> Answer:
    from embodied_rl.training.dry_run import dry_run

    found = dry_run(config)
    checked = found.checked if memory is None else [memory, *found.checked]
    changes = [f"  {name}={new} instead of {old}" for name, (old, new) in found.changes.items()]
    lines = ["options of the dry run:", *changes]
    lines += ["checked:", *(f"  {text}" for text in checked)]
    lines.append(
        f"the dry run passed in {found.seconds:.0f} s: {len(checked)} checks of simulator, policy, "
        f"learning, evaluation and checkpoint, as listed above; nothing is left of it on disk"
    )
    shrunk = {name: {"from": old, "to": new} for name, (old, new) in found.changes.items()}
    data = {"ok": True, "shrunk": shrunk, "checked": checked, "seconds": round(found.seconds, 1)}
    return "\n".join(lines), data


def plan(given: argparse.Namespace) -> Answer:
    """`embodied-rl plan`."""
    return plans.plan(load(RunConfig, given.config, given.overrides))


def imitate(given: argparse.Namespace) -> Answer:
    """`embodied-rl imitate`."""
    config = load(RunConfig, given.config, given.overrides)
    if not config.imitation:
        raise ConfigError(f"{given.config} sets no demonstrations and no imitation")
    from embodied_rl.training.loop import imitate_only

    watch = {} if given.force else {"watch": plans.watch(config, reinforces=False)}
    result = imitate_only(config, given.resume, **watch)
    return f"{result.line}\nthe policy is {config.directory}/policies/start", result.summary


def collect(given: argparse.Namespace) -> Answer:
    """`embodied-rl collect`."""
    overrides = given.overrides
    if given.episodes is not None:
        count = f"demonstrations.episodes={given.episodes}"
        overrides = [*overrides, count, "demonstrations.by_task=null"]
    config = load(RunConfig, given.config, overrides)
    if not config.demonstrations:
        raise ConfigError(f"{given.config} sets no demonstrations; add demonstrations.episodes=50")
    from embodied_rl.training.progress import ProgressLine
    from embodied_rl.training.recording import record

    options = config.demonstrations
    task: Any = getattr(config.simulator, "task", "demonstrations")
    task = task if isinstance(task, str) else "+".join(task)
    path = given.output or Path("data") / str(task)
    with ProgressLine("demonstrations", options.total) as progress:
        summary = record(
            config.simulator,
            path,
            options.by_task or options.total,
            options.action_noise,
            config.seed,
            lambda successes, attempts: progress.update(successes, f"{attempts} attempts"),
            options.video,
        )
    words = (
        f"{summary.episodes} successes of {summary.attempts} attempts, {summary.frames} frames, "
        f"in {summary.seconds:.0f} s: {path}"
    )
    data = {"path": str(path), "episodes": summary.episodes, "attempts": summary.attempts}
    return words, data | {"frames": summary.frames, "seconds": round(summary.seconds, 1)}


def evaluate(given: argparse.Namespace) -> Answer:
    """`embodied-rl evaluate`."""
    folder = _policy_folder(given.policy)
    simulator = _simulator_options(folder, given.overrides)
    for name in ("episodes", "slots"):
        if getattr(given, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(given, name)}")
    if given.best_of:
        best_of.check(given.best_of, simulator)
    from embodied_rl.evaluation.evaluate import protocol
    from embodied_rl.rollout.build import build_simulator
    from embodied_rl.rollout.planner import evaluation_plan
    from embodied_rl.training.policy_folder import load_policy

    device = _device(given.device)
    loaded = load_policy(folder, device)
    slots = min(given.slots, given.episodes)
    rollout = RolloutConfig(num_slots=slots, halves=2 if slots % 2 == 0 else 1)
    running = build_simulator(simulator, rollout, loaded.policy.chunk, device)
    try:
        spec = running.spec
        plan = evaluation_plan(spec.all_tasks, given.episodes, given.seed, "final", spec.states)
        options = simulator.model_dump(mode="json")
        header = protocol(loaded.fingerprint, options, plan, given.seed)
        run = best_of.run if given.best_of else _run_once
        return run(given, loaded, running, plan, rollout.halves, device, header)
    finally:
        running.close()


def _run_once(
    given: argparse.Namespace,
    loaded: LoadedPolicy,
    simulator: Simulator,
    plan: list[Episode],
    halves: int,
    device: str,
    header: dict[str, Any],
) -> Answer:
    from embodied_rl.evaluation.evaluate import evaluate as run
    from embodied_rl.training.progress import ProgressLine

    with ProgressLine("evaluate", len(plan)) as progress:
        summary = run(
            loaded.policy,
            simulator,
            plan,
            halves,
            given.seed,
            device,
            output=given.output,
            header=header,
            on_progress=lambda done, good: progress.update(done, f"{good} successes"),
        )
    lines = [f"{summary.task}: success {summary.in_words} over {summary.episodes} held-out states"]
    lines += [f"  {name}: {part.in_words}" for name, part in summary.by_task.items()]
    lines.append(
        f"at the end {100 * summary.success_at_end:.1f} % "
        f"[{100 * summary.low_at_end:.1f}, {100 * summary.high_at_end:.1f}], "
        f"{summary.mean_steps:.1f} steps on average"
    )
    lines += [f"error in {key}: {text}" for key, text in summary.errors.items()]
    return "\n".join(lines), summary.to_json() | {"protocol": header}


def report(given: argparse.Namespace) -> Answer:
    """`embodied-rl report`."""
    from embodied_rl.training.report import write_report

    path = write_report(given.run)
    return f"wrote {path}", {"report": str(path)}


def doctor(given: argparse.Namespace) -> Answer:
    """`embodied-rl doctor`."""
    from embodied_rl.cli import doctor as machine
    from embodied_rl.cli import doctor_parts

    figures: dict[str, Any] = {}
    if given.what is None:
        findings = machine.examine()
    elif given.target is None:
        raise ConfigError(f"name the {given.what} to look at: embodied-rl doctor {given.what} NAME")
    elif given.what == "policy":
        findings = doctor_parts.policy(given.target, given.overrides)
    elif given.what == "replay":
        findings, figures["replay"] = doctor_parts.replay(given.target, given.overrides)
    else:
        findings = doctor_parts.simulator(given.target, given.overrides)
    lines = [f"{finding.state:4}  {finding.name}: {finding.text}" for finding in findings]
    ok = all(finding.state != "fail" for finding in findings)
    data = {"ok": ok, "findings": [vars(finding) for finding in findings]}
    return "\n".join(lines), data | figures


def list_parts(given: argparse.Namespace) -> Answer:
    """`embodied-rl list`."""
    if given.what == "configs":
        files = sorted(str(path.relative_to(GROUPS.parent)) for path in GROUPS.rglob("*.yaml"))
        return "\n".join(files), files
    if given.what == "parts":
        return _list_kinds()
    from simulators.maniskill_tasks import list_tasks

    tasks = list_tasks()
    lines = []
    for task in tasks:
        marks = ["fast path"] * task.has_fast_path + ["expert"] * task.has_expert
        if task.missing_assets:
            marks.append(f"needs a download: {', '.join(task.missing_assets)}")
        lines.append(f"{task.name:40} {', '.join(marks)}".rstrip())
    return "\n".join(lines), [vars(task) for task in tasks]


def _list_kinds() -> Answer:
    lines: list[str] = []
    data: dict[str, dict[str, str]] = {}
    for kind in catalogue.PARTS:
        lines.append(f"{kind}:")
        data[kind] = {}
        for name in catalogue.names(kind):
            try:
                text = (catalogue.config_class(kind, name).__doc__ or "").strip()
                meaning = text.partition("\n")[0]
            except ImportError as error:
                meaning = f"not usable: {error}"
            lines.append(f"  {name:14} {meaning}")
            data[kind][name] = meaning
    return "\n".join(lines), data


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; leave --device out")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _policy_folder(path: Path) -> Path:
    """The folder itself, or a run's best result."""
    from embodied_rl.training.policy_folder import policy_in

    found = policy_in(path)
    if found is None:
        raise FileNotFoundError(f"{path} holds no policy: no policy.json there nor under policies/")
    return found


def _simulator_options(folder: Path, overrides: list[str]) -> Any:
    """The simulator that the policy was trained with, with overrides applied."""
    stored = json.loads((folder / "policy.json").read_text())["extra"].get("simulator")
    if stored is None:
        raise ConfigError(f"{folder} does not say which simulator it is for")
    foreign = [text for text in overrides if not text.startswith("simulator.")]
    if foreign:
        raise ConfigError(f"only simulator.* can be changed in an evaluation, got {foreign[0]!r}")
    kind = catalogue.config_class("simulator", stored["type"])
    given = [f"{key}={json.dumps(value)}" for key, value in stored.items()]
    changed = [text.removeprefix("simulator.") for text in overrides]
    options: Config = load(kind, None, [*given, *changed])
    return options
