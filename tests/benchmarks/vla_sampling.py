"""How long pi0, pi0.5 and SmolVLA take to decide: ours against lerobot's `predict_action_chunk`.

Both have the same random weights and noise, and must give the same actions. `model` is lerobot's
`predict_action_chunk` on a batch that is ready for it, `whole` the same with its processors. Ours
is always whole, and estimates the value besides. Times are the median of runs that take turns, in
milliseconds of processor time (of a CUDA device: on the clock).

PYTHONPATH=. python tests/benchmarks/vla_sampling.py --batches 1 8 32 --repeats 9
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_rl.maths.randomness import standard_normal
from policies.lerobot_config import LerobotFlowConfig

sys.path.append(str(Path(__file__).parents[1] / "support"))

from tiny_vla import (
    CONTRACT,
    MAX_DIM,
    MEDIUM,
    TINY,
    Native,
    PiSize,
    native_batch,
    observation,
    tiny_sizes,
    words_of,
    write_checkpoint,
)

MODELS: dict[str, tuple[str, PiSize]] = {
    "pi0 tiny": ("pi0", TINY),
    "pi0 medium": ("pi0", MEDIUM),
    "pi05 tiny": ("pi05", TINY),
    "smolvla tiny": ("smolvla", replace(TINY, steps=10)),
}
ALLOWED = 1e-5
"""Greatest difference between ours and theirs."""


def turns(runs: dict[str, Callable[[], object]], repeats: int, clock: Any) -> dict[str, float]:
    """Median milliseconds of each, the first round left out."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            began = clock()
            run()
            times[name].append(1000 * (clock() - began))
    return {name: statistics.median(of[1:]) for name, of in times.items()}


def clock_of(device: str) -> Callable[[], float]:
    """What other programs on this machine disturb least."""

    def after_device() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return time.process_time if device == "cpu" else after_device


def measure(
    kind: str, size: PiSize, folder: Path, batches: list[int], repeats: int, device: str, how: str
) -> list[dict[str, float]]:
    """A row per batch size."""
    write_checkpoint(kind, folder, size=size)
    given = {"path": str(folder), "tokenizer": words_of(folder), "chunk": 2, "compile": how}
    options = LerobotFlowConfig.model_validate({**given, "denoise_steps": size.steps})
    with tiny_sizes(size):
        policy: Any = options.build(CONTRACT)
    policy.to(device)
    native = Native(kind, folder, size=size)
    native.policy.to(device)
    low, high = (torch.tensor(bound) for bound in (CONTRACT.action_low, CONTRACT.action_high))
    rows = []
    for batch in batches:
        seen = observation(batch).to(device)
        shape = (batch, size.chunk, MAX_DIM)
        noise = standard_normal(shape, torch.Generator().manual_seed(0)).to(device)

        def ready() -> dict[str, Any]:
            made: dict[str, Any] = native.before(native_batch(seen))  # noqa: B023
            return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in made.items()}

        def ours() -> Tensor:
            generator = torch.Generator().manual_seed(0)
            actions: Tensor = policy.act(seen, generator, "deterministic").actions  # noqa: B023
            return actions

        batch_for_it = ready()
        runs: dict[str, Callable[[], Tensor]] = {
            "ours": ours,
            "model": lambda: native.actions(batch_for_it, noise),  # noqa: B023
            "whole": lambda: native.actions(ready(), noise),  # noqa: B023
        }
        theirs = runs["whole"]()[:, :2].cpu().clamp(low, high)
        apart = float((ours().cpu() - theirs).abs().max())
        assert apart <= ALLOWED, f"{kind}: actions differ by {apart:g}"
        found = turns(dict(runs), repeats, clock_of(device))
        rows.append({"batch": batch, "apart": apart, **found})
    return rows


def main() -> None:
    """Print a table, and write JSON if asked to."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--compile", default="none")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    found = {}
    print("| model | batch | ours, ms | predict_action_chunk | with processors | ratio |")
    print("|---|---|---|---|---|---|")
    for name in given.models:
        kind, size = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / kind
            found[name] = measure(
                kind, size, place, given.batches, given.repeats, given.device, given.compile
            )
        for row in found[name]:
            times = f"{row['ours']:.1f} | {row['model']:.1f} | {row['whole']:.1f}"
            ratio = row["model"] / row["ours"]
            print(f"| {name} | {row['batch']} | {times} | {ratio:.2f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
