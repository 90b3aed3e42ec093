"""Measuring success over planned episodes: one row per episode on disk, resumed by its key."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from embodied_rl.contracts import Episode, Policy, Simulator
from embodied_rl.files import write_json, write_text
from embodied_rl.maths.intervals import wilson_interval
from embodied_rl.rollout.batch import EpisodeResult
from embodied_rl.rollout.episodes import run_episodes
from embodied_rl.rollout.lookahead import BestOf
from embodied_rl.versions import package_versions

_ROWS, _HEADER, _RESULT = "episodes.jsonl", "protocol.json", "result.json"


class OtherEvaluation(ValueError):
    """The output folder holds the episodes of another policy, simulator or plan."""


@dataclass(frozen=True)
class EvaluationSummary:
    """Success over the whole plan. Episodes that failed to run count as failures."""

    task: str
    episodes: int
    success_once: float
    """Share of episodes in which success held at some step."""
    low: float
    """Wilson 95 % interval of `success_once`."""
    high: float
    success_at_end: float
    """Share of episodes in which success held at the last step."""
    low_at_end: float
    high_at_end: float
    mean_steps: float
    mean_return: float
    errors: dict[str, str]
    """What went wrong, by episode key."""
    wall_s: float
    mean_looked: float = 0.0
    """Control steps per episode beside `mean_steps`, in which best-of-N tried candidates out."""
    by_task: dict[str, EvaluationSummary] = field(default_factory=dict)
    """The same for each task, where there are several."""

    @property
    def in_words(self) -> str:
        """Such as `47.0 % [40.2, 53.9]`."""
        rate, low, high = (100 * x for x in (self.success_once, self.low, self.high))
        return f"{rate:.1f} % [{low:.1f}, {high:.1f}]"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def protocol(
    policy_fingerprint: str, simulator: dict[str, Any], episodes: Sequence[Episode], seed: int
) -> dict[str, Any]:
    """What makes two evaluations the same: rows are only ever resumed under an equal one."""
    plan = json.dumps([asdict(episode) for episode in episodes], sort_keys=True)
    return {
        "policy": policy_fingerprint,
        "simulator": simulator,
        "plan": hashlib.sha256(plan.encode()).hexdigest(),
        "num_episodes": len(episodes),
        "seed": seed,
        "mode": "deterministic",
        "versions": package_versions(),
        "commit": _commit(),
    }


def evaluate(
    policy: Policy,
    simulator: Simulator,
    episodes: Sequence[Episode],
    halves: int,
    seed: int,
    device: str = "cpu",
    output: Path | None = None,
    header: dict[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    best_of: BestOf | None = None,
) -> EvaluationSummary:
    """Run the plan and summarise it; `on_progress` is told episodes done and successes. With
    `best_of`, the best of several candidates is executed for each decision.

    With an output folder, every episode is a line of `episodes.jsonl`, lines that are there already
    are not run again, and `result.json` is written at the end. Raises `OtherEvaluation` if the
    lines there were made under another `header`, and ContractMismatch if policy and simulator do
    not fit.
    """
    policy.contract.require_equal(simulator.spec.contract, "the policy", "the simulator")
    began = time.monotonic()
    rows = _open(output, header or {}) if output else {}
    missing = [episode for episode in episodes if episode.key not in rows]
    file = (output / _ROWS).open("a") if output else None

    def note(result: EpisodeResult) -> None:
        rows[result.episode.key] = _row(result)
        if file:
            file.write(json.dumps(rows[result.episode.key]) + "\n")
            file.flush()
        if on_progress:
            on_progress(len(rows), sum(row["success_once"] for row in rows.values()))

    try:
        run_episodes(simulator, policy, missing, halves, seed, note, device=device, best_of=best_of)
    finally:
        if file:
            file.close()
    wanted = [rows[episode.key] for episode in episodes]
    summary = summarise(simulator.spec.task, wanted, time.monotonic() - began)
    if output:
        write_json(output / _RESULT, {"summary": summary.to_json(), "protocol": header})
    return summary


def summarise(task: str, rows: Sequence[dict[str, Any]], wall_s: float) -> EvaluationSummary:
    """Success rates with their intervals from one row per planned episode."""
    count = len(rows)
    once = sum(row["success_once"] for row in rows)
    at_end = sum(row["success_at_end"] for row in rows)
    low, high = wilson_interval(once, count)
    low_at_end, high_at_end = wilson_interval(at_end, count)
    of_task: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_task.setdefault(row.get("task", task), []).append(row)
    return EvaluationSummary(
        task=task,
        episodes=count,
        success_once=once / count,
        low=low,
        high=high,
        success_at_end=at_end / count,
        low_at_end=low_at_end,
        high_at_end=high_at_end,
        mean_steps=sum(row["steps"] for row in rows) / count,
        mean_return=sum(row["return"] for row in rows) / count,
        errors={row["key"]: row["error"] for row in rows if row["error"]},
        wall_s=round(wall_s, 2),
        # Rows that were written before there were candidates tried none out.
        mean_looked=sum(row.get("looked", 0) for row in rows) / count,
        by_task=(
            {name: summarise(name, mine, wall_s) for name, mine in of_task.items()}
            if len(of_task) > 1
            else {}
        ),
    )


def _open(output: Path, header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows that were made under the same header; a torn last line is dropped."""
    output.mkdir(parents=True, exist_ok=True)
    stored = output / _HEADER
    if not stored.exists():
        write_json(stored, header)
    before = json.loads(stored.read_text())
    # A commit is kept as a record: one that touches a text file must not stop a run's resumption.
    keys = sorted((before.keys() | header.keys()) - {"commit"})
    differing = [key for key in keys if before.get(key) != header.get(key)]
    if differing:
        lines = [f"  {k}: there {before.get(k)!r}, now {header.get(k)!r}" for k in differing]
        raise OtherEvaluation(
            f"{output} holds episodes of another evaluation; choose another output folder:\n"
            + "\n".join(lines)
        )
    rows: dict[str, dict[str, Any]] = {}
    path = output / _ROWS
    if not path.exists():
        return rows
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["key"]] = row
    # Whole lines only, or the next row would be appended to what is left of a torn one.
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows.values()))
    return rows


def _row(result: EpisodeResult) -> dict[str, Any]:
    episode = result.episode
    return {
        "key": episode.key,
        "task": episode.task,
        "initial_state": episode.initial_state,
        "seed": episode.seed,
        "success_once": result.success_once,
        "success_at_end": result.success_at_end,
        "return": round(result.total_reward, 6),
        "steps": result.num_steps,
        "looked": result.num_looked,
        "error": result.error,
    }


def _commit() -> str | None:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
