"""Policies from checkpoints really see and act in the convention that they are told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.contracts import (
    Camera,
    Contract,
    ContractMismatch,
    HandMotion,
    Observation,
    StatePart,
)
from embodied_rl.conventions.known import KNOWN
from embodied_rl.training.policy_folder import load_policy, save_policy
from policies.lerobot_config import LerobotFlowConfig
from policies.lerobot_fitting import cameras_of
from policies.openvla_config import OpenVLAConfig, OpenVLAOFTConfig
from tiny_openvla import statistics, write_openvla
from tiny_vla import ACTION, CONTRACT, STATE, tiny_sizes, words_of, write_checkpoint

LIBERO = Contract(
    state_dim=9,
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    control_mode="OSC_POSE",
    control_hz=20.0,
    gripper="-1 opens, +1 closes",
    rotation="axis-angle",
    cameras=(
        Camera("agentview", 28, 28, "upside_down"),
        Camera("robot0_eye_in_hand", 28, 28, "upside_down"),
    ),
    state_parts=(
        StatePart("eef_position", 3),
        StatePart("eef_rotation", 4, "quaternion_xyzw"),
        StatePart("gripper_joints", 2),
    ),
    hand=HandMotion(0.05, 0.5, "axis_angle"),
)


def libero_seen(rows: int = 2) -> Observation:
    generator = torch.Generator().manual_seed(0)
    images = {
        camera.name: torch.randint(
            0, 256, (rows, 28, 28, 3), generator=generator, dtype=torch.uint8
        )
        for camera in LIBERO.cameras
    }
    state = torch.randn((rows, 9), generator=generator)
    return Observation(images, state, ("go",) * rows)


@pytest.fixture(scope="module")
def openvla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stats = {name: statistics() for name in ("libero_spatial", "bridge_orig", "mine")}
    stats["mine"]["action"]["q99"][0] = 0.7
    for known in stats.values():
        known["action"]["q01"][6], known["action"]["q99"][6] = 0.0, 1.0
    folder = tmp_path_factory.mktemp("openvla") / "libero"
    return write_openvla(folder, norm_stats=stats, state_dim=8)


def oft(folder: Path, contract: Contract = LIBERO, **options: Any) -> Any:
    torch.manual_seed(0)
    known = {"path": str(folder), "chunk": 2, "unnorm_key": "libero_spatial"}
    known |= {"convention": "libero_openvla", "trainable": "all", "value_hidden_size": 8}
    return OpenVLAOFTConfig.model_validate(known | options).build(contract)


def looked_at(policy: Any, seen: Observation) -> list[Tensor]:
    """The images [B, h, w, 3] that the network's own preparation gets, of an OpenVLA."""
    caught: list[Tensor] = []
    inner = policy.images._views

    def watch(image: Tensor) -> Tensor:
        caught.append(image)
        found: Tensor = inner(image)
        return found

    policy.images._views = watch
    policy.act(seen, torch.Generator().manual_seed(0), "deterministic")
    return caught


def test_openvla_oft_sees_turned_images_and_a_state_with_axis_angle(openvla: Path) -> None:
    policy, seen = oft(openvla), libero_seen()
    third, wrist = looked_at(policy, seen)
    assert torch.equal(third, seen.images["agentview"].flip((1, 2)))
    assert torch.equal(wrist, seen.images["robot0_eye_in_hand"].flip((1, 2)))
    turned = Observation(
        {name: image.flip((1, 2)) for name, image in seen.images.items()},
        policy.robot.adapter.state(seen.state),
        seen.instruction,
    )
    upright = replace(
        LIBERO,
        state_dim=8,
        state_parts=(),
        cameras=tuple(Camera(c.name, 28, 28) for c in LIBERO.cameras),
    )
    plain = oft(openvla, upright, convention=None)
    trace = policy.act(seen, torch.Generator().manual_seed(1), "explore").trace
    assert torch.equal(
        plain.evaluate(turned, trace).log_prob, policy.evaluate(seen, trace).log_prob
    )


def test_the_ratio_is_one_and_actions_are_the_simulators(openvla: Path) -> None:
    policy, seen = oft(openvla), libero_seen()
    decision = policy.act(seen, torch.Generator().manual_seed(1), "explore")
    found = policy.evaluate(seen, decision.trace)
    assert torch.allclose(found.log_prob, decision.log_prob, atol=2e-5, rtol=0)
    # The gripper is all the way open or closed, and what opens in the checkpoint is -1 here.
    assert set(decision.actions[..., 6].flatten().tolist()) <= {-1.0, 1.0}
    # The gripper is not scaled: these are raw commands, and 0.2 still closes.
    units = torch.tensor([-1.0, 0.2, 1.0])[:, None, None].expand(3, 1, 7)
    executed = policy._to_environment(units)[:, 0]
    assert executed[:, 6].tolist() == [1.0, 1.0, -1.0]
    assert executed[:, 0].tolist() == pytest.approx([-0.5, 0.1, 0.5])
    back = policy.robot.to_checkpoint(executed)
    assert back[:, 6].tolist() == [0.0, 0.0, 1.0]


