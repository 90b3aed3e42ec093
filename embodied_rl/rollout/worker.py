"""A worker process: a few environments, shared arrays, small commands through a pipe.

An environment that raises is reported and built anew; the others go on. The worker ends when told
to, or when its parent is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Literal

from embodied_rl.contracts import CannotLookAhead, Environment, Episode
from embodied_rl.rollout.arrays import Arrays, Layout
from embodied_rl.rollout.chunk import Kept, begin, execute, go_back, look


@dataclass(frozen=True)
class Attach:
    """Use these shared arrays for these slots."""

    memory: str
    plan: Layout
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Command:
    """Start episodes in slots, or execute the chunks that lie in the arrays, or try them out."""

    do: Literal["start", "execute", "look"]
    slots: tuple[int, ...]
    episodes: tuple[Episode | None, ...]


def work(pipe: Connection, simulator: Any, num_environments: int, error_file: str) -> None:
    """The whole life of a worker process; `simulator` is the simulator's config."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle.
    _redirect_output(error_file)
    _use_one_thread()
    try:
        environments = [simulator.build_environment() for _ in range(num_environments)]
        pipe.send(environments[0].spec)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}" if not str(error) else str(error))
        return
    try:
        _serve(pipe, simulator, environments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The parent is gone or has let us go.
    finally:
        for environment in environments:
            environment.close()


@dataclass(frozen=True)
class Answer:
    """What came of a command."""

    instructions: dict[int, str]
    """Of the episodes that began, by slot."""
    failures: dict[int, str]
    """By slot, the traceback of an environment that raised. It was built anew and is idle."""
    failed_starts: dict[int, str]
    """The same for environments that finished their chunk, but could not begin the next episode."""
    refusals: dict[int, str] = field(default_factory=dict)
    """By slot, why an environment, which is as it was before, cannot look ahead."""


def _serve(pipe: Connection, simulator: Any, environments: list[Environment]) -> None:
    attach: Attach = pipe.recv()
    arrays = Arrays(attach.plan, SharedMemory(attach.memory))
    kept: Kept = {}
    while True:
        command: Command | None = pipe.recv()
        if command is None:
            return
        answer = Answer({}, {}, {})
        for slot, episode in zip(command.slots, command.episodes, strict=True):
            number = attach.slots.index(slot)
            environment, failures = environments[number], answer.failures
            try:
                if command.do == "look":
                    look(environment, slot, arrays, kept)
                    continue
                if command.do == "execute":
                    go_back(environment, slot, kept)
                    ended = execute(environment, slot, episode is not None, arrays)
                    failures = answer.failed_starts
                else:
                    kept.pop(slot, None)
                    ended = True
                if ended and episode:
                    answer.instructions[slot] = begin(environment, slot, episode, arrays)
            except CannotLookAhead as refusal:
                answer.refusals[slot] = str(refusal)
            except Exception:
                failures[slot] = traceback.format_exc()
                kept.pop(slot, None)
                environments[number] = simulator.build_environment()
        pipe.send(answer)


def _redirect_output(file: str) -> None:
    """Send what simulators print to a file whose end the parent shows if something breaks."""
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def _use_one_thread() -> None:
    # Many workers share the cores; more threads each would only get in each other's way.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
