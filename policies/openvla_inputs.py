"""What OpenVLA reads: images as its release's processor makes them, and prompts."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample, interpolate

from embodied_rl.contracts import Contract, Observation
from policies.checkpoints import BadCheckpoint

if TYPE_CHECKING:
    from policies.openvla_checkpoint import Checkpoint

EMPTY_ID = 29871
"""The token that follows "Out:" wherever OpenVLA was trained: a space without a word."""

CROPPED_AREA = 0.9
"""Share of the image that random crops left in training, and that the middle crop leaves."""


class Images(nn.Module):
    """Cameras' images as the two vision transformers take them."""

    means: Tensor
    stds: Tensor

    def __init__(self, checkpoint: Checkpoint, cameras: tuple[str, ...], center_crop: bool) -> None:
        super().__init__()
        options = json.loads(checkpoint.require_file("preprocessor_config.json"))
        where = checkpoint.folder / "preprocessor_config.json"
        if missing := [n for n in ("input_sizes", "means", "stds") if n not in options]:
            raise BadCheckpoint(f"{where} lacks {', '.join(missing)}")
        if {*options.get("interpolations", ["bicubic"])} != {"bicubic"}:
            raise BadCheckpoint(
                f"{where} has interpolations {options['interpolations']}; only bicubic is supported"
            )
        sizes = [list(size[1:]) for size in options["input_sizes"]]
        if sizes != [[size, size] for size in checkpoint.description.image_sizes]:
            raise BadCheckpoint(
                f"{where} makes images of {sizes}, but config.json has image_sizes "
                f"{checkpoint.description.image_sizes}"
            )
        self.strategy = options.get("image_resize_strategy", "resize-naive")
        self.cameras, self._center_crop = cameras, center_crop
        self._sizes = checkpoint.description.image_sizes
        self.register_buffer("means", torch.tensor(options["means"]), persistent=False)
        self.register_buffer("stds", torch.tensor(options["stds"]), persistent=False)

    def require_fitting(self, contract: Contract) -> None:
        """Raise BadCheckpoint if a camera's images cannot be made to fit. Square images come out
        the same whichever way the release fills a square."""
        for camera in contract.cameras:
            is_square = camera.height == camera.width
            if camera.name in self.cameras and not is_square and self.strategy != "resize-naive":
                raise BadCheckpoint(
                    f"camera {camera.name!r} gives images of {camera.height} x {camera.width}, and "
                    f"the checkpoint's image_resize_strategy is {self.strategy!r}; make the camera "
                    f"square"
                )

    def forward(self, observation: Observation) -> Tensor:
        """float32 [B, N, 6, size, size] of N cameras."""
        return torch.stack([self._views(observation.images[name]) for name in self.cameras], 1)

    def _views(self, image: Tensor) -> Tensor:
        pixels = resized(image.permute(0, 3, 1, 2).float(), self._sizes[0])
        if self._center_crop:
            pixels = cropped(pixels)
        views = [
            (resized(pixels, size) / 255.0 - mean[:, None, None]) / std[:, None, None]
            for size, mean, std in zip(self._sizes, self.means, self.stds, strict=True)
        ]
        return torch.cat(views, dim=1)


def resized(pixels: Tensor, size: int) -> Tensor:
    """Images [B, 3, size, size] of whole numbers 0 .. 255, as Pillow's bicubic resizing gives them:
    first along rows, then along columns, rounded after each."""
    for shape in ((pixels.shape[2], size), (size, size)):
        if tuple(pixels.shape[2:]) != shape:
            found = interpolate(pixels, shape, mode="bicubic", antialias=True, align_corners=False)
            pixels = found.round().clamp(0.0, 255.0)
    return pixels


def cropped(pixels: Tensor) -> Tensor:
    """The middle `CROPPED_AREA` of images [B, 3, h, w] of 0 .. 255, enlarged to their size, as
    TensorFlow's `crop_and_resize` and `convert_image_dtype` do it in the release's evaluation."""
    side = math.sqrt(CROPPED_AREA)
    turn = torch.tensor([[side, 0.0, 0.0], [0.0, side, 0.0]], device=pixels.device)
    grid = affine_grid(turn.expand(len(pixels), -1, -1), list(pixels.shape), align_corners=True)
    found = grid_sample(pixels, grid, mode="bilinear", align_corners=True)
    return (found / 255.0 * 255.5).floor().clamp(0.0, 255.0)


class Words(NamedTuple):
    """B prompts as token ids."""

    ids: Tensor
    """int64 [B, L]: the beginning-of-sentence token, padding, then the prompt to its last token."""
    mask: Tensor
    """bool [B, L]: which of them are real."""


class Prompts:
    """Instructions as OpenVLA's prompts."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        spelling = checkpoint.require_file("tokenizer.json").decode()
        self._tokenizer = Tokenizer.from_str(spelling)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._begin: int = checkpoint.description.text.get("bos_token_id", 1)
        self._pad = checkpoint.description.pad_id
        self._known: dict[str, list[int]] = {}

    def __call__(self, instructions: tuple[str, ...], device: torch.device) -> Words:
        """Padding stands between the first token and the rest: images go in before it, and no
        position is without anything to attend to."""
        rows = [self._ids(text) for text in instructions]
        longest = max(len(row) for row in rows)
        padding = [longest - len(row) for row in rows]
        ids = [
            [row[0], *[self._pad] * count, *row[1:]]
            for row, count in zip(rows, padding, strict=True)
        ]
        place = torch.arange(longest, device=device)
        missing = torch.tensor(padding, device=device)
        mask = (place == 0) | (place > missing[:, None])
        return Words(torch.tensor(ids, device=device), mask)

    def _ids(self, instruction: str) -> list[int]:
        if instruction not in self._known:
            text = f"In: What action should the robot take to {instruction.lower()}?\nOut:"
            ids = list(self._tokenizer.encode(text).ids)
            begin = [] if ids[:1] == [self._begin] else [self._begin]
            end = [] if ids[-1:] == [EMPTY_ID] else [EMPTY_ID]
            self._known[instruction] = [*begin, *ids, *end]
        return self._known[instruction]
