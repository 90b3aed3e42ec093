"""OpenVLA (arXiv:2406.09246) from its released checkpoints: an image and an instruction in, one
action token per number out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation, Observation
from embodied_rl.maths import tokens
from embodied_rl.maths.randomness import uniform_numbers
from policies import openvla_checkpoint
from policies.checkpoints import BadCheckpoint
from policies.chosen import Chosen, choose, together
from policies.layers import require_observation
from policies.lora import merged_weights
from policies.openvla_actions import Robot, token_values, tokens_of
from policies.openvla_checkpoint import Checkpoint
from policies.openvla_inputs import Images, Prompts
from policies.openvla_learning import choose_what_learns
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.openvla_config import OpenVLACheckpointConfig


class Prefix(NamedTuple):
    """What is read before the first action token."""

    embeddings: Tensor
    """[B, L, width]."""
    mask: Tensor
    """bool [B, L]: which are real. The last one always is."""


class SpokenActions(NamedTuple):
    """Action tokens [B, P] and the value, of one pass through the language model."""

    chosen: Chosen
    estimate: Estimate


class OpenVLA(nn.Module):
    """An autoregressive vision-language-action policy; meets contracts.Policy."""

    native_prefix = "model."
    """Weights with this prefix are saved by `save_native`, in the release's own files."""

    def __init__(self, config: OpenVLACheckpointConfig, contract: Contract, path: str) -> None:
        """Load the checkpoint at `path`. Raises BadCheckpoint, a ValueError."""
        super().__init__()
        self._simulator, self.chunk, self._config = contract, config.chunk, config
        self.ratio_levels = config.ratio_levels
        self._checkpoint = openvla_checkpoint.read(openvla_checkpoint.resolve(path))
        self._require_kind(self._checkpoint)
        description = self._checkpoint.description
        self._first, self._count = description.first_action_id, description.num_action_tokens
        # All that can be wrong is looked at before gigabytes are read.
        self._prompts = Prompts(self._checkpoint)
        self.robot = Robot(config, contract, self._checkpoint)
        self.images = Images(self._checkpoint, self._cameras(), config.center_crop)
        self.images.require_fitting(contract)
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.model = openvla_checkpoint.load_model(self._checkpoint, dtype)
        choose_what_learns(self.model, config)
        hidden = [config.value_hidden_size] * 2
        self.value_network = ValueHead(config, self.model.width, hidden)

    @property
    def contract(self) -> Contract:
        """The simulator's, with the convention and the statistics of the checkpoint."""
        return self.robot.contract

    @property
    def architecture(self) -> dict[str, Any]:
        """That a folder holds the network (policy_folder)."""
        return {"native": "openvla"}

    def act(
        self,
        observation: Observation,
        generator: Randomness,
        mode: Literal["explore", "deterministic"],
    ) -> Decision:
        """Decide for B environments (contracts.Policy). Deterministic takes the likeliest."""
        with torch.no_grad():
            prefix = self._read(observation)
            uniform = None
            if mode == "explore":
                shape = (len(observation), self.chunk * self._simulator.action_dim)
                uniform = uniform_numbers(shape, generator, prefix.mask.device)
            chosen, estimate = self._speak(prefix, uniform)
            drawn = self._grid(chosen.token)
            log_prob = self._grid(chosen.score).sum(-1)
            units = token_values(drawn, self._count).float()
            actions = self._to_environment(units)
            if mode == "deterministic":
                return Decision(actions, torch.zeros_like(log_prob), estimate.value, {})
            trace = {"tokens": drawn} | ({} if chosen.kept is None else {"kept": chosen.kept})
            return Decision(actions, log_prob, estimate.value, trace, chosen.score)

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded tokens (contracts.Policy), all in one pass."""
        spoken = trace["tokens"].flatten(1)
        logits, estimate = self._hear(self._read(observation), spoken)
        log_probs = tokens.token_log_probs(logits, self._config.temperature, trace.get("kept"))
        scores = log_probs.gather(-1, spoken[..., None])[..., 0]
        steps = torch.arange(self.chunk, device=scores.device)
        return Evaluation(
            log_prob=self._grid(scores).sum(-1),
            entropy=self._grid(tokens.entropy(log_probs)).sum(-1),
            value=estimate.value,
            histogram=estimate.histogram,
            token_log_prob=scores,
            token_step=steps.repeat_interleave(self._simulator.action_dim).expand(len(scores), -1),
        )

    def value(self, observation: Observation) -> Tensor:
        """Expected return [B]."""
        return self.estimate(observation).value

    def estimate(self, observation: Observation) -> Estimate:
        """Expected return, with the histogram that it is the mean of if there is one."""
        prefix = self._read(observation)
        with torch.no_grad():
            hidden = self._run(*prefix)
        return self._estimate(hidden[:, -1])

    def prepare(self, observation: Observation) -> dict[str, Tensor]:
        """What the vision transformers say (contracts.Policy), unless they learn."""
        if not self._config.reuse_features or self._vision_learns:
            return {}
        with torch.no_grad():
            require_observation(self._simulator, observation)
            return {"features": self._features(self.robot.adapter.observation(observation))}

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Mean cross-entropy of the demonstrated tokens (contracts.Policy)."""
        units = self.robot.actions.to_units(self.robot.to_checkpoint(actions))
        spoken = tokens_of(units, self._count).flatten(1)
        logits, _ = self._hear(self._read(observation), spoken)
        scores = tokens.token_log_probs(logits).gather(-1, spoken[..., None])[..., 0]
        return -masked_mean(self._grid(scores), valid)

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Only where the options ask for it; otherwise the checkpoint's statistics stay."""
        self.robot.fit(state, actions)

    def policy_parameters(self) -> list[nn.Parameter]:
        """What learns of the checkpoint's network."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def value_parameters(self) -> list[nn.Parameter]:
        """The value network's."""
        return list(self.value_network.parameters())

    def train(self, mode: bool = True) -> Self:
        """Nothing is ever dropped out: decisions are scored as they were made."""
        super().train(mode)
        self.model.eval()
        return self

    def save_native(self, folder: Path) -> None:
        """Write the checkpoint in its release's layout, with adapters merged into the weights."""
        weights = merged_weights(self.model)
        openvla_checkpoint.save(self._checkpoint, weights, self.robot.statistics, folder)

    def _require_kind(self, checkpoint: Checkpoint) -> None:
        if checkpoint.parts:
            raise BadCheckpoint(
                f"the checkpoint {checkpoint.folder} has {' and '.join(checkpoint.parts)}, so it "
                f"is one of OpenVLA-OFT: set policy: openvla_oft"
            )

    def _cameras(self) -> tuple[str, ...]:
        """The simulator's cameras that are looked through, in order."""
        have = tuple(camera.name for camera in self._simulator.cameras)
        convention = self._config.convention
        known = dict.fromkeys(convention.cameras.values()) if convention else {}
        chosen = self._config.cameras or tuple(name for name in known if name in have) or have
        offers = f"the simulator has {', '.join(have) or 'no camera'}"
        if unknown := [name for name in chosen if name not in have]:
            raise BadCheckpoint(f"policy.cameras names {', '.join(unknown)}, but {offers}")
        if not chosen:
            raise BadCheckpoint(f"{type(self).__name__} looks through a camera, but {offers}")
        self._require_number_of_cameras(chosen, offers)
        return chosen

    def _require_number_of_cameras(self, chosen: tuple[str, ...], offers: str) -> None:
        if len(chosen) > 1:
            raise BadCheckpoint(
                f"OpenVLA sees one image, but {offers}; set policy.cameras=[{chosen[0]}]"
            )

    def _read(self, observation: Observation) -> Prefix:
        """The first token, the images' patches, the state if the checkpoint reads it, the rest of
        the prompt."""
        rows = len(observation)
        if not observation.prepared:
            require_observation(self._simulator, observation)
        observation = self.robot.adapter.observation(observation)
        with self._rounding():
            seen = [self.model.project(self._features(observation).flatten(0, 1), rows)]
            if self.model.proprio_projector is not None and self.robot.state is not None:
                state = self.robot.state.to_units(observation.state).to(seen[0].dtype)
                seen.append(self.model.proprio_projector(state))
        words = self._prompts(observation.instruction, seen[0].device)
        text = self.model.embed(words.ids)
        parts = [text[:, :1], *(part.to(text.dtype) for part in seen), text[:, 1:]]
        shown = words.mask.new_ones(rows, sum(part.shape[1] for part in seen))
        mask = torch.cat([words.mask[:, :1], shown, words.mask[:, 1:]], dim=1)
        return Prefix(torch.cat(parts, dim=1), mask)

    def _features(self, observation: Observation) -> Tensor:
        """What the vision transformers say [B, N, P, width] of each patch of N images, of an
        observation as the checkpoint sees it."""
        if observation.prepared:
            return observation.prepared["features"]
        grad = torch.is_grad_enabled() and self._vision_learns
        with torch.set_grad_enabled(grad), self._rounding():
            pixels = self.images(observation).to(getattr(torch, self._config.dtype))
            features: Tensor = self.model.vision_backbone(pixels.flatten(0, 1))
        return features.view(*pixels.shape[:2], *features.shape[1:])

    def _rounding(self) -> torch.autocast:
        """Within it, networks compute in the option's precision."""
        device = self.images.means.device.type
        rounds = self._config.precision == "bfloat16"
        return torch.autocast(device, torch.bfloat16, enabled=rounds)

    @property
    def _vision_learns(self) -> bool:
        return any(p.requires_grad for p in self.model.vision_backbone.parameters())

    def _run(self, embeddings: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        """Hidden states [B, L, width] of embeddings [B, L, width]. The mask [B, K] also covers what
        the cache holds."""
        length = embeddings.shape[1]
        positions = (mask.long().cumsum(dim=1) - 1)[:, -length:]
        if self._config.gradient_checkpointing:
            self.model.checkpoint_language(torch.is_grad_enabled() and cache is None)
        with self._rounding():
            output = self.model.language_model.model(
                inputs_embeds=embeddings,
                attention_mask=self._attention(mask, length),
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _attention(self, mask: Tensor, length: int) -> Tensor:
        """What transformers takes: a mask [B, K] for causal attention."""
        return mask.long()

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden, self._first, self._count)

    def _hear(self, prefix: Prefix, spoken: Tensor) -> tuple[Tensor, Estimate]:
        """Logits [B, P, V] of every token given those of `spoken` [B, P] before, and the value."""
        said = self.model.embed(self._first + spoken[:, :-1])
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(said.shape[:2])], dim=1)
        hidden = self._run(torch.cat([prefix.embeddings, said], dim=1), mask)
        answers = hidden[:, prefix.mask.shape[1] - 1 :]
        return self._logits(answers), self._estimate(answers[:, 0])

    def _speak(self, prefix: Prefix, uniform: Tensor | None) -> SpokenActions:
        """Tokens [B, P], drawn with the numbers [B, P] or the likeliest if there are none."""
        from transformers import DynamicCache

        cache = DynamicCache()
        inputs, mask = prefix
        found: list[Chosen] = []
        for i in range(self.chunk * self._simulator.action_dim):
            last = self._run(inputs, mask, cache)[:, -1]
            if i == 0:
                estimate = self._estimate(last)
            numbers = None if uniform is None else uniform[:, i]
            found.append(choose(self._config, self._logits(last), numbers))
            inputs = self.model.embed(self._first + found[-1].token[:, None])
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return SpokenActions(together(found), estimate)

    def _estimate(self, hidden: Tensor) -> Estimate:
        """Of the hidden state of the prompt's last token [B, width], without gradients into it: the
        value must not bend what the policy knows."""
        features = hidden.detach().float()
        found: Estimate = self.value_network(layer_norm(features, features.shape[-1:]))
        return found

    def _grid(self, values: Tensor) -> Tensor:
        """[B, H, A] of values per token [B, H * A]: all numbers of the first step, then of the
        second."""
        return values.view(len(values), self.chunk, -1)

    def _to_environment(self, units: Tensor) -> Tensor:
        return self.robot.to_environment(self.robot.actions.from_units(units))


def masked_mean(values: Tensor, valid: Tensor) -> Tensor:
    """The mean of values [B, H, A] over the steps where `valid` [B, H]; 0 if there are none."""
    counted = torch.where(valid[..., None], values, torch.zeros_like(values))
    return counted.sum() / (valid.sum().clamp_min(1) * values.shape[-1])
