"""Around a model of lerobot: its own saved processors, from observations to its inputs and from its
outputs to actions."""

from __future__ import annotations

import copy
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied_rl.contracts import short_hash
from embodied_rl.conventions.adapter import Adapter
from embodied_rl.conventions.evidence import require_gripper_range
from policies.checkpoints import BadCheckpoint

if TYPE_CHECKING:
    from embodied_rl.contracts import Contract, Observation
    from embodied_rl.conventions.config import ConventionConfig

TOKENIZER_FOLDER = "tokenizer"
"""In folders that we save: the tokenizer, which lerobot looks up by name."""

_STATE, _ACTION = "observation.state", "action"
_NEEDED = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""Statistics that each kind of normalisation reads."""

_ACTION_WORDS = "action_tokenizer_processor"


class Processors:
    """lerobot's pre- and postprocessor of a checkpoint, which speaks a convention of its own or as
    the simulator does.

    Actions are scaled with the very statistics that were saved (it is a `flow_head.Scaling`). In
    two things inputs are made otherwise than by the saved pipelines: tensors stay on the
    observation's device, and instructions are padded to their greatest length, so that a row looks
    the same in every batch.
    """

    def __init__(
        self,
        folder: Path,
        contract: Contract,
        tokenizer: Path | None,
        convention: ConventionConfig | None = None,
    ) -> None:
        self._folder = folder
        self.adapter = Adapter(convention, contract)
        names = [f"policy_{which}processor.json" for which in ("pre", "post")]
        for name in names:
            if not (folder / name).is_file():
                raise BadCheckpoint(
                    f"the checkpoint {folder} has no {name}, with which lerobot saves how inputs "
                    f"and actions are scaled; save it with lerobot 0.4 or later"
                )
        if tokenizer is None and (folder / TOKENIZER_FOLDER).is_dir():
            tokenizer = folder / TOKENIZER_FOLDER
        self._before = _load(folder, names[0], tokenizer)
        self._after = _load(folder, names[1], None)
        steps = self._before.steps
        self._normalise = _step(steps, "NormalizerProcessorStep", folder)
        self._unnormalise = _step(self._after.steps, "UnnormalizerProcessorStep", folder)
        self._tokenise = _step(steps, "TokenizerProcessorStep", folder)
        padded = copy.copy(self._tokenise)
        padded.padding = "max_length"
        inputs = [padded if step is self._tokenise else step for step in steps]
        self._to_inputs = _pipeline(inputs, is_action=False)
        self._to_units = _pipeline([self._normalise], is_action=False)
        self._to_actions = _pipeline(self._after.steps, is_action=True)
        self._require_sizes()

    def __call__(self, x: Tensor) -> Tensor:
        """Actions [..., A] as the model speaks of them."""
        scaled: Tensor = self._to_units({_ACTION: self.adapter.to_checkpoint(x)})[_ACTION]
        return scaled

    def inverse(self, x: Tensor) -> Tensor:
        """Actions [..., A] in the environment's units."""
        actions: Tensor = self._to_actions(x)
        return self.adapter.to_simulator(actions)

    def inputs(self, observation: Observation, cameras: dict[str, str]) -> dict[str, Tensor]:
        """A batch for lerobot's model; `cameras` gives the camera of each of its images."""
        self.require_statistics()
        observation = self.adapter.observation(observation)
        batch: dict[str, Any] = {
            key: observation.images[name].permute(0, 3, 1, 2).float() / 255.0
            for key, name in cameras.items()
        }
        batch[_STATE] = observation.state.float()
        batch["task"] = list(observation.instruction)
        made: dict[str, Tensor] = self._to_inputs(batch)
        return made

    def normalised_state(self, state: Tensor) -> Tensor:
        """States [B, S] as the model sees them."""
        scaled: Tensor = self._to_units({_STATE: self.adapter.state(state.float())})[_STATE]
        return scaled

    @property
    def tokenizer(self) -> Any:
        """What turns instructions into the model's words."""
        return self._tokenise.input_tokenizer

    @property
    def contract(self) -> Contract:
        """The simulator's, with the convention and the statistics that the checkpoint speaks."""
        step, uses = self._normalise, (_STATE, _ACTION)
        modes = {key: _mode(step, key) for key in uses}
        values = {
            key: {
                name: torch.as_tensor(value).float().flatten().tolist()
                for name, value in (step.stats or {}).get(key, {}).items()
                if name in _NEEDED.get(modes[key], ())
            }
            for key in uses
        }
        return replace(
            self.adapter.contract,
            statistics=", ".join(f"{key} by {mode or 'IDENTITY'}" for key, mode in modes.items()),
            statistics_hash="" if self.missing_statistics else short_hash(values),
        )

    @property
    def missing_statistics(self) -> list[str]:
        """Statistics that the checkpoint's normalisation needs and does not have."""
        uses = [(self._normalise, _STATE), (self._normalise, _ACTION), (self._unnormalise, _ACTION)]
        return [
            f"{key}.{name}"
            for step, key in uses
            if key in step.features
            for name in _NEEDED.get(_mode(step, key), ())
            if name not in (step.stats or {}).get(key, {})
        ]

    def require_statistics(self) -> None:
        """Raise `BadCheckpoint` if nobody gave the statistics that scale states and actions."""
        if missing := self.missing_statistics:
            raise BadCheckpoint(
                f"the checkpoint {self._folder} has no statistics to scale states and actions with "
                f"({', '.join(dict.fromkeys(missing))}); set demonstrations and imitation, which "
                f"give them, or take a checkpoint that was trained"
            )

    def fit(self, state: Tensor, actions: Tensor) -> None:
        """Take statistics from demonstrated states [N, S] and actions [N, A], unless the checkpoint
        brought its own: what it learned holds for those alone."""
        if not self.missing_statistics:
            return
        state, actions = self.adapter.state(state), self.adapter.to_checkpoint(actions)
        known = {_STATE: _statistics(state), _ACTION: _statistics(actions)}
        for step in (self._normalise, self._unnormalise):
            step.stats = {**(step.stats or {}), **known}
            step.to(device="cpu", dtype=torch.float32)

    @contextmanager
    def rehearsal(self) -> Generator[None]:
        """Within it, statistics that nobody gave are made up (contracts.Policy)."""
        steps = (self._normalise, self._unnormalise)
        before = [step.stats for step in steps]
        robot = self.adapter.simulator
        ends = torch.tensor([[-1.0], [1.0]])
        self.fit(ends.expand(2, robot.state_dim), ends.expand(2, robot.action_dim))
        try:
            yield
        finally:
            for step, stats in zip(steps, before, strict=True):
                step.stats = stats
                step.to(device="cpu", dtype=torch.float32)

    def save(self, folder: Path) -> None:
        """Write both pipelines as lerobot does, and the tokenizer beside them."""
        self.require_statistics()
        self._before.save_pretrained(folder)
        self._after.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)

    def _require_sizes(self) -> None:
        """Statistics of other sizes belong to another robot."""
        known = self.adapter.checkpoint
        wanted = {_STATE: known.state_dim, _ACTION: known.action_dim}
        for key, size in wanted.items():
            for values in (self._normalise.stats or {}).get(key, {}).values():
                found = torch.as_tensor(values).numel()
                if found not in (1, size):
                    raise BadCheckpoint(
                        f"the checkpoint {self._folder} scales {key} of {found} entries, the "
                        f"simulator has {size}; it was trained for another robot or controller"
                    )
        actions = (self._unnormalise.stats or {}).get(_ACTION, {})
        for low, high in (("min", "max"), ("q01", "q99")):
            if low in actions and high in actions:
                ends = [float(torch.as_tensor(actions[name]).flatten()[-1]) for name in (low, high)]
                where = f"the statistics of the checkpoint {self._folder}"
                require_gripper_range(self.adapter.convention, ends[0], ends[1], where)


