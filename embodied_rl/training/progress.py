"""Progress of long work on standard error: a bar in a terminal, lines now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 10.0


class ProgressLine:
    """A bar, or lines, for one piece of work of `total` steps; use it as a context manager."""

    def __init__(self, title: str, total: int, completed: int = 0) -> None:
        self._title, self._total, self._completed = title, total, completed
        self._last_line_s = time.monotonic()
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(title, total=total, completed=completed, note="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def update(self, completed: int, note: str = "") -> None:
        """Show that `completed` of the steps are done; `note` says how it goes."""
        self._completed = completed
        if self._bar:
            self._bar.update(self._task, completed=completed, note=note)
            return
        now = time.monotonic()
        if now - self._last_line_s >= SECONDS_BETWEEN_LINES or completed >= self._total:
            self._last_line_s = now
            print(f"{self._title} {completed}/{self._total} {note}", file=sys.stderr, flush=True)

    def advance(self, note: str = "") -> None:
        """One more step is done."""
        self.update(self._completed + 1, note)

    def say(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
