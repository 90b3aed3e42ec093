"""What to practise on: where PPO's episodes start, what GRPO's groups are made of, on ManiSkill.

PPO with {uniform, curriculum, demonstrated, visited} starts; GRPO with {no refill, refill,
branches}. All cells of a seed start from the same imitation and simulate the same number of
control steps, those of preludes and of groups that are not learned from included. Runs that are
there already are not repeated, so the command can be stopped and given again.

python tests/benchmarks/practice.py --seeds 0 1 2 --env-steps 100000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from embodied_rl.config import load
from embodied_rl.run_config import RunConfig
from embodied_rl.training.loop import imitate_only, train

SHARED = [
    "simulator=maniskill",
    "simulator.task=PickCube-v1",
    "policy=flow_mlp",
    "logging.video_episodes=0",
]
DEMONSTRATIONS = ["demonstrations.episodes=50", "imitation.ema_decay=0.99"]
LEARNING = ["algorithm.learning_rate=1e-4", "algorithm.minibatch_size=512"]
PPO = [*LEARNING, "algorithm=ppo", "algorithm.decisions_per_iteration=16"]
GRPO = [*LEARNING, "algorithm=grpo", "algorithm.group_size=8"]

CELLS: dict[str, list[str]] = {
    "ppo_uniform": PPO,
    "ppo_curriculum": [*PPO, "practice.starts=curriculum"],
    "ppo_demonstrated": [*PPO, "practice.demonstrated_share=0.5"],
    "ppo_visited": [*PPO, "practice.visited_share=0.5"],
    # Not a matter of practice: the exact gradient where an episode ends within a chunk.
    "ppo_all_steps": [*PPO, "algorithm.scored_steps=all"],
    "grpo_no_refill": [*GRPO, "algorithm.groups_per_iteration=24", "algorithm.max_refill=1"],
    "grpo_refill": [*GRPO, "algorithm.groups_per_iteration=24", "algorithm.max_refill=2"],
    # Half of the groups, as each that teaches is followed by another.
    "grpo_branches": [
        *GRPO,
        "algorithm.groups_per_iteration=12",
        "algorithm.max_refill=1",
        "algorithm.branches=1",
    ],
}


@dataclass(frozen=True)
class Sizes:
    """How large everything is; the defaults are for results, smaller ones to see that it runs."""

    folder: Path
    env_steps: int
    imitation_steps: int
    evaluation: int
    slots: int


def start_of(sizes: Sizes, seed: int) -> Path:
    """The run whose demonstrations and imitation the cells of a seed begin with."""
    config = _config(sizes, f"start_{seed}", seed, [*_imitation(sizes), "algorithm=ppo"])
    if not (config.directory / "result.json").exists():
        imitate_only(config, resume=config.directory.exists())
    return config.directory


def cell(sizes: Sizes, name: str, seed: int) -> dict[str, Any]:
    """The result of one run."""
    start = start_of(sizes, seed)
    options = [
        *CELLS[name],
        f"initial_policy={start / 'policies' / 'start'}",
        f"max_env_steps={sizes.env_steps}",
        "iterations=100000",
    ]
    if "demonstrated" in name:
        options += [*_imitation(sizes), f"demonstrations.path={start / 'demonstrations'}"]
    config = _config(sizes, f"{name}_{seed}", seed, options)
    stored = config.directory / "result.json"
    if not stored.exists():
        train(config, resume=config.directory.exists())
    result: dict[str, Any] = json.loads(stored.read_text())
    return result


def _imitation(sizes: Sizes) -> list[str]:
    return [*DEMONSTRATIONS, f"imitation.steps={sizes.imitation_steps}"]


def _config(sizes: Sizes, name: str, seed: int, options: list[str]) -> RunConfig:
    fixed = [
        f"name={name}",
        f"runs_dir={sizes.folder}",
        f"seed={seed}",
        f"evaluation.episodes={sizes.evaluation}",
        f"rollout.num_slots={sizes.slots}",
    ]
    return load(RunConfig, None, [*SHARED, *options, *fixed])


def table(results: dict[str, dict[int, dict[str, Any]]]) -> Iterator[str]:
    """Markdown rows: of every run, with Wilson intervals, and of every cell's mean over seeds."""
    yield "| cell | seed | start | after | control steps | wall time |"
    yield "|---|---|---|---|---|---|"
    for name, by_seed in results.items():
        for seed, result in by_seed.items():
            before, after = (_words(result[when]) for when in ("before", "after"))
            cost = f"{result['env_steps']:,} | {result['wall_s']:.0f} s"
            yield f"| {name} | {seed} | {before} | {after} | {cost} |"
    yield ""
    yield "| cell | seeds | start, mean | after, mean (lowest to highest) | gain, mean |"
    yield "|---|---|---|---|---|"
    for name, by_seed in results.items():
        starts, ends = (_rates([*by_seed.values()], when) for when in ("before", "after"))
        spread = f"{mean(ends):.1f} % ({min(ends):.1f} to {max(ends):.1f})"
        gain = f"{mean(ends) - mean(starts):+.1f}"
        yield f"| {name} | {len(ends)} | {mean(starts):.1f} % | {spread} | {gain} |"


def main() -> None:
    """Run what is missing and print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--env-steps", type=int, default=100_000)
    arguments.add_argument("--which", nargs="+", choices=[*CELLS], default=[*CELLS])
    arguments.add_argument("--imitation-steps", type=int, default=2000)
    arguments.add_argument("--evaluation", type=int, default=200, help="held-out initial states")
    arguments.add_argument("--slots", type=int, default=64)
    arguments.add_argument("--folder", type=Path, default=Path("runs/practice"))
    given = arguments.parse_args()
    sizes = Sizes(
        given.folder, given.env_steps, given.imitation_steps, given.evaluation, given.slots
    )
    results: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in given.which}
    for seed in given.seeds:
        for name in given.which:
            result = cell(sizes, name, seed)
            results[name][seed] = result
            print(f"{name}, seed {seed}: {_words(result['after'])}", flush=True)
    print("\n".join(table(results)))


def _rates(results: Sequence[dict[str, Any]], when: str) -> list[float]:
    return [100 * result[when]["success_once"] for result in results]


def _words(summary: dict[str, Any]) -> str:
    rate, low, high = (100 * summary[name] for name in ("success_once", "low", "high"))
    return f"{rate:.1f} % [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
    main()
