"""What simulators, policies and algorithms promise each other.

Letters of the shapes, used in the whole project: B environment slots, T decisions, H control steps
in a chunk, A action dimensions, S state dimensions, K denoising steps, M scored denoising steps,
P tokens of a chunk.

A *control step* is one simulator step. A *decision* is one policy call; it yields a *chunk* of H
actions. Reinforcement learning runs on decisions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    type FloatArray = npt.NDArray[np.float32]
    type ByteArray = npt.NDArray[np.uint8]
    type Randomness = torch.Generator | Sequence[torch.Generator]

type Prelude = tuple[tuple[float, ...], ...]
type Reason = Literal["uniform", "curriculum", "worst_case", "demonstration", "visited", "branch"]


class ContractMismatch(ValueError):
    """A policy meets a simulator, data set or robot that it was not made for."""


class CannotLookAhead(RuntimeError):
    """A simulator cannot go back to a state, so that actions cannot be tried out in it."""


@dataclass(frozen=True)
class Camera:
    """One camera as the policy sees it: upright uint8 RGB images of [height, width, 3]."""

    name: str
    height: int
    width: int


@dataclass(frozen=True)
class Contract:
    """The conventions that a policy and its environment share; it travels with the checkpoint.

    Two contracts that differ in any field must not be used together: `require_equal` says which.
    """

    state_dim: int
    """Entries of the state vector; 0 when the policy sees images alone."""
    action_dim: int
    """Entries of one action in the environment's own convention, gripper included."""
    action_low: tuple[float, ...]
    """Smallest allowed action, per dimension, in the environment's units."""
    action_high: tuple[float, ...]
    control_mode: str
    """What an action means, such as `pd_ee_delta_pose`."""
    control_hz: float
    """Control steps per second."""
    gripper: str
    """Gripper convention, such as `+1 opens, -1 closes`, or `none`."""
    rotation: str
    """Rotation representation of the action, such as `axis-angle delta`, or `none`."""
    cameras: tuple[Camera, ...] = ()
    """In the order in which the policy takes them."""

    @property
    def fingerprint(self) -> str:
        """A short hash of all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def require_equal(self, other: Contract, mine: str, theirs: str) -> None:
        """Raise `ContractMismatch` naming each field in which `other` differs."""
        ours, others = asdict(self), asdict(other)
        lines = [
            f"  {name}: {mine} has {ours[name]!r}, {theirs} has {others[name]!r}"
            for name in ours
            if ours[name] != others[name]
        ]
        if lines:
            raise ContractMismatch(
                f"{mine} does not fit {theirs}:\n" + "\n".join(lines) + "\nUse the checkpoint with "
                "the simulator options that it was trained with, or train a policy for these."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into an equal contract."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Contract:
        """The contract that `to_json` wrote."""
        values = dict(data)
        values["cameras"] = tuple(Camera(**camera) for camera in values["cameras"])
        for name in ("action_low", "action_high"):
            values[name] = tuple(values[name])
        return cls(**values)


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

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """The tasks that an episode may name."""
        return self.tasks or (self.task,)


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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Episode:
        """The episode whose fields were written as JSON, which knows no tuples."""
        prelude = tuple(tuple(action) for action in data.get("prelude", ()))
        return cls(**{**data, "prelude": prelude})


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

    def __len__(self) -> int:
        return len(self.instruction)

    def select(self, rows: Tensor) -> Observation:
        """The observation of these environments, given by int64 indices."""
        return Observation(
            images={name: image[rows] for name, image in self.images.items()},
            state=self.state[rows],
            instruction=tuple(self.instruction[row] for row in rows.tolist()),
        )

    def to(self, device: torch.device | str) -> Observation:
        """The same observation with its tensors on a device."""
        return Observation(
            images={name: image.to(device) for name, image in self.images.items()},
            state=self.state.to(device),
            instruction=self.instruction,
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


@dataclass(frozen=True)
class Decision:
    """What a policy decided for B environments."""

    actions: Tensor
    """float32 [B, H, A] in the environment's convention, within its bounds."""
    log_prob: Tensor
    """float32 [B, H]: log-probability per control step, summed over the action dimensions."""
    value: Tensor
    """float32 [B]: expected discounted return."""
    trace: dict[str, Tensor]
    """Exactly what `evaluate` needs to compute `log_prob` again; each entry is [B, ...]."""
    token_log_prob: Tensor | None = None
    """float32 [B, P]: log-probability of each action token, which `log_prob` adds up, 0 for
    padding. None from policies without tokens, and for deterministic decisions."""


@dataclass(frozen=True)
class Histogram:
    """Returns of B observations as probabilities of n equal bins; gradients flow."""

    logits: Tensor
    """float32 [B, n]."""
    edges: Tensor
    """float32 [n + 1]: where the bins begin and end."""


@dataclass(frozen=True)
class Estimate:
    """What a value head says of B observations; gradients flow."""

    value: Tensor
    """float32 [B]: expected discounted return."""
    histogram: Histogram | None = None
    """What `value` is the mean of, where the head learns by classification (HL-Gauss)."""


@dataclass(frozen=True)
class Evaluation:
    """A recorded decision seen with the present weights; gradients flow."""

    log_prob: Tensor
    """float32 [B, H]."""
    entropy: Tensor
    """float32 [B, H]; zeros where the noise is not learned."""
    value: Tensor
    """float32 [B]."""
    histogram: Histogram | None = None
    """What `value` is the mean of, if the value is learned as a histogram."""
    token_log_prob: Tensor | None = None
    """float32 [B, P], as in `Decision`."""
    token_step: Tensor | None = None
    """int64 [B, P]: the control step in which `log_prob` counts a token, -1 for padding. A token
    takes part in learning if that step was executed."""


class Policy(Protocol):
    """A neural network module that decides. `evaluate` before any update equals `act`.

    A policy whose value is a histogram also has `estimate`, which gives an `Estimate` where `value`
    gives its value alone.
    """

    @property
    def contract(self) -> Contract: ...

    @property
    def chunk(self) -> int:
        """H, the control steps executed per decision."""
        ...

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Decide without gradients.

        With one generator per row, a row's decision does not depend on the rest of the batch.
        Deterministic means without exploration noise (a flow policy still starts from noise drawn
        from the generator); `log_prob` is then zero and `trace` empty.
        """
        ...

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation: ...

    def value(self, observation: Observation) -> Tensor:
        """Expected return [B], without sampling an action."""
        ...

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Scalar loss against demonstrated chunks [B, H, A]; steps where `valid` [B, H] is false
        (past the episode's end) do not count."""
        ...

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Take normalisation statistics from demonstrated states [N, S] and actions [N, A]."""
        ...

    def policy_parameters(self) -> list[torch.nn.Parameter]:
        """What decides actions; trained with the policy's learning rate."""
        ...

    def value_parameters(self) -> list[torch.nn.Parameter]:
        """What only estimates the return; trained with the value head's learning rate."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...
