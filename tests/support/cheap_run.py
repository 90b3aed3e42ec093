"""A whole run that takes a second: a pendulum with a small Gaussian policy."""

from __future__ import annotations

from pathlib import Path

from embodied_rl.config import load
from embodied_rl.run_config import RunConfig

PENDULUM = """
simulator: {type: gymnasium, task: Pendulum-v1, max_episode_steps: 12, success_return: -100}
policy: {type: gaussian_mlp, hidden_size: 16}
algorithm: {type: ppo, decisions_per_iteration: 12, epochs: 2, minibatch_size: 16, max_kl: null}
rollout: {num_slots: 4, num_workers: 0}
evaluation: {episodes: 4}
"""


def write_config(folder: Path) -> Path:
    """Its file, with the run's folder beside it."""
    file = folder / "cheap.yaml"
    file.write_text(f"{PENDULUM}runs_dir: {folder / 'runs'}\n")
    return file


def cheap_run(folder: Path, *options: str) -> RunConfig:
    """The run with options changed."""
    return load(RunConfig, write_config(folder), list(options))
