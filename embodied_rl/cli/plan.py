"""`embodied-rl plan`, and the same look as a run begins: from measurements to a table."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from embodied_rl.memory.arithmetic import gib
from embodied_rl.memory.verdict import require_fit, shortages

if TYPE_CHECKING:
    from embodied_rl.contracts import Policy, Simulator
    from embodied_rl.memory.arithmetic import MemoryPlan, Place
    from embodied_rl.memory.machine import Machine
    from embodied_rl.run_config import RunConfig
    from embodied_rl.training.loop import Watch
    from embodied_rl.training.start import Make


def plan(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """A table of what a run needs when, and whether this machine has it."""
    found, machine = _planned(config, True)
    places = [place for place in (found.process, found.gpu) if place]
    lines = [line for place in places for line in [*_table(place), ""]]
    workers = found.measured.num_workers
    lines.append(f"simulator workers ({workers} processes): {gib(found.workers.peak)}")
    lines.append(_sum(found, machine))
    short = shortages(found, machine)
    lines += [f"it does not fit: too little {one.where}" for one in short]
    lines += [] if short else ["it fits"]
    data = found.to_json() | {"machine": asdict(machine), "fits": not short}
    return "\n".join(lines), data


def require_memory(config: RunConfig, reinforces: bool = True) -> str:
    """A line on what a run will need; ConfigError if there is less, before anything is done."""
    return _required(config, *_planned(config, reinforces))


def watch(config: RunConfig, reinforces: bool = True) -> Watch:
    """The same for a run that begins, on the simulator and policy that it makes: this costs next to
    nothing. Many environments are measured at once, before there are that many."""
    from embodied_rl.memory.check import has_many_environments, watched

    if has_many_environments(config):
        require_memory(config, reinforces)

    def look(simulator: Simulator, device: str, make: Make) -> Policy:
        policy, found, machine = watched(config, reinforces, simulator, device, make)
        _required(config, found, machine)
        return policy

    return look


def _required(config: RunConfig, found: MemoryPlan, machine: Machine) -> str:
    require_fit(config, found, machine)
    line = _sum(found, machine)
    print(line, file=sys.stderr)
    return line


def _planned(config: RunConfig, reinforces: bool) -> tuple[MemoryPlan, Machine]:
    from embodied_rl.memory.arithmetic import predict
    from embodied_rl.memory.measure import measure

    measured, machine = measure(config)
    return predict(config, measured, reinforces), machine


def _table(place: Place) -> list[str]:
    """A column for each moment."""
    moments = list(place.moments)
    names = list(dict.fromkeys(name for parts in place.moments.values() for name in parts))
    lines = [f"{place.name:18}" + "".join(f"{moment:>12}" for moment in moments)]
    for name in names:
        parts = [place.moments[moment].get(name) for moment in moments]
        cells = [gib(part.bytes) if part else "-" for part in parts]
        lines.append(f"  {name:16}" + "".join(f"{cell:>12}" for cell in cells))
    totals = [gib(place.total(moment)) for moment in moments]
    return [*lines, f"  {'total':16}" + "".join(f"{cell:>12}" for cell in totals)]


def _sum(found: MemoryPlan, machine: Machine) -> str:
    line = (
        f"memory: about {gib(found.host_peak)} at the peak ({found.process.peak_moment}), "
        f"{gib(found.process.peak)} in the training process and {gib(found.workers.peak)} in "
        f"simulator workers; {gib(machine.host)} are free"
    )
    if found.gpu and machine.gpu is not None:
        line += f". GPU: about {gib(found.gpu.peak)} ({found.gpu.peak_moment}) of "
        line += f"{gib(machine.gpu)} free"
    return line
