"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embodied_rl.maths.advantages import (
    chunk_reward,
    episode_weights,
    explained_variance,
    gae,
    group_advantage,
    leave_one_out_advantage,
    normalise,
    normalise_each,
    vtrace,
)

NAN = float("nan")


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)[:, None]


def test_chunk_reward_discounts_within_the_chunk_and_ignores_what_was_not_executed() -> None:
    reward = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, NAN], [NAN, NAN, NAN]])
    executed = torch.tensor([3, 2, 0])
    # 1 + 0.5 * 2 + 0.25 * 4 = 3; 1 + 0.5 * 2 = 2; nothing.
    assert chunk_reward(reward, executed, 0.5).tolist() == [3.0, 2.0, 0.0]


def test_gae_by_hand_over_three_decisions() -> None:
    # discount 0.5, lambda 0.5, values 2, 4, 6, then 8; rewards 1, 1, 1.
    # deltas: 1 + .5*4 - 2 = 1;  1 + .5*6 - 4 = 0;  1 + .5*8 - 6 = -1.
    # A2 = -1;  A1 = 0 + .25*(-1) = -.25;  A0 = 1 + .25*(-.25) = .9375.
    found = gae(
        reward=column(1, 1, 1),
        value=column(2, 4, 6),
        next_value=column(4, 6, 8),
        discount=column(0.5, 0.5, 0.5),
        done=flags(0, 0, 0),
        valid=flags(1, 1, 1),
        trace_decay=0.5,
    )
    assert found[:, 0].tolist() == [0.9375, -0.25, -1.0]


def test_a_termination_stops_bootstrap_and_trace() -> None:
    # Decision 0 ends its episode with reward 1 after one step; what comes next is another episode.
    found = gae(
        reward=column(1, 0),
        value=column(0.25, 100),
        next_value=column(0, 0),
        discount=column(0.5, 0.5),
        done=flags(1, 0),
        valid=flags(1, 1),
        trace_decay=1.0,
    )
    assert found[:, 0].tolist() == [0.75, -100.0]


def test_a_time_limit_bootstraps_from_the_cut_observation_but_stops_the_trace() -> None:
    # delta0 = 0 + .5 * 10 - 1 = 4: the value 10 of the cut observation counts, the next
    # episode's advantage (0 + 0 - 100) does not.
    found = gae(
        reward=column(0, 0),
        value=column(1, 100),
        next_value=column(10, 0),
        discount=column(0.5, 0.5),
        done=flags(1, 0),
        valid=flags(1, 1),
        trace_decay=1.0,
    )
    assert found[:, 0].tolist() == [4.0, -100.0]


def test_discount_follows_the_executed_steps() -> None:
    # A chunk of 2 steps (0.5^2) then one of 1 step (0.5): delta0 = .25*8 - 1 = 1.
    found = gae(
        reward=column(0, 0),
        value=column(1, 8),
        next_value=column(8, 16),
        discount=0.5 ** column(2, 1),
        done=flags(0, 0),
        valid=flags(1, 1),
        trace_decay=0.0,
    )
    assert found[:, 0].tolist() == [1.0, 0.0]


