"""Recorded demonstrations, executed again: as they are, and by way of a checkpoint's convention."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from embodied_rl.contracts import Contract, Environment, Episode
from embodied_rl.conventions.adapter import Adapter
from embodied_rl.correctness.config import ReplayCheck
from embodied_rl.correctness.gates import Finding
from embodied_rl.correctness.replay_words import fingers, likely_causes, part_of
from embodied_rl.run_config import DemonstrationsConfig
from embodied_rl.training.demonstrations import load_vectors
from embodied_rl.training.lerobot_folder import OUR_FILE, BadDemonstrations

_CLOSE = 1e-3
"""Actions that differ by less are the same: about a twentieth of a millimetre."""


@dataclass(frozen=True)
class Replay:
    """How it went."""

    episodes: int
    direct: int
    """Demonstrations that succeed with their recorded actions."""
    adapted: int
    """Those that succeed with actions that went through the convention and back."""
    lost: tuple[int, ...]
    """Numbers of the episodes that succeed directly and no longer through the convention."""
    largest_error: float
    """Between recorded actions and those that came back, in the simulator's units."""
    where: str
    """Which part of which action that is."""


def examine_replay(path: Path, options: ReplayCheck) -> tuple[list[Finding], Replay]:
    """Execute the demonstrations of a data set again, from their recorded initial states.

    Raises `BadDemonstrations` if the data set does not tell how, ContractMismatch if it does not
    fit the simulator or the convention fits neither.
    """
    episodes = recorded_episodes(path)[: options.episodes]
    simulator: Any = options.simulator
    environment: Environment = simulator.build_environment()
    try:
        contract = environment.spec.contract
        told = Adapter(options.convention, contract, reads_state=False)
        spoken = Adapter(options.spoken or options.convention, contract, reads_state=False)
        wanted = DemonstrationsConfig(path=path, episodes=len(episodes))
        data = load_vectors(path, contract, wanted)
        recorded = data.by_episode()
        back = [told.to_simulator(spoken.to_checkpoint(actions)) for actions in recorded]
        direct = _successes(environment, episodes, recorded)
        adapted = _successes(environment, episodes, back) if told.convention else direct
    finally:
        environment.close()
    error, where = _largest(contract, recorded, back)
    lost = tuple(i for i, (a, b) in enumerate(zip(direct, adapted, strict=True)) if a and not b)
    replay = Replay(len(episodes), sum(direct), sum(adapted), lost, error, where)
    findings = [_directly(replay), fingers(contract, data)]
    if told.convention:
        causes = likely_causes(contract, recorded, back)
        findings += [_round_trip(replay, causes), _adapted(replay, told, spoken, causes)]
    return findings, replay


def to_json(replay: Replay) -> dict[str, Any]:
    """Plain data."""
    return asdict(replay) | {"lost": list(replay.lost)}


def recorded_episodes(path: Path) -> list[Episode]:
    """The episodes of a data set in order, with their initial states. Raises `BadDemonstrations`
    where executing the recorded actions would not lead through what was recorded."""
    file = path / OUR_FILE
    description: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if not description.get("episodes"):
        raise BadDemonstrations(
            f"the demonstrations in {path} cannot be executed again: it has no {OUR_FILE} with the "
            f"initial states of its episodes. Record some with `embodied-rl collect`"
        )
    if description["action_noise"]:
        raise BadDemonstrations(
            f"the demonstrations in {path} cannot be executed again: they were recorded with "
            f"action_noise={description['action_noise']}, and the noise is not in their actions. "
            f"Record others with demonstrations.action_noise=0"
        )
    return [Episode.from_json(episode) for episode in description["episodes"]]


def _successes(
    environment: Environment, episodes: Sequence[Episode], actions: Sequence[Tensor]
) -> list[bool]:
    """Which episodes come to a success with these actions, [L, A] each."""
    found = []
    for episode, chosen in zip(episodes, actions, strict=True):
        environment.reset(episode)
        success = False
        for action in chosen:
            outcome = environment.step(action.numpy())
            success = outcome.success
            if success or outcome.terminated or outcome.truncated:
                break
        found.append(success)
    return found


def _largest(
    contract: Contract, recorded: Sequence[Tensor], back: Sequence[Tensor]
) -> tuple[float, str]:
    errors = [(a - b).abs() for a, b in zip(recorded, back, strict=True)]
    number = max(range(len(errors)), key=lambda i: float(errors[i].max()))
    step, entry = divmod(int(errors[number].argmax()), contract.action_dim)
    where = f"{part_of(contract, entry)} (entry {entry}) of step {step} in episode {number}"
    return float(errors[number].max()), where


def _directly(replay: Replay) -> Finding:
    text = f"{replay.direct} of {replay.episodes} demonstrations succeed with their own actions"
    if not replay.direct:
        advice = "the simulator is not the one that they were recorded in"
        return Finding("direct replay", "fail", f"{text}; {advice}")
    if replay.direct < replay.episodes:
        advice = "the simulator repeats itself only nearly; look at more episodes"
        return Finding("direct replay", "warn", f"{text}; {advice}")
    return Finding("direct replay", "ok", text)


def _round_trip(replay: Replay, causes: list[str]) -> Finding:
    text = (
        f"actions come back with a difference of {replay.largest_error:.2g} at most, in "
        f"{replay.where}"
    )
    if replay.largest_error > _CLOSE:
        return Finding("round trip", "warn", "; ".join([text, *causes]))
    return Finding("round trip", "ok", text)


def _adapted(replay: Replay, told: Adapter, spoken: Adapter, causes: list[str]) -> Finding:
    through = f"through the convention {told.name}"
    if spoken.convention != told.convention:
        through += f", of a checkpoint that speaks {spoken.name}"
    text = f"{replay.adapted} of {replay.episodes} demonstrations succeed {through}"
    if not replay.lost:
        if spoken.convention == told.convention:
            text += ". Nothing is lost on the way; what a checkpoint that speaks another one would "
            text += "do, spoken=NAME tells"
        return Finding("adapter", "ok", text)
    several = f"{len(replay.lost)} that succeed directly are lost, the first is {replay.lost[0]}"
    return Finding("adapter", "fail", "; ".join([text, several, *causes]))
