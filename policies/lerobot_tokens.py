"""pi0-FAST, as lerobot's own class, behind the contract of a policy.

A chunk is a sequence of FAST tokens and `|` (`word_sequences`), said after `Action: `, which is no
choice. lerobot's own decoding draws from all words of the language, goes on after `|`, and has to
say `Action: ` itself; where it says what it was trained to say, both mean the same actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation, Observation
from embodied_rl.maths.randomness import uniform_numbers
from policies.fast_tokens import FastTokenizer
from policies.layers import LARGEST_STATE, require_observation
from policies.lerobot_adapters import set_spoken_trainable
from policies.lerobot_checkpoint import load_native, resolve, type_of
from policies.lerobot_fast import FAST_FOLDER, fast_folder, without_remote_code
from policies.lerobot_fitting import cameras_of, require_fitting
from policies.lerobot_processors import Processors
from policies.lerobot_speech import Speech
from policies.lora import merged_weights
from policies.value_head import ValueHead
from policies.word_sequences import (
    PADDING,
    held,
    in_step_0,
    longest_spoken,
    scored,
    speak,
    tokens_of,
    words_of,
)

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.lerobot_config import LerobotTokensConfig

_REACH = 10.0
"""Actions that are scaled by mean and deviation may lie beyond [-1, 1], but not beyond this."""


class LerobotTokens(nn.Module):
    """An autoregressive policy of lerobot; meets contracts.Policy. P is `longest`."""

    native_prefix = "speech.native."
    """Weights with this prefix are saved by `save_native`, in lerobot's own files."""
    low: Tensor
    high: Tensor

    def __init__(self, config: LerobotTokensConfig, contract: Contract, path: str) -> None:
        """Load the checkpoint at `path`. Raises BadCheckpoint (a ValueError)."""
        super().__init__()
        self.chunk, self._config = config.chunk, config
        self.ratio_levels = config.ratio_levels
        folder = resolve(path)
        self.architecture = {"native": type_of(folder, config.type)}
        self.processors = Processors(folder, contract, config.tokenizer, config.convention)
        processor = fast_folder(folder, config.processor)
        with without_remote_code(self.processors.tokenizer):
            native = load_native(folder, config.type)
        fitted = bool(self.processors.missing_statistics)
        self._seen = self.processors.adapter.checkpoint
        require_fitting(native, self._seen, self.chunk, fitted, path)
        self.imitated_steps: int = native.config.chunk_size
        # lerobot decodes `n_action_steps` steps, but what was said are the frequencies of all.
        native.config.n_action_steps = self.imitated_steps
        shape = self.imitated_steps, contract.action_dim
        self.tokenizer = FastTokenizer.load(processor, shape, _REACH)
        self.speech = Speech(native, self.processors.tokenizer, self.tokenizer.size)
        self._cameras = cameras_of(self.speech.images, config.cameras, contract, config.convention)
        room = native.config.max_decoding_steps - len(self.speech.opening)
        self.longest = max(1, min(room, self.tokenizer.longest + 1))
        """P: the words of a sequence at most; one that is not over by then is cut."""
        set_spoken_trainable(self.speech, config)
        self.register_buffer("low", torch.tensor(contract.action_low), persistent=False)
        self.register_buffer("high", torch.tensor(contract.action_high), persistent=False)
        hidden = [config.value_hidden_size] * 2
        self.value_network = ValueHead(config, self.speech.width + self._seen.state_dim, hidden)

    @property
    def contract(self) -> Contract:
        """The simulator's, with the convention and the statistics of the checkpoint."""
        return self.processors.contract

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Decide for B environments (contracts.Policy). Deterministic takes the likeliest words."""
        from transformers import DynamicCache

        with torch.no_grad():
            cache = DynamicCache()
            heard = self.speech.hear(self._read(observation), self._no_words(observation), cache)
            value = self._estimate(heard.pooled, observation).value
            uniform = None
            if mode == "explore":
                uniform = uniform_numbers((len(value), self.longest), generator, value.device)
            last, mask = heard.hidden[:, -1], heard.mask

            def next_logits(word: Tensor | None) -> Tensor:
                nonlocal last, mask
                if word is not None:
                    last, mask = self.speech.go_on(word, mask, cache)
                return self.speech.logits(last)

            words, scores, kept = speak(next_logits, self._config, uniform, self.longest)
            actions, log_prob = self._to_actions(words), in_step_0(scores, self.chunk)
            if mode == "deterministic":
                return Decision(actions, torch.zeros_like(log_prob), value, {})
            trace = {"words": words} | ({} if kept is None else {"kept": kept})
            return Decision(actions, log_prob, value, trace, scores)

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded words (contracts.Policy), all in one pass."""
        words = trace["words"]
        before = words[:, : longest_spoken(words) - 1]
        heard = self.speech.hear(self._read(observation), before)
        logits = self.speech.logits(heard.hidden[:, len(self.speech.opening) :])
        found = self._estimate(heard.pooled, observation)
        return scored(logits, words, trace.get("kept"), self._config, found, self.chunk)

    def value(self, observation: Observation) -> Tensor:
        """Expected return [B]."""
        return self.estimate(observation).value

    def estimate(self, observation: Observation) -> Estimate:
        """Expected return, with the histogram that it is the mean of if there is one."""
        with torch.no_grad():
            heard = self.speech.hear(self._read(observation), self._no_words(observation))
        return self._estimate(heard.pooled, observation)

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Mean cross-entropy of what demonstrated chunks [B, imitated_steps, A] are called
        (contracts.Policy); where an episode ended within one, its last action is held.

        `Action: ` counts too, and among all words of the language, so that a plain lerobot says it.
        The tokens are laid out as they are when actions are decided, not as in lerobot's training.
        """
        units = self.processors(held(actions, valid))
        words = words_of(self.tokenizer.encode(units), self.longest).to(actions.device)
        words = words[:, : longest_spoken(words)]
        heard = self.speech.hear(self._read(observation), words)
        said, real = self.speech.said(words)
        real = real & valid.any(1, keepdim=True)
        logits = self.speech.text_logits(heard.hidden[:, :-1][real])
        return cross_entropy(logits, said[real], reduction="sum") / real.sum().clamp_min(1)

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Take statistics from demonstrations, where the checkpoint brought none of its own."""
        self.processors.fit(state, actions)

    def rehearsal(self) -> AbstractContextManager[None]:
        """Within it, decides without statistics (contracts.Policy)."""
        return self.processors.rehearsal()

    def policy_parameters(self) -> list[nn.Parameter]:
        """What learns of lerobot's weights."""
        return [parameter for parameter in self.speech.parameters() if parameter.requires_grad]

    def value_parameters(self) -> list[nn.Parameter]:
        """The value network's."""
        return list(self.value_network.parameters())

    def train(self, mode: bool = True) -> Self:
        """lerobot's model never drops anything out: decisions are scored as they were made."""
        super().train(mode)
        self.speech.eval()
        return self

    def save_native(self, folder: Path) -> None:
        """Write the checkpoint as lerobot does, with adapters merged into the weights, and both
        tokenizers beside it."""
        native = self.speech.native
        self.processors.save(folder)
        self.tokenizer.save(folder / FAST_FOLDER)
        native.save_pretrained(folder, state_dict=merged_weights(native))

    def _read(self, observation: Observation) -> dict[str, Tensor]:
        require_observation(self.processors.adapter.simulator, observation)
        return self.processors.inputs(observation, self._cameras)

    def _no_words(self, observation: Observation) -> Tensor:
        shape = (len(observation), 0)
        return torch.full(shape, PADDING, device=observation.state.device)

    def _estimate(self, pooled: Tensor, observation: Observation) -> Estimate:
        """Of the mean of the prompt as the language model sees it, and the state, without gradients
        into either: the value must not bend what the policy knows."""
        seen = layer_norm(pooled.detach(), pooled.shape[-1:])
        state = self.processors.normalised_state(observation.state)
        state = state.clamp(-LARGEST_STATE, LARGEST_STATE)
        found: Estimate = self.value_network(torch.cat([seen, state], dim=-1))
        return found

    def _to_actions(self, words: Tensor) -> Tensor:
        """Actions [B, H, A] that words [B, P] mean: the first steps of those planned."""
        planned = self.tokenizer.decode(tokens_of(words)).to(words.device)
        return torch.clamp(self.processors.inverse(planned)[:, : self.chunk], self.low, self.high)
