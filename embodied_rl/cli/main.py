"""Commands, their options, and how errors reach a person."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from embodied_rl import __version__, shrunk
from embodied_rl.cli import best_of, commands
from embodied_rl.config import ConfigError

DONE, FAILED, BAD_CONFIGURATION, INTERRUPTED = 0, 1, 2, 130

type Command = Callable[[argparse.Namespace], tuple[str, Any]]


class _Parser(argparse.ArgumentParser):
    """Answers a wrong command line in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_CONFIGURATION, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = _Parser(
        prog="embodied-rl",
        description="Take a robot policy pretrained by imitation and make it succeed by "
        "reinforcement learning.",
        epilog="Start with: embodied-rl train configs/quickstart.yaml",
    )
    top.add_argument("--version", action="version", version=f"embodied-rl {__version__}")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, add_arguments, meaning, example) in _COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=meaning,
            description=meaning.replace("%%", "%"),
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print the result as JSON, only that")
        sub.add_argument("--traceback", action="store_true", help="show where an error came from")
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; the exit code is 0 only if its work was done."""
    # Read when torch is loaded. Its threads would wait for each other in a loop that keeps the
    # cores busy: beside other processes, imitation was 25 times slower than with sleeping threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(_run(_parse(arguments)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    top = parser()
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in _COMMANDS:
        near = difflib.get_close_matches(command, _COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        top.error(f"no command is called {command!r}{hint}; known: {', '.join(_COMMANDS)}")
    given, rest = top.parse_known_args(words)
    # `train FILE --resume seed=1`: argparse closes a list of words at the first option.
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if unknown or (rest and not hasattr(given, "overrides")):
        top.error(f"unknown argument {(unknown or rest)[0]!r}; see embodied-rl {command} --help")
    if rest:
        given.overrides = [*given.overrides, *rest]
    return given


def _run(given: argparse.Namespace) -> int:
    from embodied_rl.training.interrupt import Interrupted

    try:
        words, data = _COMMANDS[given.command][0](given)
    except ConfigError as error:
        return _fail(given, error, BAD_CONFIGURATION)
    except (KeyboardInterrupt, Interrupted) as error:
        return _fail(given, str(error) or "interrupted", INTERRUPTED)
    except (OSError, RuntimeError, ValueError, LookupError, ImportError) as error:
        return _fail(given, error, FAILED)
    print(json.dumps(data, indent=2, ensure_ascii=False) if given.json else words)
    failed = isinstance(data, dict) and data.get("ok") is False
    return FAILED if failed else DONE


def _fail(given: argparse.Namespace, error: BaseException | str, code: int) -> int:
    if given.traceback and isinstance(error, BaseException):
        raise error
    print(f"embodied-rl {given.command}: {error}", file=sys.stderr)
    return code


def _config_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", type=Path, help="a YAML file, such as configs/quickstart.yaml")
    sub.add_argument(
        "overrides", nargs="*", metavar="key=value", help="change an option: policy.chunk=8"
    )


def _run_arguments(sub: argparse.ArgumentParser) -> None:
    _config_arguments(sub)
    sub.add_argument("--resume", action="store_true", help="go on with the run of this name")
    sub.add_argument(
        "--force",
        action="store_true",
        help="begin without the look at the memory that it will need (embodied-rl plan)",
    )


def _train_arguments(sub: argparse.ArgumentParser) -> None:
    _run_arguments(sub)
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="go through all phases with the real simulator and policy and next to no work, say "
        "whether that passed, and leave nothing behind. It takes these options: "
        f"{shrunk.in_words()}",
    )


def _collect_arguments(sub: argparse.ArgumentParser) -> None:
    _config_arguments(sub)
    sub.add_argument("--output", type=Path, help="folder of the data set (default: data/TASK)")
    sub.add_argument("--episodes", type=int, help="successes to record, instead of the file's")


def _evaluate_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("policy", type=Path, help="a policy folder, or a run's folder")
    sub.add_argument(
        "overrides", nargs="*", metavar="simulator.key=value", help="change a simulator option"
    )
    sub.add_argument("--episodes", type=int, default=200, help="held-out initial states (200)")
    sub.add_argument("--seed", type=int, default=0, help="seed of the plan and of the noise (0)")
    sub.add_argument("--slots", type=int, default=32, help="environments at the same time (32)")
    sub.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where the policy runs; auto takes a GPU if there is one",
    )
    sub.add_argument("--output", type=Path, help="folder for a row per episode; resumes there")
    sub.add_argument(
        "--best-of",
        type=best_of.number,
        nargs="+",
        metavar="N",
        help="success against N: of N candidate chunks per decision, execute the one that scores "
        "best by its reward and the policy's value of what follows. Candidates are tried out in "
        "the simulator, which thus serves as a model of the world: that needs snapshots (ManiSkill "
        "on the CPU, MuJoCo) and costs N + 1 control steps for each one executed. 1 is the plain "
        "evaluation",
    )


def _report_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run", type=Path, help="a run's folder")


def _list_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "what",
        nargs="?",
        choices=["parts", "tasks", "configs"],
        default="parts",
        help="parts (default): simulators, policies, algorithms; tasks: ManiSkill's; configs",
    )


def _doctor_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "what",
        nargs="?",
        choices=["policy", "simulator", "replay"],
        help="look at a policy or simulator instead of the machine: does it keep the promises "
        "of embodied_rl/contracts? replay: do recorded demonstrations still succeed when their "
        "actions go through a checkpoint's convention and back?",
    )
    sub.add_argument(
        "target",
        nargs="?",
        help="its name, or a policy's or run's folder; for replay a data set or a configuration",
    )
    sub.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="options: policy.chunk=8, simulator=gymnasium, simulator.task=Pendulum-v1",
    )


_COMMANDS: dict[str, tuple[Command, Callable[[argparse.ArgumentParser], None], str, str]] = {
    "train": (
        commands.train,
        _train_arguments,
        "imitate, improve by reinforcement learning, evaluate before and after",
        "embodied-rl train configs/quickstart.yaml name=mine seed=1 policy.denoise_steps=8",
    ),
    "plan": (
        commands.plan,
        _config_arguments,
        "how much memory a run will need, when and where, and whether this machine has it",
        "embodied-rl plan configs/quickstart_rgb.yaml algorithm.minibatch_size=1024",
    ),
    "imitate": (
        commands.imitate,
        _run_arguments,
        "demonstrations and imitation alone, with a closed-loop check at the end",
        "embodied-rl imitate configs/quickstart.yaml name=imitated demonstrations.episodes=100",
    ),
    "collect": (
        commands.collect,
        _collect_arguments,
        "record a scripted expert's successes into a LeRobotDataset v3 folder",
        "embodied-rl collect configs/quickstart.yaml --episodes 100 simulator.task=StackCube-v1",
    ),
    "evaluate": (
        commands.evaluate,
        _evaluate_arguments,
        "success of a saved policy on held-out initial states, with a 95 %% interval",
        "embodied-rl evaluate runs/quickstart --episodes 500 simulator.terminate_on_success=false",
    ),
    "report": (
        commands.report,
        _report_arguments,
        "write a run's self-contained report.html",
        "embodied-rl report runs/quickstart",
    ),
    "doctor": (
        commands.doctor,
        _doctor_arguments,
        "check this machine, a policy, a simulator or demonstrations; says what to do",
        "embodied-rl doctor\n  embodied-rl doctor policy runs/quickstart\n  "
        "embodied-rl doctor simulator gymnasium simulator.task=Pendulum-v1\n  "
        "embodied-rl doctor replay data/PickCube-v1 convention=libero_openvla",
    ),
    "list": (
        commands.list_parts,
        _list_arguments,
        "what exists and what is installed",
        "embodied-rl list tasks",
    ),
}
