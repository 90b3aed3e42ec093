"""ManiSkill 3 on a GPU: all scenes are one batch in one process, and tensors stay on the device.

Who starts where: ManiSkill draws the initial states of all scenes from one generator, so that equal
seeds give unequal scenes. Here initial state i is what a reset of one scene alone gives with every
generator seeded with i. It is the same in every slot, however many slots there are. It is not the
state that the CPU backend gives for i, because CUDA draws other numbers. A file of
`initial_states` means the same on both, and starts many slots at once, while seeded starts take
their turns.

Tasks that build other shapes in each scene (PegInsertionSide's peg, say) start equal except for
these shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from embodied_rl.contracts import BatchOutcome, Episode, Observation, SimulatorSpec
from simulators import maniskill_visuals as visuals
from simulators.maniskill import build_scene, load_bank, time_limit
from simulators.maniskill_contract import make_contract
from simulators.maniskill_tasks import instruction_for, only_task

if TYPE_CHECKING:
    from embodied_rl.contracts import ByteArray
    from simulators.config import ManiSkillConfig

type States = dict[str, dict[str, Tensor]]
"""By kind (`actors`, `articulations`) and name, one row per scene."""


class ManiSkillBatch:
    """Many ManiSkill scenes stepped as one (contracts.BatchEnvironment).

    The physics cannot stop for single scenes. A slot that is not active although its episode runs
    is put back after the step; one whose episode is over just goes on unseen. The putting back
    costs time, so step all running slots together where you can (`rollout.halves=1`).
    """

    def __init__(
        self,
        config: ManiSkillConfig,
        num_slots: int,
        device: str,
        *,
        sim_backend: str = "physx_cuda",
    ) -> None:
        """`sim_backend="physx_cpu"` runs the same code on one scene without a GPU, for tests.

        Raises RuntimeError without a CUDA device, and what `maniskill.build_scene` raises.
        """
        if sim_backend == "physx_cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "simulator.backend=gpu needs an NVIDIA GPU that PyTorch can use, and there is "
                "none; set simulator.backend=cpu"
            )
        self._config = config
        self._device = torch.device(device)
        self.num_slots = num_slots
        self.base = build_scene(config, num_envs=num_slots, sim_backend=sim_backend)
        self._read = self.base.get_obs
        # ManiSkill would observe (and draw) at every step and reset; we observe when asked.
        self.base.get_obs = lambda info=None, **_: {}
        self.base.reset(seed=[0] * num_slots)
        self._bank = self._read_bank()
        self._limit = time_limit(config)
        self._instruction = instruction_for(only_task(config), config.instruction)
        self._elapsed = self._zeros(torch.int64)
        self._running = self._zeros(torch.bool)
        self._had_success = self._zeros(torch.bool)
        self.spec = SimulatorSpec(
            task=only_task(config),
            contract=make_contract(config, self.base, state_dim=self._states().shape[1]),
            max_episode_steps=self._limit,
            can_render=visuals.has_render_device(),
            num_initial_states=_num_rows(self._bank) if self._bank else None,
        )

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Start these episodes in these slots; the others go on."""
        if len(slots) != len(episodes):
            raise ValueError(f"{len(slots)} slots but {len(episodes)} episodes")
        if not slots:
            return
        rows = self._indices(slots)
        if self._bank:
            chosen = _rows(self._bank, [episode.initial_state for episode in episodes])
            options = {"env_idx": rows, "reset_to_env_states": {"env_states": chosen}}
            self.base.reset(options=options)
        else:
            for row, episode in zip(rows, episodes, strict=True):
                # One seed per scene although one scene is reset: tasks index the list by scene.
                seeds = [episode.initial_state] * self.num_slots
                self.base.reset(seed=seeds, options={"env_idx": row[None]})
        self._elapsed[rows] = 0
        self._had_success[rows] = False
        self._running[rows] = True

    def step(self, actions: Tensor, active: Tensor) -> BatchOutcome:
        """Run one control step with actions [B, A] in the active slots.

        The sparse reward is 1 when success first holds, and never again.
        """
        active = active.to(self.base.device)
        paused = (self._running & ~active).nonzero()[:, 0]
        before = _pick(self._moving(), paused) if len(paused) else None
        _, dense, _, _, info = self.base.step(actions.to(self.base.device, torch.float32))
        if before is not None:
            self.base.set_state_dict(before, paused)
        success = info.get("success", torch.zeros_like(active)).bool() & active
        self._elapsed += active
        first = success & ~self._had_success
        reward = first.float() if self._config.reward == "sparse" else dense.float() * active
        terminated = success if self._config.terminate_on_success else torch.zeros_like(success)
        truncated = (self._elapsed >= self._limit) & active
        self._had_success |= success
        self._running &= ~(terminated | truncated)
        return BatchOutcome(
            reward=reward.to(self._device),
            terminated=terminated.to(self._device),
            truncated=truncated.to(self._device),
            success=success.to(self._device),
        )

    def observe(self, slots: Sequence[int]) -> Observation:
        """What these slots show. Cameras draw all scenes at once, whichever are asked for."""
        rows = self._indices(slots)
        images: dict[str, Tensor] = {}
        if self._config.gives_images:
            data = self.base._get_obs_sensor_data()
            images = {name: data[name]["rgb"][rows].to(self._device) for name in sorted(data)}
        state = self._states()[rows].to(self._device)
        return Observation(images, state, (self._instruction,) * len(slots))

    def snapshot(self, slots: Sequence[int]) -> States:
        """Poses and velocities of everything that moves in these slots, one row each."""
        return _pick(self._moving(), self._indices(slots))

    def restore(self, slots: Sequence[int], states: States) -> None:
        """Put these slots into states that `snapshot` gave; their time limits go on counting."""
        self.base.set_state_dict(states, self._indices(slots))

    def render(self, slot: int) -> ByteArray:
        """A picture of one slot from the task's camera for people, [height, width, 3]."""
        if not self.spec.can_render:
            raise RuntimeError(visuals.NO_RENDER_DEVICE)
        picture: ByteArray = self.base.render_rgb_array()[slot].cpu().numpy().astype(np.uint8)
        return picture

    def close(self) -> None:
        """Free all scenes."""
        self.base.close()

    def _states(self) -> Tensor:
        """float32 [B, S]: ManiSkill's flat state, or in rgb mode what a robot can measure."""
        from mani_skill.utils import common

        info = self.base.get_info()
        if not self._config.gives_images:
            flat: Tensor = self._read(info)
        else:
            extra = self.base._get_obs_extra(info)
            measured = {"agent": self.base._get_obs_agent(), "extra": extra}
            flat = common.flatten_state_dict(measured, use_torch=True)
        # The buffers behind it belong to the simulation and change with the next step.
        return flat.float().clone()

    def _moving(self) -> States:
        """Poses and velocities. Controllers keep targets of their own beside these, which only the
        `*_target_*` control modes read."""
        states = self.base.get_state_dict()
        return {kind: states[kind] for kind in ("actors", "articulations") if kind in states}

    def _indices(self, slots: Sequence[int]) -> Tensor:
        return torch.as_tensor(list(slots), dtype=torch.int64, device=self.base.device)

    def _zeros(self, kind: torch.dtype) -> Tensor:
        return torch.zeros(self.num_slots, dtype=kind, device=self.base.device)

    def _read_bank(self) -> States:
        path = self._config.initial_states
        bank: States = {}
        for key, rows in load_bank(path).items() if path else ():
            kind, slash, name = key.partition("/")
            if slash:
                bank.setdefault(kind, {})[name] = torch.as_tensor(rows, device=self.base.device)
        have = {(kind, name) for kind, group in bank.items() for name in group}
        need = {(k, n) for k, group in self._moving().items() for n in group}
        if path and have != need:
            raise ValueError(
                f"the states in {path} do not belong to {self._config.task}: they have "
                f"{sorted(have - need) or 'nothing'} too much and lack "
                f"{sorted(need - have) or 'nothing'}"
            )
        return bank


def _num_rows(states: States) -> int:
    return len(next(iter(next(iter(states.values())).values())))


def _rows(bank: States, wanted: Sequence[int]) -> States:
    count = _num_rows(bank)
    for row in wanted:
        if not 0 <= row < count:
            raise IndexError(f"there are {count} initial states, 0 to {count - 1}; got {row}")
    first = next(iter(next(iter(bank.values())).values()))
    return _pick(bank, torch.as_tensor(list(wanted), dtype=torch.int64, device=first.device))


def _pick(states: Mapping[str, Mapping[str, Tensor]], rows: Tensor) -> States:
    """Copies of these rows, which later steps do not change."""
    return {
        kind: {name: value[rows].clone() for name, value in group.items()}
        for kind, group in states.items()
    }