def test_invalid_rows_hide_nan_and_pass_nothing_on() -> None:
    found = gae(
        reward=column(1, NAN, 1),
        value=column(0, NAN, 0),
        next_value=column(0, NAN, 0),
        discount=column(1, 1, 1),
        done=flags(0, 0, 0),
        valid=flags(1, 0, 1),
        trace_decay=1.0,
    )
    assert found[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_slots_do_not_mix_and_their_order_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (6, 5)
    fields = {
        name: torch.rand(shape, generator=generator)
        for name in ("reward", "value", "next_value", "discount")
    }
    done = torch.rand(shape, generator=generator) < 0.3
    valid = torch.rand(shape, generator=generator) < 0.9
    whole = gae(**fields, done=done, valid=valid, trace_decay=0.9)
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = {name: tensor[:, order] for name, tensor in fields.items()}
    again = gae(**permuted, done=done[:, order], valid=valid[:, order], trace_decay=0.9)
    assert torch.equal(again, whole[:, order])


def test_vtrace_by_hand_over_three_decisions() -> None:
    # The decisions of the first test: deltas 1, 0, -1, and discount times lambda .25. The ratios
    # 2, .5, 4 count as 1.5, .5, 1.5 for the deltas and as 1, .5, 1 for what comes later.
    # c2 = 1.5*(-1) = -1.5;  c1 = .5*0 + .25*.5*(-1.5) = -.1875;
    # c0 = 1.5*1 + .25*1*(-.1875) = 1.453125.
    # A2 = -1;  A1 = 0 + .25*(-1.5) = -.375;  A0 = 1 + .25*(-.1875) = .953125.
    advantage, correction = vtrace(
        reward=column(1, 1, 1),
        value=column(2, 4, 6),
        next_value=column(4, 6, 8),
        discount=column(0.5, 0.5, 0.5),
        done=flags(0, 0, 0),
        valid=flags(1, 1, 1),
        trace_decay=0.5,
        ratio=column(2, 0.5, 4),
        rho_bar=1.5,
        c_bar=1.0,
    )
    assert advantage[:, 0].tolist() == [0.953125, -0.375, -1.0]
    assert correction[:, 0].tolist() == [1.453125, -0.1875, -1.5]


def test_vtrace_of_fresh_decisions_is_gae() -> None:
    generator = torch.Generator().manual_seed(1)
    fields: dict[str, Tensor] = {
        name: torch.rand((9, 7), generator=generator)
        for name in ("reward", "value", "next_value", "discount")
    }
    fields["done"] = torch.rand((9, 7), generator=generator) < 0.3
    fields["valid"] = torch.rand((9, 7), generator=generator) < 0.8
    wanted = gae(**fields, trace_decay=0.9)
    for rho_bar, c_bar in ((1.0, 1.0), (3.0, 2.0)):
        found = vtrace(
            **fields, trace_decay=0.9, ratio=torch.ones(9, 7), rho_bar=rho_bar, c_bar=c_bar
        )
        assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted)


def test_vtrace_keeps_episodes_and_lost_rows_apart() -> None:
    # Row 0 ends its episode (with value 10 at its cut): delta 0 + .5*10 - 1 = 4. Row 2 is lost.
    advantage, correction = vtrace(
        reward=column(0, 1, NAN, 1),
        value=column(1, 0, NAN, 0),
        next_value=column(10, 0, NAN, 0),
        discount=column(0.5, 1, 1, 1),
        done=flags(1, 0, 0, 0),
        valid=flags(1, 1, 0, 1),
        trace_decay=1.0,
        ratio=column(0.5, 0.25, NAN, 0.5),
        rho_bar=1.0,
        c_bar=1.0,
    )
    assert advantage[:, 0].tolist() == [4.0, 1.0, 0.0, 1.0]
    assert correction[:, 0].tolist() == [2.0, 0.25, 0.0, 0.5]


@pytest.mark.parametrize(("rho_bar", "value"), [(10.0, 0.8), (1.0, 5 / 7)])
def test_vtrace_learns_the_value_of_a_policy_between_the_two(rho_bar: float, value: float) -> None:
    """One decision between winning 1 and nothing, taken evenly; the present policy wins in 8 of 10.
    With ratios cut at 1 the policy in between wins with weight 5 against 2."""
    _, correction = vtrace(
        reward=torch.tensor([[1.0, 0.0]]),
        value=torch.full((1, 2), value),
        next_value=torch.zeros(1, 2),
        discount=torch.ones(1, 2),
        done=torch.ones(1, 2, dtype=torch.bool),
        valid=torch.ones(1, 2, dtype=torch.bool),
        trace_decay=1.0,
        ratio=torch.tensor([[1.6, 0.4]]),
        rho_bar=rho_bar,
        c_bar=1.0,
    )
    assert float(correction.mean()) == pytest.approx(0.0, abs=1e-6)


def test_normalise_ignores_padding() -> None:
    values = torch.tensor([1.0, 3.0, NAN, 1e9])
    valid = torch.tensor([True, True, False, False])
    # Mean 2, deviation sqrt(2) with Bessel's correction.
    found = normalise(values, valid)
    assert found.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2), 0, 0])


def test_normalise_does_not_blow_up_equal_advantages() -> None:
    valid = torch.ones(3, dtype=torch.bool)
    assert normalise(torch.full((3,), 5.0), valid).tolist() == [0.0, 0.0, 0.0]
    tiny = normalise(torch.tensor([0.0, 1e-6, 2e-6]), valid)
    assert tiny.abs().max() < 0.01
    assert normalise(torch.tensor([4.0]), valid[:1]).tolist() == [0.0]


