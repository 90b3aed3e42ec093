"""Dry runs: every phase for real, with next to no work in each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cheap_run import cheap_run
from embodied_rl.algorithms.steps import RatioError
from embodied_rl.run_config import RunConfig
from embodied_rl.training.dry_run import DryRunFailed, dry_run
from outside import install
from policies.gaussian_mlp import GaussianMLP


def test_a_good_run_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = dry_run(cheap_run(tmp_path))
    assert not (tmp_path / "runs").exists()
    assert found.changes["iterations"] == (100, 2)
    text = "\n".join(found.checked)
    # 2 iterations of 4 decisions in 4 slots, of one control step each.
    assert found.checked[0] == "the simulator executed 32 control steps"
    assert "reproduces its log-probabilities" in text and "allowed 0.001" in text
    assert "2 iterations changed " in text and " tensors of the policy" in text
    assert "the last checkpoint was read back" in text
    assert found.checked[-1].endswith("saved, loaded and evaluated on 4 states")


def test_other_runs_are_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "runs" / "run" / "config.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    dry_run(cheap_run(tmp_path))
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] == [kept]
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
def test_groups_of_equal_returns_are_given_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Where all episodes return the same nothing can be learned, which is no reason to fail."""
    tree = cheap_run(tmp_path).model_dump(mode="json")
    install(tmp_path, {"simulator": {"line": "line_world:LineConfig"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    tree["simulator"] = {"type": "line", "limit": 2, "radius": 0.0}
    tree["algorithm"] = {"type": algorithm, "groups_per_iteration": 2, "group_size": 2}
    config = RunConfig.model_validate(tree)
    found = dry_run(config)
    text = "\n".join(found.checked)
    assert (
        "an update with made-up returns, because those of every group were equal, changed" in text
    )


def test_a_run_without_reinforcement(tmp_path: Path) -> None:
    found = dry_run(cheap_run(tmp_path, "iterations=0"))
    assert len(found.checked) == 1 and "evaluated on 4 states" in found.checked[0]


def test_a_policy_that_does_not_move(tmp_path: Path) -> None:
    with pytest.raises(DryRunFailed) as caught:
        dry_run(cheap_run(tmp_path, "algorithm.learning_rate=1e-60"))
    text = str(caught.value)
    assert "the dry run failed: 2 iterations left all parameters of the policy as they were" in text
    assert "algorithm.learning_rate" in text
    assert not (tmp_path / "runs").exists()


def test_a_policy_that_forgets_its_own_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = GaussianMLP.evaluate

    def wrong(self: GaussianMLP, *given: Any) -> Any:
        found = evaluate(self, *given)
        return replace(found, log_prob=found.log_prob + 0.01)

    monkeypatch.setattr(GaussianMLP, "evaluate", wrong)
    with pytest.raises(RatioError, match=r"largest log-ratio 0\.0"):
        dry_run(cheap_run(tmp_path))
    assert not (tmp_path / "runs").exists()
