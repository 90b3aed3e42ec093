"""What this machine has left."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Bytes that a run may take."""

    host: int
    """Ordinary memory, within the limit of the container if there is one."""
    shared: int | None
    """Shared memory; None if there is none."""
    gpu: int | None = None
    """Of the GPU that the networks would run on."""


def free(device: str) -> Machine:
    """What is free now."""
    left = None
    if device != "cpu":
        import torch

        left = torch.cuda.mem_get_info()[0]
    folder = Path("/dev/shm")
    shared = shutil.disk_usage(folder).free if folder.exists() else None
    return Machine(min([_meminfo(), *_limits()]), shared, left)


def _meminfo() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = dict(line.split(":") for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024


def _limits(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What a container's limit (of either version of control groups) leaves."""
    found = []
    for limit, used, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            most = (root / limit).read_text().strip()
            if not most.isdecimal():
                continue  # `max`: no limit.
            statistics = (root / used).with_name("memory.stat").read_text().splitlines()
            given_back = next(
                (int(line.split()[1]) for line in statistics if line.split()[0] == unused), 0
            )
            found.append(int(most) - int((root / used).read_text()) + given_back)
        except OSError:
            continue
    return found
