"""The options of a whole run: one part of each kind, and the phases around them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from embodied_rl.config import Config, part
from embodied_rl.run_rules import RULES


class DemonstrationsConfig(Config):
    """Where the demonstrations come from. Without a data set, by `path` or `repo_id`, the scripted
    expert records one into the run."""

    path: Path | None = None
    """A LeRobotDataset v3 folder."""
    repo_id: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    """A LeRobotDataset v3 of the Hugging Face Hub, such as lerobot/pusht. lerobot downloads the
    episodes that are used, once."""
    episodes: int | None = Field(50, ge=1)
    """Successful episodes to record, or the first ones to use of a given data set; null uses all of
    it."""
    by_task: dict[str, Annotated[int, Field(ge=1)]] | None = None
    """With several tasks: successful episodes of each, in place of `episodes`, where a hard task
    needs more than an easy one. For recording."""
    action_noise: float = Field(0.0, ge=0.0, le=1.0)
    """Standard deviation of noise on the executed (not the recorded) expert actions, as a share of
    the action range: it shows the policy how to recover."""
    video: bool = False
    """Record videos (AV1, lossy) instead of single PNG pictures. For recording."""
    cameras: dict[str, str] = Field(default_factory=dict)
    """The given data set's column of a camera of the simulator, where it is not
    observation.images.NAME: {top: observation.images.cam_high}."""
    resize: Literal["crop", "pad", "stretch"] | None = None
    """What to do with pictures of another size than the simulator's cameras have: scale them by
    area and keep the middle, add black borders, or distort them, where the proportions differ.
    Without it, another size is an error."""
    in_memory_mib: int = Field(2048, ge=0)
    """Pictures that take no more than this are all decoded before imitation. Others are decoded
    whenever they are trained on, which needs no memory but more work."""
    workers: int | None = Field(None, ge=0)
    """Processes that decode pictures; 0 decodes in the training process. By default one per CPU
    core, at most 8."""

    @model_validator(mode="after")
    def _options_suit_the_source(self) -> Self:
        if self.path and self.repo_id:
            raise ValueError(f"set path={self.path} or repo_id={self.repo_id}, not both")
        source = f"path={self.path}" if self.path else f"repo_id={self.repo_id}"
        if self.is_given and self.by_task:
            raise ValueError(
                f"by_task={self.by_task} counts what is recorded, but {source} is there already; "
                f"leave by_task out and set episodes"
            )
        if self.is_given and self.video:
            raise ValueError(
                f"video=true is about recording, but {source} is there already; leave video out"
            )
        if self.is_given:
            return self
        if self.episodes is None:
            raise ValueError(
                "episodes=null uses all of a given data set; set path or repo_id, or a number of "
                "episodes to record"
            )
        if self.cameras or self.resize:
            raise ValueError(
                "cameras and resize fit a given data set to the simulator; set path or repo_id, "
                "or leave them out"
            )
        return self

    @property
    def is_given(self) -> bool:
        """Whether there is a data set, so that none is recorded."""
        return self.path is not None or self.repo_id is not None

    @property
    def limit(self) -> int | None:
        """Episodes of all tasks to use; None for all that there are."""
        return sum(self.by_task.values()) if self.by_task else self.episodes

    @property
    def total(self) -> int:
        """Episodes of all tasks to record; raises ValueError if only a given data set says it."""
        if self.limit is None:
            raise ValueError(
                "demonstrations.episodes=null does not say how many to record; set a number"
            )
        return self.limit


class ImitationConfig(Config):
    """Supervised start of the policy from demonstrations."""

    steps: int = Field(2000, ge=1)
    """Gradient steps."""
    batch_size: int = Field(256, ge=1)
    """Demonstrated chunks per gradient step."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Most chunks whose gradients are computed at once: a larger batch is divided into parts whose
    gradients add up, weighted by their control steps, which takes less memory and a little more
    time. Noise is then drawn part by part, and where a loss is a mean over tokens, of which chunks
    have different numbers (FAST), parts weigh a little differently. null never divides."""
    learning_rate: float = Field(1e-3, gt=0.0)
    """Peak of a cosine schedule that ends at zero."""
    warmup_steps: int = Field(100, ge=0)
    """Gradient steps over which the learning rate rises from zero."""
    weight_decay: float = Field(1e-4, ge=0.0)
    ema_decay: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the moving average of the weights that is kept as the result; 0 keeps the last."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients are scaled down to this norm."""
    checkpoint_every: int = Field(1000, ge=1)
    """Gradient steps between checkpoints for resuming."""
    holdout_share: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the episodes kept out of training, to measure the open-loop action error on."""


class RolloutConfig(Config):
    """How simulators run."""

    num_workers: int | None = Field(None, ge=0)
    """Worker processes; 0 runs the simulator inside the training process. By default one per CPU
    core, at most 16."""
    num_slots: int = Field(32, ge=1, le=65_536)
    """Environments in all, spread over the workers."""
    halves: Literal[1, 2] = 2
    """With 2, one half of the slots simulates while the policy decides for the other."""
    step_timeout_s: float = Field(60.0, gt=0.0)
    """A worker silent for this long, and for ten times its usual chunk time, is replaced."""
    max_worker_restarts: int = Field(20, ge=0)
    """Workers and environments that failed and were replaced in one run, before it gives up."""

    @model_validator(mode="after")
    def _halves_divide_the_slots(self) -> Self:
        if self.num_slots % self.halves:
            raise ValueError(
                f"num_slots={self.num_slots} must be a multiple of halves={self.halves}"
            )
        if self.num_workers and self.num_workers > self.num_slots:
            raise ValueError(
                f"num_workers={self.num_workers} is more than num_slots={self.num_slots}; "
                f"give every worker at least one slot"
            )
        return self


class EvaluationConfig(Config):
    """How success is measured."""

    episodes: int = Field(200, ge=1)
    """Held-out initial states of each task, at the start and the end of reinforcement learning."""
    every: int = Field(0, ge=0)
    """Iterations between smaller checks during training, with one at the end; 0 turns them off."""
    quick_episodes: int = Field(64, ge=1)
    """Episodes of each task in those checks. They use other initial states than the final result
    does."""
    keep_best: bool = True
    """Guard against a collapse: where the last quick check is worse than the best one by more than
    its standard error, the result is the last policy that was not, instead of the very last one."""


class PracticeConfig(Config):
    """Where training episodes start. Evaluation is never affected."""

    starts: Literal["uniform", "curriculum", "worst_case"] = "uniform"
    """All training states alike; or, from a pool of them, those the more often whose success rate
    is near one half (`curriculum`) or low (`worst_case`)."""
    pool: int = Field(256, ge=2)
    """Training states of each task to choose from, drawn by the seed; all where there are fewer."""
    floor: float = Field(0.1, ge=0.0, le=1.0)
    """Share of the episodes that start anywhere in the pool, whatever is known."""
    decay: float = Field(0.95, gt=0.0, le=1.0)
    """Share of what was seen of a state that still counts an iteration later."""
    temperature: float = Field(0.25, gt=0.0)
    """Of `worst_case`: a state whose failure rate is higher by this is e times as likely."""
    demonstrated_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the groups (of one episode for PPO) that begin within a demonstration, at its state
    after a random number of its actions; 0 starts all at initial states."""
    demonstrated_until: float = Field(0.5, gt=0.0, le=1.0)
    """Share of the run after which that has fallen, linearly, to zero."""
    visited_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the other groups that begin at a decision that an earlier, successful episode of
    this run came through, as soon as there is one."""
    visited_until: float = Field(0.5, gt=0.0, le=1.0)
    """Share of the run after which that has fallen, linearly, to zero."""
    visited_pool: int = Field(64, ge=1)
    """Successful episodes to choose from, the newest; checkpoints hold their actions."""


class LoggingConfig(Config):
    """What a run writes beside `metrics.jsonl`."""

    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; `offline` needs no account."""
    wandb_project: str = "embodied-rl"
    video_episodes: int = Field(4, ge=0)
    """Episodes of each task filmed before and after reinforcement learning, where something can
    draw."""


