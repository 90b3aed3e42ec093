"""pi0, pi0.5 and SmolVLA, as lerobot's own classes, behind the contract of a policy.

The chain of denoising steps has the checkpoint's whole chunk and padded dimensions; executed and
scored are the first `chunk` steps and the robot's own dimensions (`flow_head.ChainSize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from embodied_rl.contracts import Contract, Decision, Estimate, Evaluation, Observation
from policies.checkpoints import BadCheckpoint
from policies.flow_head import ChainSize, FlowHead
from policies.layers import LARGEST_STATE, require_observation
from policies.lerobot_adapters import set_trainable
from policies.lerobot_backbones import Backbone, Prefix, backbone_of
from policies.lerobot_checkpoint import (
    load_native,
    resolve,
    save_vlm_description,
    type_of,
)
from policies.lerobot_processors import Processors
from policies.lora import merged_weights
from policies.value_head import ValueHead

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness
    from embodied_rl.conventions.config import ConventionConfig
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
        self.architecture = {"native": type_of(folder)}
        self.processors = Processors(
            folder, self.architecture["native"], contract, config.tokenizer, config.convention
        )
        self.native = load_native(folder, config)
        self.backbone: Backbone = backbone_of(self.native)
        self._require_fitting(path)
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
            value = self._estimate(observation, prefix).value
            return self.head.sample(self.backbone.velocity, prefix, value, generator, mode)

    def evaluate(self, observation: Observation, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score recorded decisions (contracts.Policy)."""
        prefix = self._prefix(observation)
        found = self._estimate(observation, prefix)
        prefixes = prefix.repeat(self.head.num_scored(trace))
        return self.head.score(self.backbone.velocity, prefixes, found, trace)

    def value(self, observation: Observation) -> Tensor:
        """Expected return [B]."""
        return self.estimate(observation).value

    def estimate(self, observation: Observation) -> Estimate:
        """Expected return, with the histogram that it is the mean of if there is one."""
        return self._estimate(observation, self._prefix(observation))

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
        prefix = self._prefix(observation)
        time = self.backbone.imitation_times(len(actions), generator).to(actions.device)
        return self.head.loss(self.backbone.velocity, prefix, actions, valid, generator, time)

    def fit_normalisation(self, state: Tensor, actions: Tensor) -> None:
        """Take statistics from demonstrations, where the checkpoint brought none of its own."""
        self.processors.fit(state, actions)

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

    def _estimate(self, observation: Observation, prefix: Prefix) -> Estimate:
        with torch.no_grad():
            state = prefix.state[:, : self._seen.state_dim]
            if self._config.value_from == "vlm":
                seen = prefix.pooled
            else:
                shape = (len(observation), self.head.size.steps, self.head.size.dims)
                nowhere = torch.zeros(shape, device=state.device)
                begin = torch.ones(len(observation), device=state.device)
                _, features = self.backbone.velocity(prefix, nowhere, begin)
                seen = features[:, : self.chunk].mean(dim=1)
            # Whatever scale the features have, the value head begins with moderate ones.
            seen = layer_norm(seen, seen.shape[-1:])
        state = state.clamp(-LARGEST_STATE, LARGEST_STATE)
        found: Estimate = self.value_network(torch.cat([seen, state], dim=-1))
        return found

    def _require_fitting(self, path: str) -> None:
        """Chunk and sizes fit; a plain lerobot will be told the simulator's sizes."""
        back, contract = self.backbone, self._seen
        if self.chunk > back.chunk_size:
            raise BadCheckpoint(
                f"policy.chunk={self.chunk} is more than the {back.chunk_size} steps that the "
                f"checkpoint {path} plans; choose at most {back.chunk_size}"
            )
        config = self.native.config
        fitted = bool(self.processors.missing_statistics)
        for what, features, size, most in (
            ("observation.state", config.input_features, contract.state_dim, back.max_state_dim),
            ("action", config.output_features, contract.action_dim, back.max_action_dim),
        ):
            known = features[what].shape[0] if what in features else 0
            if not size or size > most or (known not in (size, most) and not fitted):
                raise BadCheckpoint(
                    f"the simulator has {size} entries in {what}, but the checkpoint {path} was "
                    f"made for {known} and has room for {most}; choose a checkpoint for this robot "
                    f"and controller"
                )
            features[what].shape = (size,)


def cameras_of(
    images: list[str],
    given: Mapping[str, str],
    contract: Contract,
    convention: ConventionConfig | None = None,
) -> dict[str, str]:
    """The simulator's camera for each image of the checkpoint, in the checkpoint's order: as given,
    as the convention knows, with the same names, or all of them in order.

    Raises BadCheckpoint if a name is not known, or if it is not clear which camera is which.
    """
    have = [camera.name for camera in contract.cameras]
    offers = f"the checkpoint has {', '.join(images)}; the simulator {', '.join(have) or 'none'}"
    for key, name in given.items():
        if key not in images or name not in have:
            raise BadCheckpoint(f"policy.cameras names {key}: {name}, but {offers}")
    by_name = {key: key.rpartition(".")[2] for key in images}
    if not given and convention:
        known = {key: convention.cameras.get(name) for key, name in by_name.items()}
        given = {key: name for key, name in known.items() if name in have and name is not None}
    if given:
        return {key: given[key] for key in images if key in given}
    if set(by_name.values()) <= set(have):
        return by_name
    if len(images) != len(have):
        raise BadCheckpoint(
            f"{offers}. Say which is which, such as policy.cameras={{{images[0]}: "
            f"{(have or ['CAMERA'])[0]}}}"
        )
    return dict(zip(images, have, strict=True))
