"""Does a simulator keep the promises of contracts.Simulator? Each gate is one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import ChunkResult, Environment, Episode, Observation, Simulator
from embodied_rl.correctness.gates import Broken, Doubtful, Finding, Gate, pass_through
from embodied_rl.correctness.play import apart, play_out
from embodied_rl.rollout.build import build_simulator
from embodied_rl.run_config import RolloutConfig

CHUNK = 3
"""Control steps per chunk; a time limit that is no multiple of it ends an episode inside one."""

LARGEST_DIFFERENCE = 1e-4
"""Between two simulations of the same episode before anything touches: physics engines keep caches,
so later differences are reported and not forbidden."""

_MOST_CHUNKS = 400


@dataclass(frozen=True)
class SimulatorBench:
    """A simulator's options, with two slots running in this process."""

    config: Any
    simulator: Simulator

    def episode(self, state: int, task: int = 0) -> Episode:
        """A planned episode from an initial state."""
        tasks = self.simulator.spec.all_tasks
        return Episode(f"doctor/{state}", tasks[task % len(tasks)], state, state)

    def actions(self, seed: int, slots: int = 2) -> Tensor:
        """A chunk [slots, H, A] of random actions within finite bounds, the same for all slots."""
        contract = self.simulator.spec.contract
        low = torch.tensor(contract.action_low).clamp_min(-1e3)
        high = torch.tensor(contract.action_high).clamp_max(1e3)
        generator = torch.Generator().manual_seed(seed)
        share = torch.rand(CHUNK, contract.action_dim, generator=generator)
        return (low + share * (high - low)).expand(slots, -1, -1).contiguous()


def examine_simulator(config: Any) -> list[Finding]:
    """Every gate on the simulator that these options build; raises its own complaint if it cannot
    be built."""
    with _running(config, 0) as simulator:
        return pass_through(SimulatorBench(config, simulator), GATES)


def description(bench: SimulatorBench) -> str:
    """What the simulator says of itself makes sense."""
    spec = bench.simulator.spec
    contract = spec.contract
    for name, values in (("low", contract.action_low), ("high", contract.action_high)):
        if len(values) != contract.action_dim:
            raise Broken(f"action_{name} has {len(values)} entries, not {contract.action_dim}")
    bad = [
        i
        for i, (low, high) in enumerate(zip(contract.action_low, contract.action_high, strict=True))
        if not low < high
    ]
    if bad:
        raise Broken(f"action_low is not below action_high in dimension {bad[0]}")
    if spec.max_episode_steps < 1 or not contract.control_hz > 0:
        raise Broken("max_episode_steps and control_hz must be positive")
    if not all(map(math.isfinite, (*contract.action_low, *contract.action_high))):
        raise Doubtful("some actions have no bounds: gaussian_mlp cannot be used")
    return f"{spec.task}, {spec.max_episode_steps} steps at {contract.control_hz:g} Hz"


def observation(bench: SimulatorBench) -> str:
    """Observations have the contract's shapes and are finite."""
    seen = _begin(bench, 1, 2)
    _require_fits(bench, seen)
    if any(image.float().std() == 0 for image in seen.images.values()):
        raise Broken("a camera gives an image of one colour: does the driver draw?")
    if not all(seen.instruction):
        raise Doubtful("the instruction is empty: policies with language have nothing to read")
    state, cameras = bench.simulator.spec.contract.state_dim, len(seen.images)
    return f"a state of {state} numbers, {cameras} camera(s), {seen.instruction[0]!r}"


def initial_states(bench: SimulatorBench) -> str:
    """Equal numbers start equal, in every slot; different numbers start differently."""
    same = _begin(bench, 5, 5)
    difference = _difference(same.select(torch.tensor([0])), same.select(torch.tensor([1])))
    if not difference <= LARGEST_DIFFERENCE:
        raise Broken(
            f"two slots start initial state 5 apart by {difference:.3g}: the state must follow "
            f"from the episode alone, or GRPO's groups compare what is not alike"
        )
    later = _begin(bench, 6, 5)
    again = _difference(same.select(torch.tensor([1])), later.select(torch.tensor([1])))
    if not again <= LARGEST_DIFFERENCE:
        raise Broken(f"initial state 5 starts apart by {again:.3g} the second time")
    other = later.select(torch.tensor([0]))
    if _difference(other, later.select(torch.tensor([1]))) == 0:
        raise Doubtful("initial states 5 and 6 look the same: does the task vary at all?")
    return f"equal numbers start equal to {max(difference, again):.1e}"


def repeatable(bench: SimulatorBench) -> str:
    """The same episode under the same actions goes the same way in a fresh simulator."""
    with _running(bench.config, 0) as fresh:
        runs = [_first_chunks(bench, simulator) for simulator in (bench.simulator, fresh)]
    return _require_alike(runs[0], runs[1], "in a fresh simulator")


def workers(bench: SimulatorBench) -> str:
    """A worker process gives what the simulator gives in this process."""
    if bench.config.batched:
        return "steps as one batch and has no workers"
    with _running(bench.config, 1) as pool:
        runs = [_first_chunks(bench, simulator) for simulator in (bench.simulator, pool)]
    return _require_alike(runs[0], runs[1], "in a worker process")


