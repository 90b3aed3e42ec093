"""Training curves: `metrics.jsonl` always, TensorBoard and Weights & Biases by switch."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embodied_rl.files import write_text
from embodied_rl.run_config import LoggingConfig

_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends one line per call; what a resumed run repeats replaces what it logged before."""

    def __init__(
        self, directory: Path, logging: LoggingConfig, run_name: str, options: dict[str, Any]
    ) -> None:
        self._path = directory / _FILE
        kept = read(directory)
        if self._path.exists():
            # A killed run may have left half a line.
            write_text(self._path, "".join(_line(entry) for entry in kept))
        self._file = self._path.open("a")
        self._tensorboard: Any = None
        if logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(directory / "tensorboard"))
        self._wandb: Any = None
        if logging.wandb != "off":
            import wandb

            self._wandb = wandb.init(
                project=logging.wandb_project,
                name=run_name,
                id=_wandb_id(directory),
                dir=str(directory),
                mode=logging.wandb,
                resume="allow",
                config=options,
            )

    def log(
        self, phase: str, step: int, values: Mapping[str, float], label: str | None = None
    ) -> None:
        """Write values of one step of a phase."""
        entry: dict[str, Any] = {"phase": phase, "step": step, "time": round(time.time(), 3)}
        if label is not None:
            entry["label"] = label
        entry["values"] = {
            name: float(value) if math.isfinite(value) else None for name, value in values.items()
        }
        self._file.write(_line(entry))
        self._file.flush()
        if self._tensorboard:
            for name, value in values.items():
                self._tensorboard.add_scalar(f"{phase}/{name}", value, step)
        if self._wandb:
            named = {f"{phase}/{name}": value for name, value in values.items()}
            self._wandb.log(named | {f"{phase}/step": step})

    def truncate_after(self, phase: str, step: int) -> None:
        """Forget what a phase logged after a step: a resumed run will log it again."""
        self._keep(lambda entry: entry["phase"] != phase or entry["step"] <= step)

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        self._file.close()
        kept = [entry for entry in read(self._path.parent) if wanted(entry)]
        write_text(self._path, "".join(_line(entry) for entry in kept))
        self._file = self._path.open("a")

    def forget(self, phase: str, label: str) -> None:
        """Drop what a phase logged under a label: it will be logged again."""
        self._keep(lambda entry: (entry["phase"], entry.get("label")) != (phase, label))

    def close(self) -> None:
        """Flush and end everything."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def read(directory: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics."""
    path = directory / _FILE
    entries = []
    # A killed process may have left half a line, cut within a character.
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def _wandb_id(directory: Path) -> str:
    """An id of this run folder alone: other folders, and machines, have runs of the same name."""
    path = directory / ".wandb_id"
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:12])
    return path.read_text()


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n"
