"""The recipes in configs/: each begins as it is and goes through a dry run, with a tiny checkpoint
of the same class instead of the one from the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from embodied_rl.config import GROUPS, load
from embodied_rl.contracts import Contract
from embodied_rl.run_config import RunConfig
from embodied_rl.training.dry_run import dry_run
from simulators.config import ManiSkillConfig
from simulators.maniskill_visuals import has_render_device
from tiny_fast import processor_of, tiny_fast, write_fast_checkpoint
from tiny_openvla import write_openvla
from tiny_vla import tiny_sizes, words_of, write_checkpoint

KINDS = ("pi0", "pi05", "smolvla", "pi0_fast", "openvla", "openvla_oft")
SIDE = 64
"""Of the images, in pixels."""
RECIPES = [f"{kind}_{algorithm}_maniskill" for kind in KINDS for algorithm in ("ppo", "grpo")]


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with tiny_sizes(), tiny_fast():
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints are that were written already."""
    return tmp_path_factory.mktemp("checkpoints")


def tiny(kind: str, folder: Path) -> list[str]:
    """The options that take a tiny checkpoint instead of the recipe's."""
    path = folder / kind
    if kind.startswith("openvla"):
        if not path.exists():
            write_openvla(path)
        return [f"policy.path={path}"]
    contract = maniskill_contract()
    if kind == "pi0_fast":
        if not path.exists():
            write_fast_checkpoint(path, contract)
        given = [f"policy.processor={processor_of(path)}"]
    else:
        if not path.exists():
            write_checkpoint(kind, path, contract, statistics=False)
        given = []
    return [f"policy.path={path}", f"policy.tokenizer={words_of(path)}", *given]


@cache
def maniskill_contract() -> Contract:
    """Of the recipes' task."""
    environment = ManiSkillConfig(observation="rgb", image_size=SIDE).build_environment()
    try:
        return environment.spec.contract
    finally:
        environment.close()


def recipe(name: str, folder: Path, checkpoints: Path) -> RunConfig:
    """A recipe of configs/ with a tiny checkpoint and small images."""
    changes = [
        f"runs_dir={folder}",
        f"simulator.image_size={SIDE}",
        "rollout.num_workers=1",
        *tiny(name.rpartition("_maniskill")[0].rpartition("_")[0], checkpoints),
    ]
    return load(RunConfig, GROUPS / f"{name}.yaml", changes)


def test_there_are_no_other_recipes() -> None:
    found = {path.stem for path in GROUPS.glob("*_maniskill.yaml")}
    assert found == set(RECIPES)


@pytest.mark.render
@pytest.mark.skipif(not has_render_device(), reason="no Vulkan device that SAPIEN can draw with")
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_goes_through_a_dry_run(name: str, tmp_path: Path, checkpoints: Path) -> None:
    config = recipe(name, tmp_path, checkpoints)
    found = dry_run(config)
    text = "\n".join(found.checked)
    assert "reproduces its log-probabilities" in text and " tensors of the policy" in text
    assert found.changes["iterations"] == (config.iterations, 2)
