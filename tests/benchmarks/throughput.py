"""Control steps per second: stock ManiSkill under AsyncVectorEnv, our pool alone, and our collector
with the policy in the loop, all with the same number of processes.

    python tests/benchmarks/throughput.py --observation state
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.collector import Collector
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.rollout.running import halves_of
from embodied_rl.run_config import RolloutConfig
from policies.config import FlowMLPConfig, FlowVLAConfig
from simulators.config import ManiSkillConfig

CHUNK = 4


def stock(config: ManiSkillConfig, processes: int, seconds: float) -> float:
    """ManiSkill's own environments, one per process, with random actions."""
    import gymnasium

    def make() -> Any:
        import mani_skill.envs  # noqa: F401
        from mani_skill.utils.wrappers import CPUGymWrapper

        from simulators import maniskill_visuals as visuals

        torch.set_num_threads(1)
        visuals.prepare_rendering(need_images=config.gives_images)
        options: dict[str, Any] = {"render_backend": visuals.render_backend()}
        if config.gives_images:
            size = config.image_size
            options["sensor_configs"] = {"width": size, "height": size}
        environment = gymnasium.make(
            config.task,
            obs_mode=config.observation,
            control_mode=config.control_mode,
            sim_backend="physx_cpu",
            **options,
        )
        return CPUGymWrapper(environment)

    vector = gymnasium.vector.AsyncVectorEnv([make] * processes, context="forkserver")
    vector.reset(seed=list(range(processes)))
    actions = [vector.action_space.sample() for _ in range(50)]
    for action in actions[:5]:
        vector.step(action)
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        vector.step(actions[count % len(actions)])
        count += 1
    rate = count * processes / (time.monotonic() - began)
    vector.close()
    return rate


def bare(config: ManiSkillConfig, rollout: RolloutConfig, seconds: float) -> float:
    """Our pool with random actions, both halves kept busy."""
    simulator = build_simulator(config, rollout, CHUNK)
    planner = TrainingPlanner(config.task, 0)
    halves = halves_of(rollout.num_slots, 2)
    for slots in halves:
        simulator.start(slots, planner.take(len(slots)))
    generator = torch.Generator().manual_seed(0)
    size = len(halves[0]), CHUNK, simulator.spec.contract.action_dim
    random = [2 * torch.rand(size, generator=generator) - 1 for _ in range(20)]
    for slots in halves:
        simulator.send(slots, random[0], planner.take(len(slots)))
    began, steps, turn = time.monotonic(), 0, 0
    while time.monotonic() - began < seconds:
        for slots in halves:
            steps += int(simulator.receive(slots).executed.sum())
            turn += 1
            simulator.send(slots, random[turn % 20], planner.take(len(slots)))
    rate = steps / (time.monotonic() - began)
    simulator.close()
    return rate


def with_policy(config: ManiSkillConfig, rollout: RolloutConfig, seconds: float) -> float:
    """Our collector: the policy decides, everything is recorded."""
    simulator = build_simulator(config, rollout, CHUNK)
    options: Any = (
        FlowVLAConfig(hidden_size=64, patch_size=16, max_instruction_bytes=32)
        if config.gives_images
        else FlowMLPConfig()
    )
    policy = options.build(simulator.spec.contract)
    planner = TrainingPlanner(config.task, 0)
    collector = Collector(simulator, policy, planner, torch.Generator().manual_seed(0), 2, 8)
    collector.collect()
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        steps += int(collector.collect().executed.sum())
    rate = steps / (time.monotonic() - began)
    simulator.close()
    return rate


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--observation", choices=["state", "rgb"], default="state")
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--slots", type=int, default=32)
    arguments.add_argument("--seconds", type=float, default=10.0)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    np.random.seed(0)
    config = ManiSkillConfig(observation=given.observation)
    rollout = RolloutConfig(num_workers=given.processes, num_slots=given.slots)
    a = stock(config, given.processes, given.seconds)
    b = bare(config, rollout, given.seconds)
    c = with_policy(config, rollout, given.seconds)
    rates = {"stock": a, "bare": b, "with_policy": c}
    rates |= {"with_policy / stock": c / a, "with_policy / bare": c / b}
    print(json.dumps({name: round(rate, 2) for name, rate in rates.items()}, indent=2))


if __name__ == "__main__":
    main()
