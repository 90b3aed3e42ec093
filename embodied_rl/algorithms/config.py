"""Options of the algorithms. Kept apart from the algorithms so that a configuration is checked
without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from embodied_rl import catalogue
from embodied_rl.config import Config

if TYPE_CHECKING:
    from embodied_rl.contracts import Policy


class PPOConfig(Config):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) on decisions."""

    type: Literal["ppo"] = "ppo"
    decisions_per_iteration: int = Field(16, ge=1)
    """T: decisions per slot collected between updates."""
    epochs: int = Field(4, ge=1)
    """Passes over the collected decisions per iteration."""
    minibatch_size: int = Field(256, ge=1)
    """Decisions per gradient step."""
    discount: float = Field(0.99, ge=0.0, le=1.0)
    """Discount per control step; a decision that executed n steps is discounted n times."""
    gae_lambda: float = Field(0.95, ge=0.0, le=1.0)
    """Trace decay of generalised advantage estimation, per decision."""
    clip: float = Field(0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped to 1 - clip .. 1 + clip."""
    ratio_level: Literal["chunk", "step"] = "chunk"
    """One ratio per decision, or one per executed control step."""
    learning_rate: float = Field(3e-5, gt=0.0)
    """Of the policy."""
    value_learning_rate: float = Field(1e-3, gt=0.0)
    """Of the value head."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How both learning rates fall to zero over the run."""
    value_coefficient: float = Field(0.5, ge=0.0)
    """Weight of the value loss."""
    entropy_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the entropy bonus; Flow-SDE has none, its noise is fixed."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients of the policy and of the value head are each scaled down to this norm."""
    max_kl: float | None = Field(0.05, gt=0.0)
    """Stop an iteration's epochs once the estimated KL divergence exceeds this; null: never."""
    critic_warmup_iterations: int = Field(3, ge=0)
    """First iterations that train the value head alone."""
    normalise_advantages: Literal["batch", "minibatch", "off"] = "batch"
    """Give advantages zero mean and unit deviation over the whole batch or each minibatch."""
    ratio_tolerance: float = Field(1e-3, gt=0.0)
    """Largest log-ratio allowed before the first update; more means that the policy does not
    reproduce its own log-probabilities, and training stops."""

    def build(self, policy: Policy, iterations: int, seed: int) -> Any:
        """The algorithm for a policy, over this many iterations."""
        return catalogue.load("embodied_rl.algorithms.ppo:PPO")(self, policy, iterations, seed)
