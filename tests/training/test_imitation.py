"""Imitation learns what it is shown, averages its weights, and continues exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.contracts import Contract, Observation
from embodied_rl.run_config import ImitationConfig
from embodied_rl.training.checkpoint import CheckpointStore
from embodied_rl.training.demonstrations import Demonstrations
from embodied_rl.training.imitation import (
    Imitation,
    NonFiniteImitation,
    _move_average,
    learning_rate_factor,
    split,
)
from policies.config import FlowMLPConfig, GaussianMLPConfig

CONTRACT = Contract(
    state_dim=2,
    action_dim=1,
    action_low=(-1.0,),
    action_high=(1.0,),
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
)


def shown(num_episodes: int = 10) -> Demonstrations:
    """The right action is the first state entry halved."""
    count = 20 * num_episodes
    state = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) - 1
    episode = torch.arange(count) // 20
    return Demonstrations(Observation({}, state, ("",) * count), state[:, :1] / 2, episode)


def policy() -> Any:
    torch.manual_seed(0)
    return FlowMLPConfig(chunk=1, hidden_size=32, num_layers=2).build(CONTRACT)


def imitation(made: Any, steps: int, **options: Any) -> Imitation:
    config = ImitationConfig(steps=steps, batch_size=64, warmup_steps=5, **options)
    return Imitation(made, shown(), config, seed=1, device="cpu")


def run(phase: Imitation, folder: Path, stop_at: int | None = None) -> Any:
    seen: list[int] = []
    return phase.run(
        log=lambda step, values: None,
        store=CheckpointStore(folder, keep=1),
        on_step=lambda step, loss: seen.append(step),
        stop=lambda: stop_at is not None and seen[-1] >= stop_at,
    )


def test_learns_what_was_shown(tmp_path: Path) -> None:
    made = policy()
    result = run(imitation(made, 600), tmp_path)
    assert result.open_loop_error is not None and result.open_loop_error < 0.1
    state = torch.tensor([[0.8, 0.0], [-0.6, 0.5]])
    generator = torch.Generator().manual_seed(0)
    many = Observation({}, state.repeat(50, 1), ("",) * 100)
    actions = made.act(many, generator, "deterministic").actions.view(50, 2).mean(0)
    assert actions.tolist() == pytest.approx([0.4, -0.3], abs=0.1)


def test_stopped_and_continued_equals_uninterrupted(tmp_path: Path) -> None:
    whole, parts = policy(), policy()
    run(imitation(whole, 60), tmp_path / "whole")
    assert run(imitation(parts, 60), tmp_path / "parts", stop_at=23) is None
    resumed = policy()
    phase = imitation(resumed, 60)
    assert phase.restore(CheckpointStore(tmp_path / "parts", keep=1)) == 23
    assert run(phase, tmp_path / "parts") is not None
    a, b = whole.state_dict(), resumed.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_batch_in_parts_is_the_same(tmp_path: Path) -> None:
    """Also where chunks go past the end of an episode. The loss of this policy draws no noise."""
    weights = []
    for name, most in (("whole", None), ("parts", 7)):
        torch.manual_seed(0)
        made = GaussianMLPConfig(chunk=4, hidden_size=16).build(CONTRACT)
        phase = imitation(made, 5, micro_batch_size=most)
        run(phase, tmp_path / name)
        weights.append(torch.cat([p.detach().flatten() for p in made.policy_parameters()]))
    torch.testing.assert_close(weights[1], weights[0], atol=1e-6, rtol=0)


def test_without_a_checkpoint_it_begins_at_the_beginning(tmp_path: Path) -> None:
    assert imitation(policy(), 5).restore(CheckpointStore(tmp_path, keep=1)) == 0


def test_the_average_by_hand() -> None:
    average = [torch.tensor([0.0])]
    # Late in training the decay itself counts: 0.9 * 0 + 0.1 * 1, then 0.9 * 0.1 + 0.1 * 1.
    for expected in (0.1, 0.19):
        _move_average(average, [torch.tensor([1.0])], 0.9, step=10_000)
        assert average[0].item() == pytest.approx(expected)
    # At step 10 the average remembers only half: 10 / (10 + 10).
    early = [torch.tensor([0.0])]
    _move_average(early, [torch.tensor([1.0])], 0.9, step=10)
    assert early[0].item() == pytest.approx(0.5)
    # A decay of 0 keeps the last weights.
    _move_average(early, [torch.tensor([7.0])], 0.0, step=10)
    assert early[0].item() == 7.0


def test_learning_rate_rises_and_falls() -> None:
    factors = [learning_rate_factor(step, 10, 110) for step in (0, 9, 10, 60, 110)]
    assert factors == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])


def test_whole_episodes_are_held_out() -> None:
    train, held_out = split(shown(), 0.2, seed=0)
    assert held_out is not None
    assert (train.num_episodes, held_out.num_episodes) == (8, 2)
    rows = {tuple(row) for row in held_out.observation.state.tolist()}
    assert not rows & {tuple(row) for row in train.observation.state.tolist()}
    assert split(shown(1), 0.9, seed=0)[1] is None  # something must be left to learn from
    assert split(shown(), 0.0, seed=0)[1] is None


def test_normalisation_never_sees_the_held_out_episodes() -> None:
    made = policy()
    imitation(made, 5, holdout_share=0.2)
    train, _ = split(shown(), 0.2, seed=1)
    assert torch.allclose(made.state_normaliser.mean, train.observation.state.mean(0))


def test_the_value_head_is_left_alone(tmp_path: Path) -> None:
    made = policy()
    before = [p.detach().clone() for p in made.value_parameters()]
    run(imitation(made, 10), tmp_path)
    pairs = zip(before, made.value_parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    made = policy()
    phase = imitation(made, 10)
    with torch.no_grad():
        made.network[0].weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteImitation, match=r"at step 0 the loss is nan.*lower imitation"):
        run(phase, tmp_path)


def test_decides_on_no_more_rows_at_once_than_it_learned_from(tmp_path: Path) -> None:
    made, rows = policy(), []
    act = made.act

    def counted(observation: Observation, *rest: Any) -> Any:
        rows.append(len(observation))
        return act(observation, *rest)

    made.act = counted
    phase = imitation(made, 1, holdout_share=0.5)
    assert run(phase, tmp_path).open_loop_error > 0
    assert rows == [64, 36]
