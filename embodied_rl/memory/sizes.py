"""How much of everything a run works with, by its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodied_rl.memory.parts import Measured
from embodied_rl.run_config import RunConfig


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
