"""What ManiSkill draws with, and how much it draws.

Without a usable Vulkan device SAPIEN cannot even describe a coloured box, so that state-only tasks
fail too. `prepare_rendering` gives it materials that are recorded but never drawn. With a software
driver most of a frame's cost is the robot's detailed meshes: `use_light_visuals` swaps them for the
collision meshes, which have the same outline and some 30 times fewer triangles.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

_LIGHT_FLOOR_WIDTH_M = 20
_LIGHT_ROBOT_COLOUR = "0.82 0.83 0.85 1"
_TABLE_SCENE = "mani_skill.utils.scene_builder.table.scene_builder"
_PANDAS = ("Panda", "PandaWristCam")
_DETAILED_MESH = re.compile(
    r'franka_description/meshes/visual/(link\d|hand)\.glb"\s*/>\s*</geometry>'
)

NO_RENDER_DEVICE = """\
Drawing images needs a Vulkan device that SAPIEN can use, and there is none. A GPU with its driver
is one; without a GPU, a recent Mesa software driver is enough (Debian 12's own, 22.3, is too old).
Either install it:
  Debian 12 (enable bookworm-backports first):
      sudo apt-get install -t bookworm-backports mesa-vulkan-drivers
  Debian 13, Ubuntu 24.04 and later:
      sudo apt-get install mesa-vulkan-drivers
or unpack the same package privately, without administrator rights:
      apt-get download mesa-vulkan-drivers
      dpkg -x mesa-vulkan-drivers_*.deb "$HOME/mesa"
      sed "s#: \\".*libvulkan_lvp.so#: \\"$HOME/mesa/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so#" \\
          "$HOME"/mesa/usr/share/vulkan/icd.d/lvp_icd*.json > "$HOME/mesa/lvp_icd.json"
      export VK_ICD_FILENAMES="$HOME/mesa/lvp_icd.json"
  (on Debian 12 take it from backports: apt-get download -t bookworm-backports mesa-vulkan-drivers)
Or train from the state alone: simulator.observation=state."""

_originals: dict[str, Any] = {}
"""What `use_light_visuals` replaced, by the name of the class or function."""


@lru_cache(maxsize=1)
def has_render_device() -> bool:
    """Whether images can be drawn on this machine.

    Asks in a process of its own: a driver that crashes takes only that one along, and processes
    forked from this one inherit no half-open driver.
    """
    probe = "import sapien, sapien.render; sapien.render.RenderMaterial()"
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", probe], capture_output=True, timeout=60.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def prepare_rendering(need_images: bool) -> None:
    """Make `gym.make` of a ManiSkill task work here, with or without images. Call it before.

    Raises `RuntimeError` that says what to install if images are needed and cannot be drawn.
    """
    if _device_opens_here():
        return
    if need_images:
        raise RuntimeError(NO_RENDER_DEVICE)
    _give_undrawn_materials()


def render_backend() -> str:
    """ManiSkill's `render_backend` for this machine: `gpu`, `cpu` (software) or `none`."""
    if not _device_opens_here():
        return "none"
    import sapien

    try:
        sapien.Device("cuda")
    except RuntimeError:
        return "cpu"
    return "gpu"


def use_light_visuals() -> None:
    """Draw the Panda robots from their collision meshes, on a smaller floor, from now on.

    Physics does not change. Scenes that exist already stay as they are; calling twice is harmless.
    """
    robots: Any = importlib.import_module("mani_skill.agents.robots")
    for name in _PANDAS:
        robot = getattr(robots, name)
        if name not in _originals:
            _originals[name] = robot.urdf_path
            robot.urdf_path = str(_light_robot(Path(robot.urdf_path)))
    scene: Any = importlib.import_module(_TABLE_SCENE)
    if "build_ground" not in _originals:
        _originals["build_ground"] = scene.build_ground
        scene.build_ground = _with_small_floor(scene.build_ground)


def use_stock_visuals() -> None:
    """Undo `use_light_visuals` for scenes made from now on."""
    robots: Any = importlib.import_module("mani_skill.agents.robots")
    scene: Any = importlib.import_module(_TABLE_SCENE)
    for name in _PANDAS:
        if name in _originals:
            getattr(robots, name).urdf_path = _originals.pop(name)
    if "build_ground" in _originals:
        scene.build_ground = _originals.pop("build_ground")


@lru_cache(maxsize=1)
def _device_opens_here() -> bool:
    import sapien.render

    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        return False
    return True


class _UndrawnMaterial:
    """Takes the place of SAPIEN's materials and textures: remembers what it is told, draws nothing.

    Scene builders set attributes and call setters on materials; none of them reads a result back.
    """

    base_color = (1.0, 1.0, 1.0, 1.0)

    def __init__(self, *_: Any, **properties: Any) -> None:
        self.__dict__.update(properties)

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Dunder look-ups must fail as usual, or copying and pickling would take us for callable.
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _give_undrawn_materials() -> None:
    # SAPIEN's loader and binding hold references of their own, hence three places.
    for module_name in ("sapien.render", "sapien.pysapien.render", "sapien.wrapper.urdf_loader"):
        module = importlib.import_module(module_name)
        for name in ("RenderMaterial", "RenderTexture2D"):
            if hasattr(module, name):
                setattr(module, name, _UndrawnMaterial)


def _with_small_floor(build_ground: Callable[..., Any]) -> Callable[..., Any]:
    def build(scene: Any, floor_width: int = 100, **options: Any) -> Any:
        # Many scenes drawn as one are laid out over a wide area and need all of their floor.
        if not scene.parallel_in_single_scene:
            floor_width = min(floor_width, _LIGHT_FLOOR_WIDTH_M)
        return build_ground(scene, floor_width=floor_width, **options)

    return build


def light_description(description: str, asset_folder: Path) -> str:
    """A Panda's URDF text with light meshes, whose file names no longer depend on its place."""
    light = _DETAILED_MESH.sub(
        r'franka_description/meshes/collision/\1.stl"/></geometry>'
        rf'<material name="light_\1"><color rgba="{_LIGHT_ROBOT_COLOUR}"/></material>',
        description,
    )
    return re.sub(
        r'filename="(?!package:|/)', lambda found: f"{found.group()}{asset_folder}/", light
    )


def _light_robot(urdf: Path) -> Path:
    """Write the light description into the user's cache, unless it is there, and return it."""
    description = light_description(urdf.read_text(), urdf.parent)
    srdf = urdf.with_suffix(".srdf").read_text()
    digest = hashlib.sha256(f"{description}{srdf}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied-rl"
    folder = cache / f"{urdf.stem}-light-{digest}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Built aside and renamed: several workers may start at the same time.
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=cache))
        (unfinished / urdf.name).write_text(description)
        (unfinished / f"{urdf.stem}.srdf").write_text(srdf)
        try:
            unfinished.rename(folder)
        except OSError:
            shutil.rmtree(unfinished)
            if not folder.exists():
                raise
    return folder / urdf.name
