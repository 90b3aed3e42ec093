"""The `embodied-rl` command: words, exit codes, speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.cli import main
from embodied_rl.cli.main import _COMMANDS
from embodied_rl.config import GROUPS, ConfigError, load
from embodied_rl.run_config import RunConfig
from embodied_rl.training.interrupt import Interrupted
from source_tree import ROOT

QUICKSTART = str(GROUPS / "quickstart.yaml")
MISTAKES = ["policy.denoise_stepz=3", "algorithm.clip=oops", "simulator=maniskil"]


def run(*words: str) -> int:
    """The exit code of a command line in this process."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


def in_a_new_process(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A command line, what it left imported as its last line of output, and its seconds."""
    program = (
        "import atexit, sys\n"
        "heavy = ('torch', 'gymnasium', 'mani_skill', 'sapien', 'lerobot', 'matplotlib')\n"
        "atexit.register(lambda: print('imported:', [n for n in heavy if n in sys.modules]))\n"
        "from embodied_rl.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    began = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return answer, time.monotonic() - began


def quickest(limit_s: float, *words: str) -> subprocess.CompletedProcess[str]:
    """Tries a few times, because this machine may be busy with something else."""
    for _ in range(5):
        answer, seconds = in_a_new_process(*words)
        if seconds < limit_s:
            return answer
    raise AssertionError(f"{words} took {seconds:.2f} s, allowed {limit_s} s")


def test_help_answers_in_a_second_and_imports_nothing_heavy() -> None:
    answer = quickest(1.0, "--help")
    assert answer.returncode == 0
    assert answer.stdout.splitlines()[-1] == "imported: []"
    for command in _COMMANDS:
        assert command in answer.stdout


def test_all_mistakes_at_once_in_two_seconds_without_torch() -> None:
    answer = quickest(2.0, "train", "configs/quickstart.yaml", *MISTAKES)
    assert answer.returncode == 2
    assert answer.stdout.splitlines() == ["imported: []"]
    said = answer.stderr
    assert "3 configuration mistake(s) in configs/quickstart.yaml" in said
    assert "policy.denoise_stepz: unknown option; did you mean 'denoise_steps'?" in said
    assert "algorithm.clip: got 'oops'" in said
    assert "simulator: no simulator is called 'maniskil'; did you mean 'maniskill'?" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_explains_itself_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--help") == 0
    said = capsys.readouterr().out
    meaning, example = _COMMANDS[command][2:]
    assert meaning.replace("%%", "%").partition(",")[0] in " ".join(said.split())
    assert f"example:\n  {example}" in said
    assert example.split()[:2] == ["embodied-rl", command]


@pytest.mark.parametrize("command", _COMMANDS)
def test_examples_are_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def note(arguments: Any) -> tuple[str, Any]:
        given.append(arguments)
        if hasattr(arguments, "config"):
            load(RunConfig, ROOT / arguments.config, arguments.overrides)
        return "", {}

    monkeypatch.setitem(_COMMANDS, command, (note, *_COMMANDS[command][1:]))
    examples = _COMMANDS[command][3].splitlines()
    assert [run(*example.split()[1:]) for example in examples] == [0] * len(examples)
    assert len(given) == len(examples)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "no command is called 'trian'; did you mean 'train'?; known: train, imitate"),
        (["xyz"], "no command is called 'xyz'; known: train, imitate"),
        (["train"], "the following arguments are required: config"),
        (["train", QUICKSTART, "--fast"], "unknown argument '--fast'"),
        (["report", "runs/x", "seed=1"], "unknown argument 'seed=1'"),
        (["list", "robots"], "'parts', 'tasks', 'configs'"),
        (["evaluate", "x", "--episodes", "many"], "invalid int value: 'many'"),
        ([], "required: COMMAND"),
    ],
)
def test_a_wrong_command_line_is_answered_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["train", QUICKSTART, "seed=1", "name=a", "--resume"],
        ["train", QUICKSTART, "--resume", "seed=1", "name=a"],
        ["train", "--resume", QUICKSTART, "seed=1", "name=a"],
        ["train", QUICKSTART, "seed=1", "--resume", "name=a"],
        ["train", QUICKSTART, "seed=2", "--json", "seed=1", "--resume", "name=a"],
    ],
)
def test_overrides_may_stand_anywhere(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def note(given: Any) -> tuple[str, Any]:
        config = load(RunConfig, given.config, given.overrides)
        seen.append((config.seed, config.name, given.resume))
        return "", {}

    monkeypatch.setitem(_COMMANDS, "train", (note, *_COMMANDS["train"][1:]))
    assert run(*words) == 0
    assert seen == [(1, "a", True)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("the simulator would not start"), 1),
        (FileNotFoundError("no such run"), 1),
        (ValueError("does not fit"), 1),
        (ImportError("not the one that ships"), 1),
        (KeyboardInterrupt(), 130),
        (Interrupted("stopped; go on with --resume"), 130),
        (ConfigError("a wrong option"), 2),
    ],
)
def test_errors_become_one_message_and_an_exit_code(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(given: Any) -> tuple[str, Any]:
        raise error

    monkeypatch.setitem(_COMMANDS, "report", (fail, *_COMMANDS["report"][1:]))
    assert run("report", "runs/x", "--json") == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"embodied-rl report: {error or 'interrupted'}\n" or (
        isinstance(error, KeyboardInterrupt) and "interrupted" in captured.err
    )


def test_a_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(given: Any) -> tuple[str, Any]:
        raise RuntimeError("deep inside")

    monkeypatch.setitem(_COMMANDS, "report", (fail, *_COMMANDS["report"][1:]))
    with pytest.raises(RuntimeError, match="deep inside"):
        main(["report", "runs/x", "--traceback"])


def test_json_is_the_only_thing_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"simulator", "policy", "algorithm"}
    assert "flow_vla" in data["policy"]
    assert run("list", "configs", "--json") == 0
    assert "configs/quickstart.yaml" in json.loads(capsys.readouterr().out)


def test_the_list_of_tasks_says_what_needs_a_download(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "tasks") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["PickCube-v1"].endswith("fast path, expert")
    assert "needs a download: ycb" in lines["PickSingleYCB-v1"]


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", str(tmp_path)) == 1
    assert f"{tmp_path} is not a run's folder" in capsys.readouterr().err


def test_python_m_is_the_same_command() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "embodied_rl", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout.startswith("embodied-rl 0.")


def test_waiting_threads_sleep_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set by hand first, so that the variable is put back afterwards.
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    run("--version")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    del os.environ["OMP_WAIT_POLICY"]
    run("--version")
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
