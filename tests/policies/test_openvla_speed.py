"""Switches for speed and memory of OpenVLA change nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.contracts import Camera, Contract, Observation
from learning import kept_bytes, learned
from policies.openvla_config import OpenVLAConfig, OpenVLAOFTConfig
from tiny_openvla import write_openvla

CONTRACT = Contract(
    state_dim=8,
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
    cameras=(Camera("front", 64, 64),),
)
KINDS: dict[str, type[OpenVLAConfig] | type[OpenVLAOFTConfig]] = {
    "openvla": OpenVLAConfig,
    "openvla_oft": OpenVLAOFTConfig,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_openvla(tmp_path_factory.mktemp("openvla") / "tiny")


def build(kind: str, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"path": str(folder), "chunk": 2, "lora_rank": 4, **options}
    return KINDS[kind].model_validate(given).build(CONTRACT)


def seen(rows: int = 3) -> Observation:
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (rows, 64, 64, 3), generator=generator, dtype=torch.uint8)
    state = torch.randn(rows, 8, generator=generator)
    return Observation({"front": image}, state, ("push", "pick up the cube", "go")[:rows])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@every_kind
def test_kept_features_give_the_same_decisions_and_gradients(kind: str, tiny: Path) -> None:
    policy = build(kind, tiny, freeze_vision=True)
    made = policy.prepare(seen())
    assert [*made] == ["features"] and made["features"].shape[:2] == (3, 1)
    ready = replace(seen(), images={}, prepared=made)
    wanted, found = (policy.act(o, seeded(), "explore") for o in (seen(), ready))
    assert torch.equal(found.log_prob, wanted.log_prob)
    assert torch.equal(policy.value(ready), policy.value(seen()))
    again = learned(policy, ready, wanted.trace)
    for name, gradient in learned(policy, seen(), wanted.trace).items():
        assert torch.equal(again[name], gradient)
    assert build(kind, tiny).prepare(seen()) == {}
    assert build(kind, tiny, freeze_vision=True, reuse_features=False).prepare(seen()) == {}


@every_kind
@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_checkpointed_gradients_are_the_same_and_keep_less(
    kind: str, trainable: str, tiny: Path
) -> None:
    plain = build(kind, tiny, trainable=trainable)
    saving = build(kind, tiny, trainable=trainable, gradient_checkpointing=True)
    trace = plain.act(seen(), seeded(), "explore").trace
    wanted, found = learned(plain, seen(), trace), learned(saving, seen(), trace)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)
    assert kept_bytes(saving, seen(), trace) < 0.6 * kept_bytes(plain, seen(), trace)
    # Drawing decisions after it, from a cache, still works.
    again = saving.act(seen(), seeded(), "explore")
    assert torch.equal(again.trace["tokens"], trace["tokens"])


@every_kind
def test_rounding_networks_learn_in_float32(kind: str, tiny: Path) -> None:
    exact = build(kind, tiny, trainable="all")
    policy = build(kind, tiny, trainable="all", precision="bfloat16")
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    drawn = policy.act(seen(), seeded(), "explore")
    apart = (policy.evaluate(seen(), drawn.trace).log_prob - drawn.log_prob).abs().max()
    assert apart < 0.3
    exactly = exact.evaluate(seen(), drawn.trace).log_prob
    assert 1e-5 < (exactly - drawn.log_prob).abs().max() < 0.5
    assert all(g.dtype == torch.float32 for g in learned(policy, seen(), drawn.trace).values())
