"""Sequences of FAST tokens, which differ in length: spoken to their end, scored, padded.

A word is the end of a sequence, or FAST token `word - 1`. Every token shapes all H control steps of
a chunk, so the log-probability of a chunk cannot be divided among them: step 0 holds that of the
whole sequence, exactly, and the other steps hold 0. A chunk counts whole even if an episode ends
within it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from embodied_rl.contracts import Estimate, Evaluation
from embodied_rl.maths import tokens
from policies.chosen import Chosen, choose, together

if TYPE_CHECKING:
    from policies.config import SamplingConfig

END = 0
"""The word that ends a sequence; word i + 1 is FAST token i."""
PADDING = -1
"""What follows the end."""


def speak(
    next_logits: Callable[[Tensor | None], Tensor],
    options: SamplingConfig,
    uniform: Tensor | None,
    longest: int,
) -> Chosen:
    """Words [B, longest]: drawn with the numbers [B, longest], or the likeliest if there are none.

    `next_logits` gives the logits [B, V] after the word [B] that was said last, None at first. Rows
    that are over go on being asked while others are not; what they would say is dropped.
    """
    found: list[Chosen] = []
    word: Tensor | None = None
    over: Tensor | None = None
    for i in range(longest):
        logits = next_logits(word)
        word, score, kept = choose(options, logits, None if uniform is None else uniform[:, i])
        if over is None:
            over = torch.zeros_like(word, dtype=torch.bool)
        found.append(
            Chosen(
                torch.where(over, PADDING, word),
                torch.where(over, torch.zeros_like(score), score),
                kept,
            )
        )
        over = over | (word == END)
        if over.all():
            break
    words, scores, allowed = together(found)
    room = longest - len(found)
    return Chosen(
        pad(words, (0, room), value=PADDING),
        pad(scores, (0, room)),
        None if allowed is None else pad(allowed, (0, 0, 0, room), value=True),
    )


def longest_spoken(words: Tensor) -> int:
    """How far the longest row of words [B, P] goes, at least 1."""
    return max(1, int((words != PADDING).sum(1).max()))


def scores_of(log_probs: Tensor, words: Tensor) -> Tensor:
    """Log-probability [B, P] of words [B, P], 0 for padding, from distributions of the first L of
    them [B, L, V]."""
    known = words[:, : log_probs.shape[1]]
    chosen = log_probs.gather(-1, known.clamp_min(0)[..., None])[..., 0]
    chosen = torch.where(known == PADDING, torch.zeros_like(chosen), chosen)
    return pad(chosen, (0, words.shape[1] - known.shape[1]))


def scored(
    logits: Tensor,
    words: Tensor,
    kept: Tensor | None,
    options: SamplingConfig,
    estimate: Estimate,
    chunk: int,
) -> Evaluation:
    """Recorded words [B, P] under the logits [B, L, V] of the first L of them, among the tokens
    [B, P, V] that were kept when they were drawn."""
    within = None if kept is None else kept[:, : logits.shape[1]]
    log_probs = tokens.token_log_probs(logits, options.temperature, within)
    scores = scores_of(log_probs, words)
    entropy = tokens.entropy(log_probs) * (words[:, : log_probs.shape[1]] != PADDING)
    return Evaluation(
        log_prob=in_step_0(scores, chunk),
        entropy=in_step_0(entropy, chunk),
        value=estimate.value,
        histogram=estimate.histogram,
        token_log_prob=scores,
        token_step=torch.where(words == PADDING, -1, 0),
    )


def in_step_0(values: Tensor, chunk: int) -> Tensor:
    """The sum of values [B, L] as [B, H]: all in step 0, which every decision executes."""
    return pad(values.sum(dim=1, keepdim=True), (0, chunk - 1))


def words_of(spoken: Sequence[Sequence[int]], longest: int) -> Tensor:
    """int64 [B, longest] of FAST tokens with an end after them; what is longer is cut."""
    words = torch.full((len(spoken), longest), PADDING)
    for row, numbers in enumerate(spoken):
        said = torch.tensor([*(number + 1 for number in numbers), END])[:longest]
        words[row, : len(said)] = said
    return words


def tokens_of(words: Tensor) -> list[list[int]]:
    """The FAST tokens of words [B, P]."""
    return [[word - 1 for word in row if word > END] for row in words.tolist()]


def held(actions: Tensor, valid: Tensor) -> Tensor:
    """Demonstrated chunks [B, H, A]; where an episode ended within one (`valid` [B, H] is false),
    its last action is held."""
    step = torch.arange(actions.shape[1], device=valid.device)
    step = torch.minimum(step, (valid.sum(1, keepdim=True) - 1).clamp_min(0))
    return actions.gather(1, step[..., None].expand_as(actions))
