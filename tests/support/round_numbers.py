"""A measured policy and simulator with round numbers, and a run of them."""

from __future__ import annotations

from embodied_rl.config import load
from embodied_rl.memory.parts import Growing, Measured, PolicyBytes, WorkerBytes
from embodied_rl.run_config import RunConfig

POLICY = PolicyBytes(
    weights=1000,
    learned=600,
    imitated=400,
    update=Growing(50, 10),
    imitation=Growing(30, 5),
    act=Growing(0, 2),
    observation=20,
    decision=8,
    action=4,
)
MEASURED = Measured(
    process=10_000,
    simulator=700,
    workers=WorkerBytes(server=100, worker=30, environment=7),
    num_workers=2,
    policy=POLICY,
    arrays=64,
    num_tasks=3,
    max_episode_steps=10,
    on_gpu=False,
)
DEMONSTRATED = ["demonstrations.episodes=2", "imitation.batch_size=6"]
PPO = [
    *("algorithm=ppo", "rollout.num_slots=4", "rollout.halves=2", "policy.chunk=2"),
    *("algorithm.decisions_per_iteration=3", "algorithm.minibatch_size=4"),
]


def config(*options: str) -> RunConfig:
    return load(RunConfig, None, ["simulator=maniskill", "policy=flow_mlp", *options])
