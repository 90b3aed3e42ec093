"""Options of the policies. Kept apart from the networks so that a configuration is checked without
importing torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from embodied_rl import catalogue
from embodied_rl.config import Config

if TYPE_CHECKING:
    from embodied_rl.contracts import Contract, Policy


class ValueConfig(Config):
    """How a policy's value head is built; shared by all policies."""

    value_head: Literal["scalar", "hl_gauss"] = "scalar"
    """The expected return as one number, learned by its squared error, or as the mean of a
    histogram, learned by cross-entropy (HL-Gauss, arXiv:2403.03950)."""
    value_range: tuple[float, float] = (-0.1, 1.1)
    """Returns that the histogram covers; it should reach a little past the possible ones. The
    default is for a single reward of 1."""
    value_bins: int = Field(101, ge=2)
    """Bins of the histogram."""

    @model_validator(mode="after")
    def _value_range_is_one(self) -> Self:
        low, high = self.value_range
        if not low < high:
            raise ValueError(
                f"value_range={list(self.value_range)} must be two rising numbers, such as "
                f"[-0.1, 1.1]"
            )
        return self


class FlowConfig(Config):
    """How a flow policy draws actions; shared by all flow policies."""

    chunk: int = Field(4, ge=1)
    """H: control steps planned and executed per decision."""
    denoise_steps: int = Field(4, ge=2)
    """K: Euler steps from noise to actions."""
    exploration: Literal["flow_sde", "flow_noise", "fpo"] = "flow_sde"
    """Where randomness comes from: fixed noise that keeps the marginals, or a learned noise in
    every step (piRL, arXiv:2510.25889). `fpo` adds none and scores actions by their flow-matching
    loss instead of a likelihood (arXiv:2507.21053)."""
    fpo_samples: int = Field(8, ge=1)
    """M: pairs of noise and time at which FPO measures that loss."""
    noise_level: float = Field(0.5, gt=0.0, le=2.0)
    """a of Flow-SDE: scale of the exploration noise (piRL, equation for sigma_t)."""
    stochastic_steps: Literal["one", "all"] = "one"
    """Flow-SDE's steps that draw noise: one per decision, chosen per environment, or all."""
    skip_last_step: bool = True
    """Never make Flow-SDE's last denoising step stochastic: its noise would stay in the action."""
    noise_std: tuple[float, float] = (0.08, 0.16)
    """Bounds of Flow-Noise's learned deviation, in deviations of the demonstrated actions."""
    chain_log_prob: Literal["sum", "mean"] = "sum"
    """Flow-Noise's log-probability of a chain: the exact sum over its steps, or the mean over
    K + 1 terms that piRL's public code takes, which tempers the ratio."""
    final_noise: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the exploration noise that is left at the end of training; it falls linearly."""

    @model_validator(mode="after")
    def _exploration_fits(self) -> Self:
        low, high = self.noise_std
        if not 0.0 < low < high:
            raise ValueError(
                f"noise_std={list(self.noise_std)} must be two rising positive numbers, such as "
                f"[0.08, 0.16]"
            )
        for name, owner in _BELONGS_TO.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and self.exploration != owner:
                raise ValueError(
                    f"{name}={value} belongs to exploration={owner} and would do nothing with "
                    f"exploration={self.exploration}; leave it out"
                )
        if self.exploration == "fpo" and self.final_noise != 1.0:
            raise ValueError(
                f"final_noise={self.final_noise} anneals exploration noise, and exploration=fpo "
                f"has none; leave it out"
            )
        return self


_BELONGS_TO = {
    "noise_level": "flow_sde",
    "stochastic_steps": "flow_sde",
    "skip_last_step": "flow_sde",
    "noise_std": "flow_noise",
    "chain_log_prob": "flow_noise",
    "fpo_samples": "fpo",
}
"""Options of FlowConfig that one kind of exploration reads."""


class FlowMLPConfig(FlowConfig, ValueConfig):
    """A flow policy on the state alone: small, for tasks without cameras."""

    type: Literal["flow_mlp"] = "flow_mlp"
    needs_cameras: ClassVar[bool] = False
    hidden_size: int = Field(256, ge=8)
    num_layers: int = Field(3, ge=1)
    value_hidden_size: int = Field(256, ge=8)
    instruction_size: int = Field(0, ge=0)
    """Width of what the policy reads from the instruction; 0 does not read it. Several tasks need
    it."""

    def build(self, contract: Contract) -> Policy:
        """A new policy with random weights for this contract."""
        policy: Policy = catalogue.load("policies.flow_mlp:FlowMLP")(self, contract)
        return policy


class PrefixConfig(ValueConfig):
    """How a vision-language-action policy sees."""

    hidden_size: int = Field(128, ge=16)
    """Width of all tokens."""
    num_prefix_layers: int = Field(2, ge=1)
    """Transformer layers over image patches, instruction and state."""
    num_heads: int = Field(4, ge=1)
    patch_size: int = Field(8, ge=2)
    """Side of an image patch in pixels; it divides the images' height and width."""
    max_instruction_bytes: int = Field(64, ge=0)
    """Instructions are read as UTF-8 bytes, and longer ones refused; 0 does not read them. Several
    tasks need them."""
    value_hidden_size: int = Field(128, ge=8)

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_heads={self.num_heads}"
            )
        return self


