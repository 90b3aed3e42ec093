"""Every gate passes on our policies, and each catches the fault that it is there for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from embodied_rl.contracts import Decision, Evaluation, Observation, Policy
from embodied_rl.correctness.policy import GATES, PolicyBench, examine_policy
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.collector import Collector
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig
from line_world import LineConfig
from policies.config import FastVLAConfig, FlowMLPConfig, GaussianMLPConfig, TokenVLAConfig
from policies.gaussian_mlp import GaussianMLP

SMALL = GaussianMLPConfig(hidden_size=16, chunk=2)
POLICIES: dict[str, Any] = {
    "gaussian": SMALL,
    "flow_sde": FlowMLPConfig(hidden_size=16, instruction_size=4, chunk=2),
    "flow_noise": FlowMLPConfig(hidden_size=16, exploration="flow_noise", chunk=2),
    "fpo": FlowMLPConfig(hidden_size=16, exploration="fpo", chunk=2),
    "tokens": TokenVLAConfig(hidden_size=16, chunk=2, num_bins=8, max_instruction_bytes=24),
    "fast": FastVLAConfig(hidden_size=16, chunk=2, vocabulary=32, max_instruction_bytes=24),
}


def line() -> Any:
    rollout = RolloutConfig(num_slots=4, halves=1, num_workers=0)
    return build_simulator(LineConfig(), rollout, chunk=2)


@pytest.mark.parametrize("name", POLICIES)
def test_our_policies_pass(name: str) -> None:
    simulator, config = line(), POLICIES[name]
    torch.manual_seed(0)
    findings = examine_policy(config.build(simulator.spec.contract), config, simulator)
    assert [f.name for f in findings] == [*GATES]
    assert [(f.name, f.text) for f in findings if f.state != "ok"] == []


class Wide(GaussianMLP):
    def _to_actions(self, units: Tensor) -> Tensor:
        return 3.0 * units + 2.0


class Certain(GaussianMLP):
    """Minds the bounds only when it explores."""

    def act(self, observation: Observation, generator: Any, mode: Any) -> Decision:
        found = super().act(observation, generator, mode)
        return found if mode == "explore" else replace(found, actions=found.actions + 7.0)


class Forgetful(GaussianMLP):
    """Scores something else than what it drew."""

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        return super().evaluate(observation, {"drawn": trace["drawn"] + 0.1})


class Crowded(GaussianMLP):
    """Rows see the mean of the batch."""

    def _see(self, observation: Observation) -> Tensor:
        seen = super()._see(observation)
        return seen + 5.0 * seen.mean(dim=0)


class Careless(GaussianMLP):
    """Draws without the generator."""

    def act(self, observation: Observation, generator: Any, mode: Any) -> Decision:
        return super().act(observation, torch.Generator().manual_seed(torch.seed() % 2**31), mode)


class Frozen(GaussianMLP):
    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        found = super().evaluate(observation, trace)
        value = found.value
        return Evaluation(found.log_prob.detach() + 0.0 * value[:, None], found.entropy, value)


class Shared(GaussianMLP):
    """The value looks through the policy's network."""

    def _mixed(self, observation: Observation) -> Tensor:
        state = self._see(observation)
        own: Tensor = self.value_network(state).value
        return own + self._mean(state).mean(dim=(1, 2))

    def value(self, observation: Observation) -> Tensor:
        return self._mixed(observation)

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        found = super().evaluate(observation, trace)
        return Evaluation(found.log_prob, found.entropy, self._mixed(observation))


class Twice(GaussianMLP):
    def value_parameters(self) -> list[torch.nn.Parameter]:
        return [*super().value_parameters(), self.log_std]


class Absent(GaussianMLP):
    def policy_parameters(self) -> list[torch.nn.Parameter]:
        return list(self.mean_network.parameters())


class Hidden(GaussianMLP):
    """Keeps a number that no state_dict has."""

    shift = 0.0

    def _see(self, observation: Observation) -> Tensor:
        return super()._see(observation) + self.shift


