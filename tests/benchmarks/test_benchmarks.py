"""Benchmarks of large models run, at least with tiny ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pi0_full_size
import prefix_reuse
import vla_sampling
from tiny_vla import TINY


def test_full_size_needs_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pi0_full_size.main([]) == 2
    assert capsys.readouterr().err.splitlines() == [pi0_full_size.NO_DEVICE]
    with pytest.raises(SystemExit):
        pi0_full_size.main(["--precision", "int8"])


def test_full_size_can_be_tried_out_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = ["--slots", "2", "--decisions", "2", "--minibatch", "4", "--epochs", "1"]
    file = tmp_path / "found.json"
    assert pi0_full_size.main(["--tiny", *small, "--repeats", "1", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())
    assert row["compile"] == "none" and row["decisions learned from"] == 4
    assert all(value > 0 for name, value in row.items() if name != "compile")


def test_sampling_compares_equal_actions(tmp_path: Path) -> None:
    rows = vla_sampling.measure("pi05", TINY, tmp_path / "pi05", [1, 3], 1, "cpu", "none")
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["apart"] <= vla_sampling.ALLOWED and row["ours"] > 0 for row in rows)


def test_prefix_reuse_compares_equal_weights() -> None:
    options = {
        "num_slots": 4,
        "decisions_per_iteration": 2,
        "minibatch_size": 4,
        "epochs": 2,
        "critic_warmup_iterations": 0,
        "max_kl": None,
        "learning_rate": 1e-4,
    }
    found = prefix_reuse.measure(TINY, options, repeats=1)
    assert found["rows"] == 8 and found["bytes"] > 0
    assert found["apart"] <= prefix_reuse.KEPT < found["moved"]