class FlowVLAConfig(PrefixConfig, FlowConfig):
    """Cameras, an instruction and the state as a shared prefix; a transformer action expert."""

    type: Literal["flow_vla"] = "flow_vla"
    needs_cameras: ClassVar[bool] = True
    num_expert_layers: int = Field(2, ge=1)

    def build(self, contract: Contract) -> Policy:
        """A new policy with random weights for this contract."""
        policy: Policy = catalogue.load("policies.flow_vla:FlowVLA")(self, contract)
        return policy


class SamplingConfig(Config):
    """How tokens are drawn; shared by all policies with action tokens."""

    temperature: float = Field(1.0, gt=0.0)
    """Of exploration; the log-probabilities are those of the same distribution."""
    top_k: int | None = Field(None, ge=1)
    """Explore among this many likeliest tokens only."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Explore among the likeliest tokens that make up this probability."""


class SpokenConfig(PrefixConfig, SamplingConfig):
    """A language model that speaks after cameras (if there are any), instruction and state; shared
    by policies with action tokens."""

    needs_cameras: ClassVar[bool] = False
    ratio_levels: ClassVar[tuple[str, ...]]
    """What `algorithm.ratio_level` may be."""
    policy_class: ClassVar[str]
    chunk: int = Field(4, ge=1)
    """H: control steps planned and executed per decision."""
    decoder: str = "llama"
    """transformers' model type of a new decoder, such as `llama` or `qwen2`."""
    pretrained: Path | None = None
    """A folder with a causal language model of transformers to begin with, instead of a new one;
    its size then counts, and its last ids become the action tokens, as in OpenVLA."""
    num_decoder_layers: int = Field(2, ge=1)

    def build(self, contract: Contract) -> Policy:
        """A new policy for this contract, with random weights but for a pretrained decoder."""
        policy: Policy = catalogue.load(self.policy_class)(self, contract)
        return policy

    def rebuild(self, contract: Contract, architecture: dict[str, Any], folder: Path) -> Policy:
        """The policy of a saved folder: its decoder's sizes are known, its weights come next."""
        policy: Policy = catalogue.load(self.policy_class)(self, contract, architecture)
        return policy


class TokenVLAConfig(SpokenConfig):
    """Speaks one token, a bin, per number of the chunk."""

    type: Literal["token_vla"] = "token_vla"
    policy_class: ClassVar[str] = "policies.token_vla:TokenVLA"
    ratio_levels: ClassVar[tuple[str, ...]] = ("chunk", "step", "token")
    num_bins: int = Field(256, ge=4)
    """Values per action dimension, evenly spaced between the 1st and 99th percentile of the
    demonstrated actions, and action tokens (OpenVLA, arXiv:2406.09246, section 3.2)."""
    decoding: Literal["autoregressive", "parallel"] = "autoregressive"
    """One token after the other, or all of a chunk at once (OpenVLA-OFT, arXiv:2502.19645)."""


class FastVLAConfig(SpokenConfig):
    """Speaks the shape of a chunk, in a varying number of FAST tokens (arXiv:2501.09747). A chunk
    counts whole in learning, also where an episode ended within it."""

    type: Literal["fast_vla"] = "fast_vla"
    policy_class: ClassVar[str] = "policies.fast_vla:FastVLA"
    # Every token shapes all steps of its chunk.
    ratio_levels: ClassVar[tuple[str, ...]] = ("chunk", "token")
    processor: Path | None = None
    """A folder with the files of a FAST processor, such as physical-intelligence/fast of the Hub,
    whose scale and vocabulary then count. Without one, it is fitted to the demonstrations."""
    scale: float = Field(10.0, gt=0.0)
    """Cosine coefficients are rounded to multiples of 1 / scale: more is finer, and more tokens."""
    vocabulary: int = Field(512, ge=3)
    """FAST tokens at most."""


class GaussianMLPConfig(ValueConfig):
    """The classic continuous-control policy: a Gaussian around a tanh network."""

    type: Literal["gaussian_mlp"] = "gaussian_mlp"
    needs_cameras: ClassVar[bool] = False
    chunk: int = Field(1, ge=1)
    """H: control steps planned and executed per decision."""
    hidden_size: int = Field(64, ge=1)
    num_layers: int = Field(2, ge=1)
    initial_std: float = Field(1.0, gt=0.0)
    """Standard deviation of the untrained policy, as a share of half the action range."""
    normalise_state: bool = True
    """Keep a running mean and deviation of the states seen in training."""

    def build(self, contract: Contract) -> Policy:
        """A new policy with random weights for this contract."""
        policy: Policy = catalogue.load("policies.gaussian_mlp:GaussianMLP")(self, contract)
        return policy
