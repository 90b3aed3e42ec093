"""A run's folder: configuration, metrics, checkpoints, policies, result."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from embodied_rl.config import ConfigError, load, save
from embodied_rl.files import recover, write_json
from embodied_rl.run_config import RunConfig
from embodied_rl.training.checkpoint import CheckpointStore
from embodied_rl.training.metrics import MetricsLog, read

_FREE = (
    "iterations",
    "max_env_steps",
    "logging",
    "checkpoint",
    "runs_dir",
    "rollout.num_workers",
    "rollout.step_timeout_s",
    "rollout.max_worker_restarts",
    "demonstrations.in_memory_mib",
    "demonstrations.workers",
)
"""Options that may change when a run is resumed."""


class Run:
    """The folder of one run, locked against a second process; use it as a context manager."""

    def __init__(self, config: RunConfig, resume: bool = False) -> None:
        self.config, self.directory = config, config.directory
        stored = self.directory / "config.yaml"
        # Nothing was done in a run that failed at once: it may be begun anew, with other options.
        self.resumed = stored.exists() and not _is_blank(self.directory)
        if self.resumed:
            if not resume:
                raise ConfigError(
                    f"{self.directory} already holds a run. Add --resume to go on with it, or "
                    f"choose another name with name=OTHER. {_reached(self.directory)}"
                )
            _require_same(load(RunConfig, stored, []), config, self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.directory)
        try:
            recover(self.directory / "policies")
            unfinished = self.directory / ".config.yaml.unfinished"
            save(config, unfinished)
            unfinished.replace(stored)
            options = config.model_dump(mode="json")
            self.metrics = MetricsLog(self.directory, config.logging, config.name, options)
        except BaseException:
            self._lock.close()
            raise
        self.checkpoints = CheckpointStore(self.directory / "checkpoints", config.checkpoint.keep)

    def policy_folder(self, name: str) -> Path:
        """Where a policy of this run is kept: `start`, `best` or `final`."""
        return self.directory / "policies" / name

    def result(self, summary: dict[str, Any]) -> None:
        """Write `result.json`."""
        write_json(self.directory / "result.json", summary)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.metrics.close()
        if error is not None and not self.resumed and _is_blank(self.directory):
            for path in self.directory.iterdir():
                path.unlink()
            self.directory.rmdir()
        self._lock.close()


def _is_blank(directory: Path) -> bool:
    """Whether a run folder holds nothing but its configuration."""
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    metrics = directory / "metrics.jsonl"
    return names <= {"config.yaml", ".lock", "metrics.jsonl"} and (
        not metrics.exists() or metrics.stat().st_size == 0
    )


def _lock(directory: Path) -> IO[str]:
    # The system drops the lock with the process, so that a killed run leaves none behind.
    handle = (directory / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise ConfigError(f"another process is working on {directory}") from None
    return handle


def _reached(directory: Path) -> str:
    if (directory / "result.json").exists():
        return "It is finished."
    entries = read(directory)
    if not entries:
        return "It has not logged anything yet."
    return f"It reached phase {entries[-1]['phase']}, step {entries[-1]['step']}."


def _require_same(stored: RunConfig, given: RunConfig, directory: Path) -> None:
    before, now = _flat(stored.model_dump(mode="json")), _flat(given.model_dump(mode="json"))
    lines = [
        f"  {key}: the run has {before.get(key)!r}, you gave {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not any(key == free or key.startswith(f"{free}.") for free in _FREE)
    ]
    if lines:
        raise ConfigError(f"{directory} cannot be resumed with other options:\n" + "\n".join(lines))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
