"""Adding up the memory of a run, phase by phase, from what single parts were measured to take."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from embodied_rl.run_config import RunConfig

LEROBOT_BYTES = 200 * 2**20
"""What importing lerobot's data sets adds to a process that trains: lerobot 0.6.1, x86-64 Linux."""


@dataclass(frozen=True)
class Growing:
    """Bytes that grow with the rows of a batch."""

    fixed: int = 0
    per_row: int = 0

    def at(self, rows: int) -> int:
        """Bytes for so many rows; none for no rows."""
        return self.fixed + rows * self.per_row if rows else 0

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> Growing:
        """The line through two measurements (rows, bytes)."""
        (few, little), (many, much) = first, second
        per_row = max(0, much - little) // (many - few)
        return cls(max(0, little - few * per_row), per_row)


@dataclass(frozen=True)
class PolicyBytes:
    """A policy, where its networks run."""

    weights: int
    """All parameters and buffers."""
    learned: int
    """The parameters that reinforcement learning trains, value head included."""
    imitated: int
    """The parameters that imitation trains."""
    update: Growing
    """At most beside weights and gradients while decisions are scored and gradients computed."""
    imitation: Growing
    """The same for the imitation loss."""
    act: Growing
    """At most beside the weights while the policy decides."""
    observation: int
    """One row of what it sees."""
    decision: int
    """One row of what it decides, with its trace, the reward that comes of it, and what is kept of
    the observation (`Policy.prepare`)."""
    action: int
    """One demonstrated action, and the number of its episode."""


@dataclass(frozen=True)
class WorkerBytes:
    """Worker processes of a simulator. Pages that several processes share count once."""

    server: int = 0
    """The process that they are forked from, with the pages that they share with it."""
    worker: int = 0
    """A worker's own, without its environments."""
    environment: int = 0

    def of(self, workers: int, environments: int) -> int:
        """All workers with all their environments."""
        if not workers:
            return 0
        return self.server + workers * self.worker + environments * self.environment


@dataclass(frozen=True)
class Measured:
    """What was measured of the parts of a run."""

    process: int
    """The training process before there is a policy: Python, torch, the project."""
    simulator: int
    """What simulators add to the training process, where they run or are recorded in it."""
    workers: WorkerBytes
    num_workers: int
    policy: PolicyBytes
    arrays: int
    """Shared arrays through which simulators and collector talk."""
    num_tasks: int
    max_episode_steps: int
    on_gpu: bool
    context: int = 0
    """What a GPU costs the training process in ordinary memory."""
    gpu_simulator: int = 0
    """What a simulator takes on the GPU."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything a run works with, by its options."""

    at_once: int
    """Decisions that gradients are computed of at once."""
    decisions: int
    """Decisions that are collected for an update, at most."""
    views_per_decision: int
    """Observations kept per decision while collecting: what was seen, what was seen last before a
    time limit, and the joined copy."""
    acting: int
    """Environments that are decided for at once."""
    imitated_at_once: int
    """Demonstrated chunks that gradients are computed of at once; 0 without imitation."""
    frames: int
    """Demonstrated frames in memory, at most."""
    reference: bool
    """Whether a frozen copy of the policy is kept."""
    conflicts: int
    """Tasks whose gradients are kept apart; 0 if they are not."""
    keeps_best: bool
    """Whether an earlier policy may be loaded while everything else is still there."""

    @classmethod
    def of(cls, config: RunConfig, measured: Measured) -> Sizes:
        """What a run's options ask for."""
        algorithm: Any = config.algorithm
        slots, chunk = config.rollout.num_slots, int(getattr(config.policy, "chunk", 1))
        steps = getattr(algorithm, "decisions_per_iteration", None)
        decisions_of_episode = -(-measured.max_episode_steps // chunk)
        if steps is not None:
            decisions = slots * int(steps)
        else:
            decisions = _most_episodes(algorithm) * decisions_of_episode
        frames, batch = 0, 0
        if config.demonstrations and config.imitation and not config.initial_policy:
            frames = config.demonstrations.total * measured.max_episode_steps
            batch = min(config.imitation.batch_size, frames)
            batch = _divided(batch, config.imitation.micro_batch_size)
        projects = getattr(algorithm, "task_gradients", "sum") == "pcgrad"
        return cls(
            at_once=_divided(
                _largest_part(decisions, int(algorithm.minibatch_size)), algorithm.micro_batch_size
            ),
            decisions=decisions,
            views_per_decision=3 if steps is not None else 2,
            acting=-(-slots // config.rollout.halves),
            imitated_at_once=batch,
            frames=frames,
            reference=bool(getattr(algorithm, "kl_coefficient", 0.0)),
            conflicts=measured.num_tasks if projects else 0,
            keeps_best=bool(config.evaluation.every and config.evaluation.keep_best),
        )


def _largest_part(decisions: int, size: int) -> int:
    """Rows of the largest minibatch where decisions are divided into parts of about `size`."""
    return -(-decisions // max(1, round(decisions / size)))


def _divided(rows: int, most: int | None) -> int:
    """Rows of the largest part where they are divided into as few even parts as have `most`."""
    return rows if most is None or not rows else -(-rows // -(-rows // most))


def _most_episodes(algorithm: Any) -> int:
    """Episodes of groups that are kept until an update."""
    groups, size = int(algorithm.groups_per_iteration), int(algorithm.group_size)
    tried = round(groups * float(algorithm.max_refill)) * (1 + int(algorithm.extra_groups))
    return size * (tried + groups * int(algorithm.branches))


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
