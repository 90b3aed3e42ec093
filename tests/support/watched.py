"""A command in a process of its own, with the memory that it took."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embodied_rl.memory.tracking import process_bytes


@dataclass(frozen=True)
class Watched:
    """What a command printed (of one that failed, its complaints), and its memory in bytes."""

    code: int
    output: str
    process: int
    """Largest resident memory of the process itself (VmHWM) until it prints its result. Not
    ru_maxrss, which begins with that of the process that started it; and not to the very end, when
    libraries that are put away read 70 to 120 MiB of their own files again."""
    others: int
    """Largest sum of the proportional shares of all processes that it started: workers and the
    process that they are forked from. Not of short-lived copies of itself, which another program
    is about to replace: their pages are its own."""
    seconds: float


def watch(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Watched:
    """Run `python -m embodied_rl` with these words."""
    began = time.monotonic()
    output = folder / "output.txt"
    with output.open("w") as file, (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "embodied_rl", *words],
            stdout=file,
            stderr=errors,
            env={**os.environ, **environment},
        )
        most = others = 0
        while process.poll() is None:
            if not output.stat().st_size:
                most = max(most, _high_water(process.pid))
            own = _command(process.pid)
            started = [pid for pid in _descendants(process.pid) if _command(pid) != own]
            found = sum(process_bytes(pid).get("Pss", 0) for pid in started)
            others = max(others, found)
            time.sleep(0.1)
    seconds = time.monotonic() - began
    text = output.read_text() if process.returncode == 0 else (folder / "errors.txt").read_text()
    return Watched(process.returncode, text, most, others, seconds)


def _high_water(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if "VmHWM" in line), 0)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    except OSError:
        return found
    return found + [below for child in found for below in _descendants(child)]
