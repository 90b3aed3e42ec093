"""Groups of episodes on the line, collected in one way or another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from embodied_rl.contracts import Policy, Simulator
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.groups import GroupCollector, Growth
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig
from line_world import LineConfig
from policies.config import FlowMLPConfig

GROUP_SIZE = 4
NEVER = Growth()


@contextmanager
def line(num_slots: int = 8, workers: int = 0, limit: int = 5) -> Iterator[Simulator]:
    rollout = RolloutConfig(num_slots=num_slots, num_workers=workers)
    simulator = build_simulator(LineConfig(limit=limit), rollout, chunk=2)
    yield simulator
    simulator.close()


def policy_for(simulator: Simulator) -> Policy:
    torch.manual_seed(0)
    config = FlowMLPConfig(chunk=2, hidden_size=16, num_layers=1, value_hidden_size=8)
    return config.build(simulator.spec.contract)


def collector(
    simulator: Simulator,
    policy: Policy,
    num_groups: int = 5,
    max_groups: int = 15,
    growth: Growth = NEVER,
) -> GroupCollector:
    planner = TrainingPlanner("line", 0, group_size=GROUP_SIZE)
    return GroupCollector(simulator, policy, planner, "cpu", 2, num_groups, max_groups, growth)


def collect(
    num_slots: int = 8, workers: int = 0, max_groups: int = 15, growth: Growth = NEVER
) -> Batch:
    with line(num_slots, workers) as simulator:
        policy = policy_for(simulator)
        return collector(simulator, policy, max_groups=max_groups, growth=growth).collect()


def same(a: Batch, b: Batch) -> bool:
    names = ["log_prob", "value", "next_value", "reward", "executed", "done", "group", "episode"]
    return all(
        torch.allclose(getattr(a, name).float(), getattr(b, name).float(), atol=1e-5)
        for name in names
    ) and {r.episode.key for r in a.results} == {r.episode.key for r in b.results}