def _hide(policy: Any) -> None:
    policy.shift = 0.5


class Miscounted(GaussianMLP):
    """Tokens that do not add up."""

    def act(self, observation: Observation, generator: Any, mode: Any) -> Decision:
        return replace(super().act(observation, generator, mode), token_log_prob=TWO.clone())

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        count = len(observation)
        step = torch.zeros(1, 1, dtype=torch.int64).expand(count, -1)
        found = super().evaluate(observation, trace)
        return replace(found, token_log_prob=TWO[:1].expand(count, -1), token_step=step)


class HalfTold(GaussianMLP):
    def act(self, observation: Observation, generator: Any, mode: Any) -> Decision:
        return replace(super().act(observation, generator, mode), token_log_prob=TWO)


TWO = torch.full((4, 1), 2.0)
"""A token log-probability for each of four slots."""

BROKEN: list[tuple[type[GaussianMLP], str, Literal["fail", "warn"], str]] = [
    (Wide, "shapes", "fail", "actions (explore) leave the contract's bounds"),
    (Certain, "shapes", "fail", "actions (deterministic) leave the contract's bounds"),
    (Forgetful, "ratio", "fail", "largest log-ratio"),
    (Miscounted, "tokens", "fail", "added up by token_step, differs from log_prob"),
    (HalfTold, "tokens", "fail", "go together"),
    (Crowded, "minibatches", "fail", "rows influence each other"),
    (Crowded, "rows", "fail", "decides otherwise in another batch"),
    (Careless, "seeds", "fail", "something draws without it"),
    (Frozen, "gradients", "fail", "no gradient of the log-probability reaches"),
    (Shared, "value", "warn", "the value loss also changes"),
    (Twice, "parameters", "fail", "both the policy's and the value's"),
    (Absent, "parameters", "warn", "never trained, because in neither list: log_std"),
    (Hidden, "folder", "fail", "after saving and loading, actions differ"),
]


@pytest.mark.parametrize(("kind", "gate", "state", "message"), BROKEN)
def test_a_gate_catches_its_fault(
    kind: type[GaussianMLP], gate: str, state: str, message: str
) -> None:
    simulator = line()
    torch.manual_seed(0)
    policy = kind(SMALL, simulator.spec.contract)
    if kind is Hidden:
        _hide(policy)
    findings = {f.name: f for f in examine_policy(policy, SMALL, simulator)}
    assert findings[gate].state == state
    assert message in findings[gate].text


def test_a_gate_that_crashes_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(bench: PolicyBench) -> str:
        raise KeyError("tokens")

    monkeypatch.setitem(GATES, "ratio", crash)
    simulator = line()
    policy: Policy = SMALL.build(simulator.spec.contract)
    findings = {f.name: f for f in examine_policy(policy, SMALL, simulator)}
    assert findings["ratio"].state == "fail"
    assert findings["ratio"].text == "raised KeyError: 'tokens'"
    assert all(f.state == "ok" for f in findings.values() if f.name != "ratio")


def test_steps_that_were_not_executed_do_not_count() -> None:
    """A chunk of 4 in episodes of 6 steps: of every second decision only 2 steps are executed."""
    rollout = RolloutConfig(num_slots=2, halves=1, num_workers=0)
    simulator = build_simulator(LineConfig(radius=1e-6), rollout, chunk=4)
    config = GaussianMLPConfig(hidden_size=16, chunk=4)
    policy = config.build(simulator.spec.contract)
    generator = torch.Generator().manual_seed(0)
    batch = Collector(simulator, policy, TrainingPlanner("line", 0), generator, 1, 2).collect()
    assert batch.executed.tolist() == [4, 4, 2, 2]
    batch.log_prob[2:, 2:] = 1e6
    assert GATES["ratio"](PolicyBench(policy, config, batch)).startswith("largest log-ratio")
