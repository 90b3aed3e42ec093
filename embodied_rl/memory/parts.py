"""What single parts of a run were measured to take."""

from __future__ import annotations

from dataclasses import dataclass


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
