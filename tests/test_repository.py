"""What lies where."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

from embodied_rl.cli.main import parser
from source_tree import PACKAGES, ROOT

TOP_LEVEL = {
    *PACKAGES,
    *("configs", "tests", "README.md", "LICENSE", "pyproject.toml", "uv.lock"),
    *(".assets", ".ci", ".gitignore", ".python-version"),
}
LONGEST_FILE = 350
"""Lines that are not blank."""

FLAGS: dict[str, set[str]] = {
    "": {"--version"},
    "train": {"config", "overrides", "--resume", "--force", "--dry-run"},
    "plan": {"config", "overrides"},
    "imitate": {"config", "overrides", "--resume", "--force"},
    "collect": {"config", "overrides", "--output", "--episodes"},
    "evaluate": {
        *("policy", "overrides", "--episodes", "--seed", "--slots", "--device", "--output"),
        "--best-of",
    },
    "report": {"run"},
    "doctor": {"what", "target", "overrides"},
    "list": {"what"},
}
"""The command line that people's scripts rely on. Changing it is a decision, not an accident."""


def tracked() -> list[Path]:
    """Files that belong to the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    answer = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / line for line in answer.stdout.splitlines() if (ROOT / line).exists()]


def test_the_top_level_is_the_fixed_set() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} == TOP_LEVEL


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed_and_say_what_they_are_for(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert (ROOT / package / "__init__.py").read_text().startswith('"""')


def test_folders_with_code_are_packages_and_test_folders_are_not() -> None:
    folders = {path.parent for path in tracked() if path.suffix == ".py"}
    for folder in folders:
        is_package = (folder / "__init__.py").exists()
        in_tests = folder.relative_to(ROOT).parts[0] == "tests"
        assert is_package != in_tests, folder.relative_to(ROOT)


def test_no_module_hides_one_of_the_standard_library() -> None:
    taken = {"types", "math", "random", "logging", "typing", "statistics", "queue", "copy", "io"}
    code = [path for path in tracked() if path.suffix == ".py"]
    # `maths/statistics.py` is only ever imported by its full name.
    found = [p for p in code if p.stem in taken and p.parent.name not in ("maths",)]
    assert not found


def test_files_can_be_read_in_one_go() -> None:
    for path in tracked():
        if path.suffix == ".py" and "tests" not in path.parts:
            lines = [line for line in path.read_text().splitlines() if line.strip()]
            assert len(lines) <= LONGEST_FILE, f"{path.relative_to(ROOT)}: {len(lines)} lines"


def test_every_module_says_what_it_is_for() -> None:
    for path in tracked():
        if path.suffix == ".py":
            assert path.read_text().startswith('"""'), path.relative_to(ROOT)


def test_no_file_knows_a_particular_machine() -> None:
    home = re.compile(r"(?<![\w$.-])/(?:home|root|work|Users)/\w")
    for path in tracked():
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".sh") and path != Path(__file__):
            found = home.search(path.read_text())
            assert not found, f"{path.relative_to(ROOT)}: {found and found.group()}"


def test_the_command_line_is_as_written_down() -> None:
    top = parser()
    (commands,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    flags = {"": names_of(top)}
    for name, sub in commands.choices.items():
        own = names_of(sub)
        assert {"--json", "--traceback"} <= own, name
        flags[name] = own - {"--json", "--traceback"}
    assert flags == FLAGS


def names_of(command: argparse.ArgumentParser) -> set[str]:
    """Options by their long name and positional words, without --help."""
    return {
        action.option_strings[-1] if action.option_strings else action.dest
        for action in command._actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    }
