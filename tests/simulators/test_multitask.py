"""Several tasks behind one environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.config import PPOConfig
from embodied_rl.contracts import ContractMismatch, Episode
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.planner import TrainingPlanner, evaluation_plan
from embodied_rl.run_config import RolloutConfig, RunConfig
from embodied_rl.training.lerobot_folder import OUR_FILE
from embodied_rl.training.recording import record
from policies.config import FlowMLPConfig, TokenVLAConfig
from simulators.config import ManiSkillConfig
from simulators.multitask import MultiTask

PICK, PULL = "PickCube-v1", "PullCube-v1"
BOTH = ManiSkillConfig(task=(PICK, PULL))


def episode(task: str, state: int = 3) -> Episode:
    return Episode(f"test/{task}/{state}", task, state, 0)


def test_each_episode_runs_its_task() -> None:
    both = BOTH.build_environment()
    alone = ManiSkillConfig(task=PULL).build_environment()
    sizes = (both.spec.contract.state_dim, alone.spec.contract.state_dim)
    assert sizes == (42, 35)
    assert both.spec.tasks == (PICK, PULL)
    both.reset(episode(PICK))
    assert both.instruction == "pick up the red cube and move it to the green goal"
    both.reset(episode(PULL))
    alone.reset(episode(PULL))
    assert both.instruction == "pull the cube onto the target"
    for _ in range(3):
        action = np.full(7, 0.5, dtype=np.float32)
        assert both.step(action) == alone.step(action)
        seen = both.observe().state
        np.testing.assert_allclose(seen[:35], alone.observe().state, atol=1e-5)
        np.testing.assert_array_equal(seen[35:], 0.0)
    both.close()
    alone.close()


def test_a_snapshot_brings_back_task_and_state() -> None:
    both = BOTH.build_environment()
    both.reset(episode(PULL))
    before, kept = both.observe().state, both.snapshot()
    both.reset(episode(PICK))
    both.restore(kept)
    assert both.instruction == "pull the cube onto the target"
    np.testing.assert_allclose(both.observe().state, before, atol=1e-5)
    both.close()


def test_an_unknown_task_is_named() -> None:
    both = BOTH.build_environment()
    with pytest.raises(ValueError, match=r"no task 'Juggle-v1' here; tasks: PickCube-v1, PullCube"):
        both.reset(episode("Juggle-v1"))


def test_tasks_with_other_actions_cannot_share_a_policy() -> None:
    other = ManiSkillConfig(task=PULL, control_mode="pd_joint_delta_pos")
    with pytest.raises(ContractMismatch, match=r"(?s)cannot share one policy.*control_mode"):
        MultiTask({PICK: ManiSkillConfig(task=PICK), PULL: other})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": (PICK,)}, "one task, or several different ones"),
        ({"task": (PICK, PICK)}, "one task, or several different ones"),
        ({"task": (PICK, PULL), "backend": "gpu"}, "backend belongs to a single task"),
        ({"task": (PICK, PULL), "instruction": "go"}, "instruction belongs to a single task"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ManiSkillConfig.model_validate(options)


def test_plans_take_turns() -> None:
    planner = TrainingPlanner(("a", "b"), 0, group_size=2)
    assert [e.task for e in planner.take(8)] == ["a", "a", "b", "b"] * 2
    plan = evaluation_plan(("a", "b"), 3)
    assert [e.task for e in plan] == ["a", "b"] * 3
    assert len({e.key for e in plan}) == len({e.group for e in plan}) == 6
    # Each task is measured on the same held-out states as it would be alone.
    alone = [e.initial_state for e in evaluation_plan("a", 3)]
    assert [e.initial_state for e in plan if e.task == "b"] == alone


def test_a_batch_knows_its_tasks() -> None:
    from embodied_rl.rollout.collector import Collector

    simulator = build_simulator(BOTH, RolloutConfig(num_slots=4, num_workers=0), chunk=4)
    torch.manual_seed(0)
    policy = FlowMLPConfig(instruction_size=8, hidden_size=16, value_hidden_size=16).build(
        simulator.spec.contract
    )
    planner = TrainingPlanner(simulator.spec.all_tasks, 0)
    generator = torch.Generator().manual_seed(0)
    batch = Collector(simulator, policy, planner, generator, 2, 2).collect()
    simulator.close()
    assert batch.task.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    sentences = {0: "pick up the red cube and move it to the green goal"}
    sentences[1] = "pull the cube onto the target"
    assert list(batch.observation.instruction) == [sentences[t] for t in batch.task.tolist()]


def test_every_task_gets_its_own_number_of_demonstrations(tmp_path: Path) -> None:
    summary = record(BOTH, tmp_path / "data", {PICK: 1, PULL: 3}, action_noise=0.0, seed=0)
    assert (summary.episodes, summary.attempts) == (4, 4)
    described = json.loads((tmp_path / "data" / OUR_FILE).read_text())
    # Tasks take turns until they have enough.
    assert [e["task"] for e in described["episodes"]] == [PICK, PULL, PULL, PULL]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"by_task": {PICK: 2}},
            r"by_task counts PickCube-v1, but simulator.task is PickCube-v1, Pu",
        ),
        ({"by_task": {PICK: 2, PULL: 2}, "path": "data"}, r"path=data is there already"),
        ({"by_task": {PICK: 2, PULL: 0}}, "greater than or equal to 1"),
    ],
)
def test_counts_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {
        "simulator": BOTH,
        "policy": FlowMLPConfig(instruction_size=8),
        "algorithm": PPOConfig(),
    }
    with pytest.raises(ValueError, match=words):
        RunConfig(name="x", **options, demonstrations=given, imitation={})


@pytest.mark.parametrize(
    ("policy", "option"),
    [
        (FlowMLPConfig(), "instruction_size"),
        (TokenVLAConfig(max_instruction_bytes=0), "max_instruction_bytes"),
    ],
)
def test_a_policy_that_reads_no_instruction_cannot_do_several_tasks(
    policy: Any, option: str
) -> None:
    with pytest.raises(ValueError, match=rf"{option}=0 reads no instruction.*PullCube"):
        RunConfig(name="x", simulator=BOTH, policy=policy, algorithm=PPOConfig())
    reads = FlowMLPConfig(instruction_size=8)
    RunConfig(name="x", simulator=BOTH, policy=reads, algorithm=PPOConfig())
