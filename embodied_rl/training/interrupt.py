"""Stopping a run politely: SIGTERM or Ctrl-C lets it save first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self


class Interrupted(Exception):
    """The run was asked to stop, and has saved what it did."""


class StopSignal:
    """While in use, SIGTERM and SIGINT only set `requested`; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def leave(self, saved: str) -> NoReturn:
        """End the run; `saved` says what was kept."""
        raise Interrupted(f"stopped as asked: {saved}; start again with --resume to go on")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
