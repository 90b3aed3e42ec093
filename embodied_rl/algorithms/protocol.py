"""What the training loop asks of an algorithm."""

from __future__ import annotations

from typing import Any, Protocol

from embodied_rl.rollout.batch import Batch


class Algorithm(Protocol):
    """Improves a policy from batches of decisions. All that it keeps is in `state_dict`."""

    @property
    def decisions_per_iteration(self) -> int:
        """T: decisions per slot that `update` wants to see."""
        ...

    def update(self, batch: Batch, iteration: int) -> dict[str, float]:
        """Improve the policy; returns values for the training curves."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
