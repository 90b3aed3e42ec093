"""Light visuals, and working without a device that can draw."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.contracts import Episode
from simulators import maniskill_visuals as visuals
from simulators.config import ManiSkillConfig
from simulators.maniskill import ManiSkillEnvironment

needs_drawing = pytest.mark.skipif(
    not visuals.has_render_device(), reason="no Vulkan device that can draw"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    visuals.use_stock_visuals()
    yield
    visuals.use_stock_visuals()


def run_without_vulkan(program: str) -> str:
    """What a program prints in a process in which no Vulkan driver can be found."""
    nowhere = {"VK_ICD_FILENAMES": "/nonexistent", "VK_DRIVER_FILES": "/nonexistent"}
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_light_visuals_change_the_description_and_stock_visuals_bring_it_back(
    tmp_path: Path,
) -> None:
    from mani_skill.agents.robots import Panda, PandaWristCam
    from mani_skill.utils.scene_builder.table import scene_builder

    stock = (Panda.urdf_path, PandaWristCam.urdf_path, scene_builder.build_ground)
    visuals.use_light_visuals()
    visuals.use_light_visuals()
    light = (Panda.urdf_path, PandaWristCam.urdf_path, scene_builder.build_ground)
    assert all(now != before for now, before in zip(light, stock, strict=True))
    assert Path(Panda.urdf_path).is_relative_to(tmp_path)
    visuals.use_stock_visuals()
    assert (Panda.urdf_path, PandaWristCam.urdf_path, scene_builder.build_ground) == stock
    visuals.use_stock_visuals()


def test_the_light_description_draws_collision_meshes_and_collides_as_before() -> None:
    from mani_skill.agents.robots import Panda

    source = Path(Panda.urdf_path)
    stock = source.read_text()
    light = visuals.light_description(stock, source.parent)
    assert "visual/link" not in light and "visual/hand" not in light
    assert "visual/finger.glb" in light
    for link in (*(f"link{i}" for i in range(8)), "hand"):
        mesh = source.parent / f"franka_description/meshes/collision/{link}.stl"
        assert light.count(f'filename="{mesh}"') == 1 + stock.count(f"collision/{link}.stl")
        assert mesh.is_file()
    assert light.count("<inertia ") == stock.count("<inertia ")
    assert light.count("<collision>") == stock.count("<collision>")
    assert 'filename="franka' not in light


def test_the_cache_is_written_once_and_leaves_nothing_unfinished(tmp_path: Path) -> None:
    from mani_skill.agents.robots import Panda

    visuals.use_light_visuals()
    first = Path(Panda.urdf_path)
    written = first.stat().st_mtime_ns
    visuals.use_stock_visuals()
    visuals.use_light_visuals()
    assert Path(Panda.urdf_path) == first and first.stat().st_mtime_ns == written
    assert first.with_suffix(".srdf").is_file()
    assert len(list((tmp_path / "embodied-rl").iterdir())) == 2  # One for each Panda.


def test_light_visuals_leave_the_physics_alone() -> None:
    config = ManiSkillConfig(task="PickCube-v1")
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 7)).astype(np.float32)

    def run() -> list[float]:
        environment = ManiSkillEnvironment(config)
        environment.reset(Episode("test", environment.spec.task, 3, 0))
        for action in actions:
            environment.step(action)
        state = [float(value) for value in environment.observe().state]
        environment.close()
        return state

    stock = run()
    visuals.use_light_visuals()
    np.testing.assert_allclose(run(), stock, rtol=0, atol=1e-6)


def test_without_a_device_states_work_and_images_say_what_to_install() -> None:
    printed = run_without_vulkan("""if True:
        from embodied_rl.contracts import Episode
        from simulators import maniskill_visuals as visuals
        from simulators.config import ManiSkillConfig
        print(visuals.has_render_device(), visuals.render_backend())
        visuals.prepare_rendering(need_images=False)
        visuals.prepare_rendering(need_images=False)
        environment = ManiSkillConfig(task="PickCube-v1").build_environment()
        environment.reset(Episode("test", "PickCube-v1", 0, 0))
        print(environment.observe().state.shape, environment.spec.can_render)
        try:
            ManiSkillConfig(task="PickCube-v1", observation="rgb").build_environment()
        except RuntimeError as error:
            print(error)
        try:
            ManiSkillConfig(task="PushT-v1").build_environment()
        except ValueError as error:
            print(error)
    """)
    assert printed.startswith("False none\n(42,) False\n")
    for advice in ("bookworm-backports", "VK_ICD_FILENAMES", "simulator.observation=state"):
        assert advice in printed
    assert "PushT-v1 cannot be built without a device to draw on" in printed


@pytest.mark.render
@needs_drawing
def test_light_and_stock_pictures_show_the_same_scene() -> None:
    def picture(style: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        visuals.use_stock_visuals()
        config = ManiSkillConfig.model_validate(
            {"task": "PushCube-v1", "observation": "rgb", "visuals": style}
        )
        environment = ManiSkillEnvironment(config)
        environment.reset(Episode("test", environment.spec.task, 0, 0))
        image = environment.observe().images["base_camera"]
        environment.close()
        assert image.shape == (64, 64, 3) and image.dtype == np.uint8
        return image.astype(np.float64)

    light, stock = picture("light"), picture("stock")
    difference = np.abs(light - stock)
    # The robot and the floor behind it are in the upper half, table, cube and goal in the lower.
    assert 1.0 < difference[:32].mean() < 25.0
    assert difference[32:].mean() < 0.5
