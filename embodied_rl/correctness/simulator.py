"""Does a simulator keep the promises of contracts.Simulator? Each gate is one of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import Environment, Observation, Simulator
from embodied_rl.correctness.bench import (
    CHUNK,
    LARGEST_DIFFERENCE,
    SimulatorBench,
    difference,
    require_fits,
    require_row,
    running,
)
from embodied_rl.correctness.gates import Broken, Doubtful, Finding, Gate, pass_through
from embodied_rl.correctness.play import apart, play_out

_MOST_CHUNKS = 400


def examine_simulator(config: Any) -> list[Finding]:
    """Every gate on the simulator that these options build; raises its own complaint if it cannot
    be built."""
    with running(config, 0) as simulator:
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
    seen = bench.begin(1, 2)
    require_fits(bench, seen)
    if any(image.float().std() == 0 for image in seen.images.values()):
        raise Broken("a camera gives an image of one colour: does the driver draw?")
    if not all(seen.instruction):
        raise Doubtful("the instruction is empty: policies with language have nothing to read")
    state, cameras = bench.simulator.spec.contract.state_dim, len(seen.images)
    return f"a state of {state} numbers, {cameras} camera(s), {seen.instruction[0]!r}"


def initial_states(bench: SimulatorBench) -> str:
    """Equal numbers start equal, in every slot; different numbers start differently."""
    same = bench.begin(5, 5)
    apart_by = difference(same.select(torch.tensor([0])), same.select(torch.tensor([1])))
    if not apart_by <= LARGEST_DIFFERENCE:
        raise Broken(
            f"two slots start initial state 5 apart by {apart_by:.3g}: the state must follow "
            f"from the episode alone, or GRPO's groups compare what is not alike"
        )
    later = bench.begin(6, 5)
    again = difference(same.select(torch.tensor([1])), later.select(torch.tensor([1])))
    if not again <= LARGEST_DIFFERENCE:
        raise Broken(f"initial state 5 starts apart by {again:.3g} the second time")
    other = later.select(torch.tensor([0]))
    if difference(other, later.select(torch.tensor([1]))) == 0:
        raise Doubtful("initial states 5 and 6 look the same: does the task vary at all?")
    return f"equal numbers start equal to {max(apart_by, again):.1e}"


def repeatable(bench: SimulatorBench) -> str:
    """The same episode under the same actions goes the same way in a fresh simulator."""
    with running(bench.config, 0) as fresh:
        runs = [_first_chunks(bench, simulator) for simulator in (bench.simulator, fresh)]
    return _require_alike(runs[0], runs[1], "in a fresh simulator")


def workers(bench: SimulatorBench) -> str:
    """A worker process gives what the simulator gives in this process."""
    if bench.config.batched:
        return "steps as one batch and has no workers"
    with running(bench.config, 1) as pool:
        runs = [_first_chunks(bench, simulator) for simulator in (bench.simulator, pool)]
    return _require_alike(runs[0], runs[1], "in a worker process")


def chunks(bench: SimulatorBench) -> str:
    """What happens inside a chunk, up to the end of an episode without a following one."""
    bench.begin(7, 7)
    limit, steps = bench.simulator.spec.max_episode_steps, 0
    for number in range(_MOST_CHUNKS):
        result = bench.execute(bench.actions(number), [None, None])
        for row in range(2):
            require_row(result, row)
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
        require_fits(bench, result.final_observation.select(torch.tensor([0])))
    if result.refilled.any():
        raise Broken("a slot says that it was refilled, but nothing was offered")
    how = "terminated" if result.terminated[0] else "cut by the time limit"
    return f"{how} after {steps} steps, {int(result.executed[0])} of {CHUNK} in the last chunk"


def refill(bench: SimulatorBench) -> str:
    """An ended slot begins the episode that was offered to it."""
    bench.begin(8, 8)
    offer = bench.episode(9)
    for number in range(_MOST_CHUNKS):
        result = bench.execute(bench.actions(number), [offer, None])
        if not result.done[0]:
            if result.refilled[0]:
                raise Broken("a slot was refilled although its episode goes on")
            continue
        if not result.refilled[0]:
            raise Broken("an ended slot did not begin the episode that was offered to it")
        wanted = bench.begin(9, 9).select(torch.tensor([0]))
        apart_by = difference(result.observation.select(torch.tensor([0])), wanted)
        if not apart_by <= LARGEST_DIFFERENCE:
            raise Broken(
                f"after a refill the first view differs from that of its episode by {apart_by:.3g}"
            )
        return f"the next episode's first view is right to {apart_by:.1e}"
    raise Doubtful(f"no episode ended within {_MOST_CHUNKS} chunks")


def slots(bench: SimulatorBench) -> str:
    """A slot is left where it is by what happens in another one: a new start, or a chunk."""
    first, following = bench.actions(0), bench.actions(1)
    views = []
    for disturbed in (False, True):
        bench.begin(2, 3)
        if bench.execute(first, [None, None]).done[1]:
            raise Doubtful("the episode ended within one chunk")
        if disturbed:
            bench.simulator.start([0], [bench.episode(4)])
            bench.simulator.send([0], following[:1], [None])
            bench.simulator.receive([0])
        bench.simulator.send([1], following[1:], [None])
        views.append(bench.simulator.receive([1]).observation)
    apart_by = difference(views[0], views[1])
    if not apart_by <= 100 * LARGEST_DIFFERENCE:
        raise Broken(
            f"a new start and a chunk in one slot move the other, which waits, by {apart_by:.3g}"
        )
    return f"a slot that waits stays where it is, to {apart_by:.1e}"


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
    bench.begin(3, 3)
    result = bench.execute(100.0 * bench.actions(1).sign(), [None, None])
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
    start = difference(first[0][0], second[0][0])
    if not start <= LARGEST_DIFFERENCE:
        raise Broken(
            f"{where} the same episode starts apart by {start:.3g}: draw everything random from "
            f"the episode's initial_state and seed"
        )
    pairs = list(zip(first, second, strict=True))
    later = max(difference(a, b) for (a, _), (b, _) in pairs)
    reward = max(float((a - b).abs().max()) for (_, a), (_, b) in pairs)
    if not max(later, reward) <= 100 * LARGEST_DIFFERENCE:
        raise Broken(
            f"{where} the same actions lead elsewhere: states differ by {later:.3g}, rewards by "
            f"{reward:.3g}"
        )
    return f"the same {where}: states to {later:.1e}, rewards to {reward:.1e}"
