"""Environments in worker processes that are watched and replaced when they die.

Observations and actions lie in shared memory; pipes carry only small commands. A worker that dies,
fails or falls silent costs the episodes that it was running, and nothing else.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from torch import Tensor

from embodied_rl.contracts import CannotLookAhead, ChunkResult, Episode, Observation, SimulatorSpec
from embodied_rl.rollout.arrays import Arrays, layout
from embodied_rl.rollout.worker import Answer, Attach, Command, work
from embodied_rl.run_config import RolloutConfig

START_TIMEOUT_S = 300.0
"""A worker may have to compile shaders or read large assets before it is ready."""

_TAIL_CHARACTERS = 2000


class SimulatorStartError(RuntimeError):
    """The simulator could not be built; the message is the simulator's own."""


class WorkersKeepDying(RuntimeError):
    """Simulators failed more often than the options allow."""


class _Lost(Exception):
    """A worker did not answer; the text says why."""


class _Worker:
    """One process and the parent's end of its pipe."""

    def __init__(self, simulator: Any, slots: tuple[int, ...], error_file: Path) -> None:
        self.slots, self.error_file = slots, error_file
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=work, args=(theirs, simulator, len(slots), str(error_file)), daemon=True
        )
        self.process.start()
        theirs.close()  # So that the pipe ends when the worker does.
        self.sent: deque[tuple[int, ...]] = deque()

    def spec(self) -> SimulatorSpec:
        """Wait until the environments are built."""
        answer = self._answer(START_TIMEOUT_S, "building the simulator")
        if not isinstance(answer, SimulatorSpec):
            raise SimulatorStartError(str(answer))
        return answer

    def send(self, command: Command) -> None:
        """Give a command; a dead worker is noticed when the answer is read."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(command)
        self.sent.append(command.slots)

    def receive(self, timeout_s: float) -> Answer:
        """The answer to the oldest command."""
        self.sent.popleft()
        answer: Answer = self._answer(timeout_s, "a chunk")
        return answer

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def output_tail(self) -> str:
        """The end of what the worker printed."""
        with contextlib.suppress(OSError):
            return self.error_file.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip()
        return ""

    def _answer(self, timeout_s: float, doing: str) -> Any:
        pipe: Connection = self.pipe
        try:
            if not pipe.poll(timeout_s):
                raise _Lost(f"no answer within {timeout_s:.0f} s while {doing}")
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=5.0)
            code = self.process.exitcode
            raise _Lost(f"the worker process ended while {doing} (exit code {code})") from None


class SimulatorPool:
    """Worker processes as a contracts.Simulator. Slot s runs in worker s modulo their number, so
    that every worker has slots in each half."""

    def __init__(
        self, simulator: Any, num_workers: int, chunk: int, options: RolloutConfig
    ) -> None:
        self._simulator, self._options = simulator, options
        self._num_slots = options.num_slots
        self._folder = Path(tempfile.mkdtemp(prefix="embodied-rl-workers-"))
        self._memory: SharedMemory | None = None
        self._workers: list[_Worker] = []
        self._num_started = 0
        self._num_failures = 0
        self._usual_s = 0.0
        self._instruction = [""] * self._num_slots
        self._ended_instruction = [""] * self._num_slots
        self._offers: dict[int, Episode | None] = {}
        self._lost: dict[int, str] = {}
        self._failed_starts: dict[int, str] = {}
        try:
            _start_forkserver(getattr(simulator, "preload", ()))
            for number in range(num_workers):
                slots = tuple(range(number, self._num_slots, num_workers))
                self._workers.append(self._new_worker(slots))
            specs = [self._require_started(worker) for worker in self._workers]
            self._spec = specs[0]
            plan = layout(self._spec, self._num_slots, chunk)
            self._plan = plan
            self._memory = SharedMemory(create=True, size=plan.size)
            self._arrays = Arrays(plan, self._memory)
            for worker in self._workers:
                self._attach(worker)
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> SimulatorSpec:
        """What the simulator offers."""
        return self._spec

    @property
    def num_slots(self) -> int:
        """Environments in all workers."""
        return self._num_slots

    @property
    def process_ids(self) -> list[int]:
        """Of the workers, for those who watch or break them."""
        return [worker.process.pid or 0 for worker in self._workers]

    def start(self, slots: Sequence[int], episodes: Sequence[Episode]) -> Observation:
        """Begin these episodes (contracts.Simulator)."""
        self._start(dict(zip(slots, episodes, strict=True)))
        return self._arrays.observation(slots, [self._instruction[slot] for slot in slots])

    def send(self, slots: Sequence[int], actions: Tensor, offers: Sequence[Episode | None]) -> None:
        """Let the workers execute a chunk (contracts.Simulator)."""
        self._arrays["actions"][list(slots)] = actions.detach().cpu().numpy()
        for slot, offer in zip(slots, offers, strict=True):
            self._offers[slot] = offer
            self._ended_instruction[slot] = self._instruction[slot]
        for worker, mine in self._by_worker(slots):
            alive = tuple(slot for slot in mine if slot not in self._lost)
            if alive:
                worker.send(Command("execute", alive, tuple(self._offers[s] for s in alive)))

    def receive(self, slots: Sequence[int]) -> ChunkResult:
        """Wait for the chunk of these slots (contracts.Simulator)."""
        began = time.monotonic()
        deadline = began + self._patience_s()
        for worker, mine in self._by_worker(slots):
            if worker.sent and worker.sent[0][0] in mine:
                self._collect(worker, max(0.1, deadline - time.monotonic()))
        self._usual_s = 0.9 * self._usual_s + 0.1 * (time.monotonic() - began)
        errors = {slot: self._lost.pop(slot) for slot in slots if slot in self._lost}
        restart = {slot: offer for slot in errors if (offer := self._offers[slot]) is not None}
        self._start(restart)
        # Episodes that could not begin are lost from the next chunk on; this one counts.
        for slot in slots:
            if slot in self._failed_starts:
                self._lost[slot] = self._failed_starts.pop(slot)
        for slot in errors:
            self._arrays["refilled"][slot] = slot in restart
        return self._arrays.result(
            slots,
            [self._instruction[slot] for slot in slots],
            [self._ended_instruction[slot] for slot in slots],
            [slot in errors for slot in slots],
            errors,
        )

    def look(self, slots: Sequence[int], actions: Tensor) -> ChunkResult:
        """Let the workers try a chunk out, and wait for it (contracts.Simulator)."""
        self._arrays["actions"][list(slots)] = actions.detach().cpu().numpy()
        asked = []
        for worker, mine in self._by_worker(slots):
            alive = tuple(slot for slot in mine if slot not in self._lost)
            if alive:
                worker.send(Command("look", alive, (None,) * len(alive)))
                asked.append(worker)
        for answer in [self._newest_answer(worker) for worker in asked]:
            for refusal in answer.refusals.values() if answer else ():
                raise CannotLookAhead(refusal)
        instructions = [self._instruction[slot] for slot in slots]
        lost = [slot in self._lost for slot in slots]
        return self._arrays.result(slots, instructions, instructions, lost, {})

    def close(self) -> None:
        """End all workers and free the shared memory; may be called twice."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        if self._memory:
            self._arrays.release()
            self._memory.unlink()
            self._memory = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, episodes: dict[int, Episode]) -> None:
        """Begin episodes; those that a dying worker takes along are asked for again, one by one.

        A slot whose episode cannot begin stays lost; the next `receive` says so.
        """
        waiting, given_up, at_once = dict(episodes), set[int](), True
        while waiting:
            asked = [
                (worker, mine if at_once else mine[:1])
                for worker, mine in self._by_worker(list(waiting))
            ]
            for worker, mine in asked:
                worker.send(Command("start", mine, tuple(waiting[slot] for slot in mine)))
            for worker, mine in asked:
                answer = self._newest_answer(worker)
                if answer is None:
                    at_once = False
                    if len(mine) == 1:
                        given_up.add(mine[0])
                    # Whatever this worker had begun before is gone with it.
                    waiting |= {slot: episodes[slot] for slot in worker.slots if slot in episodes}
                    waiting = {s: e for s, e in waiting.items() if s not in given_up}
                    continue
                for slot in mine:
                    waiting.pop(slot)
                    if slot not in answer.failures:
                        self._lost.pop(slot, None)

    def _newest_answer(self, worker: _Worker) -> Answer | None:
        """The answer to the last command. Chunks of the other half may be ahead of it; they stay in
        the arrays, and `receive` finds that their answers were read."""
        answer: Answer | None = None
        while worker in self._workers and worker.sent:
            answer = self._collect(worker, self._patience_s())
        return answer

    def _patience_s(self) -> float:
        return max(self._options.step_timeout_s, 10 * self._usual_s)

    def _collect(self, worker: _Worker, timeout_s: float) -> Answer | None:
        """Read the worker's oldest answer; replace the worker and return None if there is none."""
        try:
            answer = worker.receive(timeout_s)
        except _Lost as lost:
            tail = worker.output_tail()
            text = f"{lost}\nthe worker's last output:\n{tail}" if tail else str(lost)
            self._count_failure(text)
            self._replace(worker, text)
            return None
        for slot, instruction in answer.instructions.items():
            self._instruction[slot] = instruction
        for slot, text in answer.failures.items():
            self._lost[slot] = text
        self._failed_starts |= answer.failed_starts
        for text in (*answer.failures.values(), *answer.failed_starts.values()):
            self._count_failure(text)
        return answer

    def _count_failure(self, text: str) -> None:
        self._num_failures += 1
        if self._num_failures > self._options.max_worker_restarts:
            raise WorkersKeepDying(
                f"simulators failed {self._num_failures} times, more often than "
                f"rollout.max_worker_restarts={self._options.max_worker_restarts} allows. The "
                f"last time: {text}"
            )

    def _replace(self, worker: _Worker, text: str) -> None:
        worker.kill()
        for slot in worker.slots:
            self._lost[slot] = text
        fresh = self._new_worker(worker.slots)
        self._workers[self._workers.index(worker)] = fresh
        self._require_started(fresh)
        self._attach(fresh)

    def _new_worker(self, slots: tuple[int, ...]) -> _Worker:
        self._num_started += 1
        return _Worker(self._simulator, slots, self._folder / f"worker_{self._num_started}.log")

    def _require_started(self, worker: _Worker) -> SimulatorSpec:
        try:
            return worker.spec()
        except _Lost as lost:
            raise SimulatorStartError(f"{lost}\n{worker.output_tail()}".strip()) from None

    def _attach(self, worker: _Worker) -> None:
        assert self._memory is not None
        worker.pipe.send(Attach(self._memory.name, self._plan, worker.slots))

    def _by_worker(self, slots: Sequence[int]) -> Iterator[tuple[_Worker, tuple[int, ...]]]:
        wanted = set(slots)
        for worker in list(self._workers):
            mine = tuple(slot for slot in worker.slots if slot in wanted)
            if mine:
                yield worker, mine


def _start_forkserver(preload: Sequence[str]) -> None:
    """Start the process from which workers are forked. It imports the simulator once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["embodied_rl.rollout.worker", *preload])
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
