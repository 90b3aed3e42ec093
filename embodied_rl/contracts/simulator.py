"""What simulators promise: planned episodes, observations, and chunks of actions executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from embodied_rl.contracts.convention import Contract

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    type FloatArray = npt.NDArray[np.float32]
    type ByteArray = npt.NDArray[np.uint8]

type Prelude = tuple[tuple[float, ...], ...]
type Variation = tuple[str, float]
"""An axis on which an episode differs from the plain task, and its level: 0 is the plain task, 1
the most that the simulator's own description of the axis says."""
type Reason = Literal["uniform", "curriculum", "worst_case", "demonstration", "visited", "branch"]


class CannotLookAhead(RuntimeError):
    """A simulator cannot go back to a state, so that actions cannot be tried out in it."""


@dataclass(frozen=True)
class InitialStates:
    """What the numbers of a simulator's initial states stand for."""

    count: int | None = None
    """How many there are, of each task; None if every number gives another one."""
    benchmark: int = 0
    """The first so many, if any, are those on which others publish results: final evaluations use
    these, and training starts in others."""
    trained_on: bool = False
    """Whether training starts in the benchmark's states all the same, as some papers do. Results
    then say so."""


@dataclass(frozen=True)
class SimulatorSpec:
    """What a simulator offers."""

    task: str
    contract: Contract
    max_episode_steps: int
    """Time limit of an episode in control steps."""
    can_render: bool = False
    """Whether `render` gives pictures for videos."""
    num_initial_states: int | None = None
    """How many initial states there are, of each task; None if every number gives another one."""
    tasks: tuple[str, ...] = ()
    """The tasks that an episode may name, where there are several; `task` joins their names."""
    benchmark_states: int = 0
    """As `InitialStates.benchmark`; so is the next."""
    trains_on_benchmark: bool = False
    variations: tuple[str, ...] = ()
    """The axes on which an episode may differ from the plain task (`Episode.variations`)."""
    stages: tuple[str, ...] = ()
    """What an episode goes through on its way, in order, such as `reached`, `grasped`, `placed`;
    empty where the simulator does not tell."""
    protocol: Mapping[str, Any] = field(default_factory=dict)
    """What else decides a success rate, for the record: the name and numbers of a protocol card,
    versions of what runs in another interpreter. Plain data."""

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """The tasks that an episode may name."""
        return self.tasks or (self.task,)

    @property
    def states(self) -> InitialStates:
        """How its initial states may be used."""
        return InitialStates(
            self.num_initial_states, self.benchmark_states, self.trains_on_benchmark
        )


@dataclass(frozen=True)
class Episode:
    """One planned episode. A planner emits it and the simulator obeys."""

    key: str
    """Unique within a plan, such as `train/000017`; evaluation resumes by it."""
    task: str
    initial_state: int
    """Number of the initial state. Equal numbers start equal; training and held-out ones differ."""
    seed: int
    """Seeds whatever else is random in the episode."""
    group: int = 0
    """Episodes to be compared with each other (GRPO) share a group."""
    start: Reason = "uniform"
    """Why it starts where it does."""
    prelude: Prelude = ()
    """Actions executed after the reset and before the first decision; nobody learns from them.
    Where they would end the episode, those that come before the end."""
    variations: tuple[Variation, ...] = ()
    """How it differs from the plain task: axes of `SimulatorSpec.variations`, applied at the reset
    and gone with the next one."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Episode:
        """The episode whose fields were written as JSON, which knows no tuples."""
        prelude = tuple(tuple(action) for action in data.get("prelude", ()))
        variations = tuple((axis, level) for axis, level in data.get("variations", ()))
        return cls(**{**data, "prelude": prelude, "variations": variations})


@dataclass(frozen=True)
class StepOutcome:
    """One control step of one environment."""

    reward: float
    terminated: bool
    """The task itself ended the episode: nothing follows, so nothing is bootstrapped."""
    truncated: bool
    """The time limit ended the episode."""
    success: bool
    """The task's success condition holds right now."""
    stage: int = 0
    """How many of `SimulatorSpec.stages` are behind the episode now."""


@dataclass(frozen=True)
class EnvironmentObservation:
    """What one environment shows: images per camera, uint8 [height, width, 3], and a state [S]."""

    images: dict[str, ByteArray]
    state: FloatArray


class Environment(Protocol):
    """One simulated scene, stepped on its own. Most simulators implement this."""

    @property
    def spec(self) -> SimulatorSpec: ...

    @property
    def instruction(self) -> str:
        """What the present episode asks for, in words."""
        ...

    def reset(self, episode: Episode) -> None: ...

    def step(self, action: FloatArray) -> StepOutcome:
        """Run one control step with an action [A] in the environment's convention."""
        ...

    def observe(self) -> EnvironmentObservation:
        """Read, and render if there are cameras. Called only when somebody uses the result."""
        ...

    def snapshot(self) -> dict[str, FloatArray]:
        """The physical state by name, for `restore`; raises NotImplementedError if unsupported."""
        ...

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None: ...

    def render(self) -> ByteArray:
        """A picture for videos, [height, width, 3]."""
        ...

    def close(self) -> None: ...


