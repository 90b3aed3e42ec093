"""A language model that speaks actions in FAST tokens: a chunk is as many tokens as it takes.

A chunk is a sequence of FAST tokens (Pertsch et al. 2025, arXiv:2501.09747) and a last one that
ends it; `word_sequences` says how they are scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from embodied_rl.contracts import Contract, Decision, Evaluation, Observation
from embodied_rl.maths import tokens
from embodied_rl.maths.randomness import uniform_numbers
from policies.chosen import Chosen
from policies.fast_tokens import FastTokenizer
from policies.spoken_vla import SpokenVLA
from policies.word_sequences import (
    PADDING,
    held,
    in_step_0,
    longest_spoken,
    scored,
    scores_of,
    speak,
    tokens_of,
    words_of,
)

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.config import FastVLAConfig

_MOST_WINDOWS = 4096
"""Demonstrated chunks that a tokenizer is fitted to."""


class FastVLA(SpokenVLA):
    """An autoregressive vision-language-action policy; meets contracts.Policy. P is
    `longest`, the words of the longest sequence that is spoken to its end."""

    _config: FastVLAConfig

    def __init__(
        self,
        config: FastVLAConfig,
        contract: Contract,
        architecture: dict[str, Any] | None = None,
    ) -> None:
        shape = config.chunk, contract.action_dim
        if architecture is not None:
            tokenizer = FastTokenizer.from_json(architecture["tokenizer"], shape)
        elif config.processor is not None:
            tokenizer = FastTokenizer.load(config.processor, shape)
        else:
            none = torch.zeros(0, *shape)
            tokenizer = FastTokenizer.fit(none, config.scale, config.vocabulary, shape)
        sizes = architecture["decoder"] if architecture is not None else None
        super().__init__(config, contract, tokenizer.vocab_size + 1, 1, sizes)
        self.tokenizer = tokenizer

    @property
    def architecture(self) -> dict[str, Any]:
        """What `FastVLAConfig.rebuild` needs: the decoder's sizes and the tokenizer."""
        return {"decoder": self.decoder_sizes, "tokenizer": self.tokenizer.to_json()}

    @property
    def longest(self) -> int:
        """P: the words of a sequence at most; one that is not over by then is cut."""
        return self.tokenizer.longest + 1

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Decide for B environments (contracts.Policy). Deterministic takes the likeliest words."""
        with torch.no_grad():
            prefix, mask, found = self._encode(observation)
            value = found.value
            uniform = None
            if mode == "explore":
                uniform = uniform_numbers((len(value), self.longest), generator, value.device)
            words, scores, kept = self._speak(prefix, mask, uniform)
            actions, log_prob = self._to_actions(words), in_step_0(scores, self.chunk)
            if mode == "deterministic":
                return Decision(actions, torch.zeros_like(log_prob), value, {})
            trace = {"words": words} | ({} if kept is None else {"kept": kept})
            return Decision(actions, log_prob, value, trace, scores)

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded words (contracts.Policy), all in one pass."""
        prefix, mask, found = self._encode(observation)
        words = trace["words"]
        logits = self._logits(prefix, mask, words)
        return scored(logits, words, trace.get("kept"), self._config, found, self.chunk)

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Mean cross-entropy of the words of demonstrated chunks (contracts.Policy). Where an
        episode ended within a chunk, its last action is held."""
        words = self._to_words(held(actions, valid))
        words = words.masked_fill(~valid.any(1, keepdim=True), PADDING)
        prefix, mask, _ = self._encode(observation)
        log_probs = tokens.token_log_probs(self._logits(prefix, mask, words))
        count = (words != PADDING).sum().clamp_min(1)
        return -scores_of(log_probs, words).sum() / count

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Percentiles, and a tokenizer unless one was given (contracts.Policy). It is fitted to
        windows of H successive rows; that a few of them span two episodes does no harm."""
        super().fit_normalisation(state, actions)
        if self._config.processor is not None:
            return
        shape = self.chunk, self.contract.action_dim
        windows = torch.zeros(0, *shape)
        if len(actions) >= self.chunk:
            stride = -(-len(actions) // _MOST_WINDOWS)
            windows = self._to_units(actions).unfold(0, self.chunk, stride).transpose(1, 2)
        options = self.tokenizer.to_json()["options"]
        self.tokenizer = FastTokenizer.fit(windows, options["scale"], options["vocab_size"], shape)

    def _speak(self, prefix: Tensor, mask: Tensor, uniform: Tensor | None) -> Chosen:
        """Words [B, P]: drawn with the numbers [B, P], or the likeliest if there are none."""
        from transformers import DynamicCache

        cache = DynamicCache()
        query = self.query.expand(len(prefix), -1, -1)

        def next_logits(word: Tensor | None) -> Tensor:
            new = torch.cat([prefix, query], dim=1) if word is None else self._embed(word[:, None])
            return self._word_logits(new, mask, 1, cache)[:, 0]

        return speak(next_logits, self._config, uniform, self.longest)

    def _logits(self, prefix: Tensor, mask: Tensor, words: Tensor) -> Tensor:
        """Logits [B, L, words] of every word given those of `words` [B, P] before; L <= P is as far
        as the longest row goes."""
        length = longest_spoken(words)
        before = words[:, : length - 1].clamp_min(0)
        inputs = torch.cat([prefix, self.query.expand(len(prefix), -1, -1)], dim=1)
        inputs = torch.cat([inputs, self._embed(before)], dim=1)
        return self._word_logits(inputs, mask, length, None)

    def _word_logits(self, inputs: Tensor, mask: Tensor, count: int, cache: Any) -> Tensor:
        # A fitted tokenizer may have fewer tokens than there is room for.
        return self._run(inputs, mask, count, cache)[..., : self.tokenizer.size + 1]

    def _to_words(self, actions: Tensor) -> Tensor:
        """int64 [B, P]."""
        found = self.tokenizer.encode(self._to_units(actions))
        return words_of(found, self.longest).to(actions.device)

    def _to_actions(self, words: Tensor) -> Tensor:
        units = self.tokenizer.decode(tokens_of(words)).to(words.device)
        return self._from_units(units)
