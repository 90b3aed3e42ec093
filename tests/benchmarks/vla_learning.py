"""A tiny SmolVLA learns to pull a cube from camera images: imitation, then Flow-SDE PPO.

The model is lerobot's own class with a tiny configuration and random weights, in the layout of a
released checkpoint, so the run goes the way of a real one. It can be stopped and given again.

python tests/benchmarks/vla_learning.py --folder runs/tiny_smolvla
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from embodied_rl.config import load
from embodied_rl.run_config import RunConfig
from embodied_rl.training.loop import TrainResult, train
from simulators.config import ManiSkillConfig
from tiny_vla import TINY, words_of, write_checkpoint

TASK, SIDE, CHUNK = "PullCube-v1", 64, 4
OPTIONS = [
    "simulator=maniskill",
    f"simulator.task={TASK}",
    "simulator.observation=rgb",
    f"simulator.image_size={SIDE}",
    "policy=lerobot_flow",
    f"policy.chunk={CHUNK}",
    # There is nothing in random weights that would be worth keeping.
    "policy.trainable=all",
    "policy.value_hidden_size=128",
    "algorithm=ppo",
    "algorithm.learning_rate_schedule=cosine",
    "algorithm.decisions_per_iteration=16",
    "algorithm.epochs=3",
    "algorithm.critic_warmup_iterations=6",
    "imitation.batch_size=64",
    "imitation.ema_decay=0.99",
    "rollout.num_slots=64",
    "evaluation.every=10",
    "evaluation.quick_episodes=96",
]


def checkpoint(folder: Path) -> Path:
    """The tiny SmolVLA; written if it is not there yet."""
    if not folder.exists():
        environment = ManiSkillConfig(
            task=TASK, observation="rgb", image_size=SIDE
        ).build_environment()
        try:
            contract = environment.spec.contract
        finally:
            environment.close()
        size = replace(TINY, chunk=CHUNK)
        write_checkpoint("smolvla", folder, contract, statistics=False, size=size, patch=8)
    return folder


def learn(given: argparse.Namespace) -> TrainResult:
    """Imitate, evaluate, reinforce, evaluate."""
    path = checkpoint(given.folder / "checkpoint")
    config = load(
        RunConfig,
        None,
        [
            *OPTIONS,
            f"policy.path={path}",
            f"policy.tokenizer={words_of(path)}",
            f"algorithm.learning_rate={given.learning_rate}",
            f"demonstrations.episodes={given.demonstrations}",
            f"imitation.steps={given.imitation_steps}",
            f"evaluation.episodes={given.evaluation}",
            f"iterations={given.iterations}",
            f"seed={given.seed}",
            f"name=seed_{given.seed}",
            f"runs_dir={given.folder}",
        ],
    )
    return train(config, resume=config.directory.exists())


def main() -> None:
    """Run, and say where everything is."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--folder", type=Path, default=Path("runs/tiny_smolvla"))
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--learning-rate", type=float, default=5e-5)
    arguments.add_argument("--demonstrations", type=int, default=40)
    arguments.add_argument("--imitation-steps", type=int, default=2500)
    arguments.add_argument("--evaluation", type=int, default=200, help="held-out initial states")
    arguments.add_argument("--iterations", type=int, default=60)
    given = arguments.parse_args()
    result = learn(given)
    for when in ("before", "after"):
        found = result.summary[when]
        rate, low, high = (100 * found[name] for name in ("success_once", "low", "high"))
        print(f"{when} reinforcement learning: {rate:.1f} % [{low:.1f}, {high:.1f}]")
    print(f"curves and videos are in {given.folder / f'seed_{given.seed}' / 'report.html'}")


if __name__ == "__main__":
    main()
