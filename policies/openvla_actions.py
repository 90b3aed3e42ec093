"""OpenVLA's numbers: action tokens, and the statistics that scale actions and states."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embodied_rl.contracts import Contract, short_hash
from embodied_rl.conventions.adapter import Adapter
from embodied_rl.conventions.evidence import require_data_set, require_gripper_range
from policies.checkpoints import BadCheckpoint

if TYPE_CHECKING:
    from policies.openvla_checkpoint import Checkpoint
    from policies.openvla_config import OpenVLACheckpointConfig

_EDGES = 0.01, 0.99
_LITTLE = 1e-8
"""As in the release: spans of 0 divide nothing."""


def token_values(token: Tensor, count: int) -> Tensor:
    """Numbers in -1 .. 1, float64 [...], of action tokens 0 .. count - 1 [...].

    `count` edges bound one bin less, and a token stands for its bin's middle. The last token is the
    lowest bin; the first stands for 1 exactly where numbers are read and, having no bin, for the
    highest one where they are spoken: as the second does.
    """
    highest_first = (count - 1 - token).clamp_max(count - 2)
    return (2.0 * highest_first.double() + 1.0) / (count - 1) - 1.0


def tokens_of(value: Tensor, count: int) -> Tensor:
    """The action tokens, int64 [...], of numbers [...]; what lies outside -1 .. 1 is cut."""
    edges = torch.linspace(-1.0, 1.0, count, dtype=torch.float64, device=value.device)
    place = torch.bucketize(value.double().clamp(-1.0, 1.0), edges, right=True)
    return count - place


class Scale(nn.Module):
    """Between a robot's units and -1 .. 1, by the 1st and 99th percentile; what the checkpoint's
    mask leaves out is never scaled."""

    low: Tensor
    high: Tensor
    scaled: Tensor

    def __init__(self, statistics: dict[str, Any]) -> None:
        super().__init__()
        low, high = (torch.tensor(statistics[name], dtype=torch.float64) for name in ("q01", "q99"))
        scaled = torch.tensor(statistics.get("mask") or [True] * len(low))
        for name, tensor in (("low", low), ("high", high), ("scaled", scaled)):
            self.register_buffer(name, tensor, persistent=False)

    def to_units(self, values: Tensor) -> Tensor:
        """float32 [..., n] within -1 .. 1, of values in the robot's units [..., n]."""
        span = self.high - self.low + _LITTLE
        units = 2.0 * (values.double() - self.low) / span - 1.0
        return torch.where(self.scaled, units, values.double()).clamp(-1.0, 1.0).float()

    def from_units(self, units: Tensor) -> Tensor:
        """float32 [..., n] in the robot's units."""
        values = (units.double() + 1.0) / 2.0 * (self.high - self.low + _LITTLE) + self.low
        return torch.where(self.scaled, values, units.double()).float()


