"""A language model that speaks actions: cameras, instruction and state in, action tokens out.

A chunk of H control steps with A action dimensions is H * A tokens, in this order: all dimensions
of the first step, then of the second. The decoder is any causal language model of transformers; it
reads the prefix as embeddings, and the last `num_bins` ids of its vocabulary are the action tokens
(OpenVLA, arXiv:2406.09246).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation, Observation
from embodied_rl.maths import tokens
from embodied_rl.maths.randomness import uniform_numbers
from policies.layers import Normaliser, fit_state, normalised_state, require_observation
from policies.prefix import PrefixEncoder
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.config import TokenVLAConfig

_QUANTILES = 0.01, 0.99
_SMALLEST_SPAN = 1e-6


class TokenVLA(nn.Module):
    """An autoregressive (or parallel-decoding) vision-language-action policy; meets
    contracts.Policy."""

    low: Tensor
    high: Tensor
    quantile_low: Tensor
    quantile_high: Tensor

    def __init__(
        self,
        config: TokenVLAConfig,
        contract: Contract,
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.contract, self.chunk, self._config = contract, config.chunk, config
        self._num_tokens = config.chunk * contract.action_dim
        self.register_buffer("low", torch.tensor(contract.action_low), persistent=False)
        self.register_buffer("high", torch.tensor(contract.action_high), persistent=False)
        # Until demonstrations say otherwise, the bins span the environment's bounds.
        self.register_buffer("quantile_low", self.low.clamp_min(-1e6))
        self.register_buffer("quantile_high", self.high.clamp_max(1e6))
        self.state_normaliser = Normaliser(contract.state_dim)
        self.encoder = PrefixEncoder(config, contract)
        self.decoder = _decoder(config, architecture)
        width = self.decoder.get_input_embeddings().embedding_dim
        self._first_action_id = self.decoder.config.vocab_size - config.num_bins
        if self._first_action_id < 0:
            raise ValueError(
                f"num_bins={config.num_bins} is more than the decoder's vocabulary of "
                f"{self.decoder.config.vocab_size} tokens"
            )
        self.bridge = nn.Linear(config.hidden_size, width)
        # Asks for the first token; in parallel decoding there is one question per token.
        count = self._num_tokens if config.decoding == "parallel" else 1
        self.query = nn.Parameter(0.02 * torch.randn(count, width))
        hidden = config.value_hidden_size
        features = config.hidden_size + contract.state_dim
        self.value_network = ValueHead(config, features, [hidden, hidden])

    @property
    def architecture(self) -> dict[str, Any]:
        """The decoder's sizes, as transformers writes them: a saved policy is built from these."""
        sizes: dict[str, Any] = json.loads(self.decoder.config.to_json_string(use_diff=True))
        return sizes

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
            drawn, log_prob = self._speak(prefix, mask, uniform)
            if mode == "deterministic":
                return Decision(self._to_actions(drawn), torch.zeros_like(log_prob), value, {})
            return Decision(self._to_actions(drawn), log_prob, value, {"tokens": drawn})

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded tokens (contracts.Policy), all in one pass."""
        prefix, mask, found = self._encode(observation)
        spoken = trace["tokens"].flatten(1)
        log_probs = self._distribution(self._logits(prefix, mask, spoken))
        chosen = log_probs.gather(-1, spoken[..., None])[..., 0]
        entropy = self._per_step(tokens.entropy(log_probs))
        return Evaluation(self._per_step(chosen), entropy, found.value, found.histogram)

    def value(self, observation: Observation) -> Tensor:
        """Expected return [B]."""
        return self.estimate(observation).value

    def estimate(self, observation: Observation) -> Estimate:
        """Expected return, with the histogram that it is the mean of if there is one."""
        state = self._see(observation)
        seen, mask = self.encoder(observation, state)
        return self._estimate(seen, mask, state)

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

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Bins between the 1st and 99th percentile of demonstrated actions (contracts.Policy)."""
        fit_state(self.state_normaliser, state)
        edges = torch.tensor(_QUANTILES, device=actions.device)
        low, high = torch.quantile(actions.float(), edges, dim=0)
        still = high - low < _SMALLEST_SPAN
        self.quantile_low.copy_(torch.where(still, low - _SMALLEST_SPAN, low))
        self.quantile_high.copy_(torch.where(still, high + _SMALLEST_SPAN, high))

    def policy_parameters(self) -> list[nn.Parameter]:
        """Encoder, bridge, query and decoder."""
        parts = [self.encoder, self.bridge, self.decoder]
        return [*(p for part in parts for p in part.parameters()), self.query]

    def value_parameters(self) -> list[nn.Parameter]:
        """The value network's."""
        return list(self.value_network.parameters())

    def _see(self, observation: Observation) -> Tensor:
        require_observation(self.contract, observation)
        return normalised_state(self.state_normaliser, observation.state)

    def _encode(self, observation: Observation) -> tuple[Tensor, Tensor, Estimate]:
        """Prefix embeddings for the decoder [B, L, width], which are real [B, L], and the value."""
        state = self._see(observation)
        seen, mask = self.encoder(observation, state)
        return self.bridge(seen), mask, self._estimate(seen, mask, state)

    def _estimate(self, seen: Tensor, mask: Tensor, state: Tensor) -> Estimate:
        # Without gradients into the encoder: the value must not bend what the policy sees.
        weight = mask[..., None].to(seen.dtype)
        pooled = (seen.detach() * weight).sum(1) / weight.sum(1)
        found: Estimate = self.value_network(torch.cat([pooled, state], dim=-1))
        return found

    def _logits(self, prefix: Tensor, mask: Tensor, spoken: Tensor) -> Tensor:
        """Logits [B, H * A, num_bins] of every token given those of `spoken` [B, H * A] before."""
        asked = self.query.expand(len(prefix), -1, -1)
        if self._config.decoding == "autoregressive":
            asked = torch.cat([asked, self._embed(spoken[:, :-1])], dim=1)
        inputs = torch.cat([prefix, asked], dim=1)
        return self._run(inputs, mask, asked.shape[1], None)

    def _speak(self, prefix: Tensor, mask: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens [B, H, A] and their log-probability [B, H]: drawn with the numbers [B, H * A], or
        the likeliest if there are none."""
        if self._config.decoding == "parallel":
            log_probs = self._distribution(self._logits(prefix, mask, prefix.new_zeros(0)))
            drawn = log_probs.argmax(-1) if uniform is None else tokens.draw(log_probs, uniform)
            chosen = log_probs.gather(-1, drawn[..., None])[..., 0]
            return self._grid(drawn), self._per_step(chosen)
        from transformers import DynamicCache

        cache = DynamicCache()
        inputs = torch.cat([prefix, self.query.expand(len(prefix), -1, -1)], dim=1)
        found, scores = [], []
        for i in range(self._num_tokens):
            log_probs = self._distribution(self._run(inputs, mask, 1, cache)[:, 0])
            if uniform is None:
                token = log_probs.argmax(-1)
            else:
                token = tokens.draw(log_probs, uniform[:, i])
            found.append(token)
            scores.append(log_probs.gather(-1, token[:, None])[:, 0])
            inputs = self._embed(token[:, None])
        return self._grid(torch.stack(found, 1)), self._per_step(torch.stack(scores, 1))

    def _run(self, inputs: Tensor, mask: Tensor, count: int, cache: Any) -> Tensor:
        """Action logits of the last `count` positions; what the cache holds comes before."""
        known = cache.get_seq_length() if cache is not None else 0
        total = known + inputs.shape[1]
        spoken = mask.new_ones(len(mask), total - mask.shape[1])
        attended = torch.cat([mask, spoken], dim=1).long()
        positions = (attended.cumsum(dim=1) - 1).clamp_min(0)[:, known:]
        output = self.decoder(
            inputs_embeds=inputs,
            attention_mask=attended,
            position_ids=positions,
            cache=cache,
            use_cache=cache is not None,
            logits_to_keep=count,
        )
        logits: Tensor = output.logits[..., self._first_action_id :]
        return logits

    def _distribution(self, logits: Tensor) -> Tensor:
        config = self._config
        return tokens.token_log_probs(logits, config.temperature, config.top_k, config.top_p)

    def _embed(self, spoken: Tensor) -> Tensor:
        embedded: Tensor = self.decoder.get_input_embeddings()(spoken + self._first_action_id)
        return embedded

    def _grid(self, spoken: Tensor) -> Tensor:
        return spoken.view(len(spoken), self.chunk, -1)

    def _per_step(self, values: Tensor) -> Tensor:
        """Sum [B, H] over the action dimensions of values per token [B, H * A]."""
        return values.view(len(values), self.chunk, -1).sum(dim=-1)

    def _to_tokens(self, actions: Tensor) -> Tensor:
        span = self.quantile_high - self.quantile_low
        units = (actions.float() - self.quantile_low) / span * 2.0 - 1.0
        return tokens.to_bins(units, self._config.num_bins)

    def _to_actions(self, spoken: Tensor) -> Tensor:
        units = tokens.from_bins(spoken, self._config.num_bins)
        span = self.quantile_high - self.quantile_low
        values = self.quantile_low + (units + 1.0) / 2.0 * span
        return torch.clamp(values, self.low, self.high)


def _decoder(config: TokenVLAConfig, architecture: dict[str, Any] | None) -> Any:
    """A causal language model of transformers: one of known sizes, a local pretrained one, or a new
    one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if architecture is not None:
        known = AutoConfig.for_model(**architecture)
        return AutoModelForCausalLM.from_config(known)  # type: ignore[no-untyped-call]
    if config.pretrained is not None:
        if not (config.pretrained / "config.json").is_file():
            raise ValueError(
                f"policy.pretrained={config.pretrained} is no folder of a transformers model: it "
                f"has no config.json"
            )
        return AutoModelForCausalLM.from_pretrained(
            config.pretrained, local_files_only=True, use_safetensors=True
        )
    sizes = AutoConfig.for_model(
        config.decoder,
        vocab_size=config.num_bins,
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.num_decoder_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(sizes)  # type: ignore[no-untyped-call]
