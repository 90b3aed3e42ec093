"""Does a run fit into what the machine has, and if not, what would make it fit?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodied_rl.config import ConfigError
from embodied_rl.memory.arithmetic import Component, MemoryPlan, Place, gib
from embodied_rl.memory.machine import Machine
from embodied_rl.memory.parts import Growing
from embodied_rl.run_config import RunConfig

FORCE = "or go on all the same with --force"


@dataclass(frozen=True)
class Shortage:
    """Memory of which a run wants more than there is."""

    where: str
    wanted: int
    available: int
    places: tuple[Place, ...]


def shortages(plan: MemoryPlan, machine: Machine) -> list[Shortage]:
    """What there is too little of."""
    found = [Shortage("memory", plan.host_peak, machine.host, (plan.process, plan.workers))]
    if plan.gpu and machine.gpu is not None:
        found.append(Shortage("GPU memory", plan.gpu.peak, machine.gpu, (plan.gpu,)))
    if plan.measured.num_workers and machine.shared is not None:
        arrays = Component(
            plan.measured.arrays, ("rollout.num_slots", "simulator.image_size", "/dev/shm")
        )
        shared = Place("shared memory", {"all the time": {"shared arrays": arrays}})
        found.append(Shortage("shared memory", shared.peak, machine.shared, (shared,)))
    return [one for one in found if one.wanted > one.available]


def require_fit(config: RunConfig, plan: MemoryPlan, machine: Machine) -> None:
    """Raise `ConfigError` that says what is short, and which options to turn."""
    found = shortages(plan, machine)
    if found:
        lines = "\n".join(f"  {_in_words(config, plan, one)}" for one in found)
        raise ConfigError(f"this run does not fit:\n{lines}\n{FORCE}")


def _in_words(config: RunConfig, plan: MemoryPlan, short: Shortage) -> str:
    parts = [part for place in short.places for part in place.at_peak().items()]
    parts.sort(key=lambda part: part[1].bytes, reverse=True)
    largest = [part for part in parts if _knobs(config, part[1])][:3]
    advice = [
        f"{name} take {gib(part.bytes)}: change {', '.join(_knobs(config, part))}"
        for name, part in largest
    ]
    moment = short.places[0].peak_moment
    when = f" (most of it to {moment})" if len(short.places[0].moments) > 1 else ""
    hint = _fitting_batch(plan, short, moment)
    text = (
        f"it needs about {gib(short.wanted)} of {short.where}{when}, and {gib(short.available)} "
        f"are free. {'; '.join(advice)}"
    )
    return f"{text}. {hint}" if hint else text


def _knobs(config: RunConfig, part: Component) -> list[str]:
    """Those that this run has."""
    return [knob for knob in part.knobs if _exists(config, knob.partition("=")[0])]


def _exists(config: RunConfig, knob: str) -> bool:
    group, dot, leaf = knob.partition(".")
    if not dot:
        return True
    options: Any = getattr(config, group)
    return leaf in type(options).model_fields


def _fitting_batch(plan: MemoryPlan, short: Shortage, moment: str) -> str:
    """The largest batch that would do, where a smaller one is enough."""
    policy, sizes = plan.measured.policy, plan.sizes
    batches: dict[str, tuple[str, Growing, int]] = {
        "update": ("algorithm.micro_batch_size", policy.update, sizes.at_once),
        "imitate": ("imitation.micro_batch_size", policy.imitation, sizes.imitated_at_once),
    }
    if moment not in batches:
        return ""
    option, line, rows = batches[moment]
    rest = short.available - (short.wanted - line.at(rows)) - line.fixed
    most = rest // line.per_row if line.per_row else 0
    return f"{option}={most} would fit there" if most >= 1 else ""