def test_the_contract_tells_and_another_convention_is_refused(
    openvla: Path, tmp_path: Path
) -> None:
    policy = oft(openvla)
    said = policy.contract
    assert (said.convention, said.convention_hash) == ("libero_openvla", "ccfb77000dfc")
    assert said.statistics == "q01 and q99 of libero_spatial"
    said.require_equal(LIBERO, "the policy", "the simulator")
    save_policy(policy, policy._config, tmp_path / "saved")
    again = load_policy(tmp_path / "saved")
    assert again.contract == again.policy.contract == said
    other = {**KNOWN["libero_openvla"].model_dump(), "orientation": "upright", "name": "mine"}
    options = policy._config.model_copy(
        update={"convention": type(KNOWN["libero_openvla"]).model_validate(other)}
    )
    with pytest.raises(
        ContractMismatch,
        match=r"(?s)convention: the policy with these options has 'mine', .*"
        r"has 'libero_openvla'.*convention_hash",
    ):
        load_policy(tmp_path / "saved", options=options)
    silent = policy._config.model_copy(update={"convention": None})
    with pytest.raises(ContractMismatch, match="has 'none', the saved policy has 'libero_openvla'"):
        load_policy(tmp_path / "saved", options=silent)
    elsewhere = policy._config.model_copy(update={"unnorm_key": "mine"})
    with pytest.raises(ContractMismatch, match=r"(?s)statistics: .* of mine'.*statistics_hash"):
        load_policy(tmp_path / "saved", options=elsewhere)


def test_statistics_that_speak_otherwise_are_refused(openvla: Path) -> None:
    with pytest.raises(ContractMismatch, match="statistics bridge_orig are of data in bridge_open"):
        oft(openvla, unnorm_key="bridge_orig")
    with pytest.raises(ContractMismatch, match="libero_openpi has commands from -1 to 1, the"):
        oft(openvla, convention="libero_openpi")
    joints = replace(LIBERO, hand=None, control_mode="pd_joint_delta_pos")
    with pytest.raises(ContractMismatch, match=r"control_mode: .* has 'pd_joint_delta_pos'"):
        oft(openvla, joints)


def test_openvla_looks_through_the_conventions_camera(
    tmp_path: Path,
) -> None:
    folder = write_openvla(tmp_path / "plain", norm_stats={"mine": statistics()})
    known = KNOWN["libero_openvla"].model_dump() | {"cameras": {"full_image": "agentview"}}
    options = {"path": str(folder), "convention": known, "value_hidden_size": 8}
    torch.manual_seed(0)
    # It reads no state, so that the simulator need not name the parts of one.
    config = OpenVLAConfig.model_validate(options | {"fit_statistics": True, "unnorm_key": "new"})
    policy: Any = config.build(replace(LIBERO, state_parts=()))
    assert policy.images.cameras == ("agentview",)
    seen = libero_seen()
    (image,) = looked_at(policy, seen)
    assert torch.equal(image, seen.images["agentview"].flip((1, 2)))
    # Statistics are of actions as the checkpoint says them.
    actions = torch.tensor([[0.0] * 6 + [1.0], [0.0] * 6 + [-1.0]])
    policy.fit_normalisation(torch.zeros(2, 9), actions)
    fitted = policy.robot.statistics["new"]["action"]
    assert (fitted["min"][6], fitted["max"][6]) == (0.0, 1.0)


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    with tiny_sizes():
        yield


@pytest.fixture(scope="module")
def smolvla(tmp_path_factory: pytest.TempPathFactory, small: None) -> Path:
    return write_checkpoint("smolvla", tmp_path_factory.mktemp("lerobot") / "smolvla")


MIXED = {
    "name": "mixed",
    "orientation": "turned",
    "orientations": {"wrist": "upright"},
    "state": {"turned": "axis_angle", "rest": None},
    "gripper": {"open": -5.0, "closed": 5.0},
}
GIVEN = replace(
    CONTRACT,
    state_dim=STATE + 1,
    gripper="+1 opens, -1 closes",
    action_low=(-1.0,) * ACTION,
    action_high=(1.0,) * ACTION,
    state_parts=(StatePart("rest", STATE - 3), StatePart("turned", 4, "quaternion_wxyz")),
)


