"""Counting the bytes of tensors and of processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from embodied_rl.memory.machine import _limits, free
from embodied_rl.memory.tracking import bytes_of, data_bytes, parent_of, peak_of, process_bytes


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    def compute() -> None:
        first = torch.zeros(1000)  # 4000 bytes
        second = torch.zeros(500)  # 2000 more
        first[:10].add_(1)
        second.view(5, 100)  # Views are nothing of their own.
        del first
        torch.zeros(250)  # 2000 + 1000 by now

    assert peak_of(compute, "cpu") == 6000


def test_what_was_there_before_does_not_count() -> None:
    known = torch.zeros(1000)
    assert peak_of(lambda: known.add_(1), "cpu") == 0
    assert peak_of(lambda: known + 1, "cpu") == 4000


def test_activations_are_kept_for_the_backward_pass() -> None:
    weight = torch.ones(100, requires_grad=True)

    def compute() -> None:
        weight.exp().exp().exp().sum().backward()  # type: ignore[no-untyped-call]

    # Three results of 400 bytes, needed to the end, and a few gradients on the way back.
    assert 3 * 400 <= peak_of(compute, "cpu") <= 7 * 400


def test_shared_tensors_count_once() -> None:
    whole = torch.zeros(10, 10)
    assert bytes_of([whole, whole[0], whole.T]) == 400
    assert bytes_of([whole, torch.zeros(5, dtype=torch.bfloat16)]) == 410


def test_a_process_is_read() -> None:
    before = process_bytes()["Rss"]
    taken = torch.ones(16 * 2**20)  # 64 MiB
    assert process_bytes()["Rss"] - before == pytest.approx(64 * 2**20, rel=0.1)
    assert data_bytes() > taken.nbytes
    assert process_bytes(2**22 + 1) == {}
    assert parent_of(os.getpid()) == os.getppid()


def test_what_is_free_here() -> None:
    found = free("cpu")
    assert found.host > 2**28 and found.gpu is None


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container(tmp_path: Path, version: int) -> None:
    """What can be given back at once counts as free."""
    folder = tmp_path if version == 2 else tmp_path / "memory"
    folder.mkdir(exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limit, used, unused = names[version]
    (folder / limit).write_text("1000\n")
    (folder / used).write_text("700\n")
    (folder / "memory.stat").write_text(f"anon 5\n{unused} 50\n")
    assert _limits(tmp_path) == [350]
    (folder / limit).write_text("max\n")
    assert _limits(tmp_path) == []
