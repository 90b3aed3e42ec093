"""Bins, the distribution that tokens are drawn from, and drawing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.maths import tokens


def test_bins_by_hand() -> None:
    values = torch.tensor([-1.0, -0.51, -0.49, 0.0, 0.99, 1.0, 3.0, -3.0])
    assert tokens.to_bins(values, 4).tolist() == [0, 0, 1, 2, 3, 3, 3, 0]
    assert tokens.from_bins(torch.arange(4), 4).tolist() == [-0.75, -0.25, 0.25, 0.75]


@given(value=st.floats(-1, 1), num_bins=st.integers(2, 300))
def test_a_value_comes_back_to_within_half_a_bin(value: float, num_bins: int) -> None:
    found = tokens.from_bins(tokens.to_bins(torch.tensor(value), num_bins), num_bins)
    assert abs(float(found) - value) <= 1 / num_bins + 1e-6


def cut(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> torch.Tensor:
    kept = tokens.likeliest(logits, temperature, top_k, top_p)
    return tokens.token_log_probs(logits, temperature, kept)


def test_temperature_and_cut_offs_by_hand() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    plain = tokens.token_log_probs(logits).exp()
    assert plain.tolist() == pytest.approx([0.5, 0.25, 0.15, 0.1])
    # At temperature 1/2 probabilities are squared: .25, .0625, .0225, .01, of .345 in all.
    cold = tokens.token_log_probs(logits, temperature=0.5).exp()
    assert cold.tolist() == pytest.approx(
        [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]
    )
    two = cut(logits, top_k=2).exp()
    assert two.tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    # .5 + .25 is less than .8, so the third is needed; of those three the shares are out of .9.
    most = cut(logits, top_p=0.8).exp()
    assert most.tolist() == pytest.approx([5 / 9, 2.5 / 9, 1.5 / 9, 0])
    # top_k acts first: of the two left, the first alone has 2/3 of the probability.
    both = cut(logits, top_k=2, top_p=0.6).exp()
    assert both.tolist() == pytest.approx([1, 0, 0, 0])


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 5),
    top_k=st.one_of(st.none(), st.integers(1, 12)),
    top_p=st.floats(0.01, 1),
)
def test_it_is_a_distribution_that_keeps_the_likeliest(
    seed: int, temperature: float, top_k: int | None, top_p: float
) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) * 4
    found = cut(logits, temperature, top_k, top_p)
    assert torch.allclose(found.exp().sum(-1), torch.ones(3), atol=1e-5)
    assert torch.equal(found.argmax(-1), logits.argmax(-1))
    assert (found.isfinite().sum(-1) <= (top_k or 8)).all()


def test_half_precision_logits_are_scored_in_full_precision() -> None:
    found = tokens.token_log_probs(torch.randn(4, 256).bfloat16())
    assert found.dtype == torch.float32
    assert torch.allclose(found.exp().sum(-1), torch.ones(4), atol=1e-6)


def test_entropy_by_hand_and_its_gradient_with_excluded_tokens() -> None:
    logits = torch.tensor([0.5, 0.5, 1e-9]).log().requires_grad_()
    found = tokens.entropy(cut(logits, top_k=2))
    assert float(found.detach()) == pytest.approx(math.log(2))
    found.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_drawing_follows_the_distribution_and_never_takes_an_excluded_token() -> None:
    log_probs = cut(torch.tensor([0.1, 0.6, 0.05, 0.25]).log(), top_k=3)
    uniform = (torch.arange(10_000) + 0.5) / 10_000
    drawn = tokens.draw(log_probs.expand(10_000, -1), uniform)
    shares = torch.bincount(drawn, minlength=4) / 10_000
    assert torch.allclose(shares, log_probs.exp(), atol=2e-4)
    assert shares[2] == 0
    ends = torch.tensor([0.0, 1.0 - 2**-24])
    assert tokens.draw(log_probs.expand(2, -1), ends).tolist() == [0, 3]
    only = cut(torch.tensor([0.0, 5.0, 1.0]), top_k=1)
    assert tokens.draw(only.expand(2, -1), ends).tolist() == [1, 1]


def test_what_was_kept_stays_possible_when_the_policy_changes() -> None:
    kept = tokens.likeliest(torch.tensor([0.5, 0.3, 0.2]).log(), top_k=2)
    later = tokens.token_log_probs(torch.tensor([0.1, 0.3, 0.6]).log(), kept=kept).exp()
    assert later.tolist() == pytest.approx([0.25, 0.75, 0.0])
    assert tokens.likeliest(torch.zeros(3)) is None
