"""How long a PPO update takes if a frozen vision-language model reads every observation once (when
the decision is made), against reading it again in every epoch.

Two policies with the same weights learn from the same decisions in turns, by the algorithm itself.
Afterwards they must have the same weights. Times are medians in seconds of processor time (of a
CUDA device: on the clock).

PYTHONPATH=. python tests/benchmarks/prefix_reuse.py --epochs 4 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.algorithms.ppo import PPO
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig
from policies.lerobot_config import LerobotFlowConfig
from vla_sampling import clock_of, turns

sys.path.append(str(Path(__file__).parents[1] / "support"))

from seen_line import SeenLineConfig
from tiny_vla import MEDIUM, TINY, PiSize, tiny_sizes, words_of, write_checkpoint

SIZES = {"tiny": TINY, "small": PiSize(256, 6, 128, 32, 128, 4, 112, 50, 10), "medium": MEDIUM}
KEPT = 1e-6
"""How far apart weights may be in the end."""


class Both:
    """The same decisions, and one learner of each kind."""

    def __init__(self, folder: Path, size: PiSize, options: dict[str, Any], device: str) -> None:
        rollout = RolloutConfig(num_slots=options.pop("num_slots"), halves=1, num_workers=0)
        simulator = build_simulator(SeenLineConfig(cameras=2), rollout, chunk=2)
        contract = simulator.spec.contract
        write_checkpoint("pi0", folder, contract, size=size)
        given = {"path": str(folder), "tokenizer": words_of(folder), "chunk": 2}
        config = LerobotFlowConfig.model_validate({**given, "denoise_steps": size.steps})
        self.learners = {}
        for name in ("reused", "read again"):
            torch.manual_seed(0)
            with tiny_sizes(size):
                policy: Any = config.build(contract)
            policy.to(device)
            self.learners[name] = PPO(PPOConfig.model_validate(options), policy, seed=0)
        generator = torch.Generator(device).manual_seed(0)
        planner = TrainingPlanner("line", 0)
        found = self.learners["reused"].collector(simulator, planner, generator, 1).collect()
        bare = replace(found.observation, prepared={})
        self.batches: dict[str, Batch] = {
            "reused": found,
            "read again": replace(found, observation=bare),
        }

    def update(self, name: str) -> dict[str, float]:
        """Learn once more from the same decisions."""
        learner = self.learners[name]
        # Only fresh decisions have a ratio of 1; these were made by the first weights.
        learner.config = learner.config.model_copy(update={"ratio_tolerance": 1e3})
        return learner.update(self.batches[name], 0)

    def weights(self, name: str) -> list[Tensor]:
        """A learner's weights that learn."""
        return [p.detach().clone() for p in self.learners[name].policy.policy_parameters()]

    @property
    def kept_bytes(self) -> int:
        """Of what is kept of all observations."""
        tensors = self.batches["reused"].observation.prepared.values()
        return sum(tensor.nbytes for tensor in tensors)


def measure(
    size: PiSize, options: dict[str, Any], repeats: int, device: str = "cpu"
) -> dict[str, float]:
    """Seconds of an update of each kind, their ratio, and how far apart weights are after it."""
    with tempfile.TemporaryDirectory() as folder:
        both = Both(Path(folder) / "pi0", size, dict(options), device)
    before = both.weights("reused")
    for name in both.learners:
        both.update(name)
    after = both.weights("reused")
    apart, moved = _largest(after, both.weights("read again")), _largest(after, before)
    assert apart <= KEPT < moved, f"weights are {apart:g} apart and moved by {moved:g}"
    runs = {name: lambda name=name: both.update(name) for name in both.learners}
    times = turns(dict(runs), repeats, clock_of(device))
    seconds = {name: spent / 1000 for name, spent in times.items()}
    ratio = seconds["read again"] / seconds["reused"]
    rows = float(both.batches["reused"].valid.sum())
    sizes = {"rows": rows, "bytes": float(both.kept_bytes)}
    return {**seconds, "ratio": ratio, "apart": apart, "moved": moved, **sizes}


def _largest(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def main() -> None:
    """Print what was found, and write JSON if asked to."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--size", choices=SIZES, default="small")
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--slots", type=int, default=8)
    arguments.add_argument("--decisions", type=int, default=4)
    arguments.add_argument("--minibatch", type=int, default=16)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    options = {
        "num_slots": given.slots,
        "decisions_per_iteration": given.decisions,
        "minibatch_size": given.minibatch,
        "epochs": given.epochs,
        "critic_warmup_iterations": 0,
        "max_kl": None,
        "learning_rate": 5e-6,
    }
    found = measure(SIZES[given.size], options, given.repeats, given.device)
    print(f"{found['rows']:.0f} decisions, {given.epochs} epochs, pi0 {given.size}:")
    print(f"read once {found['reused']:.2f} s, read again {found['read again']:.2f} s")
    print(f"ratio {found['ratio']:.2f}; kept {found['bytes'] / 2**20:.1f} MiB")
    print(f"weights moved by {found['moved']:.1e} and differ by {found['apart']:.1e}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
