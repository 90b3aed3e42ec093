"""What `embodied-rl doctor policy`, `doctor simulator` and `doctor replay` look at, as options."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SerializeAsAny

from embodied_rl.config import Config, part
from embodied_rl.conventions.known import Convention


class SimulatorCheck(Config):
    """A simulator."""

    simulator: Annotated[SerializeAsAny[Config], part("simulator")]


class PolicyCheck(SimulatorCheck):
    """A policy, and the simulator that it acts in."""

    policy: Annotated[SerializeAsAny[Config], part("policy")]


class ReplayCheck(SimulatorCheck):
    """Recorded demonstrations, executed again through a convention."""

    convention: Convention | None = None
    """The one that a policy is told to speak (`policy.convention`)."""
    spoken: Convention | None = None
    """What the checkpoint really speaks, where that may be another: the demonstrations are put into
    it first. By default the same."""
    episodes: int = Field(20, ge=1)
    """The first ones of the data set."""
