"""Options of OpenVLA and OpenVLA-OFT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from embodied_rl import catalogue
from embodied_rl.conventions.known import Convention
from policies.config import SamplingConfig, ValueConfig

if TYPE_CHECKING:
    from embodied_rl.contracts import Contract, Policy


class OpenVLACheckpointConfig(ValueConfig, SamplingConfig):
    """What OpenVLA and OpenVLA-OFT share: how a released checkpoint is used and explored."""

    needs_cameras: ClassVar[bool] = True
    ratio_levels: ClassVar[tuple[str, ...]] = ("chunk", "step", "token")
    policy_class: ClassVar[str]
    example: ClassVar[str]
    """A checkpoint on the Hub."""
    chunk: int
    path: str | None = None
    """The checkpoint: a folder as downloaded, or its name on the Hugging Face Hub. Needed, but for
    a policy folder that this project saved. Code that lies in it is never run."""
    unnorm_key: str | None = None
    """Whose statistics scale the actions: a data set of the checkpoint's `norm_stats` or
    `dataset_statistics.json`. Can be left out if there is only one."""
    fit_statistics: bool = False
    """For a new robot: take these statistics from the demonstrations instead, and keep them under
    `unnorm_key`. Until there are any, actions span the environment's bounds."""
    cameras: tuple[str, ...] = ()
    """The simulator's cameras in the order in which the checkpoint takes images: third person
    first, wrist cameras after it. By default those of the convention, or all in the simulator's
    order."""
    center_crop: bool = False
    """See the middle 90 % of the image's area alone, enlarged: for checkpoints that were fine-tuned
    with random crops, such as those for LIBERO."""
    convention: Convention | None = None
    """How the checkpoint speaks of images, states and actions, where that is not how the simulator
    does: `libero_openvla`, `bridge_openvla`, another one of `embodied_rl/conventions/known.py`, or
    one inline. Most data sets have a gripper of 1 for open and 0 for closed."""
    trainable: Literal["all", "lora"] = "lora"
    """What learns: everything that is used, or low-rank adapters (LoRA, arXiv:2106.09685) in all
    its linear layers but the word head, which are merged into the weights on saving."""
    freeze_vision: bool = False
    """Leave the two vision transformers as they are."""
    lora_rank: int = Field(32, ge=1)
    lora_alpha: float = Field(16.0, gt=0.0)
    """Adapters count `lora_alpha / lora_rank` times."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the checkpoint's weights; adapters, logits and likelihoods are float32 in any case. With
    bfloat16, log-probabilities depend a little on how decisions are batched: a ratio_tolerance of
    about 0.3 is then needed."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """In which networks compute whose weights are float32; log-probabilities then depend on batches
    in the same way. Weights, logits and likelihoods stay in float32."""
    gradient_checkpointing: bool = False
    """Keep no activations within the layers and compute them again for the gradient: less memory,
    about a third more time."""
    reuse_features: bool = True
    """While the vision transformers do not learn, keep what they say of each collected observation
    until the end of the update: saves their forward passes, and needs about 1 MB per image and
    decision in bfloat16."""
    value_hidden_size: int = Field(512, ge=8)

    @model_validator(mode="after")
    def _what_learns_is_not_rounded(self) -> Self:
        if self.dtype == "bfloat16" and self.trainable == "all":
            raise ValueError(
                "dtype=bfloat16 does not fit trainable=all: small updates of bfloat16 weights "
                "would be rounded away; choose trainable=lora or dtype=float32"
            )
        if self.fit_statistics and self.unnorm_key is None:
            raise ValueError(
                "fit_statistics=true needs a name for the new statistics: set unnorm_key"
            )
        return self

    def build(self, contract: Contract) -> Policy:
        """The checkpoint's policy for this contract, with a new value head.

        Raises ValueError naming what is missing in the checkpoint or does not fit the contract.
        """
        if self.path is None:
            raise ValueError(
                f"policy.path is needed: a folder with a checkpoint, or its name on the Hugging "
                f"Face Hub, such as {self.example}"
            )
        policy: Policy = catalogue.load(self.policy_class)(self, contract, self.path)
        return policy

    def rebuild(self, contract: Contract, architecture: dict[str, Any], folder: Path) -> Policy:
        """The policy of a saved folder, which holds the checkpoint; `path` is not needed."""
        policy: Policy = catalogue.load(self.policy_class)(self, contract, str(folder))
        return policy


class OpenVLAConfig(OpenVLACheckpointConfig):
    """OpenVLA (arXiv:2406.09246) from its released checkpoints: one token per number, in turn."""

    type: Literal["openvla"] = "openvla"
    policy_class: ClassVar[str] = "policies.openvla:OpenVLA"
    example: ClassVar[str] = "openvla/openvla-7b"
    chunk: int = Field(1, ge=1)
    """H: control steps planned and executed per decision. The release speaks one action."""

    @model_validator(mode="after")
    def _one_image(self) -> Self:
        if len(self.cameras) > 1:
            raise ValueError(
                f"OpenVLA sees one image, got cameras={list(self.cameras)}; openvla_oft sees more"
            )
        return self


class OpenVLAOFTConfig(OpenVLACheckpointConfig):
    """OpenVLA-OFT (arXiv:2502.19645) from its released checkpoints: a chunk in one parallel pass.
    Whether it also sees the state is up to the checkpoint."""

    type: Literal["openvla_oft"] = "openvla_oft"
    policy_class: ClassVar[str] = "policies.openvla_oft:OpenVLAOFT"
    example: ClassVar[str] = "moojink/openvla-7b-oft-finetuned-libero-spatial"
    chunk: int = Field(8, ge=1)
    """H: control steps planned and executed per decision."""
    head: Literal["tokens", "l1"] = "tokens"
    """What the checkpoint was trained for: tokens, which reinforcement learning needs, or numbers
    by L1 regression, which can be evaluated and imitated."""

    @property
    def explores(self) -> bool:
        """Whether decisions have a likelihood."""
        return self.head == "tokens"
