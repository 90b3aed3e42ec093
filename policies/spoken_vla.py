"""What policies that speak action tokens share: they see, run a decoder and estimate the return.

The decoder is any causal language model of transformers; it reads the prefix as embeddings, and the
last ids of its vocabulary are the action tokens (OpenVLA, arXiv:2406.09246).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embodied_rl.contracts import Contract, Estimate, Observation
from embodied_rl.maths import tokens
from policies.chosen import Chosen, choose
from policies.layers import Normaliser, fit_state, normalised_state, require_observation
from policies.prefix import PrefixEncoder
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from policies.config import SpokenConfig

_QUANTILES = 0.01, 0.99
_SMALLEST_SPAN = 1e-6


class SpokenVLA(nn.Module):
    """A vision-language-action model without its words: base of those that choose tokens."""

    low: Tensor
    high: Tensor
    quantile_low: Tensor
    quantile_high: Tensor

    def __init__(
        self,
        config: SpokenConfig,
        contract: Contract,
        num_words: int,
        num_queries: int,
        sizes: dict[str, Any] | None,
    ) -> None:
        """`num_words` action tokens exist; `num_queries` learned inputs ask for them. The decoder
        has these sizes where they are known from a saved policy."""
        super().__init__()
        self.contract, self.chunk = contract, config.chunk
        self.ratio_levels = config.ratio_levels
        self._config = config
        self.register_buffer("low", torch.tensor(contract.action_low), persistent=False)
        self.register_buffer("high", torch.tensor(contract.action_high), persistent=False)
        # Until demonstrations say otherwise, tokens span the environment's bounds.
        self.register_buffer("quantile_low", self.low.clamp_min(-1e6))
        self.register_buffer("quantile_high", self.high.clamp_max(1e6))
        self.state_normaliser = Normaliser(contract.state_dim)
        self.encoder = PrefixEncoder(config, contract)
        self.decoder = _decoder(config, num_words, sizes)
        width = self.decoder.get_input_embeddings().embedding_dim
        self._first_action_id = self.decoder.config.vocab_size - num_words
        if self._first_action_id < 0:
            raise ValueError(
                f"the policy speaks {num_words} action tokens, which is more than the decoder's "
                f"vocabulary of {self.decoder.config.vocab_size}; take a larger decoder or fewer "
                f"tokens"
            )
        self.bridge = nn.Linear(config.hidden_size, width)
        self.query = nn.Parameter(0.02 * torch.randn(num_queries, width))
        hidden = config.value_hidden_size
        features = config.hidden_size + contract.state_dim
        self.value_network = ValueHead(config, features, [hidden, hidden])

    @property
    def decoder_sizes(self) -> dict[str, Any]:
        """The decoder's sizes, as transformers writes them: a saved policy is built from these."""
        sizes: dict[str, Any] = json.loads(self.decoder.config.to_json_string(use_diff=True))
        return sizes

    def value(self, observation: Observation) -> Tensor:
        """Expected return [B]."""
        return self.estimate(observation).value

    def estimate(self, observation: Observation) -> Estimate:
        """Expected return, with the histogram that it is the mean of if there is one."""
        state = self._see(observation)
        seen, mask = self.encoder(observation, state)
        return self._estimate(seen, mask, state)

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Tokens span what lies between the 1st and 99th percentile of demonstrated actions
        (contracts.Policy)."""
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
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=count,
        )
        logits: Tensor = output.logits[..., self._first_action_id :]
        return logits

    def _choose(self, logits: Tensor, uniform: Tensor | None) -> Chosen:
        """Tokens [...] of logits [..., V] (`choose`)."""
        return choose(self._config, logits, uniform)

    def _distribution(self, logits: Tensor, kept: Tensor | None) -> Tensor:
        """Log-probabilities [..., V] among the tokens that were kept when one was drawn."""
        return tokens.token_log_probs(logits, self._config.temperature, kept)

    def _embed(self, spoken: Tensor) -> Tensor:
        embedded: Tensor = self.decoder.get_input_embeddings()(spoken + self._first_action_id)
        return embedded

    def _to_units(self, actions: Tensor) -> Tensor:
        """Actions between the percentiles as -1 .. 1."""
        span = self.quantile_high - self.quantile_low
        return (actions.float() - self.quantile_low) / span * 2.0 - 1.0

    def _from_units(self, units: Tensor) -> Tensor:
        span = self.quantile_high - self.quantile_low
        values = self.quantile_low + (units + 1.0) / 2.0 * span
        return torch.clamp(values, self.low, self.high)


def _decoder(config: SpokenConfig, num_words: int, sizes: dict[str, Any] | None) -> Any:
    """A causal language model of transformers: one of known sizes, a local pretrained one, or a new
    one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if sizes is not None:
        known = AutoConfig.for_model(**sizes)
        return AutoModelForCausalLM.from_config(known)
    if config.pretrained is not None:
        if not (config.pretrained / "config.json").is_file():
            raise ValueError(
                f"policy.pretrained={config.pretrained} is no folder of a transformers model: it "
                f"has no config.json"
            )
        return AutoModelForCausalLM.from_pretrained(
            config.pretrained, local_files_only=True, use_safetensors=True
        )
    new = AutoConfig.for_model(
        config.decoder,
        vocab_size=num_words,
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
    return AutoModelForCausalLM.from_config(new)
