"""What is likely wrong with a convention, in words, from actions before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied_rl.contracts import Contract
from embodied_rl.conventions.adapter import gripper_of, regripped
from embodied_rl.conventions.config import GripperConfig
from embodied_rl.correctness.gates import Finding

if TYPE_CHECKING:
    from embodied_rl.training.demonstrations import Vectors

_UNIT = GripperConfig(open=1.0, closed=0.0)
_TENTH = 0.1
_STILL_M = 1e-4


def part_of(contract: Contract, entry: int) -> str:
    """What an entry of an action is: translation, rotation, gripper or arm."""
    if gripper_of(contract) and entry == contract.action_dim - 1:
        return "gripper"
    if contract.hand is None:
        return "arm"
    return "translation" if entry < 3 else "rotation"


def likely_causes(
    contract: Contract, recorded: Sequence[Tensor], back: Sequence[Tensor]
) -> list[str]:
    """Why actions [L, A] of episodes differ from what came back of them, as far as it shows."""
    before, after = torch.cat([*recorded]), torch.cat([*back])
    causes = []
    by_part: dict[str, list[int]] = {}
    for entry in range(contract.action_dim):
        by_part.setdefault(part_of(contract, entry), []).append(entry)
    for part, entries in by_part.items():
        cause = (
            _of_gripper(contract, before[:, -1], after[:, -1])
            if part == "gripper"
            else _of_scale(part, before[:, entries], after[:, entries])
        )
        causes += [cause] if cause else []
    return causes


def fingers(contract: Contract, data: Vectors) -> Finding:
    """Whether the recorded fingers do what the simulator says of its gripper commands; this asks no
    declaration, only what was measured."""
    name, gripper = "gripper", gripper_of(contract)
    names = [part.name for part in contract.state_parts]
    if gripper is None or "gripper_joints" not in names:
        return Finding(name, "ok", "not looked at: the simulator does not name its fingers")
    pieces = torch.split(data.state, [part.size for part in contract.state_parts], dim=-1)
    opening = pieces[names.index("gripper_joints")].abs().sum(-1)
    moved = opening[1:] - opening[:-1]
    within = (data.episode[1:] == data.episode[:-1]) & (moved.abs() > _STILL_M)
    if not within.any():
        return Finding(name, "ok", "the fingers never move in these demonstrations")
    opens = regripped(data.actions[:-1, -1], gripper, _UNIT, rounded=True)[within] > 0.5
    share = float((opens == (moved[within] > 0)).double().mean())
    text = (
        f"the fingers follow the commands ({contract.gripper}) in {100 * share:.0f} % of the "
        f"{int(within.sum())} steps in which they move"
    )
    if share < 0.5:
        advice = "the commands mean the opposite: correct `gripper` of the simulator's contract"
        return Finding(name, "fail", f"{text}; {advice}")
    return Finding(name, "ok", text)


def _of_gripper(contract: Contract, before: Tensor, after: Tensor) -> str:
    gripper = gripper_of(contract)
    assert gripper is not None, "looked at in part_of"
    first, then = regripped(torch.stack([before, after]), gripper, _UNIT, rounded=False)
    opened, opens = first > 0.5, then > 0.5
    advice = "look at `open`, `closed` and `threshold` of the convention's gripper"
    share = float((opened != opens).double().mean())
    for state, asked, given in (("opens", opened, opens), ("closes", ~opened, ~opens)):
        if asked.any() and not asked.all() and not given.any():
            often = f"in {100 * float(asked.double().mean()):.0f} % of the steps"
            return f"the gripper never {state}, as the demonstrations do {often}; {advice}"
    if share > 0.5:
        return (
            f"the gripper is reversed: it opens where the demonstrations close, and the other way "
            f"round, in {100 * share:.0f} % of the steps; exchange `open` and `closed` of the "
            f"convention's gripper"
        )
    if share > 0.0:
        return f"the gripper is the opposite in {100 * share:.0f} % of the steps; {advice}"
    if float((first - then).abs().max()) > _TENTH:
        return f"the gripper comes back only partly open or closed; {advice}"
    return ""


def _of_scale(part: str, before: Tensor, after: Tensor) -> str:
    """How much larger a part comes back than it was, by least squares."""
    size = float((before * before).sum())
    if size == 0.0:
        return ""
    ratio = float((before * after).sum()) / size
    unit = {"translation": "metres_per_unit", "rotation": "radians_per_unit"}.get(part, "units")
    if ratio < -_TENTH:
        return f"the {part} is reversed ({ratio:.2f} times as large): look at the sign of {unit}"
    if abs(ratio - 1.0) > _TENTH:
        return (
            f"the {part} comes back {ratio:.2f} times as large: look at {unit}, and whether what "
            f"the checkpoint says is beyond the simulator's bounds"
        )
    return ""
