"""Checkpoints are whole or skipped, and training continues from them bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.training.checkpoint import (
    CheckpointStore,
    generator_state,
    optimizer_from_state,
    optimizer_to_state,
    under,
    with_prefix,
)


def tensors(value: float) -> dict[str, Tensor]:
    return {"weight": torch.full((2, 3), value)}


def store(folder: Path, *steps: int, keep: int = 2) -> CheckpointStore:
    made = CheckpointStore(folder, keep)
    for step in steps:
        made.save(step, tensors(float(step)), {"step": step})
    return made


def newest(made: CheckpointStore) -> int | None:
    found = made.latest()
    return None if found is None else int(found[1]["step"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_saved_is_nothing_found(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", 2).latest() is None


def test_the_newest_are_kept_and_come_back_exactly(tmp_path: Path) -> None:
    made = store(tmp_path, 1, 2, 3)
    assert names(tmp_path) == ["step_000002", "step_000003"]
    found = made.latest()
    assert found is not None
    assert torch.equal(found[0]["weight"], tensors(3.0)["weight"])
    assert found[1] == {"step": 3}


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    assert newest(store(tmp_path, 999_999, 1_000_000)) == 1_000_000


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_a_damaged_checkpoint_is_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, harm: str
) -> None:
    made = store(tmp_path, 1, 2)
    path = tmp_path / "step_000002" / file
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(content[:-7])
    elif file == "state.json":
        data = json.loads(content)
        data["state"]["step"] = 7
        path.write_text(json.dumps(data))
    else:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert newest(made) == 1
    assert "step_000002 is damaged and skipped" in capsys.readouterr().err


def test_a_damaged_newer_checkpoint_never_pushes_out_a_good_one(tmp_path: Path) -> None:
    store(tmp_path, 10, 20, keep=3)
    (tmp_path / "step_000020" / "tensors.safetensors").write_bytes(b"")
    assert newest(store(tmp_path, 12, keep=1)) == 12
    assert names(tmp_path) == ["step_000012"]


def test_a_failed_save_leaves_the_last_one(tmp_path: Path) -> None:
    made = store(tmp_path, 1)
    with pytest.raises(TypeError):
        made.save(2, tensors(2.0), {"not": object()})
    assert names(tmp_path) == ["step_000001"]


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step_000001.unfinished").mkdir()
    (tmp_path / ".step_000002.replaced").mkdir()
    store(tmp_path, 2)
    assert names(tmp_path) == ["step_000002"]


def test_clear_removes_all(tmp_path: Path) -> None:
    made = store(tmp_path / "c", 1)
    made.clear()
    assert made.latest() is None and not (tmp_path / "c").exists()


def test_prefixes_separate_what_they_joined() -> None:
    both = with_prefix("a", {"x/y": torch.zeros(1)}) | with_prefix("ab", {"x": torch.ones(1)})
    assert list(under(both, "a")) == ["x/y"] and list(under(both, "ab")) == ["x"]


class Training:
    """A small regression with noise, an optimiser and a schedule: all that has to continue."""

    def __init__(self, optimizer: str, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(3, 2, generator=self.generator))
        known: dict[str, dict[str, Any]] = {
            "Adam": {"lr": 0.01, "amsgrad": True},
            "AdamW": {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)},
            "SGD": {"lr": 0.01, "momentum": 0.9},
        }
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, optimizer)(
            [self.weight], **known[optimizer]
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def steps(self, count: int) -> Tensor:
        for _ in range(count):
            data = torch.randn(4, 3, generator=self.generator)
            self.optimizer.zero_grad()
            (data @ self.weight - 1.0).square().mean().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.schedule.step()
        return self.weight.detach().clone()

    def save(self, folder: Path) -> None:
        moments, numbers = optimizer_to_state(self.optimizer.state_dict())
        content = with_prefix("optimizer", moments) | {"weight": self.weight}
        content["generator"] = generator_state(self.generator)
        state = {"optimizer": numbers, "schedule": self.schedule.state_dict()}
        CheckpointStore(folder, 1).save(1, content, state)

    def restore(self, folder: Path) -> None:
        found = CheckpointStore(folder, 1).latest()
        assert found is not None
        content, state = found
        self.weight.data.copy_(content["weight"])
        self.optimizer.load_state_dict(
            optimizer_from_state(under(content, "optimizer"), state["optimizer"])
        )
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(content["generator"])


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
def test_seven_and_seven_steps_equal_fourteen(tmp_path: Path, optimizer: str) -> None:
    whole = Training(optimizer, seed=3).steps(14)
    first = Training(optimizer, seed=3)
    half = first.steps(7)
    first.save(tmp_path)
    second = Training(optimizer, seed=4)
    second.restore(tmp_path)
    end = second.steps(7)
    assert torch.equal(end, whole) and not torch.equal(half, whole)


def test_an_optimiser_that_has_not_stepped_is_kept(tmp_path: Path) -> None:
    first = Training("AdamW", seed=3)
    first.save(tmp_path)
    second = Training("AdamW", seed=4)
    second.restore(tmp_path)
    assert torch.equal(second.steps(5), Training("AdamW", seed=3).steps(5))
