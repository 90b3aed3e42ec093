"""Parts by name: ours, those of others, and folders that get in the way."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import outside
from embodied_rl import catalogue
from embodied_rl.config import Config, ConfigError, load
from embodied_rl.run_config import RunConfig
from source_tree import ROOT, targets

ROWS = [(kind, name) for kind, rows in catalogue.PARTS.items() for name in rows]


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_every_row_resolves_to_options_of_that_name(kind: str, name: str) -> None:
    options = catalogue.config_class(kind, name)
    assert issubclass(options, Config)
    assert options.model_fields["type"].default == name
    assert options.__doc__


@pytest.mark.parametrize("target", targets())
def test_every_name_in_our_code_resolves(target: str) -> None:
    assert callable(catalogue.load(target))


def test_an_unknown_part_lists_the_known_ones() -> None:
    with pytest.raises(catalogue.UnknownPart) as caught:
        catalogue.config_class("policy", "flow_mpl")
    assert str(caught.value) == (
        "no policy is called 'flow_mpl'; known: fast_vla, flow_mlp, flow_vla, gaussian_mlp, "
        "lerobot_flow, lerobot_tokens, openvla, openvla_oft, token_vla"
    )


@pytest.mark.parametrize("form", ["package", "module"])
def test_a_foreign_folder_that_hides_ours_is_named(form: str, tmp_path: Path) -> None:
    foreign = tmp_path / ("policies/__init__.py" if form == "package" else "policies.py")
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("")
    answer = _python(["-m", "embodied_rl", "list"], tmp_path, str(ROOT))
    assert answer.returncode == 0
    line = next(line for line in answer.stdout.splitlines() if "flow_mlp" in line)
    assert f"'policies' is {foreign}" in line
    assert f"not the one that ships with embodied-rl ({ROOT / 'policies'})" in line
    assert "rename it" in line
    assert "Any task that ManiSkill 3 has registered." in answer.stdout  # Others still work.


def test_a_folder_of_that_name_without_a_package_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "notes.txt").write_text("")
    answer = _python(["-m", "embodied_rl", "list"], tmp_path, str(ROOT))
    assert "A flow policy on the state alone" in answer.stdout


OUTSIDER = """
    from typing import Literal
    from pydantic import Field
    from embodied_rl.algorithms.config import PPOConfig
    from line_world import LineConfig
    from policies.config import GaussianMLPConfig

    class RopeConfig(LineConfig):
        type: Literal["rope"] = "rope"

    class DotConfig(GaussianMLPConfig):
        type: Literal["dot"] = "dot"
        dots: int = Field(1, ge=1, le=3)
        '''How many dots.'''

        def build(self, contract):
            from policies.gaussian_mlp import GaussianMLP
            return GaussianMLP(self, contract)

    class SlowConfig(PPOConfig):
        type: Literal["slow"] = "slow"

        def build(self, policy, seed):
            from embodied_rl.algorithms.ppo import PPO
            print("slow was built")
            return PPO(self, policy, seed)
"""
NAMED = ["simulator=rope", "policy=dot", "algorithm=slow"]


@pytest.fixture
def outsider(tmp_path: Path) -> Path:
    """A folder with one new part of each kind."""
    (tmp_path / "outsider_parts.py").write_text(textwrap.dedent(OUTSIDER))
    outside.install(
        tmp_path,
        {
            "simulator": {"rope": "outsider_parts:RopeConfig"},
            "policy": {"dot": "outsider_parts:DotConfig"},
            "algorithm": {"slow": "outsider_parts:SlowConfig"},
        },
    )
    return tmp_path


def test_parts_from_outside_are_found_and_checked_like_ours(
    outsider: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(outsider))
    importlib.invalidate_caches()
    assert catalogue.names("policy") == [
        "dot",
        "fast_vla",
        "flow_mlp",
        "flow_vla",
        "gaussian_mlp",
        "lerobot_flow",
        "lerobot_tokens",
        "openvla",
        "openvla_oft",
        "token_vla",
    ]
    config = load(RunConfig, None, [*NAMED, "policy.dots=2"])
    assert type(config.policy).__name__ == "DotConfig"
    assert config.policy.model_dump()["dots"] == 2
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, ["simulator=rop", "policy=dot", "algorithm=slow", "policy.dotz=1"])
    assert "no simulator is called 'rop'; did you mean 'rope'?" in str(caught.value)
    assert "policy.dotz: unknown option; did you mean 'dots'?" in str(caught.value)
    with pytest.raises(ConfigError, match=r"policy\.dots: got 4.*at least 1, at most 3"):
        load(RunConfig, None, [*NAMED, "policy.dots=4"])
    sys.modules.pop("outsider_parts", None)


def test_parts_from_outside_train(outsider: Path) -> None:
    (outsider / "main.yaml").write_text(
        "simulator: rope\npolicy: dot\nalgorithm: slow\nalgorithm.critic_warmup_iterations: 0\n"
        "rollout: {num_workers: 0, num_slots: 4}\nevaluation: {episodes: 4}\niterations: 1\n"
    )
    words = ["-m", "embodied_rl", "train", "main.yaml", "name=outside"]
    answer = _python(words, outsider, f"{outsider}:{ROOT / 'tests' / 'support'}:{ROOT}")
    assert answer.returncode == 0, answer.stderr
    assert "slow was built" in answer.stdout
    assert "4 held-out initial states" in answer.stdout
    assert (outsider / "runs" / "outside" / "policies" / "final" / "policy.json").is_file()


def _python(words: list[str], folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, which it searches first, then `path`."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
