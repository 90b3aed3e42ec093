"""Typed configuration: files, parts, overrides, and one report of every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.config import GROUPS, ConfigError, load, save
from embodied_rl.run_config import RunConfig

PARTS = ["simulator=gymnasium", "policy=gaussian_mlp", "algorithm=ppo"]
MAIN_FILES = sorted(GROUPS.glob("*.yaml"))
PART_FILES = sorted(GROUPS.glob("*/*.yaml"))


def run_config(*overrides: str, file: Path | None = None) -> Any:
    return load(RunConfig, file, [*overrides] if file else [*PARTS, *overrides])


def mistakes(*overrides: str, file: Path | None = None) -> list[str]:
    """The lines of the report, without its headline and indentation."""
    with pytest.raises(ConfigError) as caught:
        run_config(*overrides, file=file)
    headline, *lines = str(caught.value).splitlines()
    assert headline.startswith(f"{len(lines)} configuration mistake(s)")
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("exploration", "term", "words"),
    [
        ("flow_sde", "entropy", "learns no noise, so there is no entropy to raise"),
        ("fpo", "entropy", "choose flow_noise"),
        ("fpo", "kl", "no likelihood that a divergence could be measured with"),
    ],
)
def test_a_term_that_means_nothing_is_refused(exploration: str, term: str, words: str) -> None:
    flow = [f"policy.exploration={exploration}", f"algorithm.{term}_coefficient=0.1"]
    with pytest.raises(ConfigError, match=words):
        load(RunConfig, None, ["simulator=gymnasium", "policy=flow_mlp", "algorithm=ppo", *flow])


@pytest.mark.parametrize("file", MAIN_FILES, ids=lambda path: path.stem)
def test_main_files_load_and_are_short(file: Path) -> None:
    config = load(RunConfig, file, [])
    assert config.name
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    assert len(lines) <= 25, f"{file.name} has {len(lines)} lines"


@pytest.mark.parametrize("file", PART_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_part_files_load(file: Path) -> None:
    config = run_config(f"{file.parent.name}={file.stem}")
    chosen = getattr(config, file.parent.name)
    assert chosen.type == yaml.safe_load(file.read_text())["type"]


@pytest.mark.parametrize("file", MAIN_FILES, ids=lambda path: path.stem)
def test_saved_and_loaded_again_is_equal(file: Path, tmp_path: Path) -> None:
    config = load(RunConfig, file, ["seed=3", "algorithm.clip=0.125", "runs_dir=elsewhere"])
    save(config, tmp_path / "config.yaml")
    assert load(RunConfig, tmp_path / "config.yaml", []) == config


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-12, 1.0, exclude_max=True), st.integers(0, 2**40))
def test_numbers_survive_the_file(tmp_path_factory: Any, clip: float, seed: int) -> None:
    file = tmp_path_factory.getbasetemp() / "numbers.yaml"
    config = run_config(f"algorithm.clip={clip!r}", f"seed={seed}")
    assert config.algorithm.clip == clip
    save(config, file)
    assert load(RunConfig, file, []) == config


def test_an_exponent_without_a_point_is_a_number() -> None:
    assert run_config("algorithm.learning_rate=1e-4").algorithm.learning_rate == 1e-4


def test_dotted_keys_in_a_file_differ_from_the_part_only_there(tmp_path: Path) -> None:
    file = tmp_path / "main.yaml"
    file.write_text(
        "policy.hidden_size: 32\npolicy: flow_mlp\nsimulator: maniskill\nalgorithm: ppo\n"
    )
    config = run_config(file=file)
    assert config.policy.type == "flow_mlp"
    assert config.policy.hidden_size == 32
    assert config.policy.num_layers == 3


def test_a_part_file_beside_the_main_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "narrow.yaml").write_text("type: flow_mlp\nhidden_size: 16\nchunk: 2\n")
    file = tmp_path / "main.yaml"
    file.write_text("policy: narrow\npolicy.chunk: 8\nsimulator: maniskill\nalgorithm: ppo\n")
    config = run_config(file=file)
    assert (config.policy.hidden_size, config.policy.chunk) == (16, 8)
    again = run_config("policy.chunk=3", file=file)
    assert (again.policy.hidden_size, again.policy.chunk) == (16, 3)


def test_another_part_on_the_command_line_drops_the_first_ones_options() -> None:
    config = run_config("policy=flow_mlp", "policy.denoise_steps=6")
    assert config.policy.type == "flow_mlp"
    assert config.policy.denoise_steps == 6
    assert not hasattr(config.policy, "initial_std")


def test_the_order_of_overrides_of_different_keys_does_not_matter() -> None:
    words = ["policy=flow_mlp", "policy.denoise_steps=6", "seed=4", "simulator.task=Acrobot-v1"]
    assert run_config(*words) == run_config(*reversed(words))


def test_the_last_of_two_equal_keys_wins() -> None:
    assert run_config("seed=1", "seed=2").seed == 2


def test_options_cannot_be_changed_afterwards() -> None:
    config = run_config()
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1


def test_all_mistakes_are_reported_at_once() -> None:
    found = mistakes(
        "policy=flow_mlp",
        "policy.denoise_stepz=3",
        "algorithm.clip=oops",
        "simulator=maniskil",
        "rollout.num_slots=0",
        "sed=1",
        "loose",
    )
    by_path = {line.partition(":")[0]: line for line in found}
    assert set(by_path) == {
        "policy.denoise_stepz",
        "algorithm.clip",
        "simulator",
        "rollout.num_slots",
        "sed",
        "loose",
    }
    assert "did you mean 'denoise_steps'?" in by_path["policy.denoise_stepz"]
    assert "allowed: chain_log_prob, chunk, denoise_steps" in by_path["policy.denoise_stepz"]
    assert "got 'oops'" in by_path["algorithm.clip"]
    assert "more than 0.0, less than 1.0" in by_path["algorithm.clip"]
    assert "The probability ratio is clipped" in by_path["algorithm.clip"]
    assert "did you mean 'maniskill'?" in by_path["simulator"]
    assert "known: gymnasium, maniskill" in by_path["simulator"]
    assert "at least 1" in by_path["rollout.num_slots"]
    assert "did you mean 'seed'?" in by_path["sed"]
    assert by_path["loose"] == "loose: write an override as key=value"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("device=gpu", "device: got 'gpu'. Input should be 'auto', 'cpu' or 'cuda'"),
        ("rollout.halves=3", "rollout.halves: got 3. Input should be 1 or 2"),
        ("rollout.num_slots=33", "num_slots=33 must be a multiple of halves=2"),
        ("rollout.num_workers=64", "num_workers=64 is more than num_slots=32"),
        ("name=../escape", "name: got '../escape'."),
        ("iterations=many", "iterations: got 'many'."),
        ("seed=-1", "at least 0"),
        ("seed=[1", "seed: '[1' is not a valid YAML value"),
        ("seed.x=1", "seed"),
        ("policy=", "policy"),
        ("demonstrations.episodes=5", "demonstrations and imitation go together"),
        ("simulator.task.name=5", "simulator.task"),
    ],
)
def test_each_mistake_says_what_is_wrong(override: str, words: str) -> None:
    (found,) = mistakes(override)
    assert words in found


def test_rules_between_parts() -> None:
    (found,) = mistakes("simulator=maniskill", "policy=flow_vla")
    assert "this policy looks through cameras but the simulator gives only a state" in found
    assert "simulator.observation=rgb" in found
    (found,) = mistakes("simulator.vectorized=true", "rollout.num_workers=2")
    assert "rollout.num_workers=2 but this simulator runs as one batch" in found


def test_a_missing_part_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, ["simulator=gymnasium"])
    assert "policy: missing" in str(caught.value)
    assert "algorithm: missing" in str(caught.value)


def test_a_missing_file_lists_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*nowhere\.yaml.*quickstart\.yaml"):
        load(RunConfig, tmp_path / "nowhere.yaml", [])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [1", "is not valid YAML"),
        ("policy: flow_mlp\nseed: 1\npolicy: gaussian_mlp\n", "the key 'policy' occurs twice"),
        ("rollout: {halves: 1, halves: 2}\n", "the key 'halves' occurs twice"),
        ("- a\n- b\n", "must hold `key: value` lines, got list"),
        ("", "must hold `key: value` lines, got NoneType"),
    ],
)
def test_a_file_that_is_none(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, file, [])
    assert "broken.yaml" in str(caught.value)
    assert words in str(caught.value)


def test_yaml_tags_build_nothing(tmp_path: Path) -> None:
    file = tmp_path / "evil.yaml"
    file.write_text("name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load(RunConfig, file, [])


def test_what_is_no_text_file_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "policy.safetensors"
    binary.write_bytes(bytes(range(128, 256)))
    for path in (binary, tmp_path):
        with pytest.raises(ConfigError, match="is not a configuration file") as caught:
            load(RunConfig, path, [])
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", [".inf", ".nan", "-.inf"])
def test_numbers_must_be_finite(value: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.learning_rate"):
        run_config(f"algorithm.learning_rate={value}")
