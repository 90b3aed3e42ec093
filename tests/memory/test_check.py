"""The look at the memory as a run begins."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from embodied_rl.config import load
from embodied_rl.memory.check import watched
from embodied_rl.memory.policy_bytes import weights_on_paper
from embodied_rl.run_config import RunConfig
from embodied_rl.training.loop import simulator_of
from policies.config import TokenVLAConfig

SPOKEN = [
    *("simulator=gymnasium", "simulator.task=Pendulum-v1", "rollout.num_slots=2"),
    *("rollout.num_workers=0", "policy=token_vla", "policy.hidden_size=16", "algorithm=ppo"),
]


def test_a_task_whose_name_is_longer_than_what_the_policy_reads() -> None:
    """What is looked at has no words, as the instructions of a run are not known yet."""
    config = load(RunConfig, None, ["name=x", *SPOKEN, "policy.max_instruction_bytes=4"])
    assert isinstance(config.policy, TokenVLAConfig)
    simulator = simulator_of(config)
    try:
        contract = simulator.spec.contract
        made = config.policy.build(contract)
        policy, plan, _ = watched(config, True, simulator, "cpu", lambda: made)
    finally:
        simulator.close()
    assert policy is made and plan.measured.policy.learned > 0


def test_weights_are_counted_by_the_headers_of_their_files(tmp_path: Path) -> None:
    config = load(RunConfig, None, ["name=x", *SPOKEN, f"initial_policy={tmp_path}"])
    file = tmp_path / "policy.safetensors"
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(2)}, file)
    simulator = simulator_of(config)
    contract = simulator.spec.contract
    simulator.close()
    assert weights_on_paper(config, contract) == 17 * 4
    whole = file.read_bytes()
    for damaged in (whole[:20], b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]"):
        file.write_bytes(damaged)
        assert weights_on_paper(config, contract) is None, "whoever loads it says what is wrong"
