"""Options of the algorithms. Kept apart from the algorithms so that a configuration is checked
without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from embodied_rl import catalogue
from embodied_rl.config import Config

if TYPE_CHECKING:
    from embodied_rl.contracts import Policy


class UpdateConfig(Config):
    """How every algorithm takes its steps."""

    learning_rate: float = Field(3e-5, gt=0.0)
    """Of the policy."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rates fall to zero over the run."""
    minibatch_size: int = Field(256, ge=1)
    """Decisions that are evaluated at once, and per gradient step where there are several."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients (those of a value head apart) are scaled down to this norm."""
    scored_steps: Literal["executed", "all"] = "executed"
    """Where an episode ends within a chunk: score its executed steps alone, as the papers do, or
    all steps. A flow policy denoises a chunk as a whole, so the noise of later steps has shaped the
    executed ones: `all` is its exact policy gradient, with more variance, and `executed` leaves
    that part of it out."""
    entropy_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the entropy bonus; Flow-SDE has none, its noise is fixed."""
    kl_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the divergence from the policy that the run began with; 0 keeps no copy of it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence (Schulman, "Approximating KL divergence", 2020)."""
    ratio_tolerance: float = Field(1e-3, gt=0.0)
    """Largest log-ratio allowed before the first update; more means that the policy does not
    reproduce its own log-probabilities, and training stops."""


class ClipConfig(UpdateConfig):
    """How PPO and GRPO bound their steps."""

    epochs: int = Field(4, ge=1)
    """Passes over the collected decisions per iteration."""
    clip: float = Field(0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped to 1 - clip .. 1 + clip."""
    clip_high: float | None = Field(None, gt=0.0)
    """Another bound above, 1 + clip_high ("clip-higher"); null: the same as below."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Bounds the loss of decisions with a negative advantage at this multiple of it; null: no."""
    ratio_level: Literal["chunk", "step", "token"] = "chunk"
    """One ratio per decision, one per executed control step, or one per action token of them (as
    SimpleVLA-RL, arXiv:2509.09674); the loss is a mean over ratios. Not every policy has all."""
    task_gradients: Literal["sum", "pcgrad"] = "sum"
    """Add up what the tasks of a minibatch ask of the policy, or first take from each task's
    gradient what points against another's (PCGrad, arXiv:2001.06782). For several tasks; it takes a
    backward pass for each."""
    max_kl: float | None = Field(0.05, gt=0.0)
    """Stop an iteration's epochs once the estimated KL divergence exceeds this; null: never."""


class PPOConfig(ClipConfig):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) on decisions."""

    type: Literal["ppo"] = "ppo"
    decisions_per_iteration: int = Field(16, ge=1)
    """T: decisions per slot collected between updates."""
    discount: float = Field(0.99, ge=0.0, le=1.0)
    """Discount per control step; a decision that executed n steps is discounted n times."""
    advantages: Literal["gae", "vtrace"] = "gae"
    """Generalised advantage estimation, once per iteration; or V-trace (arXiv:1802.01561), which
    looks at the collected decisions again before every further epoch and corrects for how the
    policy and the value have changed since."""
    gae_lambda: float = Field(0.95, ge=0.0, le=1.0)
    """Trace decay of both, per decision."""
    vtrace_rho_bar: float = Field(1.0, gt=0.0)
    """Bound of the ratio that weighs a decision's own error; 1 and more leave fresh decisions as
    they are. The larger, the nearer the value learned is to that of the present policy."""
    vtrace_c_bar: float = Field(1.0, gt=0.0)
    """Bound of the ratios that pass later errors back: smaller is slower and has less variance."""
    value_learning_rate: float = Field(1e-3, gt=0.0)
    """Of the value head."""
    value_coefficient: float = Field(0.5, ge=0.0)
    """Weight of the value loss."""
    critic_warmup_iterations: int = Field(3, ge=0)
    """First iterations that train the value head alone."""
    value_normalisation: Literal["off", "popart"] = "off"
    """Learn the returns as they are, or on a scale that follows each task's returns (PopArt,
    arXiv:1809.04474), so that tasks with large returns do not drown out the others;
    `normalise_advantages=task` does the same for the policy."""
    popart_decay: float = Field(0.9, ge=0.0, lt=1.0)
    """Share of PopArt's statistics that still counts an iteration later."""
    normalise_advantages: Literal["batch", "task", "minibatch", "off"] = "batch"
    """Give advantages zero mean and unit deviation over the whole batch, over each task's rows, so
    that no task is drowned out by another, or over each minibatch."""

    @model_validator(mode="after")
    def _bounds_of_vtrace_fit(self) -> Self:
        if self.vtrace_c_bar > self.vtrace_rho_bar:
            raise ValueError(
                f"vtrace_c_bar={self.vtrace_c_bar} must not be more than "
                f"vtrace_rho_bar={self.vtrace_rho_bar}: V-trace converges for rho_bar >= c_bar"
            )
        if self.advantages == "vtrace" and self.epochs == 1:
            raise ValueError(
                "advantages=vtrace corrects the epochs after the first one, and epochs=1 has none; "
                "choose advantages=gae or more epochs"
            )
        return self

    def build(self, policy: Policy, seed: int) -> Any:
        """The algorithm for a policy."""
        return catalogue.load("embodied_rl.algorithms.ppo:PPO")(self, policy, seed)