class Expert(Protocol):
    """A scripted controller that looks at the true state of one environment."""

    def __call__(self) -> FloatArray:
        """The action [A] for the environment's present state."""
        ...


@dataclass(frozen=True)
class Observation:
    """What a policy sees, for B environments."""

    images: dict[str, Tensor]
    """Per camera, uint8 [B, height, width, 3]."""
    state: Tensor
    """float32 [B, S]."""
    instruction: tuple[str, ...]
    """One per environment, never shared."""
    prepared: dict[str, Tensor] = field(default_factory=dict)
    """What a policy made of it that stays while it learns (`Policy`), each [B, ...]; empty as
    simulators give it."""

    def __len__(self) -> int:
        return len(self.instruction)

    def select(self, rows: Tensor) -> Observation:
        """The observation of these environments, given by int64 indices."""
        return Observation(
            images={name: image[rows] for name, image in self.images.items()},
            state=self.state[rows],
            instruction=tuple(self.instruction[row] for row in rows.tolist()),
            prepared={name: tensor[rows] for name, tensor in self.prepared.items()},
        )

    def to(self, device: torch.device | str) -> Observation:
        """The same observation with its tensors on a device."""
        return Observation(
            images={name: image.to(device) for name, image in self.images.items()},
            state=self.state.to(device),
            instruction=self.instruction,
            prepared={name: tensor.to(device) for name, tensor in self.prepared.items()},
        )


@dataclass(frozen=True)
class BatchOutcome:
    """One control step of B environments in a batch; rows that were not active hold zeros."""

    reward: Tensor
    """float32 [B]."""
    terminated: Tensor
    """bool [B]; so are the next two."""
    truncated: Tensor
    success: Tensor


class BatchEnvironment(Protocol):
    """Many scenes stepped as one batch, as GPU simulators and gymnasium vector environments do."""

    @property
    def spec(self) -> SimulatorSpec: ...

    @property
    def num_slots(self) -> int: ...

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None: ...

    def step(self, actions: Tensor, active: Tensor) -> BatchOutcome:
        """Run one control step with actions [B, A]; slots with a false `active` [B] are ignored."""
        ...

    def observe(self, slots: Sequence[int]) -> Observation: ...

    def render(self, slot: int) -> ByteArray: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ChunkResult:
    """What happened while n slots executed one chunk. Rows are the slots that were asked for."""

    reward: Tensor
    """float32 [n, H]; 0 where the step was not executed."""
    executed: Tensor
    """int64 [n]: control steps executed, from 1 to H; 0 for a lost row."""
    prelude_steps: Tensor
    """int64 [n]: actions of the prelude that the chunk's episode began with; fewer than planned
    where they would have ended it."""
    terminated: Tensor
    """bool [n]; wins over `truncated` when both fall into one chunk."""
    truncated: Tensor
    """bool [n]."""
    success_once: Tensor
    """bool [n]: success held at some step of this chunk."""
    success_now: Tensor
    """bool [n]: success holds at the last executed step."""
    stage: Tensor
    """int64 [n]: the most stages (`SimulatorSpec.stages`) that were behind at a step of this
    chunk."""
    observation: Observation
    """What to decide on next: the chunk's end, or the first view of the next episode."""
    final_observation: Observation
    """What was seen when the time limit cut the episode. Other rows are unspecified."""
    refilled: Tensor
    """bool [n]: the offered next episode was begun. An ended row that is not refilled is frozen."""
    lost: Tensor
    """bool [n]: the worker died or failed; what the episode did so far does not count."""
    errors: dict[int, str] = field(default_factory=dict)
    """Per lost slot, what went wrong."""

    @property
    def done(self) -> Tensor:
        """bool [n]: the episode ended, by the task or by the time limit."""
        return self.terminated | self.truncated


class Simulator(Protocol):
    """Slots that run planned episodes chunk by chunk: inline, in worker processes or on a GPU.

    `send` and `receive` are apart so that half of the slots simulate while the policy decides for
    the other half.
    """

    @property
    def spec(self) -> SimulatorSpec: ...

    @property
    def num_slots(self) -> int: ...

    def start(self, slots: Sequence[int], episodes: Sequence[Episode]) -> Observation:
        """Begin these episodes, whatever the slots were doing, and return their first view."""
        ...

    def send(self, slots: Sequence[int], actions: Tensor, offers: Sequence[Episode | None]) -> None:
        """Execute a chunk of actions [n, H, A]. A slot whose episode ends begins its offer."""
        ...

    def receive(self, slots: Sequence[int]) -> ChunkResult:
        """Wait for the chunk sent to exactly these slots. A lost slot begins its offer, if any."""
        ...

    def look(self, slots: Sequence[int], actions: Tensor) -> ChunkResult:
        """Execute a chunk of actions [n, H, A] from where the slots are, and forget it: `send` and
        further looks begin where the first look did. Nothing is refilled; a lost row is reported,
        with its error, by the next `receive`.

        Raises CannotLookAhead where the simulator cannot go back.
        """
        ...

    def close(self) -> None: ...