def test_explained_variance() -> None:
    target = torch.tensor([0.0, 2.0])
    assert explained_variance(target, target) == 1.0
    assert explained_variance(torch.ones(2), target) == 0.0
    # Residual variance 4 (of -2, +2) against 1.
    assert explained_variance(torch.tensor([2.0, 0.0]), target) == -3.0
    assert math.isnan(explained_variance(target, torch.ones(2)))


def test_group_advantage_by_hand() -> None:
    score = torch.tensor([1.0, 0.0, 5.0, 1.0, 7.0, 0.0])
    group = torch.tensor([8, 8, 3, 8, 3, 8])
    # Group 8 has mean 1/2 and unbiased deviation sqrt(1/3); group 3 mean 6 and sqrt(2).
    root3, root2 = math.sqrt(3), math.sqrt(2)
    expected = [root3 / 2, -root3 / 2, -1 / root2, root3 / 2, 1 / root2, -root3 / 2]
    assert group_advantage(score, group, "std").tolist() == pytest.approx(expected, abs=1e-6)
    assert group_advantage(score, group, "off").tolist() == [0.5, -0.5, -1.0, 0.5, 1.0, -0.5]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1 + 0.2, -1e4])
def test_equal_scores_have_no_advantage(value: float) -> None:
    score = torch.full((7,), value)
    group = torch.zeros(7, dtype=torch.int64)
    assert group_advantage(score, group, "std").tolist() == [0.0] * 7
    single = torch.arange(7)
    assert group_advantage(score, single, "std").tolist() == [0.0] * 7
    assert leave_one_out_advantage(score, single).tolist() == [0.0] * 7


def test_leave_one_out_by_hand() -> None:
    score = torch.tensor([1.0, 0.0, 0.0, 4.0])
    group = torch.tensor([1, 1, 1, 0])
    # The others' means are 0, 1/2 and 1/2; the last is alone.
    expected = [1.0, -0.5, -0.5, 0.0]
    assert leave_one_out_advantage(score, group).tolist() == pytest.approx(expected)


def test_groups_do_not_depend_on_the_order_of_episodes() -> None:
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(12, generator=generator)
    group = torch.arange(12) % 3
    order = torch.randperm(12, generator=generator)
    for rule in (
        lambda s, g: group_advantage(s, g, "std"),
        leave_one_out_advantage,
    ):
        assert torch.allclose(rule(score, group)[order], rule(score[order], group[order]))


def test_episode_weights_by_hand() -> None:
    """Episodes of 3, 1 and 2 decisions; one of the 3 is invalid. Five rows count."""
    episode = torch.tensor([0, 0, 0, 1, 2, 2])
    valid = torch.tensor([True, True, False, True, True, True])
    assert episode_weights(episode, valid, "decision", 4).tolist() == [1, 1, 0, 1, 1, 1]
    # Each episode weighs 5/3 in all, spread over its valid rows.
    expected = [5 / 6, 5 / 6, 0, 5 / 3, 5 / 6, 5 / 6]
    assert episode_weights(episode, valid, "episode", 4).tolist() == pytest.approx(expected)
    # Each decision weighs 1/4 of an episode: 5 / (3 * 4).
    expected = [5 / 12, 5 / 12, 0, 5 / 12, 5 / 12, 5 / 12]
    assert episode_weights(episode, valid, "constant", 4).tolist() == pytest.approx(expected)


def test_episode_weights_count_executed_steps_where_every_step_has_a_ratio() -> None:
    """Episode 0 is one decision of one step, episode 1 two of four: nine terms in the mean."""
    episode, size = torch.tensor([0, 1, 1]), torch.tensor([1, 4, 4])
    # 9 / 2 episodes, over 1 and 8 steps: each episode's terms sum to 4.5.
    found = episode_weights(episode, size, "episode", 8)
    assert found.tolist() == pytest.approx([4.5, 9 / 16, 9 / 16])
    # Every step weighs 1/8 of an episode: 9 / (2 * 8).
    found = episode_weights(episode, size, "constant", 8)
    assert found.tolist() == pytest.approx([9 / 16] * 3)


def test_normalise_each_gives_every_part_its_own_unit() -> None:
    advantage = torch.tensor([1.0, 3.0, 100.0, 300.0, 7.0])
    valid = torch.tensor([True, True, True, True, False])
    part = torch.tensor([0, 0, 1, 1, 1])
    found = normalise_each(advantage, valid, part)
    # Two values each: their distance to the mean over the unbiased deviation is 1 / sqrt(2).
    expected = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0]) / 2**0.5
    torch.testing.assert_close(found, expected)
