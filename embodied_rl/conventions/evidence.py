"""What the statistics of a checkpoint tell of the convention that it speaks."""

from __future__ import annotations

from fnmatch import fnmatch

from embodied_rl.contracts import ContractMismatch
from embodied_rl.conventions.config import ConventionConfig
from embodied_rl.conventions.known import KNOWN

_NEAR = 0.25
"""Share of the way between closed and open by which a command may miss either."""


def require_gripper_range(
    convention: ConventionConfig | None, low: float, high: float, where: str
) -> None:
    """Raise ContractMismatch if a checkpoint was trained on gripper commands from `low` to `high`
    that are not the convention's. Commands that never changed need only lie within its range."""
    if convention is None or convention.gripper is None:
        return
    ends = sorted((convention.gripper.open, convention.gripper.closed))
    slack = _NEAR * (ends[1] - ends[0])
    within = ends[0] - slack <= low and high <= ends[1] + slack
    reached = low - ends[0] <= slack and ends[1] - high <= slack
    if not within or (high - low > slack and not reached):
        raise ContractMismatch(
            f"gripper: the convention {convention.name} has commands from {ends[0]:g} to "
            f"{ends[1]:g}, {where} are of commands from {low:g} to {high:g}; set "
            f"policy.convention to the one that the checkpoint was trained with"
        )


def require_data_set(convention: ConventionConfig | None, key: str) -> None:
    """Raise ContractMismatch if the statistics `key` are known to be of data in another convention
    than a known one that was chosen."""
    spoken = spoken_by(key)
    if convention is None or not convention.datasets or spoken is None:
        return
    if not _covers(convention, key):
        raise ContractMismatch(
            f"convention: policy.convention={convention.name}, but the statistics {key} are of "
            f"data in {spoken.name}; set policy.convention={spoken.name}, or another "
            f"policy.unnorm_key"
        )


def spoken_by(key: str | None) -> ConventionConfig | None:
    """The known convention of the data whose statistics have this name, if there is one."""
    return next((known for known in KNOWN.values() if _covers(known, key or "")), None)


def _covers(convention: ConventionConfig, key: str) -> bool:
    return any(fnmatch(key, pattern) for pattern in convention.datasets)
