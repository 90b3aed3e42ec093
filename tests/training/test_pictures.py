"""Data sets whose pictures are decoded on demand: real folders, written and read by lerobot."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lerobot.datasets.dataset_metadata
import numpy as np
import pytest
import torch
from torch import Tensor

from embodied_rl.contracts import Camera, Contract, ContractMismatch
from embodied_rl.run_config import DemonstrationsConfig, ImitationConfig
from embodied_rl.training.checkpoint import CheckpointStore
from embodied_rl.training.demonstrations import Demonstrations, load
from embodied_rl.training.imitation import Imitation, _spread
from embodied_rl.training.lerobot_folder import BadDemonstrations, download, open_dataset
from embodied_rl.training.pictures import resized
from embodied_rl.training.recording import _quiet_encoders
from policies.config import FlowVLAConfig

TOP, WIDE = "observation.images.top", "observation.image"
SIZES = {TOP: (32, 32), WIDE: (32, 64)}
CONTRACT = Contract(
    state_dim=3,
    action_dim=1,
    action_low=(-1.0,),
    action_high=(1.0,),
    control_mode="test",
    control_hz=10.0,
    gripper="none",
    rotation="none",
    cameras=(Camera("top", 32, 32), Camera("front", 32, 64)),
)
NAMED = {"front": WIDE}
LENGTHS = (9, 14, 12)


def written(path: Path, video: bool) -> Path:
    """Three episodes of a gradient that moves, as anyone would record them with lerobot."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    _quiet_encoders()
    kind = "video" if video else "image"
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (1,), "names": None},
        TOP: {"dtype": kind, "shape": (32, 32, 3), "names": ["height", "width", "channels"]},
        WIDE: {"dtype": kind, "shape": (32, 64, 3), "names": ["height", "width", "channels"]},
    }
    dataset = LeRobotDataset.create(
        *("test/foreign", 10, features, path), use_videos=video, video_backend="pyav"
    )
    random = np.random.default_rng(0)
    for number, length in enumerate(LENGTHS):
        for step in range(length):
            frame: dict[str, Any] = {
                "observation.state": random.random(3, dtype=np.float32),
                "action": random.random(1, dtype=np.float32),
                "task": f"task {number % 2}",
            }
            for key, (height, width) in SIZES.items():
                rows, columns = np.indices((height, width))
                shade = 2 * rows + 2 * columns + 5 * step + 17 * number
                frame[key] = np.stack([shade, 255 - shade, 3 * rows], -1).astype(np.uint8)
            dataset.add_frame(frame)
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    return path


@pytest.fixture(scope="module", params=["image", "video"])
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("data") / request.param, request.param == "video")


@pytest.fixture(scope="module")
def pictures_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("data") / "image", video=False)


def options(path: Path, **given: Any) -> DemonstrationsConfig:
    values: dict[str, Any] = {"path": path, "episodes": None, "cameras": NAMED, "workers": 0}
    return DemonstrationsConfig(**values | given)


def streamed(path: Path, **given: Any) -> Demonstrations:
    data = load(path, CONTRACT, options(path, in_memory_mib=0, **given))
    assert data.pictures is not None and not data.observation.images
    return data


def lerobots(dataset: Any, row: int, key: str) -> Tensor:
    """The picture as lerobot's own class gives it."""
    picture: Tensor = (dataset[row][key] * 255).round().to(torch.uint8).permute(1, 2, 0)
    return picture