WIDE = replace(CONTRACT, action_low=(-1.0, -1.0, -5.0), action_high=(1.0, 1.0, 5.0))


def flow(folder: Path, contract: Contract, convention: Any) -> Any:
    torch.manual_seed(0)
    options = {"path": str(folder), "tokenizer": words_of(folder), "chunk": 2}
    options |= {"denoise_steps": 3, "value_hidden_size": 8, "convention": convention}
    return LerobotFlowConfig.model_validate(options).build(contract)


def test_lerobots_model_gets_turned_images_and_acts_the_other_way_round(
    smolvla: Path, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    images = {
        c.name: torch.randint(0, 256, (2, 32, 32, 3), generator=generator, dtype=torch.uint8)
        for c in CONTRACT.cameras
    }
    # Rotations of 2 atan(0.6 / 0.8) about x, and of none.
    angle = 2 * math.atan2(0.6, 0.8)
    state = torch.tensor([[0.1, 0.2, 0.8, 0.6, 0, 0], [0.3, 0.4, 1, 0, 0, 0]])
    seen = Observation(images, state, ("go", "go"))
    by_hand = Observation(
        {"front": images["front"].flip((1, 2)), "wrist": images["wrist"]},
        torch.tensor([[angle, 0, 0, 0.1, 0.2], [0, 0, 0, 0.3, 0.4]]),
        ("go", "go"),
    )
    told, plain = flow(smolvla, GIVEN, MIXED), flow(smolvla, WIDE, None)
    mine, theirs = (
        policy.processors.inputs(view, policy._cameras)
        for policy, view in ((told, seen), (plain, by_hand))
    )
    for key in ("observation.images.camera1", "observation.state"):
        if key in theirs:
            torch.testing.assert_close(mine[key], theirs[key], atol=1e-6, rtol=0)
    decided = told.act(seen, torch.Generator().manual_seed(1), "explore")
    same = plain.act(by_hand, torch.Generator().manual_seed(1), "explore")
    # The likelihood is the checkpoint's: it does not know of the adapter.
    torch.testing.assert_close(decided.log_prob, same.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(decided.actions[..., :-1], same.actions[..., :-1], atol=1e-5, rtol=0)
    gripper = same.actions[..., -1] / -5.0
    torch.testing.assert_close(decided.actions[..., -1], gripper, atol=1e-5, rtol=0)
    assert gripper.abs().max() > 0.01
    scored = told.evaluate(seen, decided.trace)
    torch.testing.assert_close(scored.log_prob, decided.log_prob, atol=1e-4, rtol=0)
    prepared = replace(seen, prepared=told.prepare(seen))
    again = told.evaluate(prepared, decided.trace)
    torch.testing.assert_close(again.log_prob, decided.log_prob, atol=1e-4, rtol=0)
    # Imitation learns the demonstrated actions as the checkpoint would say them.
    shape = (2, told.imitated_steps, ACTION)
    actions = torch.rand(shape, generator=torch.Generator().manual_seed(2)) - 0.5
    flipped = actions * torch.tensor([1.0, 1.0, -5.0])
    valid = torch.ones(shape[:2], dtype=torch.bool)
    losses = [
        policy.imitation_loss(view, chunk, valid, torch.Generator().manual_seed(3))
        for policy, view, chunk in ((told, seen, actions), (plain, by_hand, flipped))
    ]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    save_policy(told, told._config, tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved").policy
    assert loaded.contract == told.contract
    assert (loaded.contract.convention, loaded.contract.statistics_hash != "") == ("mixed", True)
    with pytest.raises(ContractMismatch, match=r"convention: the policy with these options has"):
        load_policy(
            tmp_path / "saved", options=told._config.model_copy(update={"convention": None})
        )


def test_images_find_the_conventions_cameras() -> None:
    images = ["observation.images.image", "observation.images.image2"]
    found = cameras_of(images, {}, LIBERO, KNOWN["libero_openpi"])
    assert found == {images[0]: "agentview", images[1]: "robot0_eye_in_hand"}
    ported = ["observation.images.base_0_rgb", "observation.images.left_wrist_0_rgb"]
    ported.append("observation.images.right_wrist_0_rgb")
    found = cameras_of(ported, {}, LIBERO, KNOWN["libero_openpi"])
    assert found == {ported[0]: "agentview", ported[1]: "robot0_eye_in_hand"}
    given = {images[0]: "robot0_eye_in_hand"}
    assert cameras_of(images, given, LIBERO, KNOWN["libero_openpi"]) == given
