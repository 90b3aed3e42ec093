"""ManiSkill 3 on the CPU: one scene per environment.

Supported tasks are stepped directly (`simulators.maniskill_fast`), all others through ManiSkill's
own step. Images are drawn only when somebody observes.
"""

from __future__ import annotations

import difflib
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.contracts import (
    EnvironmentObservation,
    Episode,
    SimulatorSpec,
    StepOutcome,
)
from simulators import maniskill_visuals as visuals
from simulators.maniskill_contract import make_contract
from simulators.maniskill_fast import CONTROL_MODES, TASKS, FastStepper
from simulators.maniskill_stock import Stepper, StockStepper
from simulators.maniskill_tasks import PANDA_TASKS, instruction_for, only_task, require_task

if TYPE_CHECKING:
    from embodied_rl.contracts import ByteArray, FloatArray
    from simulators.config import ManiSkillConfig


def make(config: ManiSkillConfig) -> ManiSkillEnvironment:
    """The environment for these options.

    Raises ValueError for an unknown task, controller or reward, FileNotFoundError with the
    download command for missing assets, RuntimeError with what to install if it cannot draw.
    """
    return ManiSkillEnvironment(config)


def save_initial_states(path: Path, snapshots: Sequence[Mapping[str, FloatArray]]) -> None:
    """Write snapshots of one environment as a file for the option `initial_states`."""
    stacked = {name: np.stack([s[name] for s in snapshots]) for name in snapshots[0]}
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, allow_pickle=False, **stacked)
    temporary.replace(path)


