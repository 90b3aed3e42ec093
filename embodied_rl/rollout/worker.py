"""A worker process: a few environments, shared arrays, small commands through a pipe.

The worker ends when told to, when its parent is gone, or when an environment fails; in the last
case it reports why, and the parent starts another.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Literal

from embodied_rl.contracts import Environment, Episode
from embodied_rl.rollout.arrays import Arrays, Layout
from embodied_rl.rollout.chunk import begin, execute


@dataclass(frozen=True)
class Attach:
    """Use these shared arrays for these slots."""

    memory: str
    plan: Layout
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Command:
    """Start episodes in slots, or execute the chunks that lie in the arrays."""

    do: Literal["start", "execute"]
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
        _serve(pipe, environments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The parent is gone or has let us go.
    finally:
        for environment in environments:
            environment.close()


def _serve(pipe: Connection, environments: list[Environment]) -> None:
    attach: Attach = pipe.recv()
    memory = SharedMemory(attach.memory)
    arrays = Arrays(attach.plan, memory)
    by_slot = dict(zip(attach.slots, environments, strict=True))
    while True:
        command: Command | None = pipe.recv()
        if command is None:
            return
        try:
            pipe.send(_run(command, by_slot, arrays))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception:
            pipe.send(traceback.format_exc())
            return


def _run(command: Command, environments: dict[int, Environment], arrays: Arrays) -> dict[int, str]:
    """Do it; returns the instructions of the episodes that began, by slot."""
    instructions: dict[int, str] = {}
    for slot, episode in zip(command.slots, command.episodes, strict=True):
        if command.do == "start":
            if episode is not None:
                instructions[slot] = begin(environments[slot], slot, episode, arrays)
        else:
            following = execute(environments[slot], slot, episode, arrays)
            if following is not None:
                instructions[slot] = following
    return instructions


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