def chunks(bench: SimulatorBench) -> str:
    """What happens inside a chunk, up to the end of an episode without a following one."""
    _begin(bench, 7, 7)
    limit, steps = bench.simulator.spec.max_episode_steps, 0
    for number in range(_MOST_CHUNKS):
        result = _execute(bench, bench.actions(number), [None, None])
        for row in range(2):
            _require_row(result, row)
        steps += int(result.executed[0])
        if result.done[0]:
            break
        if steps >= limit:
            raise Broken(f"{steps} control steps executed with a limit of {limit}, and no end")
    else:
        return f"no end within {steps} of {limit} steps, and every chunk in order"
    if result.truncated[0]:
        if steps != limit:
            raise Broken(f"cut after {steps} control steps instead of {limit}")
        _require_fits(bench, result.final_observation.select(torch.tensor([0])))
    if result.refilled.any():
        raise Broken("a slot says that it was refilled, but nothing was offered")
    how = "terminated" if result.terminated[0] else "cut by the time limit"
    return f"{how} after {steps} steps, {int(result.executed[0])} of {CHUNK} in the last chunk"


def refill(bench: SimulatorBench) -> str:
    """An ended slot begins the episode that was offered to it."""
    _begin(bench, 8, 8)
    offer = bench.episode(9)
    for number in range(_MOST_CHUNKS):
        result = _execute(bench, bench.actions(number), [offer, None])
        if not result.done[0]:
            if result.refilled[0]:
                raise Broken("a slot was refilled although its episode goes on")
            continue
        if not result.refilled[0]:
            raise Broken("an ended slot did not begin the episode that was offered to it")
        wanted = _begin(bench, 9, 9).select(torch.tensor([0]))
        difference = _difference(result.observation.select(torch.tensor([0])), wanted)
        if not difference <= LARGEST_DIFFERENCE:
            raise Broken(
                f"after a refill the first view differs from that of its episode by "
                f"{difference:.3g}"
            )
        return f"the next episode's first view is right to {difference:.1e}"
    raise Doubtful(f"no episode ended within {_MOST_CHUNKS} chunks")


def slots(bench: SimulatorBench) -> str:
    """A slot is left where it is by what happens in another one: a new start, or a chunk."""
    first, following = bench.actions(0), bench.actions(1)
    views = []
    for disturbed in (False, True):
        _begin(bench, 2, 3)
        if _execute(bench, first, [None, None]).done[1]:
            raise Doubtful("the episode ended within one chunk")
        if disturbed:
            bench.simulator.start([0], [bench.episode(4)])
            bench.simulator.send([0], following[:1], [None])
            bench.simulator.receive([0])
        bench.simulator.send([1], following[1:], [None])
        views.append(bench.simulator.receive([1]).observation)
    difference = _difference(views[0], views[1])
    if not difference <= 100 * LARGEST_DIFFERENCE:
        raise Broken(
            f"a new start and a chunk in one slot move the other, which waits, by {difference:.3g}"
        )
    return f"a slot that waits stays where it is, to {difference:.1e}"


def snapshots(bench: SimulatorBench) -> str:
    """A restored state looks as it did, and goes on as it did, to the episode's end."""
    if bench.config.batched:
        return "not for simulators that step as one batch"
    environment: Environment = bench.config.build_environment()
    try:
        environment.reset(bench.episode(4))
        actions = bench.actions(0)[0].numpy()
        environment.step(actions[0])
        try:
            kept = environment.snapshot()
        except NotImplementedError:
            raise Doubtful("no snapshots: episodes cannot begin in the middle") from None
        first = play_out(environment, actions[1])
        environment.restore(kept)
        second = play_out(environment, actions[1])
    finally:
        environment.close()
    seen, later = (apart(first.views[i], second.views[i]) for i in range(2))
    if not seen <= LARGEST_DIFFERENCE:
        raise Broken(f"a restored state differs by {seen:.3g}")
    if first.steps != second.steps or first.ending.truncated != second.ending.truncated:
        raise (Broken if first.ending.truncated and second.ending.truncated else Doubtful)(
            f"after restoring, the episode ends after {second.steps} control steps instead of "
            f"{first.steps}: a snapshot must hold the elapsed steps as well"
        )
    if not later <= 10 * LARGEST_DIFFERENCE:
        raise Doubtful(f"one step after restoring, states differ by {later:.3g}")
    if first.ending != second.ending:
        raise Doubtful(f"after restoring, the end is {second.ending} instead of {first.ending}")
    return f"restores to {seen:.1e}, one step later {later:.1e}, and ends at the same step"


def wild_actions(bench: SimulatorBench) -> str:
    """Actions far out of bounds do no more than those at the bounds."""
    _begin(bench, 3, 3)
    result = _execute(bench, 100.0 * bench.actions(1).sign(), [None, None])
    if not (result.observation.state.isfinite().all() and result.reward.isfinite().all()):
        raise Broken("an action out of bounds makes the state or reward not finite: cut it first")
    return "an action out of bounds leaves everything finite"


