"""What must hold for any numbers: masks hide, padding adds nothing, shards add up, any order."""

from __future__ import annotations

from typing import Any, Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.maths.advantages import (
    chunk_reward,
    episode_weights,
    gae,
    group_advantage,
    leave_one_out_advantage,
    normalise,
    normalise_each,
)
from embodied_rl.maths.losses import (
    clipped_policy_loss,
    executed_mask,
    kl_to_reference,
    log_ratio,
    masked_mean,
    value_loss,
)

POISON = st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.0])
SEEDS = st.integers(0, 2**31)
LEVELS: Any = st.sampled_from(["chunk", "step"])
SCALES: Any = st.sampled_from(["std", "off"])


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coins(seed: int, *shape: int) -> Tensor:
    return numbers(seed, *shape) > 0


def loss_of(new: Tensor, old: Tensor, weight: Tensor, executed: Tensor, level: Any) -> Tensor:
    steps = executed_mask(executed, new.shape[1])
    change, mask = log_ratio(new, old, steps, level)
    if level == "step":
        weight = weight[:, None].expand_as(change)
    away = kl_to_reference(new, old, steps, "k3")
    return clipped_policy_loss(change, weight, mask, 0.2, 0.3, 3.0).loss + away


@given(seed=SEEDS, rows=st.integers(1, 7), steps=st.integers(1, 5), poison=POISON, level=LEVELS)
@settings(max_examples=60, deadline=None)
def test_what_was_not_executed_reaches_neither_loss_nor_gradient(
    seed: int, rows: int, steps: int, poison: float, level: Literal["chunk", "step"]
) -> None:
    executed = (numbers(seed, rows).abs() * steps).long().clamp_max(steps)
    hidden = ~executed_mask(executed, steps)
    new, old = numbers(seed + 1, rows, steps), numbers(seed + 2, rows, steps)
    weight = numbers(seed + 3, rows)
    found = []
    for filler in (0.0, poison):
        leaf = new.masked_fill(hidden, filler).requires_grad_()
        loss = loss_of(leaf, old.masked_fill(hidden, -filler), weight, executed, level)
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        assert leaf.grad[hidden].count_nonzero() == 0
        found.append((loss.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@given(seed=SEEDS, rows=st.integers(1, 7), padding=st.integers(1, 4), level=LEVELS)
@settings(max_examples=40, deadline=None)
def test_longer_chunks_and_lost_rows_add_nothing(
    seed: int, rows: int, padding: int, level: Literal["chunk", "step"]
) -> None:
    steps = 3
    executed = 1 + (numbers(seed, rows).abs() * steps).long().clamp_max(steps - 1)
    new, old = numbers(seed + 1, rows, steps), numbers(seed + 2, rows, steps)
    weight = numbers(seed + 3, rows)
    bare = loss_of(new, old, weight, executed, level)

    def grown(x: Tensor, by: int) -> Tensor:
        wide = torch.nn.functional.pad(x, (0, padding), value=7.0)
        return torch.cat([wide, numbers(seed + by, padding, steps + padding)])

    more = torch.cat([executed, torch.zeros(padding, dtype=executed.dtype)])
    heavy = torch.cat([weight, numbers(seed + 9, padding)])
    padded = loss_of(grown(new, 7), grown(old, 8), heavy, more, level)
    torch.testing.assert_close(padded, bare)


@given(seed=SEEDS, length=st.integers(1, 6), slots=st.integers(2, 6), cut=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_gae_is_the_same_in_shards_and_blind_to_frozen_slots(
    seed: int, length: int, slots: int, cut: int
) -> None:
    shape = (length, slots)
    tensors = [numbers(seed + i, *shape) for i in range(3)]
    tensors.append(torch.full(shape, 0.9) ** (1 + numbers(seed + 3, *shape).abs().long()))
    flags = [coins(seed + 4, *shape), coins(seed + 5, *shape)]

    def advantage(parts: list[Tensor]) -> Tensor:
        return gae(*parts, trace_decay=0.95)  # type: ignore[misc, arg-type]

    whole = advantage([*tensors, *flags])
    cut = min(cut, slots - 1)
    shards = [
        advantage([x[:, part] for x in [*tensors, *flags]])
        for part in (slice(None, cut), slice(cut, None))
    ]
    assert torch.equal(torch.cat(shards, 1), whole)
    assert whole[~flags[1]].count_nonzero() == 0
    poisoned = [x.masked_fill(~flags[1], float("nan")) for x in tensors]
    assert torch.equal(advantage([*poisoned, *flags]), whole)


@given(seed=SEEDS, rows=st.integers(1, 6), steps=st.integers(1, 4), poison=POISON)
@settings(max_examples=40, deadline=None)
def test_rewards_past_the_end_do_not_count(seed: int, rows: int, steps: int, poison: float) -> None:
    executed = (numbers(seed, rows).abs() * steps).long().clamp_max(steps)
    reward = numbers(seed + 1, rows, steps)
    hidden = ~executed_mask(executed, steps)
    clean = chunk_reward(reward.masked_fill(hidden, 0.0), executed, 0.9)
    assert torch.equal(chunk_reward(reward.masked_fill(hidden, poison), executed, 0.9), clean)


@given(seed=SEEDS, groups=st.integers(1, 5), size=st.integers(1, 6), scale=SCALES)
@settings(max_examples=60, deadline=None)
def test_groups_add_up_in_any_order_and_any_sharding(
    seed: int, groups: int, size: int, scale: Literal["std", "off"]
) -> None:
    group = torch.arange(groups).repeat_interleave(size)
    score = coins(seed, groups * size).float() + numbers(seed + 1, groups * size).round()
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(seed))
    for advantage in (lambda s, g: group_advantage(s, g, scale), leave_one_out_advantage):
        whole = advantage(score, group)
        torch.testing.assert_close(advantage(score[order], group[order]), whole[order])
        apart = [advantage(score[group == g], group[group == g]) for g in range(groups)]
        torch.testing.assert_close(torch.cat(apart), whole)
        torch.testing.assert_close(
            whole.view(groups, size).sum(1), torch.zeros(groups), atol=1e-4, rtol=0
        )
        # Only differences within a group matter, and names of groups do not.
        lifted = score + 3.0 * group
        torch.testing.assert_close(advantage(lifted, 17 * group + 5), whole, atol=1e-4, rtol=1e-4)


@given(seed=SEEDS, lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_every_episode_weighs_the_same_whatever_its_length(seed: int, lengths: list[int]) -> None:
    episode = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    valid = torch.ones(len(episode), dtype=torch.bool)
    weight = episode_weights(episode, valid, "episode", 5)
    shares = torch.zeros(len(lengths)).index_add_(0, episode, weight) / len(episode)
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / len(lengths)))
    # Rows that do not count change no other row's share of the loss.
    longer = torch.cat([episode, episode[:1]])
    also = torch.cat([valid, torch.tensor([False])])
    rules: list[Any] = ["decision", "episode", "constant"]
    for rule in rules:
        plain = episode_weights(episode, valid, rule, 5)
        padded = episode_weights(longer, also, rule, 5)
        assert padded[-1] == 0
        torch.testing.assert_close(padded[:-1], plain)


@given(seed=SEEDS, rows=st.integers(2, 12), poison=POISON)
@settings(max_examples=60, deadline=None)
def test_normalising_sees_valid_rows_alone(seed: int, rows: int, poison: float) -> None:
    advantage, valid = numbers(seed, rows), coins(seed + 1, rows)
    valid[:2] = True
    poisoned = advantage.masked_fill(~valid, poison)
    clean = normalise(advantage, valid)
    assert torch.equal(normalise(poisoned, valid), clean)
    assert abs(float(clean[valid].mean())) < 1e-4
    part = torch.arange(rows) % 2
    each = normalise_each(poisoned, valid, part)
    assert torch.isfinite(each).all()
    for number in (0, 1):
        rows_of = part == number
        assert torch.equal(each[rows_of], normalise(advantage[rows_of], valid[rows_of]))


@given(seed=SEEDS, rows=st.integers(1, 8), poison=POISON)
@settings(max_examples=40, deadline=None)
def test_means_and_value_losses_see_the_mask(seed: int, rows: int, poison: float) -> None:
    value, target, mask = numbers(seed, rows), numbers(seed + 1, rows), coins(seed + 2, rows)
    hidden = value.masked_fill(~mask, poison).requires_grad_()
    assert torch.equal(masked_mean(hidden, mask), masked_mean(value, mask))
    assert torch.equal(value_loss(hidden, target, mask), value_loss(value, target, mask))
    value_loss(hidden, target, mask).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad[~mask].count_nonzero() == 0
