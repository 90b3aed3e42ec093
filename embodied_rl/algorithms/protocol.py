"""What the training loop asks of an algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from embodied_rl.rollout.batch import Batch

if TYPE_CHECKING:
    import torch

    from embodied_rl.contracts import Simulator
    from embodied_rl.rollout.planner import TrainingPlanner


class Collecting(Protocol):
    """Gathers decisions of the present policy."""

    def collect(self) -> Batch:
        """Decisions for one update."""
        ...

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain data from which collecting continues exactly."""
        ...

    def load_state_dict(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None: ...


class Algorithm(Protocol):
    """Improves a policy from batches of decisions. All that it keeps is in `state_dict`."""

    @property
    def group_size(self) -> int:
        """Consecutive episodes of the plan that share task and initial state."""
        ...

    def collector(
        self,
        simulator: Simulator,
        planner: TrainingPlanner,
        generator: torch.Generator,
        halves: int,
    ) -> Collecting:
        """What gathers the decisions that `update` wants to see."""
        ...

    def set_progress(self, share: float) -> None:
        """How much of the run [0, 1] is done, before each update; schedules follow it."""
        ...

    def update(self, batch: Batch, iteration: int) -> dict[str, float]:
        """Improve the policy; returns values for the training curves."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
