"""OpenVLA's network (arXiv:2406.09246) on timm and transformers, by the names of its release.

Two vision transformers see the image; what the layer before their last says of each patch is joined
and projected to the width of a Llama, which reads the patches after its first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import timm
import torch
from timm.layers.layer_scale import LayerScale
from torch import Tensor, nn
from torch.nn.functional import gelu, relu
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from policies.openvla_checkpoint import Description


class OpenVLAModel(nn.Module):
    """Vision, projector and language model; with OFT's projector of the state and its regression
    head where a checkpoint has them."""

    proprio_projector: ProprioProjector | None
    action_head: ActionHead | None

    def __init__(
        self, description: Description, state_dim: int | None, head_sizes: HeadSizes | None
    ) -> None:
        super().__init__()
        self.vision_backbone = VisionBackbone(description)
        text: Any = {k: v for k, v in description.text.items() if k not in ("dtype", "torch_dtype")}
        sizes = LlamaConfig(**text | {"attn_implementation": "sdpa"})
        width: int = sizes.hidden_size
        language_model: Any = LlamaForCausalLM
        self.projector = Projector(self.vision_backbone.width, width)
        self.language_model: Any = language_model(sizes)
        self.proprio_projector = None if state_dim is None else ProprioProjector(state_dim, width)
        self.action_head = None if head_sizes is None else ActionHead(*head_sizes)

    @property
    def width(self) -> int:
        """Of the language model's embeddings."""
        return int(self.language_model.config.hidden_size)

    def restore_buffers(self) -> None:
        """Make anew what no file holds, for a model that was built without memory."""
        old = self.language_model.model.rotary_emb
        self.language_model.model.rotary_emb = type(old)(config=self.language_model.config)

    def project(self, features: Tensor, rows: int) -> Tensor:
        """Embeddings [rows, N * P, width] of features [rows * N, P, width] of N images each, one
        after the other."""
        projected: Tensor = self.projector(features)
        return projected.view(rows, -1, projected.shape[-1])

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., width] of token ids [...]."""
        embedded: Tensor = self.language_model.get_input_embeddings()(ids)
        return embedded

    def logits(self, hidden: Tensor, first: int, count: int) -> Tensor:
        """Logits [..., count] of the token ids from `first` on."""
        weight = self.language_model.lm_head.weight[first : first + count]
        found: Tensor = hidden @ weight.T
        return found

    def idle(self) -> Iterator[nn.Module]:
        """What the release carries along without using it."""
        for featurizer in self.vision_backbone.featurizers():
            yield featurizer.blocks[-1]
            yield featurizer.norm
            if featurizer.attn_pool is not None:
                yield featurizer.attn_pool


class VisionBackbone(nn.Module):
    """DINOv2 and SigLIP, each with its own view of the same image."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = (
            _featurizer(description, number) for number in range(2)
        )
        self.width: int = self.featurizer.embed_dim + self.fused_featurizer.embed_dim

    def featurizers(self) -> tuple[Any, Any]:
        """Both transformers."""
        return self.featurizer, self.fused_featurizer

    def forward(self, pixels: Tensor) -> Tensor:
        """Features [B, P, width] of images [B, 6, size, size], three channels for each."""
        views = zip(self.featurizers(), pixels.chunk(2, dim=1), strict=True)
        return torch.cat([_patch_features(network, view) for network, view in views], dim=-1)


def _featurizer(description: Description, number: int) -> Any:
    network: Any = timm.create_model(
        description.timm_model_ids[number],
        pretrained=False,
        num_classes=0,
        img_size=description.image_sizes[number],
        act_layer=description.act_layers[number],
        **description.timm_model_args[number],
    )
    for block in network.blocks:
        for name in ("ls1", "ls2"):
            if isinstance(scale := getattr(block, name), LayerScale):
                setattr(block, name, Scale(scale.gamma))
    return network


def _patch_features(network: Any, images: Tensor) -> Tensor:
    """What the layer before the last says of each patch, not normalised."""
    found: list[Tensor] = network.forward_intermediates(
        images,
        indices=[len(network.blocks) - 2],
        stop_early=True,
        output_fmt="NLC",
        intermediates_only=True,
    )
    return found[0]


class Scale(nn.Module):
    """timm's LayerScale, with the name that the release gives its weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Each channel times its factor."""
        return x * self.scale_factor


class Projector(nn.Module):
    """From the features of both vision transformers to the language model's width."""

    def __init__(self, vision_width: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Embeddings [B, P, width]."""
        found: Tensor = self.fc3(gelu(self.fc2(gelu(self.fc1(features)))))
        return found


class ProprioProjector(nn.Module):
    """OFT's embedding of the robot's state."""

    def __init__(self, state_dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, state: Tensor) -> Tensor:
        """One embedding [B, 1, width] of normalised states [B, S]."""
        found: Tensor = self.fc2(gelu(self.fc1(state)))
        return found[:, None]


type HeadSizes = tuple[int, int, int, int]
"""Inputs, width, blocks and outputs of a regression head."""


class ActionHead(nn.Module):
    """OFT's regression: the hidden states of all tokens of a control step give its action."""

    def __init__(self, inputs: int, width: int, blocks: int, outputs: int) -> None:
        super().__init__()
        self.model = _ResidualMLP(inputs, width, blocks, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalised actions [B, H, A] of hidden states [B, H, A * width]."""
        found: Tensor = self.model(hidden)
        return found


class _ResidualMLP(nn.Module):
    def __init__(self, inputs: int, width: int, blocks: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(width) for _ in range(blocks))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        found: Tensor = self.fc2(self.layer_norm2(x))
        return found


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.ffn(x)
        return found