def _mode(step: Any, key: str) -> str:
    """How a step of lerobot normalises a feature; empty if it does not."""
    feature = step.features.get(key)
    return getattr(step.norm_map.get(feature.type), "name", "") if feature else ""


def _load(folder: Path, name: str, tokenizer: Path | None) -> Any:
    """A saved pipeline; it will be saved with the device and names that it had."""
    from lerobot.processor import PolicyProcessorPipeline

    stored = {s.get("registry_name"): s for s in json.loads((folder / name).read_text())["steps"]}
    overrides: dict[str, dict[str, Any]] = {}
    if "device_processor" in stored:
        overrides["device_processor"] = {"device": "cpu"}
    if tokenizer is not None:
        overrides["tokenizer_processor"] = {"tokenizer_name": str(tokenizer)}
    if _ACTION_WORDS in stored:
        # Only training by lerobot itself uses it, with code that it would fetch and run.
        overrides[_ACTION_WORDS] = {"action_tokenizer_input_object": object()}
        overrides[_ACTION_WORDS] |= {"trust_remote_code": False}
        named = stored.get("tokenizer_processor", {}).get("config", {}).get("tokenizer_name")
        overrides[_ACTION_WORDS] |= {"paligemma_tokenizer_name": str(tokenizer or named)}
    is_action = "post" in name
    try:
        pipeline: Any = PolicyProcessorPipeline.from_pretrained(
            folder, config_filename=name, overrides=overrides, **_converters(is_action)
        )
    except Exception as error:
        asked = stored.get("tokenizer_processor", {}).get("config", {}).get("tokenizer_name")
        advice = f" Its tokenizer is {asked}: policy.tokenizer=FOLDER gives it." if asked else ""
        raise BadCheckpoint(f"{folder / name} cannot be loaded: {error}.{advice}") from error
    for step in pipeline.steps:
        kept = stored.get(getattr(type(step), "_registry_name", None), {}).get("config", {})
        for attribute in ("device", "tokenizer_name", "action_tokenizer_name", "trust_remote_code"):
            if attribute in kept:
                setattr(step, attribute, kept[attribute])
        if hasattr(step, "action_tokenizer_input_object"):
            step.action_tokenizer_input_object = None
    return pipeline