class CheckpointConfig(Config):
    """When a run can be resumed from."""

    every: int = Field(10, ge=1)
    """Iterations between checkpoints. The end of every phase and SIGTERM save one as well."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept, newest first; the best one is kept as well."""


class RunConfig(Config):
    """Everything that defines a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder under `runs_dir`."""
    runs_dir: Path = Path("runs")
    seed: int = Field(0, ge=0, le=2**40)
    """Seeds weights, noise, minibatches and the plan of episodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the networks run; `auto` takes a GPU if there is one."""
    simulator: Annotated[SerializeAsAny[Config], part("simulator")]
    policy: Annotated[SerializeAsAny[Config], part("policy")]
    algorithm: Annotated[SerializeAsAny[Config], part("algorithm")]
    iterations: int = Field(100, ge=0)
    """Reinforcement-learning iterations: collect, then update."""
    max_env_steps: int | None = Field(None, ge=1)
    """End with the iteration that reaches this many control steps, if `iterations` would go on: the
    same budget for algorithms whose iterations differ in length."""
    initial_policy: Path | None = None
    """A policy folder whose weights to start from, with the options under `policy`, which they must
    fit. Demonstrations and imitation are then skipped."""
    demonstrations: DemonstrationsConfig | None = None
    """Leave out, together with `imitation`, to learn from scratch."""
    imitation: ImitationConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    practice: PracticeConfig = PracticeConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if (self.demonstrations is None) != (self.imitation is None):
            raise ValueError(
                "demonstrations and imitation go together: set both, or leave out both to learn "
                "from scratch"
            )
        for rule in RULES:
            rule(self)
        return self

    @property
    def directory(self) -> Path:
        """Where the run keeps everything."""
        return self.runs_dir / self.name
