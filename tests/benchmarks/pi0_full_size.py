"""pi0 at its full size with random weights, on a CUDA device: decisions a second, seconds of a PPO
update, and memory, with and without CUDA graphs.

The checkpoint is written in lerobot's layout and loaded as any other (13 GB on the disk and twice
as much in memory for a while). `--tiny` runs the same with a tiny model on any machine, without
CUDA graphs where there is no CUDA device.

PYTHONPATH=. python tests/benchmarks/pi0_full_size.py --slots 64 --json full_size.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.algorithms.ppo import PPO
from embodied_rl.contracts import Contract
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.running import prepared
from embodied_rl.run_config import RolloutConfig
from policies.lerobot_backbones import backbone_of
from policies.lerobot_config import LerobotFlowConfig

sys.path.append(str(Path(__file__).parents[1] / "support"))

from seen_line import SeenLineConfig
from tiny_vla import REAL, TINY, observation, tiny_sizes, words_of, write_checkpoint

NO_DEVICE = "pi0 at full size needs a CUDA device and there is none; --tiny tries this script out"


def gibibytes(device: str) -> float:
    """Most memory since `forget`: of the device, or of this process since it began."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def seconds(run: Callable[[], object], repeats: int, device: str) -> float:
    """Median on the clock; the first run, which may compile, is left out."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def sampling(policy: Any, contract: Contract, slots: int, device: str) -> dict[str, float]:
    """How fast decisions are drawn: from images, and from prefixes that are there."""
    seen = observation(slots, contract).to(device)
    ready = prepared(policy, seen)
    generator = torch.Generator(device).manual_seed(0)
    found = {}
    for name, given in (("from images", seen), ("from prefixes", ready)):
        spent = seconds(lambda given=given: policy.act(given, generator, "explore"), 5, device)  # type: ignore[misc]
        found[f"decisions a second {name}"] = slots / spent
    return found


def update(
    policy: Any, simulator: Any, options: dict[str, Any], repeats: int, device: str
) -> dict[str, float]:
    """An update of PPO on collected decisions."""
    algorithm = PPO(PPOConfig.model_validate(options), policy, seed=0)
    generator = torch.Generator(device).manual_seed(0)
    planner = TrainingPlanner("line", 0)
    batch = algorithm.collector(simulator, planner, generator, 1).collect()
    spent = seconds(lambda: algorithm.update(batch, 0), repeats, device)
    return {"decisions learned from": float(batch.valid.sum()), "seconds of an update": spent}


def measure(given: argparse.Namespace, folder: Path, device: str) -> list[dict[str, Any]]:
    """A row for each way to run the denoising step."""
    size = TINY if given.tiny else REAL
    rollout = RolloutConfig(num_slots=given.slots, halves=1, num_workers=0)
    simulator = build_simulator(SeenLineConfig(cameras=3), rollout, chunk=given.chunk)
    contract = simulator.spec.contract
    write_checkpoint("pi0", folder, contract, size=size)
    known = {"path": str(folder), "tokenizer": words_of(folder), "chunk": given.chunk}
    rounded = {"dtype": given.dtype, "precision": given.precision}
    make = LerobotFlowConfig.model_validate
    options = make({**known, **rounded, "denoise_steps": size.steps})
    with tiny_sizes(size):
        policy: Any = options.build(contract)
    policy.to(device)
    learning = {
        "decisions_per_iteration": given.decisions,
        "minibatch_size": given.minibatch,
        "epochs": given.epochs,
        "critic_warmup_iterations": 0,
        "max_kl": None,
        "learning_rate": 5e-6,
        # Decisions are learned from more than once, and may be rounded.
        "ratio_tolerance": 1e3,
    }
    rows = []
    for how in ("none", "cuda_graphs") if device == "cuda" else ("none",):
        policy.backbone = backbone_of(policy.native, options.model_copy(update={"compile": how}))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row: dict[str, Any] = {"compile": how, **sampling(policy, contract, given.slots, device)}
        row["GiB of sampling"] = gibibytes(device)
        row |= update(policy, simulator, learning, given.repeats, device)
        rows.append(row | {"GiB in all": gibibytes(device)})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each way to run the denoising step; 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=5)
    parser.add_argument("--decisions", type=int, default=4)
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.tiny:
        print(NO_DEVICE, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given, Path(folder) / "pi0", device)
    for row in rows:
        shown = {name: v if isinstance(v, str) else f"{v:.3g}" for name, v in row.items()}
        print(", ".join(f"{name} {value}" for name, value in shown.items()))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