def _pipeline(steps: list[Any], is_action: bool) -> Any:
    """These steps in a row, but for those that move tensors to a device."""
    from lerobot.processor import PolicyProcessorPipeline

    kept = [step for step in steps if type(step).__name__ != "DeviceProcessorStep"]
    return PolicyProcessorPipeline(steps=kept, **_converters(is_action))


def _converters(is_action: bool) -> dict[str, Any]:
    from lerobot.processor import converters

    if is_action:
        return {
            "to_transition": converters.policy_action_to_transition,
            "to_output": converters.transition_to_policy_action,
        }
    return {
        "to_transition": converters.batch_to_transition,
        "to_output": converters.transition_to_batch,
    }


def _step(steps: list[Any], name: str, folder: Path) -> Any:
    for step in steps:
        if type(step).__name__ == name:
            return step
    raise BadCheckpoint(f"the processors of {folder} have no {name}")


def _statistics(values: Tensor) -> dict[str, Tensor]:
    """What any of lerobot's normalisations may read, of rows [N, size]."""
    rows = values.detach().float().cpu()
    quantiles = torch.tensor([0.01, 0.10, 0.90, 0.99])
    q01, q10, q90, q99 = torch.quantile(rows, quantiles, dim=0)
    return {
        "mean": rows.mean(dim=0),
        "std": rows.std(dim=0, unbiased=False),
        "min": rows.amin(dim=0),
        "max": rows.amax(dim=0),
        **{"q01": q01, "q10": q10, "q90": q90, "q99": q99},
    }
