"""Adding up the memory of a run, phase by phase, from what single parts were measured to take."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from embodied_rl.memory.parts import Measured, PolicyBytes
from embodied_rl.memory.sizes import Sizes
from embodied_rl.run_config import RunConfig

LEROBOT_BYTES = 200 * 2**20
"""What importing lerobot's data sets adds to a process that trains: lerobot 0.6.1, x86-64 Linux."""


@dataclass(frozen=True)
class Component:
    """Something that takes memory, and the options that make it smaller."""

    bytes: int
    knobs: tuple[str, ...] = ()


type Moment = dict[str, Component]
"""What is in memory at the same time, by its name."""


@dataclass(frozen=True)
class Place:
    """Memory that is used by one process or device, at the moments that may need most."""

    name: str
    moments: dict[str, Moment] = field(default_factory=dict)

    @property
    def peak_moment(self) -> str:
        """The moment that needs most."""
        return max(self.moments, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes at that moment."""
        return self.total(self.peak_moment)

    def total(self, moment: str) -> int:
        """Bytes at a moment."""
        return sum(part.bytes for part in self.moments[moment].values())

    def at_peak(self) -> Moment:
        """What is there when most is needed."""
        return self.moments[self.peak_moment]


@dataclass(frozen=True)
class MemoryPlan:
    """Where a run will need how much. All bytes are predictions."""

    process: Place
    """The training process: its resident memory."""
    workers: Place
    """Simulator workers and the process that they are forked from: their proportional share."""
    gpu: Place | None
    measured: Measured
    sizes: Sizes

    @property
    def host_peak(self) -> int:
        """Ordinary memory at the worst moment; the workers are there all the time."""
        return self.process.peak + self.workers.peak

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        places = [place for place in (self.process, self.workers, self.gpu) if place]
        return {
            "places": {
                place.name: {
                    "peak": place.peak,
                    "peak_moment": place.peak_moment,
                    "moments": {
                        moment: {name: part.bytes for name, part in parts.items()}
                        for moment, parts in place.moments.items()
                    },
                }
                for place in places
            },
            "host_peak": self.host_peak,
            "measured": asdict(self.measured),
            "sizes": asdict(self.sizes),
        }


def predict(config: RunConfig, measured: Measured, reinforces: bool = True) -> MemoryPlan:
    """The memory of a run, or of its imitation alone."""
    sizes = Sizes.of(config, measured)
    learner = _learner(measured.policy, sizes, reinforces and config.iterations > 0)
    host = _host(measured, sizes)
    if measured.on_gpu:
        gpu_only = {"simulator": Component(measured.gpu_simulator, _SLOTS)}
        gpu = Place("GPU", {name: gpu_only | parts for name, parts in learner.items()})
        beside = _beside_a_gpu(measured.policy, sizes)
        moments = {name: host | beside.get(name, {}) for name in learner}
    else:
        gpu, moments = None, {name: host | parts for name, parts in learner.items()}
    if sizes.frames:
        seen = measured.policy.observation + measured.policy.action
        # As they were read, and their copy in training and held-out ones.
        data = Component(2 * sizes.frames * seen, ("demonstrations.episodes",))
        moments["imitate"] = moments["imitate"] | {"demonstrations": data}
    workers = measured.workers.of(measured.num_workers, config.rollout.num_slots)
    knobs = ("rollout.num_workers", *_SLOTS)
    return MemoryPlan(
        Place("training process", moments),
        Place("simulator workers", {"all the time": {"workers": Component(workers, knobs)}}),
        gpu,
        measured,
        sizes,
    )


_SLOTS = ("rollout.num_slots",)
_COLLECTED = (
    *("rollout.num_slots", "algorithm.decisions_per_iteration"),
    *("algorithm.groups_per_iteration", "algorithm.group_size", "algorithm.max_refill"),
)
_POLICY = ("the policy's size or its trainable part",)


def _host(measured: Measured, sizes: Sizes) -> Moment:
    """What the training process holds all the time."""
    found = {
        "libraries": Component(measured.process + measured.context),
        "simulator": Component(measured.simulator, _SLOTS),
        "shared arrays": Component(measured.arrays, _SLOTS),
    }
    if sizes.frames:
        found["lerobot"] = Component(LEROBOT_BYTES)
    return {name: part for name, part in found.items() if part.bytes}


def _learner(policy: PolicyBytes, sizes: Sizes, reinforces: bool) -> dict[str, Moment]:
    """Where the networks are. Gradients are there also while the next ones are computed: an
    optimiser drops them only when the loss is known. Adam keeps two moments of each weight."""
    weights = Component(policy.weights, _POLICY)
    again = Component(2 * policy.weights, _POLICY)
    moments: dict[str, Moment] = {}
    if sizes.imitated_at_once:
        learned = policy.imitated
        moments["imitate"] = {
            "weights": weights,
            "gradients": Component(learned, _POLICY),
            "optimiser": Component(2 * learned, _POLICY),
            "average": Component(learned, _POLICY),
            "activations": Component(
                policy.imitation.at(sizes.imitated_at_once), ("imitation.micro_batch_size",)
            ),
        }
    # A policy is loaded beside the one in use: the new one, and the file's content.
    held: Moment = {"weights": weights}
    if not reinforces:
        if sizes.imitated_at_once:
            held["gradients"] = Component(policy.imitated, _POLICY)
        return moments | {"evaluate": held | {"loading": again}}
    held["gradients"] = Component(policy.learned, _POLICY)
    learning = held | {"optimiser": Component(2 * policy.learned, _POLICY)}
    if sizes.reference:
        learning["reference"] = Component(policy.weights, ("algorithm.kl_coefficient=0",))
    batch = sizes.decisions * (policy.observation + policy.decision)
    # Each step's tensors, and all of them joined.
    collected = sizes.decisions * (
        sizes.views_per_decision * policy.observation + 2 * policy.decision
    )
    updating = learning | {
        "rollout": Component(batch, _COLLECTED),
        "activations": Component(policy.update.at(sizes.at_once), ("algorithm.micro_batch_size",)),
    }
    if sizes.conflicts:
        # Of every task, one by one and stacked, and the joint one.
        apart = (2 * sizes.conflicts + 1) * policy.learned
        updating["task gradients"] = Component(apart, ("algorithm.task_gradients=sum",))
    return moments | {
        "collect": learning
        | {
            "rollout": Component(collected, _COLLECTED),
            "activations": Component(policy.act.at(sizes.acting), _SLOTS),
        },
        "update": updating,
        "evaluate": (learning if sizes.keeps_best else held) | {"loading": again},
    }


def _beside_a_gpu(policy: PolicyBytes, sizes: Sizes) -> dict[str, Moment]:
    """What passes through ordinary memory while the networks are on a GPU."""
    seen = 2 * sizes.decisions * policy.observation
    saved = policy.weights + 2 * policy.learned
    imitated = policy.weights + 3 * policy.imitated
    return {
        "imitate": {"checkpoint": Component(imitated, _POLICY)},
        "collect": {"rollout": Component(seen, _COLLECTED)},
        "update": {"checkpoint": Component(saved, _POLICY)},
        "evaluate": {"loading": Component(2 * policy.weights, _POLICY)},
    }


def gib(size: int) -> str:
    """Bytes for a person."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
