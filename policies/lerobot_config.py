"""Options of the policies of lerobot: pi0, pi0.5 and SmolVLA, and pi0-FAST."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from embodied_rl import catalogue
from embodied_rl.conventions.known import Convention
from policies.config import FlowConfig, SamplingConfig, ValueConfig

if TYPE_CHECKING:
    from embodied_rl.contracts import Contract, Policy


class LerobotCheckpointConfig(ValueConfig):
    """How any checkpoint of lerobot is found, fitted to a simulator and trained."""

    needs_cameras: ClassVar[bool] = True
    policy_class: ClassVar[str]
    kinds: ClassVar[str]
    """The policies of lerobot that it may be of, in words."""
    example: ClassVar[str]
    """A checkpoint on the Hub."""
    path: str | None = None
    """The checkpoint: a folder as lerobot's `save_pretrained` writes it, processors included, or a
    name on the Hugging Face Hub. Needed, but for a policy folder that this project saved."""
    tokenizer: Path | None = None
    """A folder with the text tokenizer, instead of the name that the checkpoint gives."""
    cameras: dict[str, str] = Field(default_factory=dict)
    """The simulator's camera for each image of the checkpoint, such as
    {observation.images.camera1: base_camera}. Images left out are masked, where the checkpoint
    allows it. By default cameras with the same names, or all of them in order."""
    convention: Convention | None = None
    """How the checkpoint speaks of images, states and actions, where that is not how the simulator
    does: `libero_openpi`, another one of `embodied_rl/conventions/known.py`, or one inline."""
    trainable: str
    lora_rank: int = Field(16, ge=1)
    lora_alpha: float = Field(16.0, gt=0.0)
    """Adapters count `lora_alpha / lora_rank` times."""
    lora_targets: str | None = None
    """A regular expression for the names of the modules to adapt. By default those that lerobot
    adapts in a flow policy (queries and values of the action expert, and the projections), and all
    linear layers of the language model in one that speaks, where the word head never is."""
    value_hidden_size: int = Field(256, ge=8)

    @model_validator(mode="after")
    def _targets_belong_to_adapters(self) -> Self:
        if self.lora_targets and self.trainable != "lora":
            raise ValueError("lora_targets belongs to trainable=lora")
        return self

    def build(self, contract: Contract) -> Policy:
        """The checkpoint's policy for this contract, with a new value head.

        Raises ValueError naming what is missing in the checkpoint or does not fit the contract.
        """
        if self.path is None:
            raise ValueError(
                f"policy.path is needed: a folder with a checkpoint of {self.kinds} as lerobot "
                f"saves it, or its name on the Hugging Face Hub, such as {self.example}"
            )
        policy: Policy = catalogue.load(self.policy_class)(self, contract, self.path)
        return policy

    def rebuild(self, contract: Contract, architecture: dict[str, Any], folder: Path) -> Policy:
        """The policy of a saved folder, which holds checkpoint and tokenizer; neither `path` nor
        the tokenizer's folder is needed."""
        own = self.model_copy(update={"tokenizer": None})
        policy: Policy = catalogue.load(self.policy_class)(own, contract, str(folder))
        return policy


class LerobotFlowConfig(FlowConfig, LerobotCheckpointConfig):
    """pi0, pi0.5 or SmolVLA from a checkpoint of lerobot, which says which of them it is."""

    type: Literal["lerobot_flow"] = "lerobot_flow"
    policy_class: ClassVar[str] = "policies.lerobot_flow:LerobotFlow"
    kinds: ClassVar[str] = "pi0, pi05 or smolvla"
    example: ClassVar[str] = "lerobot/pi05_base"
    trainable: Literal["all", "expert", "lora"] = "expert"
    """What learns: everything; the action expert and its projections, with the vision-language
    model frozen; or low-rank adapters (LoRA), which are merged into the weights on saving."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen vision-language model."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """In which the action expert computes. Its weights, the denoising chain and the likelihood are
    float32 in any case. With bfloat16, log-probabilities depend a little on how decisions are
    batched: a ratio_tolerance of about 0.3 is then needed."""
    gradient_checkpointing: bool = False
    """Keep no activations within the layers and compute them again for the gradient: less memory,
    about a third more time."""
    compile: Literal["none", "default", "cuda_graphs"] = "none"
    """Compile the denoising step with torch.compile, which takes minutes once and a C++ compiler;
    `cuda_graphs` also replays it as one graph while decisions are drawn, on CUDA devices alone."""
    value_from: Literal["vlm", "expert"] = "vlm"
    """What the value is read from, without gradients into it: the mean of the vision-language
    model's outputs at the real tokens (pi_RL's V_vlm), or of the expert's at the executed steps
    (V_expert, arXiv:2510.25889, section 4.3), always at zero noise and time 1, so that rollout and
    training read the same. Both also see the state."""
    reuse_prefix: bool = True
    """While nothing in the vision-language model learns, keep what it makes of each collected
    observation until the end of the update. Saves its forward passes, and needs memory: for pi0
    with three cameras in bfloat16 about 15 MB per decision."""

    @model_validator(mode="after")
    def _frozen_parts_may_be_rounded(self) -> Self:
        learns = self.trainable == "all" or (self.trainable == "lora" and self.lora_targets)
        if self.dtype == "bfloat16" and learns:
            raise ValueError(
                "dtype=bfloat16 is for a frozen vision-language model: small updates of bfloat16 "
                "weights would be rounded away; choose trainable=expert, or trainable=lora with "
                "the default lora_targets, or dtype=float32"
            )
        return self


class LerobotTokensConfig(SamplingConfig, LerobotCheckpointConfig):
    """pi0-FAST from a checkpoint of lerobot: a chunk in a varying number of FAST tokens
    (arXiv:2501.09747). It counts whole in learning, also where an episode ended within it."""

    type: Literal["lerobot_tokens"] = "lerobot_tokens"
    policy_class: ClassVar[str] = "policies.lerobot_tokens:LerobotTokens"
    kinds: ClassVar[str] = "pi0_fast"
    example: ClassVar[str] = "lerobot/pi0fast-base"
    # Every token shapes all steps of its chunk.
    ratio_levels: ClassVar[tuple[str, ...]] = ("chunk", "token")
    processor: Path | None = None
    """A folder with the FAST processor's processor_config.json and tokenizer.json, instead of the
    name that the checkpoint gives. Code that lies in it is never run."""
    chunk: int = Field(10, ge=1)
    """H: control steps executed per decision, of those that the checkpoint plans."""
    trainable: Literal["all", "lora"] = "lora"
    """What learns: everything, or low-rank adapters (LoRA), which are merged into the weights on
    saving."""

    def rebuild(self, contract: Contract, architecture: dict[str, Any], folder: Path) -> Policy:
        """As of every checkpoint of lerobot; the FAST processor lies in the folder as well."""
        own = self.model_copy(update={"processor": None})
        return super(LerobotTokensConfig, own).rebuild(contract, architecture, folder)