def build_scene(config: ManiSkillConfig, num_envs: int, sim_backend: str) -> Any:
    """ManiSkill's own environment for these options, without gymnasium's wrappers."""
    registered = require_task(only_task(config))
    images = config.gives_images
    visuals.prepare_rendering(need_images=images)
    if images and config.visuals == "light":
        visuals.use_light_visuals()
    logging.getLogger("mani_skill").setLevel(logging.ERROR)
    options: dict[str, Any] = {
        "num_envs": num_envs,
        "obs_mode": config.observation,
        "reward_mode": "normalized_dense" if config.reward == "dense" else "none",
        "control_mode": config.control_mode,
        "sim_backend": sim_backend,
        "render_backend": visuals.render_backend(),
    }
    robot = config.robot or ("panda" if config.task in PANDA_TASKS else None)
    if robot:
        options["robot_uids"] = robot
    if images:
        size = config.image_size
        options["sensor_configs"] = {"width": size, "height": size, "shader_pack": "minimal"}
    _require_supported(config, registered.cls, robot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return registered.cls(**{**registered.default_kwargs, **options})
        except AttributeError as error:
            # Some tasks, such as PushT-v1, look at their own drawn shapes while they are built.
            if visuals.has_render_device():
                raise
            raise ValueError(
                f"{config.task} cannot be built without a device to draw on, even for the state "
                f"alone ({error}). {visuals.NO_RENDER_DEVICE}"
            ) from error


class ManiSkillEnvironment:
    """One ManiSkill scene (contracts.Environment)."""

    def __init__(self, config: ManiSkillConfig) -> None:
        import torch

        self._config = config
        self._torch = torch
        self.base = build_scene(config, num_envs=1, sim_backend="physx_cpu")
        self._limit = time_limit(config)
        self._bank = load_bank(config.initial_states) if config.initial_states else None
        self._read_extra = self.base.get_obs
        fast = (
            config.fast_path
            and only_task(config) in TASKS
            and config.control_mode in CONTROL_MODES
            and self.base.agent.uid == "panda"
        )
        if fast or config.reward == "sparse":
            # ManiSkill would observe (and draw) at every step and reset; we observe when asked.
            self.base.get_obs = lambda info=None, **_: {}
        if fast:
            self.base.get_info = dict
        self.base.reset(seed=0)
        self._stepper: Stepper = (
            FastStepper(self.base, only_task(config), config.control_mode)
            if fast
            else StockStepper(self.base, self._read_extra)
        )
        self.is_fast = fast
        self._elapsed = 0
        self._had_success = False
        self._instruction = instruction_for(only_task(config), config.instruction)
        state_dim = self._state().shape[0]
        self.spec = SimulatorSpec(
            task=only_task(config),
            contract=make_contract(config, self.base, state_dim),
            max_episode_steps=self._limit,
            can_render=visuals.has_render_device(),
            num_initial_states=_num_rows(self._bank) if self._bank else None,
        )
        self.tcp_pose = self._stepper.tcp_pose
        self.pose_of = self._stepper.pose_of
        self.gripper_opening = self._stepper.gripper_opening
        self.is_grasped = self._stepper.is_grasped

    @property
    def instruction(self) -> str:
        """What the task asks for."""
        return self._instruction

    def reset(self, episode: Episode) -> None:
        """Start from the planned initial state: a reset seed, or a row of the bank of states."""
        self._elapsed, self._had_success = 0, False
        if self._bank is None:
            self.base.reset(seed=episode.initial_state)
        else:
            self.base.reset(seed=episode.seed)
            self.restore(_row(self._bank, episode.initial_state, self._config.initial_states))
            self._elapsed, self._had_success = 0, False
        self._stepper.forget()

    def step(self, action: FloatArray) -> StepOutcome:
        """Run one control step; sparse reward is 1 when success first holds, and never again."""
        success = self._stepper.step(action)
        self._elapsed += 1
        if self._config.reward == "sparse":
            reward = float(success and not self._had_success)
        else:
            reward = self._dense_reward(action)
        self._had_success |= success
        return StepOutcome(
            reward=reward,
            terminated=success and self._config.terminate_on_success,
            truncated=self._elapsed >= self._limit,
            success=success,
        )

    def observe(self) -> EnvironmentObservation:
        """Read the state and draw the cameras."""
        images: dict[str, ByteArray] = {}
        if self._config.gives_images:
            data = self.base._get_obs_sensor_data()
            images = {name: data[name]["rgb"][0].cpu().numpy() for name in sorted(data)}
        return EnvironmentObservation(images, self._state())

    def snapshot(self) -> dict[str, FloatArray]:
        """Poses and velocities of everything that moves, the elapsed steps, and whether there was
        a success."""
        flat = {
            name: value[0].cpu().numpy().astype(np.float32).copy()
            for name, value in _flat(self.base.get_state_dict()).items()
        }
        flat["elapsed_steps"] = np.array([self._elapsed], dtype=np.float32)
        flat["had_success"] = np.array([self._had_success], dtype=np.float32)
        return flat

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None:
        """Put the scene into a state that `snapshot` gave."""
        nested: dict[str, Any] = {}
        for key, value in snapshot.items():
            *parents, name = key.split("/")
            node = nested
            for parent in parents:
                node = node.setdefault(parent, {})
            if parents:
                node[name] = self._torch.from_numpy(value.copy())[None]
        have = set(_flat(self.base.get_state_dict()))
        given = {key for key in snapshot if "/" in key}
        if have != given:
            raise ValueError(
                f"this state does not belong to {self._config.task}: it lacks "
                f"{sorted(have - given) or 'nothing'} and has {sorted(given - have) or 'nothing'} "
                f"too much"
            )
        self.base.set_state_dict(nested)
        if "controller" in nested:
            self.base.agent.set_controller_state(nested["controller"])
        self._elapsed = int(snapshot["elapsed_steps"][0])
        # Banks that were written before there was this entry hold no successes.
        self._had_success = bool(snapshot.get("had_success", (False,))[0])
        self._stepper.forget()

    def render(self) -> ByteArray:
        """A picture from the task's camera for people, [height, width, 3]."""
        if not self.spec.can_render:
            raise RuntimeError(visuals.NO_RENDER_DEVICE)
        picture = self.base.render_rgb_array()[0]
        array: ByteArray = picture.cpu().numpy().astype(np.uint8)
        return array

    def close(self) -> None:
        """Free the scene."""
        self.base.close()

    def _state(self) -> FloatArray:
        return self._stepper.state(privileged=not self._config.gives_images)

    def _dense_reward(self, action: FloatArray) -> float:
        info = self.base.evaluate()
        tensor = self._torch.from_numpy(np.asarray(action, dtype=np.float32))[None]
        reward = self.base.compute_normalized_dense_reward(obs=None, action=tensor, info=info)
        return float(reward[0])


def _require_supported(config: ManiSkillConfig, task: Any, robot: str | None) -> None:
    """Raise ValueError for a controller or reward that the task does not have."""
    from mani_skill.agents.registration import REGISTERED_AGENTS

    modes = task.SUPPORTED_REWARD_MODES
    if config.reward == "dense" and "normalized_dense" not in modes:
        raise ValueError(
            f"{config.task} has no dense reward, only {', '.join(modes)}; "
            f"set simulator.reward=sparse"
        )
    supported = getattr(task, "SUPPORTED_ROBOTS", None) or ()
    uid = robot or (supported[0] if supported and isinstance(supported[0], str) else None)
    if robot and robot not in REGISTERED_AGENTS:
        near = difflib.get_close_matches(robot, REGISTERED_AGENTS, 3)
        raise ValueError(
            f"simulator.robot={robot!r} is no ManiSkill robot; near matches: "
            f"{', '.join(near) or 'none'}"
        )
    agent = REGISTERED_AGENTS.get(uid)
    if agent is None:
        return
    known = list(getattr(agent.agent_cls, "supported_control_modes", ()) or ())
    if not known:
        known = _control_modes_of(agent.agent_cls)
    if known and config.control_mode not in known:
        raise ValueError(
            f"simulator.control_mode={config.control_mode!r} is none of {uid}'s: {', '.join(known)}"
        )


def _control_modes_of(agent: Any) -> list[str]:
    """Names of a robot's controllers, read from its class without building a scene."""
    try:
        bare = agent.__new__(agent)
        return list(agent._controller_configs.fget(bare))
    except (AttributeError, TypeError):
        return []  # This robot's controllers depend on the scene; ManiSkill itself will complain.


def time_limit(config: ManiSkillConfig) -> int:
    """Control steps of an episode. Raises ValueError if neither options nor task set a limit."""
    limit = config.max_episode_steps or require_task(only_task(config)).max_episode_steps
    if limit is None:
        raise ValueError(
            f"{config.task} has no time limit of its own; set simulator.max_episode_steps"
        )
    return int(limit)


def load_bank(path: Path) -> dict[str, FloatArray]:
    """What `save_initial_states` wrote: by name, one row per initial state."""
    if not path.is_file():
        raise FileNotFoundError(f"simulator.initial_states: no file {path}")
    with np.load(path, allow_pickle=False) as bank:
        return {name: bank[name] for name in bank.files}


def _row(bank: Mapping[str, FloatArray], row: int, path: Path | None) -> dict[str, FloatArray]:
    count = _num_rows(bank)
    if not 0 <= row < count:
        raise IndexError(f"{path} holds {count} initial states, 0 to {count - 1}; got {row}")
    return {name: values[row] for name, values in bank.items()}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries under their joined names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _num_rows(bank: Mapping[str, FloatArray]) -> int:
    return len(next(iter(bank.values())))
