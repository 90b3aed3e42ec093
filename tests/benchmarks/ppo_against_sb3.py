"""Our PPO and Stable-Baselines3's, same hyperparameters, side by side on HalfCheetah-v5.

python tests/benchmarks/ppo_against_sb3.py --steps 200000 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import gymnasium
import numpy as np
import torch

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.algorithms.ppo import PPO
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.collector import Collector
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig
from policies.config import GaussianMLPConfig
from simulators.config import GymnasiumConfig

TASK, SEGMENT, MINIBATCH, EPOCHS, RATE = "HalfCheetah-v5", 2048, 64, 10, 3e-4


def ours(steps: int, seed: int) -> list[float]:
    """Returns of the training episodes, in order."""
    torch.manual_seed(seed)
    rollout = RolloutConfig(num_workers=0, num_slots=1, halves=1)
    simulator = build_simulator(GymnasiumConfig(task=TASK), rollout, chunk=1)
    policy = GaussianMLPConfig(normalise_state=False).build(simulator.spec.contract)
    options = PPOConfig(
        decisions_per_iteration=SEGMENT,
        minibatch_size=MINIBATCH,
        epochs=EPOCHS,
        learning_rate=RATE,
        value_learning_rate=RATE,
        max_kl=None,
        critic_warmup_iterations=0,
        max_grad_norm=0.5,
        normalise_advantages="minibatch",
    )
    iterations = steps // SEGMENT
    algorithm = PPO(options, policy, seed)
    planner = TrainingPlanner(TASK, seed)
    generator = torch.Generator().manual_seed(seed)
    collector = Collector(simulator, policy, planner, generator, 1, SEGMENT)
    returns: list[float] = []
    for iteration in range(iterations):
        batch = collector.collect()
        returns += [result.total_reward for result in batch.results]
        algorithm.update(batch, iteration)
    simulator.close()
    return returns


def theirs(steps: int, seed: int) -> list[float]:
    """The same from Stable-Baselines3, whose defaults these hyperparameters are."""
    from stable_baselines3 import PPO as SB3
    from stable_baselines3.common.callbacks import BaseCallback

    class Returns(BaseCallback):  # type: ignore[misc]
        found: list[float]

        def _on_training_start(self) -> None:
            self.found = []

        def _on_step(self) -> bool:
            infos: Any = self.locals["infos"]
            self.found += [info["episode"]["r"] for info in infos if "episode" in info]
            return True

    keep = Returns()
    model = SB3("MlpPolicy", gymnasium.make(TASK), seed=seed, device="cpu")
    model.learn(steps // SEGMENT * SEGMENT, callback=keep)
    return keep.found


def main() -> None:
    """Run both and print the mean return of consecutive tenths of training."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=200_000)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = arguments.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[list[float]]] = {"ours": [], "stable-baselines3": []}
    for seed in given.seeds:
        for name, run in (("ours", ours), ("stable-baselines3", theirs)):
            began = time.monotonic()
            parts = np.array_split(run(given.steps, seed), 10)
            curve = [round(float(part.mean()), 1) for part in parts]
            curves[name].append(curve)
            print(name, "seed", seed, curve, f"{time.monotonic() - began:.0f} s", flush=True)
    means = {name: np.mean(found, axis=0).round().tolist() for name, found in curves.items()}
    print(json.dumps(means))


if __name__ == "__main__":
    main()
