"""LeRobotDataset v3 folders: checking them against the simulator, opening and downloading them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from embodied_rl.contracts import Camera, Contract, ContractMismatch
from embodied_rl.run_config import DemonstrationsConfig

OUR_FILE = "meta/embodied_rl.json"
"""Beside lerobot's own metadata: contract, simulator options, how it was recorded."""

_IMAGES = "observation.images."


class BadDemonstrations(ValueError):
    """A data set that cannot be learned from."""


def image_keys(cameras: Sequence[Camera], named: Mapping[str, str]) -> dict[str, str]:
    """The data set's column of each of the simulator's cameras, where `named` says otherwise than
    lerobot's convention. Raises ContractMismatch for a camera that the simulator has not."""
    keys = {camera.name: f"{_IMAGES}{camera.name}" for camera in cameras}
    for name in named:
        if name not in keys:
            raise ContractMismatch(
                f"demonstrations.cameras names the camera {name}, but the simulator has "
                f"{', '.join(keys) or 'none'}"
            )
    return keys | dict(named)


def check_folder(path: Path, contract: Contract, options: DemonstrationsConfig) -> None:
    """Raise unless the data set fits the simulator, as far as its metadata tell.

    FileNotFoundError for no data set, `BadDemonstrations` for one of another version or with too
    few episodes, ContractMismatch naming what does not fit.
    """
    file = path / "meta" / "info.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} is not a LeRobotDataset v3 folder: it has no meta/info.json. Record one with "
            f"`embodied-rl collect`, or leave out demonstrations.path"
        )
    info = json.loads(file.read_text())
    version = str(info["codebase_version"])
    if not version.startswith("v3."):
        raise BadDemonstrations(
            f"{path} is a LeRobotDataset {version}, but only v3 can be read; convert it with "
            f"`python -m lerobot.scripts.convert_dataset_v21_to_v30`"
        )
    if (options.limit or 1) > info["total_episodes"]:
        raise BadDemonstrations(
            f"{path} holds {info['total_episodes']} episodes, but "
            f"demonstrations.episodes={options.limit}"
        )
    _check_convention(path, contract, info["fps"])
    keys = image_keys(contract.cameras, options.cameras)
    for camera in contract.cameras:
        _check_camera(path, camera, keys[camera.name], info["features"], options.resize is not None)


def _check_convention(path: Path, contract: Contract, fps: float) -> None:
    ours = path / OUR_FILE
    if ours.is_file():
        # Cameras are looked at one by one: their pictures may be renamed and resized.
        stored = replace(Contract.from_json(json.loads(ours.read_text())["contract"]), cameras=())
        stored.require_equal(replace(contract, cameras=()), f"the data set {path}", "the simulator")
    elif abs(fps - contract.control_hz) > 0.5:  # lerobot's are whole numbers
        raise ContractMismatch(
            f"the data set {path} has {fps:g} frames per second, the simulator "
            f"{contract.control_hz:g} control steps; choose one at the same rate"
        )


def _check_camera(
    path: Path, camera: Camera, key: str, features: Mapping[str, Any], may_resize: bool
) -> None:
    found = {name for name, value in features.items() if value["dtype"] in ("image", "video")}
    if key not in found:
        raise ContractMismatch(
            f"the data set {path} has no {key}; it has {sorted(found) or 'no images'}. Say which "
            f"one is the simulator's with demonstrations.cameras.{camera.name}=..."
        )
    shape = tuple(features[key]["shape"])
    names = features[key].get("names") or ()
    if tuple(names[:1]) in (("channels",), ("channel",)):
        shape = (*shape[1:], shape[0])
    if len(shape) != 3 or shape[2] != 3:
        raise ContractMismatch(f"{key} of {path} is not in colour: its pictures are {shape}")
    if shape[:2] != (camera.height, camera.width) and not may_resize:
        raise ContractMismatch(
            f"the data set {path} has pictures of {shape[0]} x {shape[1]} in {key}, the "
            f"simulator's camera {camera.name} gives {camera.height} x {camera.width}; set "
            f"demonstrations.resize to crop, pad or stretch, or give the camera that size"
        )


def open_dataset(path: Path, num_episodes: int | None = None) -> Any:
    """The folder as lerobot's own class, with all or with the first episodes.

    Raises `BadDemonstrations` if files are missing.
    """
    quiet_lerobot()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    total = json.loads((path / "meta" / "info.json").read_text())["total_episodes"]
    # Only where it leaves some out: lerobot keeps a copy of every choice of episodes.
    some = list(range(num_episodes)) if num_episodes and num_episodes < total else None
    try:
        return LeRobotDataset(
            "local/demonstrations", root=path, episodes=some, video_backend="pyav"
        )
    except Exception as error:
        # What is missing in the folder it asks the hub for, and fails in one of many ways.
        raise BadDemonstrations(
            f"{path} is incomplete or damaged: lerobot cannot open it ({_first_line(error)}). "
            f"Record or download it again"
        ) from error


def demonstrations_folder(
    directory: Path, contract: Contract, options: DemonstrationsConfig
) -> Path:
    """Where the demonstrations of the run in `directory` are, or will be recorded."""
    if options.repo_id:
        return download(options.repo_id, contract, options)
    return options.path or directory / "demonstrations"


def download(repo_id: str, contract: Contract, options: DemonstrationsConfig) -> Path:
    """The folder of a data set of the Hugging Face Hub: found on this machine, or downloaded by
    lerobot once its metadata fit the simulator (`check_folder`).

    Raises what `check_folder` raises, and `BadDemonstrations` if it cannot be had.
    """
    quiet_lerobot()
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    try:
        meta = LeRobotDatasetMetadata(repo_id)
    except Exception as error:
        raise _unavailable(repo_id, error) from error
    check_folder(Path(meta.root), contract, options)
    some = list(range(options.limit)) if options.limit else None
    try:
        return Path(LeRobotDataset(repo_id, episodes=some, video_backend="pyav").root)
    except Exception as error:
        raise _unavailable(repo_id, error) from error


def _unavailable(repo_id: str, error: Exception) -> BadDemonstrations:
    return BadDemonstrations(
        f"demonstrations.repo_id={repo_id} is not on this machine and cannot be downloaded "
        f"({_first_line(error)}). Check the name and the connection, or set demonstrations.path to "
        f"a folder that holds it"
    )


def quiet_lerobot() -> None:
    """Keep progress bars and notes of the data-set libraries out of ours."""
    for name in ("lerobot", "datasets", "huggingface_hub", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import datasets

    datasets.disable_progress_bars()


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no reason given'}"
