"""Looking at the machine: what works, what does not, and what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embodied_rl.correctness.gates import Finding

if TYPE_CHECKING:
    from embodied_rl.contracts import EnvironmentObservation


def examine() -> list[Finding]:
    """Everything that a run may need."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", _python),
        ("machine", _machine),
        ("torch", _torch),
        ("shared memory", _shared_memory),
        ("drawing", _drawing),
        ("maniskill", _maniskill),
        ("lerobot", _lerobot),
    ]
    findings = []
    for name, check in checks:
        try:
            findings.append(check())
        except Exception as error:
            findings.append(Finding(name, "fail", f"{type(error).__name__}: {error}"))
    return findings


def _python() -> Finding:
    return Finding("python", "ok", sys.version.partition(" ")[0])


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    text = f"{cores} cores, {memory_gib:.0f} GiB memory, {free_gib:.0f} GiB free disk here"
    if memory_gib < 6:
        return Finding("machine", "warn", f"{text}; choose few workers (rollout.num_workers=2)")
    return Finding("machine", "ok", text)


def _torch() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("torch", "ok", f"{torch.__version__}, {torch.cuda.get_device_name(0)}")
    return Finding("torch", "ok", f"{torch.__version__}, no GPU: runs go on the CPU")


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.exists():
        return Finding("shared memory", "warn", "no /dev/shm; use rollout.num_workers=0")
    free_mib = shutil.disk_usage(folder).free / 2**20
    text = f"{free_mib:.0f} MiB free in /dev/shm"
    if free_mib < 64:
        advice = "start a container with --shm-size=1g, or use rollout.num_workers=0"
        return Finding("shared memory", "warn", f"{text}; {advice}")
    return Finding("shared memory", "ok", text)


def _drawing() -> Finding:
    from simulators.maniskill_visuals import NO_RENDER_DEVICE, has_render_device

    if has_render_device():
        return Finding("drawing", "ok", "SAPIEN finds a Vulkan device: images and videos work")
    return Finding("drawing", "warn", NO_RENDER_DEVICE)


def _maniskill() -> Finding:
    from simulators.maniskill_visuals import has_render_device

    began = time.monotonic()
    seen = _first_step("state")
    text = f"PickCube-v1 runs, with a state of {len(seen.state)} numbers"
    if has_render_device():
        images = _first_step("rgb").images
        blank = [name for name, image in images.items() if image.min() == image.max()]
        if blank:
            advice = "the driver draws nothing; install another, or use simulator.observation=state"
            return Finding("maniskill", "fail", f"{text}; camera {blank[0]} is blank: {advice}")
        text += f" and with {len(images)} camera(s) of 64 x 64"
    return Finding("maniskill", "ok", f"{text}, {time.monotonic() - began:.0f} s with imports")


def _first_step(observation: Literal["state", "rgb"]) -> EnvironmentObservation:
    """What PickCube shows after one control step."""
    import numpy as np

    from embodied_rl.contracts import Episode
    from simulators.config import ManiSkillConfig

    environment = ManiSkillConfig(task="PickCube-v1", observation=observation).build_environment()
    try:
        environment.reset(Episode("doctor", "PickCube-v1", 0, 0))
        environment.step(np.zeros(environment.spec.contract.action_dim, dtype=np.float32))
        return environment.observe()
    finally:
        environment.close()


def _lerobot() -> Finding:
    from importlib.metadata import version

    import av

    return Finding("lerobot", "ok", f"{version('lerobot')}, PyAV {av.__version__}")
