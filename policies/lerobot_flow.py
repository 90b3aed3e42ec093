"""pi0, pi0.5 and SmolVLA, as lerobot's own classes, behind the contract of a policy.

The chain of denoising steps has the checkpoint's whole chunk and padded dimensions; executed and
scored are the first `chunk` steps and the robot's own dimensions (`flow_head.ChainSize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation, Observation
from policies.flow_head import ChainSize, FlowHead
from policies.layers import LARGEST_STATE, require_observation
from policies.lerobot_adapters import set_trainable
from policies.lerobot_backbones import backbone_of
from policies.lerobot_checkpoint import (
    load_native,
    resolve,
    save_vlm_description,
    type_of,
)
from policies.lerobot_denoising import Backbone, Prefix
from policies.lerobot_fitting import cameras_of, require_fitting
from policies.lerobot_layers import Memory
from policies.lerobot_processors import Processors
from policies.lora import merged_weights
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from policies.lerobot_config import LerobotFlowConfig


class LerobotFlow(nn.Module):
    """A flow policy of lerobot; meets contracts.Policy."""

    native_prefix = "native."
    """Weights with this prefix are saved by `save_native`, in lerobot's own files."""
    exploration_weights = ("head.transition.",)
    """Weights that only draw noise: a policy loaded to explore in another way gets new ones."""

    def __init__(self, config: LerobotFlowConfig, contract: Contract, path: str) -> None:
        """Load the checkpoint at `path`. Raises BadCheckpoint (a ValueError)."""
        super().__init__()
        self.chunk, self._config = config.chunk, config
        folder = resolve(path)
        self.architecture = {"native": type_of(folder, config.type)}
        self.processors = Processors(folder, contract, config.tokenizer, config.convention)
        self.native = load_native(folder, config.type)
        # A plain lerobot then samples as this policy does.
        steps = "num_steps" if self.native.name == "smolvla" else "num_inference_steps"
        setattr(self.native.config, steps, config.denoise_steps)
        self.backbone: Backbone = backbone_of(self.native, config)
        fitted = bool(self.processors.missing_statistics)
        require_fitting(self.native, self._seen, self.chunk, fitted, path)
        self._cameras = cameras_of(
            self.backbone.images, config.cameras, contract, config.convention
        )
        set_trainable(self.backbone, config)
        if config.dtype == "bfloat16":
            self.backbone.round_vision_language()
        self.imitated_steps = self.backbone.chunk_size
        size = ChainSize(
            self.backbone.chunk_size,
            self.backbone.max_action_dim,
            config.chunk,
            contract.action_dim,
        )
        feature_size = self.backbone.feature_size
        self.head = FlowHead(config, contract, feature_size, size, self.processors)
        of_vlm = config.value_from == "vlm"
        features = self.backbone.pooled_size if of_vlm else feature_size
        hidden = [config.value_hidden_size] * 2
        self.value_network = ValueHead(config, features + self._seen.state_dim, hidden)

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
        """Decide for B environments (contracts.Policy)."""
        with torch.no_grad():
            prefix = self._prefix(observation)
            memory = self.backbone.memory(prefix)
            value = self._estimate(prefix, memory).value
            return self.head.sample(self.backbone.velocity, memory, value, generator, mode)

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded decisions (contracts.Policy)."""
        prefix = self._prefix(observation)
        memory = self.backbone.memory(prefix)
        found = self._estimate(prefix, memory)
        memories = memory.repeat(self.head.num_scored(trace))
        return self.head.score(self.backbone.velocity, memories, found, trace)

    def value(self, observation: Observation) -> Tensor:
        """Expected return [B]."""
        return self.estimate(observation).value

    def estimate(self, observation: Observation) -> Estimate:
        """Expected return, with the histogram that it is the mean of if there is one."""
        return self._estimate(self._prefix(observation))

    def prepare(self, observation: Observation) -> dict[str, Tensor]:
        """The prefix (contracts.Policy), unless what it is made with learns."""
        if not self._config.reuse_prefix or self._prefix_learns:
            return {}
        return self._prefix(observation).tensors()

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Flow-matching loss of chunks [B, imitated_steps, A] (contracts.Policy), at times drawn as
        lerobot draws them."""
        memory = self.backbone.memory(self._prefix(observation))
        time = self.backbone.imitation_times(len(actions), generator).to(actions.device)
        return self.head.loss(self.backbone.velocity, memory, actions, valid, generator, time)

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Take statistics from demonstrations, where the checkpoint brought none of its own."""
        self.processors.fit(state, actions)

    def rehearsal(self) -> AbstractContextManager[None]:
        """Within it, decides without statistics (contracts.Policy)."""
        return self.processors.rehearsal()

    def policy_parameters(self) -> list[nn.Parameter]:
        """What learns of lerobot's weights, and the noise network if there is one."""
        mine = [*self.native.parameters(), *self.head.parameters()]
        return [parameter for parameter in mine if parameter.requires_grad]

    def value_parameters(self) -> list[nn.Parameter]:
        """The value network's."""
        return list(self.value_network.parameters())

    def set_progress(self, share: float) -> None:
        """Anneal the exploration noise (FlowHead.set_progress)."""
        self.head.set_progress(share)

    def train(self, mode: bool = True) -> Self:
        """lerobot's model never drops anything out: decisions are scored as they were made."""
        super().train(mode)
        self.native.eval()
        return self

    def save_native(self, folder: Path) -> None:
        """Write the checkpoint as lerobot does, with adapters merged into the weights."""
        self.processors.save(folder)
        self.native.save_pretrained(folder, state_dict=merged_weights(self.native))
        save_vlm_description(self.native, folder)

    @property
    def _seen(self) -> Contract:
        """What the checkpoint sees of the simulator."""
        return self.processors.adapter.checkpoint

    @property
    def _prefix_learns(self) -> bool:
        modules = self.backbone.vision_language()
        return any(p.requires_grad for module in modules for p in module.parameters())

    def _prefix(self, observation: Observation) -> Prefix:
        if observation.prepared:
            return Prefix.from_tensors(observation.prepared)
        require_observation(self.processors.adapter.simulator, observation)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._prefix_learns):
            return self.backbone.prefix(self.processors.inputs(observation, self._cameras))

    def _estimate(self, prefix: Prefix, memory: Memory | None = None) -> Estimate:
        with torch.no_grad():
            state = prefix.state[:, : self._seen.state_dim]
            if self._config.value_from == "vlm":
                seen = prefix.pooled
            else:
                seen = self._calm_features(memory or self.backbone.memory(prefix))
            # Whatever scale the features have, the value head begins with moderate ones.
            seen = layer_norm(seen, seen.shape[-1:])
        state = state.clamp(-LARGEST_STATE, LARGEST_STATE)
        found: Estimate = self.value_network(torch.cat([seen, state], dim=-1))
        return found

    def _calm_features(self, memory: Memory) -> Tensor:
        """The expert's mean output [B, width] at the executed steps, of zero noise at time 1."""
        batch, device = len(memory.view.mask), memory.view.mask.device
        nowhere = torch.zeros(batch, self.head.size.steps, self.head.size.dims, device=device)
        _, features = self.backbone.velocity(memory, nowhere, torch.ones(batch, device=device))
        return features[:, : self.chunk].mean(dim=1)
