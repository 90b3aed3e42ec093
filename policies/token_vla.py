"""A language model that speaks actions: cameras, instruction and state in, action tokens out.

A chunk of H control steps with A action dimensions is H * A tokens, in this order: all dimensions
of the first step, then of the second. Each is the bin of one number (OpenVLA, arXiv:2406.09246).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from embodied_rl.contracts import Contract, Decision, Evaluation, Observation
from embodied_rl.maths import tokens
from embodied_rl.maths.randomness import uniform_numbers
from policies.chosen import Chosen, together
from policies.spoken_vla import SpokenVLA

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.config import TokenVLAConfig


class TokenVLA(SpokenVLA):
    """An autoregressive (or parallel-decoding) vision-language-action policy; meets
    contracts.Policy."""

    _config: TokenVLAConfig

    def __init__(
        self,
        config: TokenVLAConfig,
        contract: Contract,
        architecture: dict[str, Any] | None = None,
    ) -> None:
        self._num_tokens = config.chunk * contract.action_dim
        # Asks for the first token; in parallel decoding there is one question per token.
        num_queries = self._num_tokens if config.decoding == "parallel" else 1
        super().__init__(config, contract, config.num_bins, num_queries, architecture)

    @property
    def architecture(self) -> dict[str, Any]:
        """What `TokenVLAConfig.rebuild` needs."""
        return self.decoder_sizes

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Decide for B environments (contracts.Policy). Deterministic takes the likeliest."""
        with torch.no_grad():
            prefix, mask, found = self._encode(observation)
            value = found.value
            uniform = None
            if mode == "explore":
                uniform = uniform_numbers((len(value), self._num_tokens), generator, value.device)
            chosen = self._speak(prefix, mask, uniform)
            drawn, scores = self._grid(chosen.token), chosen.score
            actions, log_prob = self._to_actions(drawn), self._per_step(scores)
            if mode == "deterministic":
                return Decision(actions, torch.zeros_like(log_prob), value, {})
            trace = {"tokens": drawn} | ({} if chosen.kept is None else {"kept": chosen.kept})
            return Decision(actions, log_prob, value, trace, scores)

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded tokens (contracts.Policy), all in one pass."""
        prefix, mask, found = self._encode(observation)
        spoken = trace["tokens"].flatten(1)
        log_probs = self._distribution(self._logits(prefix, mask, spoken), trace.get("kept"))
        chosen = log_probs.gather(-1, spoken[..., None])[..., 0]
        return Evaluation(
            log_prob=self._per_step(chosen),
            entropy=self._per_step(tokens.entropy(log_probs)),
            value=found.value,
            token_log_prob=chosen,
            token_step=self._step_of_token(len(chosen), chosen.device),
            histogram=found.histogram,
        )

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Mean cross-entropy of the demonstrated tokens (contracts.Policy)."""
        prefix, mask, _ = self._encode(observation)
        spoken = self._to_tokens(actions).flatten(1)
        log_probs = tokens.token_log_probs(self._logits(prefix, mask, spoken))
        chosen = self._per_step(log_probs.gather(-1, spoken[..., None])[..., 0])
        counted = torch.where(valid, chosen, torch.zeros_like(chosen))
        return -counted.sum() / (valid.sum().clamp_min(1) * self.contract.action_dim)

    def _logits(self, prefix: Tensor, mask: Tensor, spoken: Tensor) -> Tensor:
        """Logits [B, H * A, num_bins] of every token given those of `spoken` [B, H * A] before."""
        asked = self.query.expand(len(prefix), -1, -1)
        if self._config.decoding == "autoregressive":
            asked = torch.cat([asked, self._embed(spoken[:, :-1])], dim=1)
        inputs = torch.cat([prefix, asked], dim=1)
        return self._run(inputs, mask, asked.shape[1], None)

    def _speak(self, prefix: Tensor, mask: Tensor, uniform: Tensor | None) -> Chosen:
        """Tokens [B, H * A]: drawn with the numbers [B, H * A], or the likeliest if there are
        none."""
        if self._config.decoding == "parallel":
            return self._choose(self._logits(prefix, mask, prefix.new_zeros(0)), uniform)
        from transformers import DynamicCache

        cache = DynamicCache()
        inputs = torch.cat([prefix, self.query.expand(len(prefix), -1, -1)], dim=1)
        found: list[Chosen] = []
        for i in range(self._num_tokens):
            logits = self._run(inputs, mask, 1, cache)[:, 0]
            found.append(self._choose(logits, None if uniform is None else uniform[:, i]))
            inputs = self._embed(found[-1].token[:, None])
        return together(found)

    def _grid(self, spoken: Tensor) -> Tensor:
        return spoken.view(len(spoken), self.chunk, -1)

    def _per_step(self, values: Tensor) -> Tensor:
        """Sum [B, H] over the action dimensions of values per token [B, H * A]."""
        return values.view(len(values), self.chunk, -1).sum(dim=-1)

    def _to_tokens(self, actions: Tensor) -> Tensor:
        return tokens.to_bins(self._to_units(actions), self._config.num_bins)

    def _to_actions(self, spoken: Tensor) -> Tensor:
        return self._from_units(tokens.from_bins(spoken, self._config.num_bins))

    def _step_of_token(self, rows: int, device: torch.device) -> Tensor:
        """int64 [B, H * A], a view of one row."""
        steps = torch.arange(self.chunk, device=device)
        return steps.repeat_interleave(self.contract.action_dim).expand(rows, -1)
