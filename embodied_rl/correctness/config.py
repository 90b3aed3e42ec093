"""What `embodied-rl doctor policy` and `doctor simulator` look at, as options."""

from __future__ import annotations

from typing import Annotated

from pydantic import SerializeAsAny

from embodied_rl.config import Config, part


class SimulatorCheck(Config):
    """A simulator."""

    simulator: Annotated[SerializeAsAny[Config], part("simulator")]


class PolicyCheck(SimulatorCheck):
    """A policy, and the simulator that it acts in."""

    policy: Annotated[SerializeAsAny[Config], part("policy")]
