"""What a collection of decisions looks like to an algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from embodied_rl.contracts import Episode, Observation

if TYPE_CHECKING:
    from embodied_rl.contracts import FloatArray, Prelude


@dataclass(frozen=True)
class Path:
    """The way that an episode took from its reset, for preludes of others that follow it."""

    actions: FloatArray
    """[L, A]: what the environment executed, the episode's own prelude included; up to the end of
    the decision in which it first succeeded, where it went on after that."""
    first: int
    """How many of them came before its first decision."""
    chunk: int
    """H: control steps between its decisions."""

    @property
    def decided(self) -> range:
        """After how many actions it decided again, its first decision left out."""
        return range(self.first + self.chunk, len(self.actions), self.chunk)

    @property
    def starts(self) -> range:
        """The same, with the decision boundaries that its prelude went through: the reset left out,
        the whole way at the rhythm of its decisions."""
        return range(self.first % self.chunk or self.chunk, len(self.actions), self.chunk)

    def prelude(self, length: int) -> Prelude:
        """The first `length` actions, for an episode from the same initial state."""
        return tuple(tuple(action) for action in self.actions[:length].tolist())


@dataclass(frozen=True)
class EpisodeResult:
    """How one planned episode went."""

    episode: Episode
    success_once: bool
    """Success held at some step."""
    success_at_end: bool
    """Success held at the last step."""
    total_reward: float
    """Undiscounted sum over the executed steps."""
    num_steps: int
    """Control steps executed."""
    error: str | None = None
    """Why the episode did not run; it then counts as a failure."""
    num_looked: int = 0
    """Control steps beside these, in which candidates were tried out."""
    stage: int = 0
    """The most stages of the task (`SimulatorSpec.stages`) that were behind at a step."""
    path: Path | None = field(default=None, compare=False, repr=False)
    """How it went, action by action, unless it did not run."""

    @property
    def simulated(self) -> int:
        """Control steps executed, with those of the prelude."""
        return self.num_steps + (self.path.first if self.path else 0)


@dataclass(frozen=True)
class Batch:
    """T decisions of each of B slots, flattened to N = T * B rows in time-major order.

    Row `t * B + b` is decision t of slot b. Where an episode of a slot ends, the next decision of
    that slot belongs to the next episode.
    """

    num_decisions: int
    """T."""
    observation: Observation
    """N rows."""
    trace: dict[str, Tensor]
    """Each [N, ...], from the policy."""
    log_prob: Tensor
    """float32 [N, H] per control step, at the time of acting."""
    token_log_prob: Tensor | None
    """float32 [N, P] per action token, from policies that have tokens."""
    value: Tensor
    """float32 [N]: value of the observation."""
    next_value: Tensor
    """float32 [N]: value of what followed. At a time limit it is the value of the observation at
    which the episode was cut; after a termination it is 0."""
    bootstraps: Tensor
    """bool [N]: `next_value` is the policy's value of an observation, not a termination's 0."""
    reward: Tensor
    """float32 [N, H]; 0 where not executed."""
    executed: Tensor
    """int64 [N]: control steps executed of H."""
    done: Tensor
    """bool [N]: the episode ended within this decision."""
    valid: Tensor
    """bool [N]: false where nothing was decided (frozen slot) or the episode was lost."""
    group: Tensor
    """int64 [N]: group of the row's episode."""
    task: Tensor
    """int64 [N]: number of the row's task among the planned ones."""
    episode: Tensor
    """int64 [N]: which entry of `results` the row belongs to; -1 while its episode goes on."""
    results: list[EpisodeResult]
    """Episodes that ended while collecting."""
    num_lost: int
    """Episodes lost to failed workers while collecting; they run again later."""
    num_steps: int
    """Control steps simulated while collecting, also those that nobody learns from: of preludes
    (when their episode ends), of lost episodes and of groups with equal returns."""
    seconds: dict[str, float]
    """Wall time by activity: `infer`, `wait` (for simulators), `total`."""
