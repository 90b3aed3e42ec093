"""Trying chunks out and going back: what is scored, what is chosen, what is left unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from broken_lines import OddLineConfig
from embodied_rl.contracts import (
    CannotLookAhead,
    ChunkResult,
    Decision,
    Observation,
    Policy,
    Simulator,
)
from embodied_rl.rollout.batched import BatchedSimulator
from embodied_rl.rollout.inline import InlineSimulator
from embodied_rl.rollout.lookahead import BestOf, choose, reward_and_value
from embodied_rl.rollout.pool import SimulatorPool
from embodied_rl.run_config import RolloutConfig
from line_world import Line, LineConfig, episode

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness

NOWHERE = Observation({}, torch.zeros(1, 2), ("",))


class Listed:
    """Explores one given chunk after the other; its value is minus the distance from home."""

    chunk = 2

    def __init__(self, chunks: Sequence[Sequence[float]]) -> None:
        self.chunks = list(chunks)

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        assert mode == "explore"
        actions = chunk_of(self.chunks.pop(0)).expand(len(observation), -1, -1)
        zeros = torch.zeros(len(observation), self.chunk)
        return Decision(actions, zeros, zeros[:, 0], {})

    def value(self, observation: Observation) -> Tensor:
        return -observation.state[:, 0].abs()


def chunk_of(actions: Sequence[float]) -> Tensor:
    return torch.tensor(actions)[None, :, None]


def inline(**options: Any) -> InlineSimulator:
    return InlineSimulator([Line(LineConfig(**options)) for _ in range(2)], chunk=2)


def start_of(state: int) -> float:
    return float(np.float32(np.random.default_rng(state).uniform(-1, 1)))


STATE, OTHER = 0, 4
X = start_of(STATE)  # 0.274, and 0.886 for OTHER.


@pytest.fixture(params=["inline", "pool"])
def simulator(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    made: Simulator = (
        inline()
        if request.param == "inline"
        else SimulatorPool(LineConfig(), 2, 2, RolloutConfig(num_slots=2))
    )
    yield made
    made.close()


def pick(
    simulator: Simulator, candidates: Sequence[Sequence[float]], score: Any = None
) -> list[float]:
    """The chunk that is chosen in slot 0, followed by the steps that it took."""
    policy = cast(Policy, Listed(candidates[1:]))
    best_of = BestOf(len(candidates), score or reward_and_value(policy, 0.9))
    generators = [[torch.Generator()] * len(candidates)]
    first = chunk_of(candidates[0])
    actions, steps = choose(best_of, simulator, policy, [0], NOWHERE, generators, first)
    return [*actions[0, :, 0].tolist(), steps[0]]


def test_looking_changes_nothing(simulator: Simulator) -> None:
    simulator.start([0, 1], [episode(STATE), episode(OTHER)])
    looks = [simulator.look([0], chunk_of(actions)) for actions in ([0.5, 0.25], [-0.5, 0.05])]
    seen = [float(look.observation.state[0, 0]) for look in looks]
    assert seen == pytest.approx([X + 0.75, X - 0.45])
    assert [look.observation.state[0, 1] for look in looks] == [pytest.approx(0.2)] * 2
    # Both begin after no step, and so does what is executed; the other slot stays where it was.
    simulator.send([0, 1], torch.tensor([[0.5, 0.0], [0.5, 0.0]])[..., None], [None, None])
    result = simulator.receive([0, 1])
    assert result.observation.state[0].tolist() == pytest.approx([X + 0.5, 0.2])
    assert result.observation.state[1].tolist() == pytest.approx([start_of(OTHER) + 0.5, 0.2])


def test_the_next_decision_is_looked_for_from_where_it_is(simulator: Simulator) -> None:
    simulator.start([0], [episode(STATE)])
    for number in range(1, 3):
        look = simulator.look([0], chunk_of([0.25, 0.25]))
        assert look.observation.state[0].tolist() == pytest.approx([X + number * 0.5, number * 0.2])
        simulator.send([0], chunk_of([0.25, 0.25]), [None])
        simulator.receive([0])
    # A new episode forgets what was looked for in the last one.
    simulator.look([0], chunk_of([0.25, 0.25]))
    simulator.start([0], [episode(OTHER)])
    simulator.send([0], chunk_of([0.0, 0.0]), [None])
    state = simulator.receive([0]).observation.state[0]
    assert state.tolist() == pytest.approx([start_of(OTHER), 0.2])


def test_an_end_is_only_looked_at(simulator: Simulator) -> None:
    simulator.start([0], [episode(STATE)])
    look = simulator.look([0], chunk_of([-X, 0.0]))
    assert look.terminated[0] and look.success_once[0] and not look.refilled[0]
    assert int(look.executed[0]) == 1 and look.reward[0].tolist() == [1.0, 0.0]
    simulator.send([0], chunk_of([0.5, 0.0]), [episode(OTHER)])
    result = simulator.receive([0])
    assert not result.done[0] and result.observation.state[0, 0] == pytest.approx(X + 0.5)


def test_the_best_is_chosen_and_the_steps_are_counted(simulator: Simulator) -> None:
    simulator.start([0], [episode(STATE)])
    # Ends at distance 0.474, at home after two steps (worth 0.9), and at home after one (worth 1).
    away, slow, quick = [0.1, 0.1], [0.1, -X - 0.1], [-X, 0.0]
    assert pick(simulator, [away, slow]) == pytest.approx([*slow, 4])
    assert pick(simulator, [away, slow, quick]) == pytest.approx([*quick, 5])
    # Distance 0.174 beats 0.274: nothing has to end.
    assert pick(simulator, [[0.0, 0.0], [0.0, -0.1], away]) == pytest.approx([0.0, -0.1, 6])


@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.nan])
def test_the_first_is_kept_unless_another_is_better(value: float) -> None:
    simulator = inline()
    simulator.start([0], [episode(STATE)])
    score = lambda result: torch.full((1,), value)  # noqa: E731
    assert pick(simulator, [[0.1, 0.1], [-X, 0.0]], score) == pytest.approx([0.1, 0.1, 3])


def test_rounding_does_not_decide() -> None:
    simulator = inline()
    simulator.start([0], [episode(STATE)])
    for gain, chosen in ((5e-6, 0.1), (5e-5, 0.2)):
        scores = iter([1.0, 1.0 + gain])
        score = lambda result, scores=scores: torch.tensor([next(scores)])  # noqa: E731
        assert pick(simulator, [[0.1, 0.1], [0.2, 0.2]], score)[0] == pytest.approx(chosen)


def outcome(**fields: Any) -> ChunkResult:
    """Three rows that did two of three steps, and now see x = 0.5."""
    false = torch.zeros(3, dtype=torch.bool)
    names = ("terminated", "truncated", "success_once", "success_now", "refilled", "lost")
    seen = Observation({}, torch.tensor([[0.5, 0.0]] * 3), ("",) * 3)
    known: dict[str, Any] = {
        "reward": torch.tensor([[0.2, 0.3, 0.0]] * 3),
        "executed": torch.tensor([2, 2, 2]),
        "prelude_steps": torch.zeros(3, dtype=torch.int64),
        "stage": torch.zeros(3, dtype=torch.int64),
        "observation": seen,
        "final_observation": seen,
        **dict.fromkeys(names, false),
    }
    return ChunkResult(**(known | fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # 0.2 + 0.5 * 0.3 + 0.5^2 * V with V = -0.5.
        ({}, [0.225, 0.225, 0.225]),
        # Nothing follows an end.
        (
            {
                "terminated": torch.tensor([True, False, False]),
                "truncated": torch.tensor([False, True, False]),
            },
            [0.35, 0.35, 0.225],
        ),
        # A success is worth 1 at the second step, 0.5; a reward that is more than that stays.
        (
            {
                "terminated": torch.tensor([True, True, False]),
                "success_once": torch.tensor([True, True, True]),
                "reward": torch.tensor([[0.2, 0.3, 0.0], [0.2, 1.0, 0.0], [0.0, 0.0, 0.0]]),
            },
            [0.5, 0.7, 0.375],
        ),
    ],
)
def test_the_score_by_hand(fields: dict[str, Any], expected: list[float]) -> None:
    score = reward_and_value(cast(Policy, Listed([])), discount=0.5)
    assert score(outcome(**fields)).tolist() == pytest.approx(expected)


def _fixed_inline() -> Simulator:
    return InlineSimulator([OddLineConfig(kind="Fixed").build_environment()], 2)


def _fixed_pool() -> Simulator:
    return SimulatorPool(OddLineConfig(kind="Fixed"), 1, 2, RolloutConfig(num_slots=2))


@pytest.mark.parametrize("build", [_fixed_inline, _fixed_pool])
def test_without_snapshots_nothing_is_tried_out(build: Callable[[], Simulator]) -> None:
    simulator = build()
    try:
        simulator.start([0], [episode(STATE)])
        with pytest.raises(CannotLookAhead, match="line gives no snapshots"):
            simulator.look([0], chunk_of([0.1, 0.1]))
        # The episode goes on as if nothing had been asked.
        simulator.send([0], chunk_of([0.1, 0.1]), [None])
        result = simulator.receive([0])
        assert not result.lost[0] and result.observation.state[0, 0] == pytest.approx(X + 0.2)
    finally:
        simulator.close()


def test_a_batch_of_scenes_cannot() -> None:
    class Batch:
        spec = Line(LineConfig()).spec
        num_slots = 2

    with pytest.raises(CannotLookAhead, match="line runs as one batch"):
        BatchedSimulator(cast(Any, Batch())).look([0], chunk_of([0.1, 0.1]))


def test_an_environment_that_fails_while_looking_is_lost_alone() -> None:
    simulator = SimulatorPool(OddLineConfig(kind="Brittle"), 1, 2, RolloutConfig(num_slots=2))
    try:
        simulator.start([0, 1], [episode(STATE), episode(OTHER)])
        look = simulator.look([0], chunk_of([0.1, 0.1]))
        assert look.lost[0] and not look.done[0] and look.executed[0] == 0
        simulator.send([0, 1], torch.zeros(2, 2, 1), [None, None])
        result = simulator.receive([0, 1])
        assert result.lost.tolist() == [True, False]
        assert "it broke" in result.errors[0]
    finally:
        simulator.close()
