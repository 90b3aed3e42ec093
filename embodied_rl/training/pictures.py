"""Pictures of a LeRobotDataset, decoded when they are asked for, in other processes if many are."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from embodied_rl.contracts import Camera
from embodied_rl.training.lerobot_folder import BadDemonstrations

type Resize = Literal["crop", "pad", "stretch"]
type _Rows = npt.NDArray[np.int64]

_PART = 64
"""Frames that are decoded together where all are wanted, and at most in one go."""
_WORTH_A_PROCESS = 4096
"""Frames; fewer are decoded before worker processes would be ready."""
_GAP = 8
"""Frames of a video that are decoded in vain rather than seeking anew."""


class Pictures(Dataset[Any]):
    """What the cameras saw in some frames of a data set, uint8 and upright."""

    def __init__(
        self,
        dataset: Any,
        cameras: Sequence[Camera],
        keys: Mapping[str, str],
        resize: Resize | None,
        workers: int,
        frames: Tensor,
    ) -> None:
        """Of `frames`, int64 [N], rows of a `LeRobotDataset`; `keys` are its columns by camera."""
        self._root, self._meta = Path(dataset.root), dataset.meta
        self._cameras, self._keys, self._resize = cameras, keys, resize
        self._workers, self._frames = workers, frames
        table = dataset.hf_dataset
        self._episode = _column(table, "episode_index")
        self._time = _column(table, "timestamp")
        stored = [key for key in keys.values() if key in table.column_names]
        self._images = {key: table.select_columns([key]).with_format(None) for key in stored}

    def select(self, rows: Tensor) -> Pictures:
        """Those of these rows, int64 [n], alone."""
        other: Pictures = object.__new__(Pictures)
        other.__dict__ |= self.__dict__ | {"_frames": self._frames[rows]}
        return other

    @property
    def num_bytes(self) -> int:
        """What they take in memory when all are decoded."""
        return len(self._frames) * sum(3 * c.height * c.width for c in self._cameras)

    def read(self, rows: Tensor) -> dict[str, Tensor]:
        """Per camera uint8 [n, height, width, 3] of these rows, decoded here and now.

        Raises `BadDemonstrations` for a file that cannot be decoded or pictures of another size.
        """
        frames = self._frames[rows].numpy()
        return {camera.name: self._read(camera, frames) for camera in self._cameras}

    def read_all(self) -> dict[str, Tensor]:
        """`read` of all rows."""
        parts = torch.split(torch.arange(len(self._frames)), _PART)
        few = len(self._frames) < _WORTH_A_PROCESS
        read = list(map(self.read, parts) if few else self.stream(parts))
        return {c.name: torch.cat([part.pop(c.name) for part in read]) for c in self._cameras}

    def stream(self, parts: Iterable[Tensor]) -> Generator[dict[str, Tensor]]:
        """`read` of one part after the other. Worker processes decode ahead of what is taken, and
        take from `parts` as much sooner."""
        loader: DataLoader[Any] = DataLoader(
            self,
            batch_size=None,
            sampler=(rows.tolist() for rows in parts),
            num_workers=self._workers,
            multiprocessing_context=_clean_processes() if self._workers else None,
            # The loader seeds its workers, which draw nothing, from a generator of its own: the
            # global one must not depend on where pictures are decoded.
            generator=torch.Generator(),
            worker_init_fn=_leave_interrupts_to_the_parent,
        )
        for images in loader:
            if isinstance(images, BadDemonstrations):
                raise images
            yield images

    def __getitem__(self, rows: list[int]) -> dict[str, Tensor] | BadDemonstrations:
        # Raised in a worker, it would reach the user wrapped in a traceback.
        try:
            return self.read(torch.tensor(rows))
        except BadDemonstrations as error:
            return error

    def _read(self, camera: Camera, frames: _Rows) -> Tensor:
        unique, where = np.unique(frames, return_inverse=True)
        fitted = torch.empty((len(unique), camera.height, camera.width, 3), dtype=torch.uint8)
        row = 0
        for part in self._parts(unique):
            for picture in self._decode(self._keys[camera.name], part):
                fitted[row] = self._fit(picture, camera)
                row += 1
        return fitted[torch.from_numpy(where)]

    def _parts(self, frames: _Rows) -> list[_Rows]:
        """Frames near each other in one episode, which are decoded in one go."""
        cuts, begin = [], 0
        for i in range(1, len(frames)):
            near = frames[i] - frames[i - 1] <= _GAP and frames[i] - frames[begin] < _PART
            if not near or self._episode[frames[i]] != self._episode[frames[begin]]:
                cuts.append(i)
                begin = i
        return np.split(frames, cuts)

    def _decode(self, key: str, frames: _Rows) -> Iterable[Tensor]:
        """uint8 [height, width, 3] of frames of one episode, as lerobot itself decodes them."""
        if key in self._images:
            return map(_to_tensor, self._images[key][frames.tolist()][key])
        from lerobot.datasets.video_utils import decode_video_frames

        number = int(self._episode[frames[0]])
        begin = self._meta.episodes[number][f"videos/{key}/from_timestamp"]
        path = self._root / self._meta.get_video_file_path(number, key)
        times = [begin + float(self._time[frame]) for frame in frames]
        # lerobot compares float32 times, which hours into a file are further apart than its usual
        # tolerance; within a quarter of a frame it is clear which one is meant.
        tolerance = 0.25 / self._meta.fps
        try:
            found = decode_video_frames(path, times, tolerance, "pyav", return_uint8=True)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise BadDemonstrations(
                f"{path} cannot be decoded at {times[0]:.3f} s, for episode {number}: {reason}. "
                f"Record or download the data set again"
            ) from error
        pictures: Tensor = found.permute(0, 2, 3, 1)
        return pictures

    def _fit(self, picture: Tensor, camera: Camera) -> Tensor:
        height, width = picture.shape[:2]
        if (height, width) == (camera.height, camera.width):
            return picture
        if self._resize is None:
            raise BadDemonstrations(
                f"{self._root} has a picture of {height} x {width} in {self._keys[camera.name]}, "
                f"the simulator's camera {camera.name} gives {camera.height} x {camera.width}; set "
                f"demonstrations.resize"
            )
        return resized(picture, camera.height, camera.width, self._resize)


def resized(picture: Tensor, height: int, width: int, how: Resize) -> Tensor:
    """A picture [h, w, 3] at another size, every pixel the mean of the area that it covers.

    Where the proportions differ, `crop` keeps the middle, `pad` adds black borders and `stretch`
    distorts.
    """
    h, w = picture.shape[:2]
    inner = (height, width)
    if how == "crop":
        rows, columns = min(h, round(w * height / width)), min(w, round(h * width / height))
        top, left = (h - rows) // 2, (w - columns) // 2
        picture = picture[top : top + max(rows, 1), left : left + max(columns, 1)]
    elif how == "pad":
        inner = (min(height, round(width * h / w)), min(width, round(height * w / h)))
        inner = (max(inner[0], 1), max(inner[1], 1))
    channels = picture.permute(2, 0, 1)[None].float().contiguous()
    scaled = interpolate(channels, size=inner, mode="area")[0].round().to(torch.uint8)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    result = torch.zeros((height, width, 3), dtype=torch.uint8)
    result[top : top + inner[0], left : left + inner[1]] = scaled.permute(1, 2, 0)
    return result


def _clean_processes() -> Any:
    """Workers are not forked from this process, whose threads may hold locks and which may render.
    If simulators run in workers, the process that those are forked from serves these as well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "lerobot.datasets.video_utils"])
    return context


def _leave_interrupts_to_the_parent(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _to_tensor(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB")))


def _column(table: Any, name: str) -> npt.NDArray[Any]:
    return np.asarray(table.data.column(name).to_numpy())