class Robot(nn.Module):
    """A robot in the checkpoint's terms: its actions, and its state where the checkpoint reads
    it."""

    def __init__(
        self, config: OpenVLACheckpointConfig, contract: Contract, checkpoint: Checkpoint
    ) -> None:
        """Raises BadCheckpoint if statistics are missing or of other sizes than the contract's, and
        ContractMismatch if the convention fits neither them nor the simulator."""
        super().__init__()
        self.statistics = dict(checkpoint.statistics)
        self._reads_state = "proprio_projector" in checkpoint.parts
        self.adapter = Adapter(config.convention, contract, self._reads_state)
        self._fitted = config.fit_statistics
        self._key = config.unnorm_key or ""
        if self._fitted and self._key not in self.statistics:
            self.statistics[self._key] = _placeholder(self.adapter)
        self._key = _chosen_key(self.statistics, config.unnorm_key, checkpoint)
        if not self._fitted:
            self._require_convention()
        self._rescale(torch.device("cpu"))
        _require_sizes(self, self.adapter.checkpoint, self._key, checkpoint)

    @property
    def contract(self) -> Contract:
        """The simulator's, with the convention and the statistics that the checkpoint speaks."""
        chosen = self.statistics[self._key]
        kinds = ("action", "proprio") if self._reads_state else ("action",)
        used = {k: {n: chosen[k].get(n) for n in ("q01", "q99", "mask")} for k in kinds}
        name = f"q01 and q99 of {self._key}"
        known = self.adapter.contract
        return replace(known, statistics=name, statistics_hash=short_hash(used))

    def _require_convention(self) -> None:
        require_data_set(self.adapter.convention, self._key)
        action = self.statistics[self._key]["action"]
        where = f"the statistics {self._key} of the checkpoint"
        require_gripper_range(self.adapter.convention, action["q01"][-1], action["q99"][-1], where)

    def _rescale(self, device: torch.device) -> None:
        chosen = self.statistics[self._key]
        self.actions = Scale(chosen["action"]).to(device)
        self.state = Scale(chosen["proprio"]).to(device) if self._reads_state else None

    def fit(self, state: Tensor, actions: Tensor) -> None:
        """Take statistics from states [N, S] and actions [N, A], if the options want that; those of
        the checkpoint stay otherwise."""
        if not self._fitted:
            return
        seen = self.adapter.state(state) if self._reads_state else state
        found = {"action": _summary(self.to_checkpoint(actions)), "proprio": _summary(seen)}
        self.statistics[self._key] = found
        self._rescale(self.actions.low.device)

    def to_checkpoint(self, actions: Tensor) -> Tensor:
        """Actions [..., A] in the data set's terms."""
        return self.adapter.to_checkpoint(actions.float())

    def to_environment(self, actions: Tensor) -> Tensor:
        """The reverse, within the environment's bounds."""
        return self.adapter.to_simulator(actions)


def _chosen_key(statistics: dict[str, Any], key: str | None, checkpoint: Checkpoint) -> str:
    if key is None and len(statistics) == 1:
        return next(iter(statistics))
    if key is None or key not in statistics:
        said = " is needed" if key is None else f"={key} is not known"
        raise BadCheckpoint(
            f"policy.unnorm_key{said}: the checkpoint {checkpoint.folder} has statistics of "
            f"{', '.join(sorted(statistics)) or 'nothing'}. For a robot of its own, set "
            f"policy.fit_statistics=true and demonstrations"
        )
    return key


def _require_sizes(robot: Robot, contract: Contract, key: str, checkpoint: Checkpoint) -> None:
    wanted = [("actions", robot.actions, contract.action_dim)]
    if robot.state is not None:
        wanted.append(("states", robot.state, contract.state_dim))
        read = checkpoint.parts["proprio_projector"].weights["fc1.weight"].shape[1]
        if read != contract.state_dim:
            raise BadCheckpoint(
                f"the simulator's state has {contract.state_dim} entries, but the checkpoint "
                f"{checkpoint.folder} reads {read}; choose a checkpoint for this robot"
            )
    for what, scale, size in wanted:
        if len(scale.low) != size:
            raise BadCheckpoint(
                f"the simulator's {what} have {size} entries, but those of {key} in the checkpoint "
                f"{checkpoint.folder} have {len(scale.low)}; choose another unnorm_key or control "
                f"mode"
            )


def _placeholder(adapter: Adapter) -> dict[str, Any]:
    """Actions span the environment's bounds, states are as they come."""
    known = adapter.checkpoint
    bounds = torch.tensor([known.action_low, known.action_high]).clamp(-1e6, 1e6)
    ends = adapter.to_checkpoint(bounds)
    count = known.state_dim
    return {
        "action": {"q01": ends.amin(0).tolist(), "q99": ends.amax(0).tolist()},
        "proprio": {"q01": [-1.0] * count, "q99": [1.0] * count},
    }


def _summary(values: Tensor) -> dict[str, Any]:
    """In the words of the release's statistics."""
    found = values.double()
    low, high = torch.quantile(found, torch.tensor(_EDGES, device=found.device).double(), dim=0)
    return {
        "mean": found.mean(0).tolist(),
        "std": found.std(0, unbiased=False).tolist(),
        "min": found.amin(0).tolist(),
        "max": found.amax(0).tolist(),
        "q01": low.tolist(),
        "q99": high.tolist(),
        "mask": [True] * found.shape[1],
    }
