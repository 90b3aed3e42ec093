"""What policies promise: decisions that they can score again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from embodied_rl.contracts.convention import Contract
from embodied_rl.contracts.simulator import Observation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    type Randomness = torch.Generator | Sequence[torch.Generator]


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

    A policy of which a costly part does not learn may have `prepare(observation)`: the tensors
    [B, ...] that this part makes of an observation, or none if it does learn. They are kept in
    `observation.prepared` from the decision to the end of the update, and every other method takes
    them from there instead of making them again. Not needed, only faster.

    A policy that cannot decide before there are statistics may have `rehearsal()`, a context within
    which it does, if by numbers that mean nothing: for those who look at its sizes.

    A policy that plans more steps than it executes may have `imitated_steps`, the length H of the
    demonstrated chunks that `imitation_loss` wants.
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
