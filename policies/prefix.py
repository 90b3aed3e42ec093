"""What a vision-language-action policy sees, as tokens that attend to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from embodied_rl.contracts import Contract, Observation

if TYPE_CHECKING:
    from policies.config import PrefixConfig

_NUM_BYTES = 256


class PrefixEncoder(nn.Module):
    """Image patches, instruction bytes and the state as tokens that attend to each other."""

    def __init__(self, config: PrefixConfig, contract: Contract) -> None:
        super().__init__()
        width, self._patch = config.hidden_size, config.patch_size
        for camera in contract.cameras:
            if camera.height % self._patch or camera.width % self._patch:
                raise ValueError(
                    f"camera {camera.name!r} gives images of {camera.height} x {camera.width}; "
                    f"both must be multiples of policy.patch_size={self._patch}"
                )
        self._cameras = [camera.name for camera in contract.cameras]
        self.patches = nn.ModuleDict()
        self.positions = nn.ParameterDict()
        for camera in contract.cameras:
            count = (camera.height // self._patch) * (camera.width // self._patch)
            # Overlapping windows see what straddles two patches.
            self.patches[camera.name] = nn.Sequential(
                nn.Conv2d(3, width // 2, 5, stride=2, padding=2),
                nn.SiLU(),
                nn.Conv2d(width // 2, width, self._patch // 2, stride=self._patch // 2),
            )
            self.positions[camera.name] = nn.Parameter(0.02 * torch.randn(count, width))
        # Bytes of an instruction that is not read have no weights.
        self._num_bytes = config.max_instruction_bytes
        self.bytes = nn.Embedding(_NUM_BYTES, width)
        self.byte_positions = nn.Parameter(0.02 * torch.randn(self._num_bytes, width))
        self.state = nn.Linear(contract.state_dim, width) if contract.state_dim else None
        self.layers = nn.ModuleList(
            Block(width, config.num_heads) for _ in range(config.num_prefix_layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, observation: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, L, width] and which of them are real [B, L]."""
        parts = [self._image(observation.images[name], name) for name in self._cameras]
        mask = [torch.ones(p.shape[:2], dtype=torch.bool, device=p.device) for p in parts]
        text, is_text = self._bytes(observation.instruction, state.device)
        parts.append(self.bytes(text) + self.byte_positions)
        mask.append(is_text)
        if self.state is not None:
            parts.append(self.state(state)[:, None])
            mask.append(torch.ones(len(state), 1, dtype=torch.bool, device=state.device))
        tokens, real = torch.cat(parts, 1), torch.cat(mask, 1)
        for layer in self.layers:
            tokens = layer(tokens, real[:, None, None])
        return self.norm(tokens), real

    def _image(self, image: Tensor, camera: str) -> Tensor:
        pixels = image.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        features: Tensor = self.patches[camera](pixels)
        tokens: Tensor = features.flatten(2).transpose(1, 2) + self.positions[camera]
        return tokens

    def _bytes(self, instructions: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """UTF-8 bytes [B, length] and which are real; a batch often repeats few sentences."""
        read = instructions if self._num_bytes else ("",) * len(instructions)
        encoded = {text: list(text.encode()) for text in set(read)}
        for text, found in encoded.items():
            if len(found) > self._num_bytes:
                raise ValueError(
                    f"the instruction {text!r} has {len(found)} bytes, and this policy reads "
                    f"{self._num_bytes}; train one with policy.max_instruction_bytes={len(found)} "
                    f"or more"
                )
        rows = [encoded[text] for text in read]
        padded = [row + [0] * (self._num_bytes - len(row)) for row in rows]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        real = torch.arange(self._num_bytes, device=device) < lengths[:, None]
        return torch.tensor(padded, dtype=torch.long, device=device), real


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = feed_forward(width)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens [B, L, width]; only tokens where mask [B, 1, 1, L] are attended to."""
        q, k, v = (heads_of(x, self._heads) for x in self.qkv(self.norm1(tokens)).chunk(3, dim=-1))
        seen = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        tokens = tokens + self.out(join_heads(seen))
        mixed: Tensor = tokens + self.feed_forward(self.norm2(tokens))
        return mixed


def feed_forward(width: int) -> nn.Sequential:
    """The position-wise part of a transformer block."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def heads_of(x: Tensor, count: int) -> Tensor:
    """[B, L, width] as [B, heads, L, width / heads]."""
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """The reverse of `heads_of`."""
    return x.transpose(1, 2).flatten(2)
