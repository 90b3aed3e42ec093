"""Any gymnasium environment, alone or as a vector environment.

The observation may be a flat or shaped array of numbers, an image, or a dictionary of these. Images
are uint8 [height, width, 3]; everything else is flattened into the state, in the sorted order of
the keys. Time limits are counted here, so that the environment's own limit and ours are the same
thing and never mixed up with a termination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from torch import Tensor

from embodied_rl.contracts import (
    BatchOutcome,
    Camera,
    Contract,
    EnvironmentObservation,
    Episode,
    Observation,
    SimulatorSpec,
    StepOutcome,
)
from simulators.gymnasium_formats import ActionFormat, EpisodeProgress, EpisodeRules, Layout

if TYPE_CHECKING:
    from embodied_rl.contracts import ByteArray, FloatArray
    from simulators.config import GymnasiumConfig

_can_draw: dict[str, bool] = {}
"""Whether a task can be drawn here, found out once per process: it costs a drawing context."""


class GymnasiumEnvironment:
    """One gymnasium environment (contracts.Environment).

    `initial_state` is the seed of the reset. Noise during the episode comes from the episode's own
    seed, as far as the environment draws it from its `np_random`.
    """

    def __init__(self, config: GymnasiumConfig) -> None:
        spec = _registered(config)
        self._rules = _rules(config, spec)
        self._env: Any = _make(config, spec)
        self._layout, self._action, self.spec = _describe(config, self._env, self._rules)
        self._progress = EpisodeProgress(self._rules)
        self._observation: Any = None
        self._instruction = config.instruction

    @property
    def instruction(self) -> str:
        """What the task asks for."""
        return self._instruction

    def reset(self, episode: Episode) -> None:
        """Start the episode."""
        self._progress = EpisodeProgress(self._rules)
        self._observation, _ = self._env.reset(seed=episode.initial_state)
        _seed_noise(self._env, episode.seed)

    def step(self, action: FloatArray) -> StepOutcome:
        """Run one control step with an action [A], clipped to the bounds."""
        answer = self._env.step(self._action.from_row(action))
        self._observation, reward, terminated, truncated, info = answer
        return self._progress.after(float(reward), bool(terminated), bool(truncated), info)

    def observe(self) -> EnvironmentObservation:
        """What the last reset, step or restore showed."""
        return self._layout.read(self._observation)

    def snapshot(self) -> dict[str, FloatArray]:
        """The complete physical state (float64, so that a replay is exact) and the progress.

        Raises NotImplementedError unless the environment is one of gymnasium's MuJoCo ones.
        """
        mujoco, model, data = self._mujoco()
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(model, kind))
        mujoco.mj_getState(model, data, physics, kind)
        progress = np.array([self._progress.num_steps, self._progress.total_reward])
        return cast("dict[str, FloatArray]", {"physics": physics, "progress": progress})

    def restore(self, snapshot: Mapping[str, FloatArray]) -> None:
        """Continue from a state that `snapshot` gave. Raises as `snapshot` does."""
        mujoco, model, data = self._mujoco()
        physics = np.asarray(snapshot["physics"], dtype=np.float64)
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        size = mujoco.mj_stateSize(model, kind)
        if physics.shape != (size,):
            raise ValueError(
                f"this state has {physics.size} numbers, {self.spec.task} has {size}; restore a "
                f"snapshot of the same task"
            )
        mujoco.mj_setState(model, data, physics, kind)
        mujoco.mj_forward(model, data)
        # The forward pass overwrote the solver's warm start, which is part of the state.
        mujoco.mj_setState(model, data, physics, kind)
        self._progress = EpisodeProgress(self._rules)
        self._progress.num_steps = int(snapshot["progress"][0])
        self._progress.total_reward = float(snapshot["progress"][1])
        self._observation = self._env.unwrapped._get_obs()

    def render(self) -> ByteArray:
        """A picture for videos. Raises RuntimeError if the task cannot be drawn here."""
        if not self.spec.can_render:
            raise RuntimeError(
                f"{self.spec.task} cannot be drawn here: it needs the render mode rgb_array, its "
                f"drawing package (such as pygame) and, for MuJoCo without a screen, MUJOCO_GL=egl"
            )
        return np.asarray(self._env.render(), dtype=np.uint8)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _mujoco(self) -> tuple[Any, Any, Any]:
        base = self._env.unwrapped
        if not all(hasattr(base, name) for name in ("model", "data", "_get_obs")):
            raise NotImplementedError(
                f"{self.spec.task} has no state that can be saved and restored; only gymnasium's "
                f"MuJoCo environments have. Start episodes from seeds (initial_state) instead"
            )
        import mujoco  # type: ignore[import-not-found,import-untyped,unused-ignore]

        return mujoco, base.model, base.data


class PausableSlot(gymnasium.Wrapper[Any, Any, Any, Any]):  # type: ignore[misc]
    """One environment of a vector environment that can be left alone for a step.

    A vector environment always steps all of its environments; an action of NaN tells this one to
    stay as it is. Ends of episodes travel in the info rather than in the flags, because gymnasium
    refuses to step a vector environment in which one has ended and waits.
    """

    def __init__(self, env: Any, rules: EpisodeRules) -> None:
        super().__init__(env)
        self._rules = rules
        self._progress = EpisodeProgress(rules)
        self._last: Any = None
        self.noise_seed = 0
        """Seed of the noise of the next episode."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode from the initial state with this number."""
        self._progress = EpisodeProgress(self._rules)
        self._last, _ = self.env.reset(seed=seed, options=options)
        _seed_noise(self.env, self.noise_seed)
        return self._last, {}

    def step(self, action: Any) -> Any:
        """Step, unless the action is NaN."""
        if np.isnan(action).any():
            return self._last, 0.0, False, False, {"ends": np.zeros(3, dtype=bool)}
        self._last, reward, terminated, truncated, info = self.env.step(action)
        outcome = self._progress.after(float(reward), bool(terminated), bool(truncated), info)
        ends = np.array([outcome.terminated, outcome.truncated, outcome.success])
        return self._last, outcome.reward, False, False, {"ends": ends}


