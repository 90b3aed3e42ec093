"""`embodied-rl doctor replay`: what executing demonstrations through a convention tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outside
from embodied_rl.cli import main
from embodied_rl.correctness.replay_words import likely_causes, part_of
from embodied_rl.training.lerobot_folder import OUR_FILE
from embodied_rl.training.recording import record
from hand_world import CONTRACT, HandConfig, reversed_gripper

REVERSED = json.dumps(reversed_gripper())
OWN = json.dumps({**reversed_gripper(), "name": "own", "gripper": {"open": 1.0, "closed": -1.0}})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "grasp"
    record(HandConfig(), path, episodes=4, action_noise=0.0, seed=0)
    return path


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.install(tmp_path / "parts", {"simulator": {"hand": "hand_world:HandConfig"}})
    monkeypatch.syspath_prepend(str(tmp_path / "parts"))


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, what was said as data, and the complaint."""
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "replay", *words, "--json"])
    said = capsys.readouterr()
    return int(caught.value.code or 0), json.loads(said.out) if said.out else {}, said.err


def states(found: dict[str, Any]) -> dict[str, str]:
    return {finding["name"]: finding["state"] for finding in found["findings"]}


def text(found: dict[str, Any], name: str) -> str:
    return next(str(f["text"]) for f in found["findings"] if f["name"] == name)


@pytest.mark.parametrize("convention", ["libero_openvla", "bridge_openvla", "maniskill_ee_delta"])
def test_nothing_is_lost_through_a_convention(
    convention: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, _ = doctor(capsys, str(data), f"convention={convention}", "episodes=3")
    assert code == 0 and found["ok"]
    assert set(states(found).values()) == {"ok"}
    replay = found["replay"]
    assert (replay["episodes"], replay["direct"], replay["adapted"]) == (3, 3, 3)
    assert replay["lost"] == []
    assert replay["largest_error"] < 1e-6
    assert "3 of 3 demonstrations succeed through the convention" in text(found, "adapter")
    assert "in 100 % of the 3 steps" in text(found, "gripper")


def test_without_a_convention_they_are_executed_as_they_are(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, _ = doctor(capsys, str(data))
    assert code == 0
    assert states(found) == {"direct replay": "ok", "gripper": "ok"}
    assert found["replay"]["adapted"] == found["replay"]["direct"] == 4


def test_a_reversed_gripper_loses_all_and_is_named(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(data), f"convention={REVERSED}", f"spoken={OWN}"]
    code, found, _ = doctor(capsys, *words)
    assert code == 1 and found["ok"] is False
    assert states(found)["adapter"] == "fail"
    assert found["replay"]["lost"] == [0, 1, 2, 3]
    assert found["replay"]["largest_error"] == 2.0
    assert found["replay"]["where"].startswith("gripper (entry 6) of step ")
    said = text(found, "adapter")
    assert "0 of 4 demonstrations succeed through the convention reversed" in said
    assert "of a checkpoint that speaks own" in said
    assert "the gripper is reversed: it opens where the demonstrations close" in said
    assert "in 100 % of the steps; exchange `open` and `closed`" in said


def test_other_units_are_named(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = doctor(capsys, str(data), "convention=libero_openvla", "spoken=bridge_openvla")
    assert code == 1
    # Metres taken for units of 0.05 m, radians for units of half a radian in another order.
    assert "the translation comes back 0.05 times as large" in text(found, "adapter")
    assert "the rotation comes back 0.49 times as large" in text(found, "adapter")
    assert "gripper is" not in text(found, "adapter")


def test_a_simulator_that_misnames_its_gripper_is_seen_by_its_fingers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd"
    record(HandConfig(gripper="-1 opens, +1 closes"), path, episodes=2, action_noise=0.0, seed=0)
    code, found, _ = doctor(capsys, str(path))
    assert code == 1
    assert states(found) == {"direct replay": "ok", "gripper": "fail"}
    assert "in 0 % of the 2 steps" in text(found, "gripper")
    assert "the commands mean the opposite" in text(found, "gripper")


def test_a_configuration_tells_data_convention_and_checkpoint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"simulator: hand\npolicy: openvla\nalgorithm: ppo\nruns_dir: {tmp_path}/runs\n"
        f"policy.path: anywhere\npolicy.unnorm_key: bridge_orig\n"
        f"policy.convention: {REVERSED}\nimitation: {{}}\n"
        f"simulator.gives_images: true\ndemonstrations: {{path: {data}}}\n"
    )
    code, found, err = doctor(capsys, str(file), "episodes=2")
    assert code == 1, err
    # The name of the statistics tells what the checkpoint speaks.
    assert "of a checkpoint that speaks bridge_openvla" in text(found, "adapter")
    assert found["replay"]["episodes"] == 2
    file.write_text(file.read_text().replace(f"{{path: {data}}}", "{}"))
    code, _, err = doctor(capsys, str(file))
    assert code == 2
    assert "there are no demonstrations in" in err and "embodied-rl collect" in err


def test_what_cannot_be_replayed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = doctor(capsys, str(tmp_path), "convention=libero_openvla")
    assert code == 2 and "it is no data set that `embodied-rl collect` recorded" in err
    code, _, err = doctor(capsys, str(data), "convention=libero")
    assert code == 2 and "no convention is called 'libero'" in err
    noisy = tmp_path / "noisy"
    record(HandConfig(), noisy, episodes=1, action_noise=0.01, seed=0)
    code, _, err = doctor(capsys, str(noisy))
    assert code == 1 and "recorded with action_noise=0.01" in err
    file = noisy / OUR_FILE
    known = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in known.items() if k != "episodes"}))
    code, _, err = doctor(capsys, str(noisy))
    assert code == 1 and "with the initial states of its episodes. Record some with" in err


def test_parts_and_causes_by_hand() -> None:
    assert [part_of(CONTRACT, entry) for entry in (0, 2, 3, 5, 6)] == [
        *("translation", "translation", "rotation", "rotation", "gripper"),
    ]
    before = torch.tensor([[0.2, 0, 0, 0.1, 0, 0, 1.0], [0, 0.4, 0, 0, 0.2, 0, -1.0]])
    assert likely_causes(CONTRACT, [before], [before]) == []
    after = before * torch.tensor([1.0, 1, 1, -1, -1, -1, 1])
    (cause,) = likely_causes(CONTRACT, [before], [after])
    assert cause.startswith("the rotation is reversed (-1.00 times as large)")
    three, after = torch.cat([before, before[:1]]), torch.cat([before, before[:1]])
    after[0, 6] = -1.0
    (cause,) = likely_causes(CONTRACT, [three], [after])
    assert cause.startswith("the gripper is the opposite in 33 % of the steps")
    after = before.clone()
    after[:, 6] = torch.tensor([-1.0, -0.2])
    (cause,) = likely_causes(CONTRACT, [before], [after])
    assert cause.startswith("the gripper never opens, as the demonstrations do in 50 % of the")
    after[:, 6] = torch.tensor([0.4, -1.0])
    (cause,) = likely_causes(CONTRACT, [before], [after])
    assert cause.startswith("the gripper comes back only partly open or closed")