def test_streamed_pictures_are_those_in_memory_and_lerobots_own(foreign: Path) -> None:
    memory, stream = load(foreign, CONTRACT, options(foreign)), streamed(foreign)
    assert memory.pictures is None and len(memory.actions) == sum(LENGTHS)
    # In no order, one twice, near and far, over the border of two episodes.
    rows = torch.tensor([20, 3, 8, 9, 3, 34, 10, 0, 24])
    expected, found = memory.chunks(rows, 4), stream.chunks(rows, 4)
    dataset = open_dataset(foreign)
    for name, key in (("top", TOP), ("front", WIDE)):
        assert torch.equal(found[0].images[name], expected[0].images[name])
        assert found[0].images[name].dtype == torch.uint8
        for i, row in enumerate(rows.tolist()):
            assert torch.equal(found[0].images[name][i], lerobots(dataset, row, key))
        assert len({picture.numpy().tobytes() for picture in found[0].images[name]}) == 8
    assert found[0].instruction == expected[0].instruction
    assert torch.equal(found[0].state, expected[0].state)
    assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subset_is_streamed_in_order(foreign: Path, workers: int) -> None:
    chosen = torch.tensor([2, 0])
    memory = load(foreign, CONTRACT, options(foreign)).subset(chosen)
    stream = streamed(foreign, workers=workers).subset(chosen)
    parts = torch.randint(21, (7, 5), generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    found = list(stream.batches(parts, 3))
    assert torch.equal(torch.get_rng_state(), before)
    for rows, (seen, actions, valid) in zip(parts, found, strict=True):
        expected = memory.chunks(rows, 3)
        assert all(torch.equal(seen.images[n], expected[0].images[n]) for n in ("top", "front"))
        assert torch.equal(seen.state, expected[0].state)
        assert torch.equal(actions, expected[1]) and torch.equal(valid, expected[2])


def test_the_limit_of_the_memory_is_counted_in_pictures(pictures_folder: Path) -> None:
    per_frame = 3 * (32 * 32 + 32 * 64)
    assert streamed(pictures_folder).pictures.num_bytes == sum(LENGTHS) * per_frame  # type: ignore[union-attr]
    assert (
        load(pictures_folder, CONTRACT, options(pictures_folder, in_memory_mib=1)).pictures is None
    )


def test_the_first_episodes_alone(foreign: Path) -> None:
    data = streamed(foreign, episodes=2)
    assert data.num_episodes == 2 and len(data.actions) == sum(LENGTHS[:2])
    seen = data.chunks(torch.tensor([22]), 1)[0]
    assert torch.equal(seen.images["top"][0], lerobots(open_dataset(foreign), 22, TOP))
    with pytest.raises(BadDemonstrations, match=r"holds 3 episodes, but demonstrations.episodes=4"):
        streamed(foreign, episodes=4)


def imitation(data: Demonstrations) -> tuple[Any, Imitation]:
    torch.manual_seed(0)
    policy: Any = FlowVLAConfig(
        chunk=2,
        hidden_size=16,
        num_heads=2,
        num_prefix_layers=1,
        num_expert_layers=1,
        patch_size=16,
    ).build(CONTRACT)
    config = ImitationConfig(steps=9, batch_size=4, warmup_steps=2, holdout_share=0.3)
    return policy, Imitation(policy, data, config, seed=1, device="cpu")


def run(phase: Imitation, folder: Path, stop_at: int | None = None) -> Any:
    seen: list[int] = []
    return phase.run(
        log=lambda step, values: None,
        store=CheckpointStore(folder, keep=1),
        on_step=lambda step, loss: seen.append(step),
        stop=lambda: stop_at is not None and seen[-1] >= stop_at,
    )


def test_imitation_is_the_same_streamed_stopped_and_continued(
    foreign: Path, tmp_path: Path
) -> None:
    whole, phase = imitation(load(foreign, CONTRACT, options(foreign)))
    expected = run(phase, tmp_path / "whole")
    assert expected.open_loop_error is not None
    _, phase = imitation(streamed(foreign, workers=2))
    assert run(phase, tmp_path / "parts", stop_at=4) is None
    # What two workers had decoded ahead is drawn again, by another number of workers.
    resumed, phase = imitation(streamed(foreign, workers=0))
    assert phase.restore(CheckpointStore(tmp_path / "parts", keep=1)) == 4
    assert run(phase, tmp_path / "parts") == expected
    a, b = whole.state_dict(), resumed.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_held_out_frames_are_spread_evenly() -> None:
    assert _spread(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert _spread(10, 4).tolist() == [0, 2, 5, 7]


def test_a_size_by_hand() -> None:
    picture = torch.tensor([[0, 2, 10, 20], [4, 6, 30, 40]], dtype=torch.uint8)
    picture = picture[..., None].repeat(1, 1, 3)

    def sized(height: int, width: int, how: Any) -> list[list[int]]:
        result = resized(picture, height, width, how)
        assert torch.equal(result[..., 0], result[..., 2])
        return result[..., 0].tolist()

    assert sized(1, 2, "stretch") == sized(1, 2, "crop") == sized(1, 2, "pad") == [[3, 25]]
    assert sized(2, 2, "stretch") == [[1, 15], [5, 35]]
    assert sized(2, 2, "crop") == [[2, 10], [6, 30]]
    assert sized(3, 2, "pad") == [[0, 0], [3, 25], [0, 0]]
    assert sized(1, 1, "crop") == [[12]]


def test_pictures_of_another_size_need_to_be_told_how(foreign: Path) -> None:
    small = replace(CONTRACT, cameras=(Camera("top", 16, 16), Camera("front", 16, 16)))
    with pytest.raises(
        ContractMismatch, match=r"32 x 32 in observation.images.top, .* top gives 16 x 16; set"
    ):
        load(foreign, small, options(foreign))
    dataset = open_dataset(foreign)
    for how in ("crop", "pad", "stretch"):
        data = load(foreign, small, options(foreign, resize=how))
        assert data.observation.images["front"].shape[1:] == (16, 16, 3)
        expected = resized(lerobots(dataset, 20, WIDE), 16, 16, how)
        assert torch.equal(data.observation.images["front"][20], expected)


def test_what_does_not_fit_is_named(pictures_folder: Path) -> None:
    path = pictures_folder
    with pytest.raises(ContractMismatch, match=r"no observation.images.front; it has .*'observa.*"):
        load(path, CONTRACT, options(path, cameras={}))
    with pytest.raises(ContractMismatch, match=r"no side_view; .*demonstrations.cameras.front="):
        load(path, CONTRACT, options(path, cameras={"front": "side_view"}))
    with pytest.raises(ContractMismatch, match=r"names the camera back, but .* has top, front"):
        load(path, CONTRACT, options(path, cameras={"back": TOP}))
    with pytest.raises(ContractMismatch, match=r"has 10 frames per second, the simulator 20 cont"):
        load(path, replace(CONTRACT, control_hz=20.0), options(path))
    assert load(path, replace(CONTRACT, control_hz=10.2), options(path)).num_episodes == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebase_version": "v2.1"}, r"LeRobotDataset v2.1, but only v3 .*convert_dataset_v21"),
        ({"shape": [32, 32, 1]}, r"observation.images.top of .* is not in colour"),
        ({"shape": [3, 16, 16], "names": ["channels", "height", "width"]}, r"of 16 x 16 in"),
    ],
)
def test_metadata_that_do_not_fit(
    pictures_folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(pictures_folder, path)
    file = path / "meta" / "info.json"
    info = json.loads(file.read_text())
    (info if "codebase_version" in change else info["features"][TOP]).update(change)
    file.write_text(json.dumps(info))
    with pytest.raises(ValueError, match=message):
        load(path, CONTRACT, options(path))


def test_pictures_that_are_not_as_described(pictures_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(pictures_folder, path)
    file = path / "meta" / "info.json"
    info = json.loads(file.read_text())
    info["features"][TOP]["shape"] = [16, 16, 3]
    file.write_text(json.dumps(info))
    small = replace(CONTRACT, cameras=(Camera("top", 16, 16),))
    data = load(path, small, options(path, cameras={}, in_memory_mib=0, workers=1))
    with pytest.raises(BadDemonstrations, match=r"^\S+ has a picture of 32 x 32 in observation.im"):
        next(data.batches([torch.tensor([0])], 1))


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_and_missing_videos_are_named(tmp_path: Path, workers: int) -> None:
    path = written(tmp_path / "data", video=True)
    data = streamed(path, workers=workers)
    video = path / "videos" / TOP / "chunk-000" / "file-000.mp4"
    video.write_bytes(b"no video")
    with pytest.raises(
        BadDemonstrations, match=r"^\S+file-000.mp4 cannot be decoded at 0.900 s, f"
    ):
        next(data.batches([torch.tensor([9])], 1))
    video.unlink()
    with pytest.raises(BadDemonstrations, match=r"is incomplete or damaged: lerobot cannot open"):
        streamed(path)


def test_a_data_set_of_the_hub(
    pictures_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # lerobot looks here before it asks the hub.
    monkeypatch.setattr(lerobot.datasets.dataset_metadata, "HF_LEROBOT_HOME", tmp_path)
    shutil.copytree(pictures_folder, tmp_path / "somebody" / "cubes")
    given = DemonstrationsConfig(repo_id="somebody/cubes", episodes=2, cameras=NAMED)
    folder = download("somebody/cubes", CONTRACT, given)
    assert folder == tmp_path / "somebody" / "cubes"
    assert load(folder, CONTRACT, given).num_episodes == 2
    with pytest.raises(ContractMismatch, match=r"no observation.images.front"):
        download("somebody/cubes", CONTRACT, given.model_copy(update={"cameras": {}}))


def test_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot.datasets.dataset_metadata, "HF_LEROBOT_HOME", tmp_path)

    def offline(*given: Any, **named: Any) -> None:
        raise ConnectionError("no network\nand much more about it")

    monkeypatch.setattr(lerobot.datasets.dataset_metadata, "get_safe_version", offline)
    with pytest.raises(BadDemonstrations) as caught:
        download("somebody/else", CONTRACT, DemonstrationsConfig(repo_id="somebody/else"))
    assert str(caught.value) == (
        "demonstrations.repo_id=somebody/else is not on this machine and cannot be downloaded "
        "(ConnectionError: no network). Check the name and the connection, or set "
        "demonstrations.path to a folder that holds it"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "x", "repo_id": "a/b"}, "path=x or repo_id=a/b, not both"),
        ({"path": "x", "video": True}, "video=true is about recording, but path=x is there"),
        ({"repo_id": "a/b", "by_task": {"t": 1}}, "but repo_id=a/b is there already"),
        ({"episodes": None}, "episodes=null uses all of a given data set"),
        ({"resize": "crop"}, "cameras and resize fit a given data set"),
        ({"cameras": {"top": "x"}}, "cameras and resize fit a given data set"),
        ({"repo_id": "cubes"}, "repo_id"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemonstrationsConfig(**given)


def test_how_many_to_record_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"episodes=null does not say how many to record"):
        _ = DemonstrationsConfig(repo_id="a/b", episodes=None).total