class GymnasiumBatch:
    """A gymnasium vector environment (contracts.BatchEnvironment).

    It steps one after the other in this process; `options: {vectorization_mode: async}` gives each
    environment a process of its own. Slots start on their own and inactive slots stay as they are.
    """

    def __init__(self, config: GymnasiumConfig, num_slots: int, device: str) -> None:
        mode = config.options.get("vectorization_mode", "sync")
        if mode not in ("sync", "async"):
            raise ValueError(
                f"simulator.options.vectorization_mode={mode!r}: slots must start and stop on "
                f"their own, which only sync and async allow"
            )
        others = {k: v for k, v in config.options.items() if k != "vectorization_mode"}
        config = config.model_copy(update={"options": others})
        spec = _registered(config)
        rules = _rules(config, spec)
        single = _make(config, spec)
        try:
            self._layout, self._action, self.spec = _describe(config, single, rules)
        finally:
            single.close()
        self._env: Any = gymnasium.make_vec(
            config.task,
            num_envs=num_slots,
            vectorization_mode=mode,
            vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED, "copy": False},
            wrappers=[lambda env: PausableSlot(env, rules)],
            **_options(config, spec),
        )
        self._device = torch.device(device)
        self._instruction = config.instruction
        self._noise_seeds = [0] * num_slots
        self.num_slots = num_slots
        self._observation, _ = self._env.reset(seed=0)

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Start these episodes in these slots; the others go on undisturbed."""
        seeds: list[int | None] = [None] * self.num_slots
        chosen = np.zeros(self.num_slots, dtype=bool)
        for slot, episode in zip(slots, episodes, strict=True):
            seeds[slot], chosen[slot] = episode.initial_state, True
            self._noise_seeds[slot] = episode.seed
        if chosen.any():
            self._env.set_attr("noise_seed", list(self._noise_seeds))
            self._observation, _ = self._env.reset(seed=seeds, options={"reset_mask": chosen})

    def step(self, actions: Tensor, active: Tensor) -> BatchOutcome:
        """Run one control step with actions [B, A] in the active slots, clipped to the bounds."""
        rows = self._action.from_rows(actions.detach().cpu().numpy(), active.cpu().numpy())
        self._observation, reward, _, _, info = self._env.step(rows)
        ends = torch.from_numpy(info["ends"]).to(self._device)
        return BatchOutcome(
            reward=torch.as_tensor(reward, dtype=torch.float32).to(self._device),
            terminated=ends[:, 0],
            truncated=ends[:, 1],
            success=ends[:, 2],
        )

    def observe(self, slots: Sequence[int]) -> Observation:
        """What these slots show, one row per slot."""
        seen = self._layout.read(self._observation, lead=(self.num_slots,))
        rows = np.asarray(slots, dtype=np.int64)
        images = {
            name: torch.from_numpy(image[rows]).to(self._device)
            for name, image in seen.images.items()
        }
        state = torch.from_numpy(seen.state[rows]).to(self._device)
        return Observation(images, state, (self._instruction,) * len(rows))

    def render(self, slot: int) -> ByteArray:
        """A picture of one slot, [height, width, 3]."""
        environments = getattr(self._env, "envs", None)
        picture = environments[slot].render() if environments else self._env.call("render")[slot]
        return np.asarray(picture, dtype=np.uint8)

    def close(self) -> None:
        """Close all environments."""
        self._env.close()


def _registered(config: GymnasiumConfig) -> Any:
    """What gymnasium knows of the task; `module:id` imports the module first."""
    try:
        return gymnasium.spec(config.task)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(
            f"gymnasium cannot find {config.task}: {error}. If a package registers it, write "
            f"simulator.task as package:{config.task.rpartition(':')[2]}"
        ) from error


def _rules(config: GymnasiumConfig, spec: Any) -> EpisodeRules:
    limit = config.max_episode_steps or spec.max_episode_steps
    if not limit:
        raise ValueError(
            f"{config.task} has no time limit of its own; set simulator.max_episode_steps"
        )
    return EpisodeRules(int(limit), config.success_key, config.success_return)


def _make(config: GymnasiumConfig, spec: Any) -> Any:
    try:
        return gymnasium.make(config.task, **_options(config, spec))
    except gymnasium.error.DependencyNotInstalled as error:
        raise RuntimeError(f"{config.task} needs another package: {error}") from error


def _options(config: GymnasiumConfig, spec: Any) -> dict[str, Any]:
    if "max_episode_steps" in config.options:
        raise ValueError("write simulator.max_episode_steps, not simulator.options")
    # We count the steps ourselves, and gymnasium's checker would look at every one of them.
    options = {"max_episode_steps": -1, "disable_env_checker": True, **config.options}
    entry = spec.entry_point
    creator = gymnasium.envs.registration.load_env_creator(entry) if type(entry) is str else entry
    modes = getattr(creator, "metadata", {}).get("render_modes", ())
    if "render_mode" not in options and "rgb_array" in modes:
        options["render_mode"] = "rgb_array"
    return options


def _describe(
    config: GymnasiumConfig, env: Any, rules: EpisodeRules
) -> tuple[Layout, ActionFormat, SimulatorSpec]:
    """How to read and drive an environment, and what it offers."""
    layout = Layout.of(env.observation_space, config.task)
    action = ActionFormat(env.action_space, config.task)
    contract = Contract(
        state_dim=layout.state_dim,
        action_dim=len(action.low),
        action_low=tuple(action.low.tolist()),
        action_high=tuple(action.high.tolist()),
        control_mode=f"as {config.task.rpartition(':')[2]} defines it",
        control_hz=_control_hz(env),
        gripper="none",
        rotation="none",
        cameras=tuple(Camera(name, *layout.sizes[name]) for name in layout.images),
    )
    spec = SimulatorSpec(config.task, contract, rules.max_steps, _draws(config, env))
    return layout, action, spec


def _control_hz(env: Any) -> float:
    """From the environment's time step, else its frame rate, else 1."""
    step_s = getattr(env.unwrapped, "dt", None)
    if isinstance(step_s, float) and step_s > 0:
        return 1.0 / step_s
    return float(env.metadata.get("render_fps") or 1.0)


def _draws(config: GymnasiumConfig, env: Any) -> bool:
    if env.render_mode != "rgb_array":
        return False
    key = f"{config.task} {config.options}"
    if key not in _can_draw:
        env.reset(seed=0)
        try:
            _can_draw[key] = env.render() is not None
        except Exception:
            # Drawing fails in as many ways as there are drawing packages; all of them mean no.
            _can_draw[key] = False
    return _can_draw[key]


def _seed_noise(env: Any, seed: int) -> None:
    env.unwrapped.np_random = seeding.np_random(seed)[0]
