"""Which likelihood with which algorithm: {Flow-SDE, Flow-Noise, tokens} x {PPO, GRPO} on ManiSkill.

All cells of a seed start from the same imitation and simulate the same number of control steps.
Tokens have an imitation of their own, of 300 demonstrations instead of 50: a bin says nothing of
those beside it, so that 50 are learned by heart. Runs that are there already are not
repeated, so the command can be stopped and given again.

python tests/benchmarks/likelihoods.py --seeds 0 1 2 --env-steps 100000
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from embodied_rl.config import load
from embodied_rl.run_config import RunConfig
from embodied_rl.training.loop import imitate_only, train

SHARED = [
    "simulator=maniskill",
    "simulator.task=PickCube-v1",
    "rollout.num_slots=64",
    "logging.video_episodes=0",
]
DEMONSTRATIONS = [
    "demonstrations.episodes=50",
    "imitation.steps=2000",
    "imitation.ema_decay=0.99",
]
MORE = [
    "demonstrations.episodes=300",
    "imitation.steps=2500",
    "imitation.batch_size=64",
    "imitation.weight_decay=0.1",
]

POLICIES: dict[str, list[str]] = {
    "flow_sde": ["policy=flow_mlp"],
    "flow_noise": [
        "policy=flow_mlp",
        "policy.exploration=flow_noise",
        "policy.chain_log_prob=mean",
        "algorithm.entropy_coefficient=0.005",
    ],
    "tokens": [
        "policy=token_vla",
        "policy.hidden_size=64",
        "policy.num_bins=64",
        "policy.decoding=parallel",
        "policy.max_instruction_bytes=0",
    ],
}
ALGORITHMS: dict[str, list[str]] = {
    "ppo": ["algorithm=ppo", "algorithm.decisions_per_iteration=16"],
    "grpo": [
        "algorithm=grpo",
        "algorithm.max_refill=2",
        "algorithm.groups_per_iteration=24",
        "algorithm.group_size=8",
    ],
}
LEARNING = ["algorithm.learning_rate=1e-4", "algorithm.minibatch_size=512"]


def start_of(folder: Path, policy: str, seed: int) -> Path:
    """The policy folder of the imitation that the cells of a seed begin with."""
    kind = "tokens" if policy == "tokens" else "flow"
    options = ["policy=flow_mlp"] if kind == "flow" else [*POLICIES["tokens"], *MORE]
    config = _config(
        folder,
        f"{kind}_start_{seed}",
        seed,
        [*DEMONSTRATIONS, *options, "algorithm=ppo", "evaluation.episodes=50"],
    )
    if not (config.directory / "result.json").exists():
        imitate_only(config, resume=config.directory.exists())
    return config.directory / "policies" / "start"


def cell(folder: Path, policy: str, algorithm: str, seed: int, env_steps: int) -> dict[str, Any]:
    """The result of one run."""
    options = [
        *POLICIES[policy],
        *ALGORITHMS[algorithm],
        *LEARNING,
        f"initial_policy={start_of(folder, policy, seed)}",
        f"max_env_steps={env_steps}",
        "iterations=100000",
    ]
    config = _config(folder, f"{policy}_{algorithm}_{seed}", seed, options)
    stored = config.directory / "result.json"
    if not stored.exists():
        train(config, resume=config.directory.exists())
    result: dict[str, Any] = json.loads(stored.read_text())
    return result


def _config(folder: Path, name: str, seed: int, options: list[str]) -> RunConfig:
    fixed = [f"name={name}", f"runs_dir={folder}", f"seed={seed}"]
    return load(RunConfig, None, [*SHARED, *options, *fixed])


def main() -> None:
    """Run what is missing and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--env-steps", type=int, default=100_000)
    arguments.add_argument("--policies", nargs="+", choices=[*POLICIES], default=[*POLICIES])
    arguments.add_argument("--folder", type=Path, default=Path("runs/likelihoods"))
    given = arguments.parse_args()
    lines = ["| policy | algorithm | seed | start | after |", "|---|---|---|---|---|"]
    for seed in given.seeds:
        for policy in given.policies:
            for algorithm in ALGORITHMS:
                result = cell(given.folder, policy, algorithm, seed, given.env_steps)
                words = [_words(result[when]) for when in ("before", "after")]
                lines.append(f"| {policy} | {algorithm} | {seed} | {words[0]} | {words[1]} |")
                print(lines[-1], flush=True)
    print("\n".join(lines))


def _words(summary: dict[str, Any]) -> str:
    rate, low, high = (100 * summary[name] for name in ("success_once", "low", "high"))
    return f"{rate:.1f} % [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
    main()
