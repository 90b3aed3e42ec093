"""Every gate passes on our simulators, and each catches the fault that it is there for."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from broken_lines import CrosstalkConfig, OddLineConfig
from embodied_rl.cli import main
from embodied_rl.correctness.bench import SimulatorBench, running
from embodied_rl.correctness.gates import pass_through
from embodied_rl.correctness.simulator import GATES, examine_simulator
from line_world import LineConfig


def test_the_line_passes() -> None:
    findings = examine_simulator(LineConfig())
    assert [f.name for f in findings] == [*GATES]
    assert [(f.name, f.text) for f in findings if f.state != "ok"] == []


BROKEN: list[tuple[str, str, Literal["fail", "warn"], str]] = [
    ("Endless", "chunks", "fail", "control steps executed with a limit of 6, and no end"),
    ("Moody", "initial states", "fail", "start initial state 5 apart"),
    ("Slippery", "repeatable", "fail", "the same actions lead elsewhere"),
    ("Moody", "workers", "fail", "in a worker process the same episode starts apart"),
    ("Moody", "refill", "fail", "after a refill the first view differs"),
    ("Foggy", "observation", "fail", "not finite"),
    ("Silent", "observation", "warn", "the instruction is empty"),
    ("Same", "initial states", "warn", "look the same"),
    ("Jumpy", "snapshots", "fail", "a restored state differs by 0.5"),
    ("Fixed", "snapshots", "warn", "no snapshots"),
    ("Timeless", "snapshots", "fail", "ends after 1 control steps instead of 5"),
    ("Wild", "wild actions", "fail", "not finite"),
]


@pytest.mark.parametrize(("kind", "gate", "state", "message"), BROKEN)
def test_a_gate_catches_its_fault(kind: str, gate: str, state: str, message: str) -> None:
    config = OddLineConfig(kind=kind, radius=1e-6)
    with running(config, 0) as simulator:
        found = pass_through(SimulatorBench(config, simulator), {gate: GATES[gate]})
    assert found[0].state == state
    assert message in found[0].text


@pytest.mark.parametrize(("fault", "state"), [("none", "ok"), ("reset", "fail"), ("step", "fail")])
def test_slots_of_a_batch_must_not_disturb_each_other(fault: str, state: str) -> None:
    config = CrosstalkConfig(fault=fault, radius=1e-6, limit=12)
    with running(config, 0) as simulator:
        found = pass_through(SimulatorBench(config, simulator), {"slots": GATES["slots"]})
    assert found[0].state == state
    if state == "fail":
        assert "move the other, which waits, by" in found[0].text


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *words])
    return int(caught.value.code or 0)


def test_the_command_tells_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulator", "gymnasium", "simulator.task=Pendulum-v1", "--json") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    states = {finding["name"]: finding["state"] for finding in data["findings"]}
    assert data["ok"] is True
    # Pendulum asks for nothing in words and cannot be put into a state.
    assert {name for name, state in states.items() if state == "warn"} <= {
        *("observation", "snapshots"),
    }


def test_the_command_looks_at_a_new_policy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulator=gymnasium", "simulator.task=Pendulum-v1", "policy.hidden_size=16")
    assert run("policy", "flow_mlp", *words) == 0
    assert "largest log-ratio before any update" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("policy",), "name the policy to look at"),
        (("policy", "nothing"), "neither a policy's name (fast_vla, flow_mlp"),
        (("simulator", "maniskil"), "did you mean 'maniskill'?"),
    ],
)
def test_wrong_names(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err