GATES: dict[str, Gate[SimulatorBench]] = {
    "description": description,
    "observation": observation,
    "initial states": initial_states,
    "repeatable": repeatable,
    "workers": workers,
    "chunks": chunks,
    "refill": refill,
    "slots": slots,
    "snapshots": snapshots,
    "wild actions": wild_actions,
}


@contextmanager
def _running(config: Any, num_workers: int) -> Iterator[Simulator]:
    batched: bool = config.batched
    rollout = RolloutConfig(num_slots=2, halves=1, num_workers=None if batched else num_workers)
    simulator = build_simulator(config, rollout, CHUNK)
    try:
        yield simulator
    finally:
        simulator.close()


def _begin(bench: SimulatorBench, *states: int) -> Observation:
    return bench.simulator.start([0, 1], [bench.episode(state) for state in states])


def _execute(bench: SimulatorBench, actions: Tensor, offers: list[Episode | None]) -> ChunkResult:
    bench.simulator.send([0, 1], actions, offers)
    return bench.simulator.receive([0, 1])


type _Run = list[tuple[Observation, Tensor]]


def _first_chunks(bench: SimulatorBench, simulator: Simulator) -> _Run:
    """Views and rewards of the first chunks of an episode, in slot 0; slot 1 does another one."""
    seen = simulator.start([0, 1], [bench.episode(2), bench.episode(3)])
    first = torch.tensor([0])
    run: _Run = [(seen.select(first), torch.zeros(1, CHUNK))]
    for number in range(3):
        simulator.send([0, 1], bench.actions(number), [None, None])
        result = simulator.receive([0, 1])
        if result.lost.any():
            raise Broken(f"the worker failed: {next(iter(result.errors.values()))}")
        if result.done.any():
            break
        run.append((result.observation.select(first), result.reward[:1]))
    return run


def _require_alike(first: _Run, second: _Run, where: str) -> str:
    if len(first) != len(second):
        raise Broken(f"{where} the same episode ends at another step")
    if first[0][0].instruction != second[0][0].instruction:
        raise Broken(f"{where} the same episode has another instruction")
    start = _difference(first[0][0], second[0][0])
    if not start <= LARGEST_DIFFERENCE:
        raise Broken(
            f"{where} the same episode starts apart by {start:.3g}: draw everything random from "
            f"the episode's initial_state and seed"
        )
    pairs = list(zip(first, second, strict=True))
    later = max(_difference(a, b) for (a, _), (b, _) in pairs)
    reward = max(float((a - b).abs().max()) for (_, a), (_, b) in pairs)
    if not max(later, reward) <= 100 * LARGEST_DIFFERENCE:
        raise Broken(
            f"{where} the same actions lead elsewhere: states differ by {later:.3g}, rewards by "
            f"{reward:.3g}"
        )
    return f"the same {where}: states to {later:.1e}, rewards to {reward:.1e}"


def _require_row(result: ChunkResult, row: int) -> None:
    executed = int(result.executed[row])
    if result.lost[row]:
        raise Broken(f"the environment failed: {result.errors.get(row, 'no reason given')}")
    if not 1 <= executed <= CHUNK:
        raise Broken(f"executed={executed} of a chunk of {CHUNK}")
    if result.reward[row, executed:].any():
        raise Broken("there is reward after the last executed step")
    if result.terminated[row] and result.truncated[row]:
        raise Broken("terminated and truncated at once: the task must win")
    if not result.done[row] and executed < CHUNK:
        raise Broken(f"only {executed} of {CHUNK} steps executed, but the episode goes on")
    if result.success_now[row] and not result.success_once[row]:
        raise Broken("success holds at the end of the chunk, but success_once says never")


def _require_fits(bench: SimulatorBench, seen: Observation) -> None:
    contract = bench.simulator.spec.contract
    if seen.state.shape[1] != contract.state_dim or seen.state.dtype != torch.float32:
        raise Broken(
            f"the state is {seen.state.dtype} with {seen.state.shape[1]} entries; the contract "
            f"says float32 with {contract.state_dim}"
        )
    if not seen.state.isfinite().all():
        raise Broken("the state has entries that are not finite")
    for camera in contract.cameras:
        image = seen.images.get(camera.name)
        if image is None:
            raise Broken(f"camera {camera.name!r} of the contract gives no image")
        if tuple(image.shape[1:]) != (camera.height, camera.width, 3) or image.dtype != torch.uint8:
            raise Broken(
                f"camera {camera.name!r} gives {image.dtype} {list(image.shape[1:])}; the contract "
                f"says uint8 [{camera.height}, {camera.width}, 3]"
            )


def _difference(first: Observation, second: Observation) -> float:
    if first.state.shape[1]:
        return float((first.state - second.state).abs().max())
    pairs = [(first.images[name], second.images[name]) for name in first.images]
    return max((float((a.float() - b.float()).abs().max()) / 255 for a, b in pairs), default=0.0)
