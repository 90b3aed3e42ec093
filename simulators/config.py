"""Options of the simulators. Kept apart from the simulators so that a configuration is checked
without importing them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from embodied_rl import catalogue
from embodied_rl.config import Config

if TYPE_CHECKING:
    from embodied_rl.contracts import BatchEnvironment, Environment, Expert


class ManiSkillConfig(Config):
    """Any task that ManiSkill 3 has registered."""

    type: Literal["maniskill"] = "maniskill"
    task: str | tuple[str, ...] = "PickCube-v1"
    """ManiSkill's environment id; `embodied-rl list tasks` shows those that run here. A list of
    several makes one policy learn them all, told apart by their instructions."""
    observation: Literal["state", "rgb"] = "state"
    """`state` is the simulator's full state; `rgb` is cameras and what a robot can measure."""
    image_size: int = Field(64, ge=16, le=1024)
    """Height and width of every camera in pixels."""
    visuals: Literal["light", "stock"] = "light"
    """`light` draws the robot with few polygons, 10 to 20 times cheaper without a GPU."""
    control_mode: str = "pd_ee_delta_pose"
    """ManiSkill's controller; the default is the usual 7-dimensional end-effector action."""
    robot: str | None = None
    """ManiSkill's robot name; by default `panda` for the tabletop tasks, else the task's own."""
    reward: Literal["sparse", "dense"] = "sparse"
    """`sparse` is 1 when the task succeeds; `dense` is ManiSkill's normalised dense reward."""
    terminate_on_success: bool = True
    """End the episode at success. Turn off to measure whether success still holds at the end."""
    max_episode_steps: int | None = Field(None, ge=1)
    """Time limit in control steps; by default the task's own."""
    backend: Literal["cpu", "gpu"] = "cpu"
    """`cpu` steps each scene on its own, in worker processes; `gpu` steps all as one batch."""
    fast_path: bool = True
    """Step supported tasks directly instead of through ManiSkill's step; the results are equal."""
    initial_states: Path | None = None
    """A file of saved states (`.npz`); initial state i then means its row i instead of a seed."""
    instruction: str | None = None
    """What to ask for, instead of the built-in sentence for the task."""

    @model_validator(mode="after")
    def _several_tasks(self) -> Self:
        if isinstance(self.task, str):
            return self
        if len(self.task) < 2 or len(set(self.task)) < len(self.task):
            raise ValueError(
                f"task={list(self.task)} must name one task, or several different ones"
            )
        alone = {
            "instruction": self.instruction is not None,
            "initial_states": self.initial_states is not None,
            "backend": self.backend == "gpu",
        }
        wrong = [name for name, given in alone.items() if given]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} belongs to a single task; leave it out")
        return self

    @property
    def by_task(self) -> dict[str, ManiSkillConfig]:
        """These options for each task alone."""
        tasks = (self.task,) if isinstance(self.task, str) else self.task
        return {task: self.model_copy(update={"task": task}) for task in tasks}

    @property
    def batched(self) -> bool:
        """Whether all slots are stepped as one batch in one process."""
        return self.backend == "gpu"

    @property
    def gives_images(self) -> bool:
        """Whether observations hold images."""
        return self.observation == "rgb"

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that worker processes share instead of importing each."""
        return ("mani_skill.envs", "simulators.maniskill")

    def build_environment(self) -> Environment:
        """One scene, or one per task behind one environment."""
        environment: Environment
        if isinstance(self.task, str):
            environment = catalogue.load("simulators.maniskill:make")(self)
        else:
            environment = catalogue.load("simulators.multitask:MultiTask")(self.by_task)
        return environment

    def build_expert(self, environment: Environment) -> Expert:
        """The scripted expert for the task; ValueError lists the tasks that have one."""
        expert: Expert
        if isinstance(self.task, str):
            expert = catalogue.load("simulators.maniskill_experts:make")(self, environment)
        else:
            several: Any = environment
            expert = several.expert()
        return expert

    def build_batch(self, num_slots: int, device: str) -> BatchEnvironment:
        """All scenes on a GPU."""
        make = catalogue.load("simulators.maniskill_gpu:ManiSkillBatch")
        batch: BatchEnvironment = make(self, num_slots, device)
        return batch


class GymnasiumConfig(Config):
    """Any environment that gymnasium knows, with a flat or image observation."""

    type: Literal["gymnasium"] = "gymnasium"
    task: str = "Pendulum-v1"
    """The environment's id, or `module:id` to import a package that registers it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for `gymnasium.make`."""
    vectorized: bool = False
    """Step all slots as one gymnasium vector environment instead of one by one."""
    success_key: str = "success"
    """Entry of the step's info that tells success."""
    success_return: float | None = None
    """Count an episode with at least this return as a success, where the task has no success."""
    max_episode_steps: int | None = Field(None, ge=1)
    """Time limit in control steps; by default the environment's own."""
    instruction: str = ""
    """What the task asks for, in words."""

    @property
    def batched(self) -> bool:
        """Whether all slots are stepped as one batch in one process."""
        return self.vectorized

    @property
    def gives_images(self) -> bool:
        """Whether observations may hold images; known only once the environment is made."""
        return True

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that worker processes share instead of importing each."""
        return ("simulators.gymnasium",)

    def build_environment(self) -> Environment:
        """One environment."""
        environment: Environment = catalogue.load("simulators.gymnasium:GymnasiumEnvironment")(self)
        return environment

    def build_expert(self, environment: Environment) -> Expert:
        """There is none: ValueError says what to do instead."""
        raise ValueError(
            f"no scripted expert for {self.task}; give demonstrations.path, or learn from scratch "
            f"by leaving out demonstrations and imitation"
        )

    def build_batch(self, num_slots: int, device: str) -> BatchEnvironment:
        """A gymnasium vector environment."""
        make = catalogue.load("simulators.gymnasium:GymnasiumBatch")
        batch: BatchEnvironment = make(self, num_slots, device)
        return batch