class GRPOConfig(ClipConfig):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300): no critic."""

    type: Literal["grpo"] = "grpo"
    groups_per_iteration: int = Field(16, ge=1)
    """Groups to learn from between updates."""
    group_size: int = Field(8, ge=2)
    """G: episodes from the same initial state whose returns are compared."""
    max_refill: float = Field(1.0, ge=1.0)
    """Groups with equal returns teach nothing and are replaced, until this many times
    `groups_per_iteration` were tried; 1 never replaces."""
    extra_groups: int = Field(0, ge=0)
    """So often at most, an initial state that hardly ever succeeds gets another `group_size`
    episodes, which join its group (DARS, arXiv:2508.13755, in its simplest form); 0: never."""
    hard_success: float = Field(0.0, ge=0.0, lt=1.0)
    """Such a state is one where at most this share of the episodes so far succeeded."""
    branches: int = Field(0, ge=0)
    """A group whose returns differ is followed by `group_size` episodes from one state in the
    middle of one of its episodes, whose returns are compared with each other; those by further
    ones, and so on, so often in a row. On top of `groups_per_iteration`; 0: never."""
    scale: Literal["std", "off"] = "std"
    """Divide advantages by their group's deviation, or not (Dr. GRPO)."""
    length_normalisation: Literal["decision", "episode", "constant"] = "decision"
    """What weighs the same: every decision (DAPO), every episode (GRPO), or every decision over
    the longest possible episode (Dr. GRPO)."""

    def build(self, policy: Policy, seed: int) -> Any:
        """The algorithm for a policy."""
        return catalogue.load("embodied_rl.algorithms.grpo:GRPO")(self, policy, seed)


class REINFORCEConfig(UpdateConfig):
    """REINFORCE with a baseline from other episodes; one gradient step per iteration."""

    type: Literal["reinforce"] = "reinforce"
    baseline: Literal["leave_one_out", "batch"] = "leave_one_out"
    """The mean of the others in the group (RLOO, arXiv:2402.14740), or the mean and deviation of
    the whole batch (REINFORCE++, arXiv:2501.03262)."""
    groups_per_iteration: int = Field(16, ge=1)
    """Groups to learn from between updates."""
    group_size: int = Field(8, ge=1)
    """Episodes from the same initial state; `baseline=batch` can do with 1."""
    max_refill: float = Field(1.0, ge=1.0)
    """As for GRPO; 1 never replaces. Groups with equal returns are left out of the mean either way,
    so that states which always or never succeed count less than in the plain policy gradient."""
    extra_groups: int = Field(0, ge=0)
    """As for GRPO; with more, hard states count more. For `baseline=leave_one_out`."""
    hard_success: float = Field(0.0, ge=0.0, lt=1.0)
    """As for GRPO."""
    branches: int = Field(0, ge=0)
    """As for GRPO; the gradient is then that of the return from those starts as well. For
    `baseline=leave_one_out`."""

    @model_validator(mode="after")
    def _leaving_one_out_needs_others(self) -> Self:
        if self.baseline == "leave_one_out" and self.group_size < 2:
            raise ValueError("baseline=leave_one_out needs group_size of at least 2, got 1")
        if self.baseline == "batch" and self.extra_groups:
            raise ValueError(
                f"extra_groups={self.extra_groups} would shift the mean of the whole batch towards "
                f"failures; set it to 0 or take baseline=leave_one_out"
            )
        if self.baseline == "batch" and self.branches:
            raise ValueError(
                f"branches={self.branches} would mix later starts, from which other returns are to "
                f"be expected, into the mean of the whole batch; set it to 0 or take "
                f"baseline=leave_one_out"
            )
        return self

    def build(self, policy: Policy, seed: int) -> Any:
        """The algorithm for a policy."""
        make = catalogue.load("embodied_rl.algorithms.reinforce:REINFORCE")
        return make(self, policy, seed)
