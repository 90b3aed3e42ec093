"""How many frames a second imitation is fed: from memory, and decoded on demand by workers.

Writes two data sets of the same moving noise into a temporary folder, PNG pictures and AV1 videos
as lerobot makes them by default, and draws random batches from each.

python tests/benchmarks/demonstrations.py --height 240 --width 320 --workers 0 2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied_rl.contracts import Camera, Contract
from embodied_rl.run_config import DemonstrationsConfig
from embodied_rl.training.demonstrations import Demonstrations, load
from embodied_rl.training.lerobot_folder import quiet_lerobot

EPISODES, LENGTH, KEY = 4, 100, "observation.images.top"


def write(path: Path, height: int, width: int, video: bool) -> None:
    """A data set of one camera."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    vector = {"dtype": "float32", "shape": (2,), "names": None}
    names = ["height", "width", "channels"]
    picture = {
        "dtype": "video" if video else "image",
        "shape": (height, width, 3),
        "names": names,
    }
    features: dict[str, Any] = {"observation.state": vector, "action": vector, KEY: picture}
    dataset = LeRobotDataset.create(
        *("local/speed", 30, features, path), use_videos=video, video_backend="pyav"
    )
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    noise = blocks.repeat(8, 0).repeat(8, 1)[:height, :width]
    for _ in range(EPISODES):
        for step in range(LENGTH):
            numbers = {
                name: random.random(2, np.float32) for name in ("observation.state", "action")
            }
            dataset.add_frame({**numbers, KEY: np.roll(noise, 2 * step, 1), "task": "watch"})
        dataset.save_episode()
    dataset.finalize()


def frames_per_second(data: Demonstrations, batch: int, batches: int) -> float:
    """Of random batches, once the first ones are there."""
    generator = torch.Generator().manual_seed(0)
    total = len(data.actions)
    parts = (torch.randint(total, (batch,), generator=generator) for _ in range(batches + 4))
    stream = data.batches(parts, 8)
    list(islice(stream, 4))
    began = time.perf_counter()
    count = sum(len(actions) for _, actions, _ in stream)
    return count / (time.perf_counter() - began)


def main() -> None:
    """Print one line per way of reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--height", type=int, default=240)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=40)
    given = parser.parse_args()
    quiet_lerobot()
    cameras = (Camera("top", given.height, given.width),)
    bounds = ((-1.0, -1.0), (1.0, 1.0))
    contract = Contract(2, 2, *bounds, "speed", 30.0, "none", "none", cameras)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("images", "videos"):
            path = Path(folder) / kind
            write(path, given.height, given.width, kind == "videos")
            ways: list[tuple[str, dict[str, Any]]] = [("in memory", {"in_memory_mib": 10**6})]
            for workers in given.workers:
                options = {"in_memory_mib": 0, "workers": workers}
                ways.append((f"streamed, {workers} workers", options))
            for name, options in ways:
                data = load(
                    path, contract, DemonstrationsConfig(path=path, episodes=None, **options)
                )
                speed = frames_per_second(data, given.batch, given.batches)
                print(f"{kind}, {name}: {speed:.0f} frames/s", flush=True)


if __name__ == "__main__":
    main()
