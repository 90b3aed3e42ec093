"""What simulators, policies and algorithms promise each other.

Letters of the shapes, used in the whole project: B environment slots, T decisions, H control steps
in a chunk, A action dimensions, S state dimensions, K denoising steps, M scored denoising steps,
P tokens of a chunk.

A *control step* is one simulator step. A *decision* is one policy call; it yields a *chunk* of H
actions. Reinforcement learning runs on decisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embodied_rl.contracts.convention import (
    Camera,
    Contract,
    ContractMismatch,
    HandMotion,
    StatePart,
    short_hash,
)
from embodied_rl.contracts.policy import (
    Decision,
    Estimate,
    Evaluation,
    Histogram,
    Policy,
)
from embodied_rl.contracts.simulator import (
    BatchEnvironment,
    BatchOutcome,
    CannotLookAhead,
    ChunkResult,
    Environment,
    EnvironmentObservation,
    Episode,
    Expert,
    InitialStates,
    Observation,
    Prelude,
    Reason,
    Simulator,
    SimulatorSpec,
    StepOutcome,
)

if TYPE_CHECKING:
    from embodied_rl.contracts.convention import Orientation as Orientation
    from embodied_rl.contracts.convention import Rotation as Rotation
    from embodied_rl.contracts.policy import Randomness as Randomness
    from embodied_rl.contracts.simulator import ByteArray as ByteArray
    from embodied_rl.contracts.simulator import FloatArray as FloatArray
    from embodied_rl.contracts.simulator import Variation as Variation

__all__ = [
    "BatchEnvironment",
    "BatchOutcome",
    "Camera",
    "CannotLookAhead",
    "ChunkResult",
    "Contract",
    "ContractMismatch",
    "Decision",
    "Environment",
    "EnvironmentObservation",
    "Episode",
    "Estimate",
    "Evaluation",
    "Expert",
    "HandMotion",
    "Histogram",
    "InitialStates",
    "Observation",
    "Policy",
    "Prelude",
    "Reason",
    "Simulator",
    "SimulatorSpec",
    "StatePart",
    "StepOutcome",
    "short_hash",
]
