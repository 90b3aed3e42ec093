"""OpenVLA-OFT (arXiv:2502.19645) from its released checkpoints: a chunk of actions in one pass.

Empty embeddings stand where the actions will be, an end token after them, and everything attends to
everything. What answers for a token stands one place before it, as in next-token prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation, Observation
from policies.checkpoints import BadCheckpoint
from policies.chosen import choose
from policies.openvla import OpenVLA, Prefix, SpokenActions, masked_mean
from policies.openvla_checkpoint import Checkpoint

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.openvla_config import OpenVLAOFTConfig


class OpenVLAOFT(OpenVLA):
    """A parallel-decoding vision-language-action policy; meets contracts.Policy. With the
    regression head it cannot explore."""

    _config: OpenVLAOFTConfig

    def __init__(self, config: OpenVLAOFTConfig, contract: Contract, path: str) -> None:
        """Load the checkpoint at `path`. Raises BadCheckpoint, a ValueError."""
        super().__init__(config, contract, path)
        self._end: int = self._checkpoint.description.text.get("eos_token_id", 2)
        if config.head == "l1":
            self.model.language_model.lm_head.requires_grad_(False)

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Decide for B environments (contracts.Policy)."""
        if self._config.explores:
            return super().act(observation, generator, mode)
        if mode == "explore":
            raise ValueError(_NO_LIKELIHOOD)
        with torch.no_grad():
            units, estimate = self._regress(observation)
            actions = self._to_environment(units)
            return Decision(actions, actions.new_zeros(actions.shape[:2]), estimate.value, {})

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded tokens (contracts.Policy)."""
        if not self._config.explores:
            raise ValueError(_NO_LIKELIHOOD)
        return super().evaluate(observation, trace)

    def estimate(self, observation: Observation) -> Estimate:
        """Expected return, with the histogram that it is the mean of if there is one."""
        prefix = self._read(observation)
        with torch.no_grad():
            answers = self._answers(prefix)
        return self._estimate(answers[:, 0])

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Mean cross-entropy of the demonstrated tokens, or mean absolute error of the normalised
        actions (contracts.Policy)."""
        if self._config.explores:
            return super().imitation_loss(observation, actions, valid, generator)
        wanted = self.robot.actions.to_units(self.robot.to_checkpoint(actions))
        units, _ = self._regress(observation)
        return masked_mean((units - wanted).abs(), valid)

    def _require_kind(self, checkpoint: Checkpoint) -> None:
        regresses = "action_head" in checkpoint.parts
        where = f"the checkpoint {checkpoint.folder}"
        if regresses and self._config.head == "tokens":
            raise BadCheckpoint(
                f"{where} has an action_head, so it was trained to give numbers and its tokens "
                f"mean nothing: set policy.head=l1 to evaluate it, or take a checkpoint with tokens"
            )
        if not regresses and self._config.head == "l1":
            raise BadCheckpoint(f"{where} has no action_head; set policy.head=tokens")
        if regresses:
            self._require_head(checkpoint, where)

    def _require_head(self, checkpoint: Checkpoint, where: str) -> None:
        weights, wanted = checkpoint.parts["action_head"].weights, self._simulator.action_dim
        width = checkpoint.description.text.get("hidden_size", 4096)
        made = weights["model.fc1.weight"].shape[1] // width
        if made != wanted:
            raise BadCheckpoint(
                f"{where} has an action_head for {made} action dimensions, the simulator has "
                f"{wanted}; choose a checkpoint for this robot and controller"
            )

    def _require_number_of_cameras(self, chosen: tuple[str, ...], offers: str) -> None:
        """As many as the checkpoint was trained with, which it does not say."""

    def _attention(self, mask: Tensor, length: int) -> Tensor:
        """Everything attends to everything that is real."""
        return mask[:, None, None].expand(-1, 1, length, -1)

    def _answers(self, prefix: Prefix) -> Tensor:
        """Hidden states [B, H * A, width] that the actions are read from; the first is that of the
        prompt's last token."""
        rows, count = len(prefix.mask), self.chunk * self._simulator.action_dim
        empty = prefix.embeddings.new_zeros(rows, count, prefix.embeddings.shape[-1])
        end = self.model.embed(torch.full((rows, 1), self._end, device=prefix.mask.device))
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(rows, count + 1)], dim=1)
        hidden = self._run(torch.cat([prefix.embeddings, empty, end], dim=1), mask)
        first = prefix.mask.shape[1] - 1
        return hidden[:, first : first + count]

    def _hear(self, prefix: Prefix, spoken: Tensor) -> tuple[Tensor, Estimate]:
        """Logits [B, P, V] of every token, whatever the others are, and the value."""
        answers = self._answers(prefix)
        return self._logits(answers), self._estimate(answers[:, 0])

    def _speak(self, prefix: Prefix, uniform: Tensor | None) -> SpokenActions:
        """Tokens [B, P], drawn with the numbers [B, P] or the likeliest if there are none."""
        answers = self._answers(prefix)
        chosen = choose(self._config, self._logits(answers), uniform)
        return SpokenActions(chosen, self._estimate(answers[:, 0]))

    def _regress(self, observation: Observation) -> tuple[Tensor, Estimate]:
        """Normalised actions [B, H, A] and the value."""
        answers = self._answers(self._read(observation))
        head = self.model.action_head
        assert head is not None, "looked at in _require_kind"
        units: Tensor = head(answers.reshape(len(answers), self.chunk, -1))
        return units.float(), self._estimate(answers[:, 0])


_NO_LIKELIHOOD = (
    "policy.head=l1 gives one action without a likelihood: it can be evaluated and imitated "
    "(iterations=0); reinforcement learning needs a checkpoint with head=tokens"
)
