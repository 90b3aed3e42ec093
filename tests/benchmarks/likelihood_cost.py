"""What scoring a recorded decision costs: one random denoising step against the whole chain.

Flow-SDE with one random step per decision evaluates the velocity once, whatever K is; with all
steps random it evaluates it K times. Both encode the observation once, which is counted here, not
assumed. Part `expert` is what is left once an observation is encoded. A frozen vision-language
model, as here that of a tiny SmolVLA, encodes it before the update, and its prefix is kept. Times
are the median of a forward and backward pass.

python tests/benchmarks/likelihood_cost.py --denoise-steps 8 --batch 256
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import Camera, Contract, Evaluation, Observation, Policy
from policies.config import FlowMLPConfig, FlowVLAConfig
from policies.flow_vla import FlowVLA
from policies.lerobot_config import LerobotFlowConfig
from tiny_vla import words_of, write_checkpoint

STATE, ACTION, SIDE = 42, 8, 64
POLICIES: dict[str, type[FlowMLPConfig | FlowVLAConfig | LerobotFlowConfig]] = {
    "flow_mlp": FlowMLPConfig,
    "flow_vla": FlowVLAConfig,
    "SmolVLA, prefix kept": LerobotFlowConfig,
}


def contract_for(cameras: tuple[Camera, ...]) -> Contract:
    """A robot arm's."""
    bounds = ((-1.0,) * ACTION, (1.0,) * ACTION)
    return Contract(STATE, ACTION, *bounds, "joints", 20.0, "none", "none", cameras)


def observation_of(contract: Contract, batch: int) -> Observation:
    """Random views."""
    images = {
        camera.name: torch.randint(0, 256, (batch, SIDE, SIDE, 3), dtype=torch.uint8)
        for camera in contract.cameras
    }
    return Observation(images, torch.randn(batch, STATE), ("pick up the red cube",) * batch)


def milliseconds(score: Callable[[], Evaluation], repeats: int) -> float:
    """Median time of a forward and backward pass, the first one left out."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        found = score()
        (found.log_prob.sum() + found.value.sum()).backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times[1:])


def encodings(policy: FlowVLA, seen: Observation, trace: Mapping[str, Tensor]) -> float:
    """How many observations are encoded to score one."""
    rows = []
    hook = policy.encoder.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    policy.evaluate(seen, trace)
    hook.remove()
    return sum(rows) / len(seen)


def cost(
    policy: Policy, seen: Observation, trace: Mapping[str, Tensor], repeats: int
) -> dict[str, float]:
    """Of a whole evaluation, and of what it does after the observation is encoded."""
    found = {"whole": milliseconds(lambda: policy.evaluate(seen, trace), repeats)}
    if isinstance(policy, FlowVLA):
        with torch.no_grad():
            prefix, value = policy._encode(seen)
        prefixes, expert = prefix.repeat(policy.head.num_scored(trace)), policy.expert
        found["expert"] = milliseconds(
            lambda: policy.head.score(expert, prefixes, value, trace), repeats
        )
        found["encoded"] = encodings(policy, seen, trace)
    return found


def built(
    config_class: type[FlowMLPConfig | FlowVLAConfig | LerobotFlowConfig],
    contract: Contract,
    options: dict[str, Any],
) -> Any:
    """A new policy, or a tiny SmolVLA of a checkpoint."""
    if config_class is not LerobotFlowConfig:
        return config_class.model_validate(options).build(contract)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("smolvla", Path(folder) / "smolvla", contract)
        files = {"path": str(path), "tokenizer": words_of(path)}
        return config_class.model_validate(options | files).build(contract)


def measure(name: str, num_steps: int, batch: int, repeats: int) -> dict[str, dict[str, float]]:
    """The cost with one random step and with all of them."""
    config_class = POLICIES[name]
    cameras = (Camera("base", SIDE, SIDE),) if config_class.needs_cameras else ()
    contract = contract_for(cameras)
    seen = observation_of(contract, batch)
    found = {}
    for steps in ("one", "all"):
        torch.manual_seed(0)
        policy = built(
            config_class,
            contract,
            {"denoise_steps": num_steps, "stochastic_steps": steps, "skip_last_step": False},
        )
        if config_class is LerobotFlowConfig:
            seen = replace(seen, prepared=policy.prepare(seen))
        trace = policy.act(seen, torch.Generator().manual_seed(0), "explore").trace
        found[steps] = cost(policy, seen, trace, repeats)
    return found


def main() -> None:
    """Print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--denoise-steps", type=int, default=8)
    arguments.add_argument("--batch", type=int, default=256)
    arguments.add_argument("--repeats", type=int, default=10)
    given = arguments.parse_args()
    torch.manual_seed(0)
    print("| policy | part | one step, ms | whole chain, ms | ratio |")
    print("|---|---|---|---|---|")
    for name in POLICIES:
        found = measure(name, given.denoise_steps, given.batch, given.repeats)
        one, chain = found["one"], found["all"]
        for part in ("whole", "expert"):
            if part in one:
                ratio = one[part] / chain[part]
                print(f"| {name} | {part} | {one[part]:.1f} | {chain[part]:.1f} | {ratio:.2f} |")
        if "encoded" in one:
            times = f"{one['encoded']:g} and {chain['encoded']:g}"
            print(f"{name} encodes every observation {times} times")


if __name__ == "__main__":
    main()
